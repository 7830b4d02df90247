"""The shards of a parameter's matrices in every layout."""
