"""DeepSpeed: ``"optimizer": {"type": "CurvaDion"}`` at every ZeRO stage.

``import curvadion.deepspeed`` is enough for a JSON configuration: it calls :func:`register`.
Importing this module alone imports no DeepSpeed and changes nothing.
"""

from curvadion.integrations.deepspeed.config import declare_shapes
from curvadion.integrations.deepspeed.engines import register

__all__ = ["declare_shapes", "register"]
