"""Process groups, and tensors that cross them in buckets."""
