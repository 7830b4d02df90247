"""Registers the optimizers "CurvaDion" and "Dion" with DeepSpeed on import."""

from curvadion.integrations.deepspeed import declare_shapes, register

__all__ = ["declare_shapes", "register"]

register()
