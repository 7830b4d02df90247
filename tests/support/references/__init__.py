"""What is right, written from equations and without the package's code."""
