"""Losses of methods that send few bytes, and the tables and pictures of them."""
