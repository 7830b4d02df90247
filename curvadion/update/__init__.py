"""How a step updates momenta, factors and weights."""
