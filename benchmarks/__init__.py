"""Measurements; README.md says which program answers which question."""
