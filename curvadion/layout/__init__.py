"""Where the shards of a parameter's matrices lie, in every layout."""
