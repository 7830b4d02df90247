"""How replicas come together, and what they agree on before a step."""
