"""Counting of bytes sent, and reports on steps."""
