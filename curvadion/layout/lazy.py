"""What can be said of DTensors without importing them, which takes as long as half of torch."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: Any) -> TypeGuard[DTensor]:
    """Whether this is a DTensor; there are none before somebody has imported their module."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)
