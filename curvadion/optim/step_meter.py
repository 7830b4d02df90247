"""What a step has sent, and how long it has taken and waited."""

from __future__ import annotations

import time
from typing import Any

from curvadion.comm.waiting import waited
from curvadion.metering import wire
from curvadion.sync.base import Sync


class StepMeter:
    """Measures each step from the end of the last one on.

    Args:
        sync: whose waits for late means count.
    """

    def __init__(self, sync: Sync) -> None:
        self._sync = sync
        self._wire = wire.Reading()
        self._late_before = sync.waited_seconds
        self._held_up_before = waited()
        self._last_end: float | None = None

    def begin(self) -> None:
        """Begin a step: leave out what replicas have waited since the last, as in synchronize()."""
        self._held_up_before = waited()

    def end(self) -> dict[str, Any]:
        """End a step; return the fields of a :class:`StepReport` that were measured."""
        now = time.perf_counter()
        sent = self._wire.take()
        late = self._sync.waited_seconds
        held_up = waited()
        last_end = self._last_end
        fields = {
            "wire_bytes": None if sent is None else sum(sent.values()),
            "wire_bytes_by_ranks": sent,
            "waited_seconds": late - self._late_before,
            "opening_seconds": held_up - self._held_up_before,
            "step_seconds": None if last_end is None else now - last_end,
        }
        self._late_before = late
        self._held_up_before = held_up
        self._last_end = now
        return fields
