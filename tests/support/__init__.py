"""What several files of tests share; tests/README.md lists the modules."""
