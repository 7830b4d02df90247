"""Seconds of operations, steps, links and imports, measured and modelled."""
