"""GPUs that are not there, and compilers that may be."""
