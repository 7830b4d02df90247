"""What ranks must agree on before a step: the meeting, and what it compares."""
