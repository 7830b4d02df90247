"""Wire bytes and step reports."""
