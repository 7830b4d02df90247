"""The shards of a parameter's matrices in every layout.

To add one, define which part of each matrix a rank holds (a view) and which groups shard rows and
columns: nothing else asks how a parameter is sharded.
"""
