"""What several benchmarks share: tasks, texts, shapes, timing, records, a limited network."""
