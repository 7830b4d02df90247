"""The optimizers, their parameter groups and their checkpoints."""
