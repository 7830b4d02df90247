"""DeepSpeed: ``"optimizer": {"type": "CurvaDion"}`` at every ZeRO stage.

``import curvadion.deepspeed`` calls :func:`register`; importing this module changes nothing.
"""

from curvadion.integrations.deepspeed.config import declare_shapes
from curvadion.integrations.deepspeed.engines import register

__all__ = ["declare_shapes", "register"]
