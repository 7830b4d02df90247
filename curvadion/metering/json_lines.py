"""Lines of JSON in a file, which any reader of the standard understands."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def append_line(path: str | Path, values: Mapping[str, Any]) -> None:
    """Append values as one line; NaN and infinity, which JSON does not have, become null."""
    known = {name: strict(value) for name, value in values.items()}
    line = json.dumps(known, allow_nan=False)
    with open(path, "a", encoding="utf-8") as file:
        file.write(line + "\n")


def strict(value: Any) -> Any:
    """The value, or None if it is infinite or NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {name: strict(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(each) for each in value]
    return value
