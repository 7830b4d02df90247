"""Bytes that ranks send, measured and modelled."""
