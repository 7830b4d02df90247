"""Process groups, and collectives on many tensors at once."""
