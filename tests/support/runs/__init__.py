"""Models, their training, the ranks they train on, and choices among many cases."""
