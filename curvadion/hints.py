"""How to keep gradients on their replica, with each framework that the program uses."""

from __future__ import annotations

import sys

# By the module whose import tells that the program uses the framework.
_OF_FRAMEWORKS = {
    "torchtitan": "build its optimizers with curvadion.integrations.torchtitan",
    "lightning.pytorch": "add the callback curvadion.integrations.lightning.Replicas()",
    "pytorch_lightning": "add the callback curvadion.integrations.lightning.Replicas()",
    "transformers.trainer": "call curvadion.integrations.huggingface.attach(trainer)",
    "accelerate": "call curvadion.integrations.accelerate.attach(accelerator) before prepare",
    "deepspeed": "import curvadion.deepspeed, and name the optimizer in the JSON",
}
_OF_TORCH = (
    "with DDP call curvadion.integrations.ddp.keep_gradients_local(model), with FSDP that of "
    "curvadion.integrations.fsdp"
)


def how_to_keep_gradients_local() -> str:
    """What a program does with each framework that it has imported, and with torch alone."""
    frameworks = [name for name in _OF_FRAMEWORKS if name in sys.modules]
    advice = [f"with {name.partition('.')[0]} {_OF_FRAMEWORKS[name]}" for name in frameworks]
    return "; ".join([*advice, _OF_TORCH])
