"""Thin adapters between the optimizers and training frameworks."""
