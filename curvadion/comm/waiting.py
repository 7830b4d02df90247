"""How long the host is held up by other replicas."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class _Waited(threading.local):
    """Each thread's own seconds: an exchange in a thread holds up no step."""

    seconds = 0.0


_waited = _Waited()


@contextmanager
def waiting(counts: bool = True) -> Iterator[None]:
    """Add the time inside to :func:`waited`; blocks must not be nested.

    counts: whether other replicas are involved; if not, nothing is added.
    """
    start = time.perf_counter()
    try:
        yield
    finally:
        if counts:
            _waited.seconds += time.perf_counter() - start


def waited() -> float:
    """Seconds that this thread has spent inside :func:`waiting`."""
    return _waited.seconds
