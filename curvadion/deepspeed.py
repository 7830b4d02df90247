"""Short for :mod:`curvadion.integrations.deepspeed`."""

from curvadion.integrations.deepspeed import attach, declare_shapes, initialize, register

__all__ = ["attach", "declare_shapes", "initialize", "register"]
