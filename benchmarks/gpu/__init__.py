"""What steps and operations do on a GPU, and what they cost its host."""
