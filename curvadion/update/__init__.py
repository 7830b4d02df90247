"""What a step does to momenta, factors and weights."""
