"""Registers the optimizers "CurvaDion" and "Dion" with DeepSpeed on import.

    import curvadion.deepspeed
    engine, *_ = deepspeed.initialize(model=model, config="ds_config.json")

Shorthand for ``curvadion.integrations.deepspeed.register()``.
"""

from curvadion.integrations.deepspeed import declare_shapes, register

__all__ = ["declare_shapes", "register"]

register()
