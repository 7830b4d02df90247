"""Training while replicas are killed, rejoin or are slow."""
