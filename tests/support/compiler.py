"""Whether this machine can build what tests want built."""

from __future__ import annotations

import pytest

from curvadion.ops import native


def _lacking() -> str | None:
    try:
        native._cxx()
    except native.Unavailable as reason:
        return str(reason)
    return None


needs_compiler = pytest.mark.skipif(_lacking() is not None, reason=str(_lacking()))
