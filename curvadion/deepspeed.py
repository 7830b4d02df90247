"""DeepSpeed knows "CurvaDion" and "Dion" once this module is imported.

    import curvadion.deepspeed
    engine, *_ = deepspeed.initialize(model=model, config="ds_config.json")

Short for :mod:`curvadion.integrations.deepspeed` and its ``register()``.
"""

from curvadion.integrations.deepspeed import declare_shapes, register

__all__ = ["declare_shapes", "register"]

register()
