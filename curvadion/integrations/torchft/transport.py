"""How a member that missed openings gets their means, or the whole state of another one."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torchft.checkpointing._serialization import _streaming_load
from torchft.checkpointing.http_transport import HTTPTransport

from curvadion.integrations.torchft.environment import WITHOUT_PROXY
from curvadion.integrations.torchft.history import History
from curvadion.integrations.torchft.thread import in_thread

# Chunks, in torchft's word, that others may fetch.
HISTORY = 0
WHOLE_STATE = 1


class Transport(HTTPTransport):  # type: ignore[misc, unused-ignore]
    """Serves the means of the last openings and the whole state, and fetches what is missing.

    They are served from meet() on. Members wait in gather() for whoever fetches, and change
    no weights before.

    Args:
        timeout: until a request fails.
        history: of this rank.
        openings: returns how many openings this rank has applied.
        whole_state: returns the state that replaces a newcomer's, on the CPU.
    """

    def __init__(
        self,
        timeout: timedelta,
        history: History,
        openings: Callable[[], int],
        whole_state: Callable[[], dict[str, Any]],
    ) -> None:
        super().__init__(timeout, num_chunks=0)
        self._history = history
        self._openings = openings
        self._whole_state = whole_state
        # Of the state with which this rank begins; equal on those who have copied it.
        self._initial_state = secrets.randbits(64)
        # torchft's server sends ``_chunks[number]``: __getitem__ makes a chunk when somebody
        # fetches it, so that states are copied only if they are needed.
        self._chunks = self

    def __getitem__(self, number: int) -> Any:
        if number == HISTORY:
            return list(self._history.records), self._initial_state
        return self._whole_state()

    @classmethod
    def _load_from_address(cls, address: str, timeout: timedelta) -> Any:
        # As torchft does it, but past the environment's proxy, which may know no replicas.
        with WITHOUT_PROXY.open(address, timeout=timeout.total_seconds()) as answer:
            return _streaming_load(answer, weights_only=False)

    def shutdown(self, wait: bool = True) -> None:
        """Stop serving, also if nobody waits for it, where torchft 0.2 would go on."""

        def stop() -> None:
            self._server.shutdown()
            self._server.server_close()

        stopped = in_thread(stop)
        if wait:
            stopped.result()

    def send_checkpoint(self, *, step: int, **_: Any) -> None:
        """Let others fetch; step: their number of openings afterwards."""
        self.allow_checkpoint(step)

    def recv_checkpoint(
        self, *, metadata: str, step: int, timeout: timedelta, **_: Any
    ) -> dict[str, Any]:
        """Fetch the missed means if they apply to this rank's anchors, else the whole state.

        Args:
            metadata: the address of the member that sends.
            step: how many openings it has applied.
            timeout: until a request fails.

        Returns:
            The state as Manager takes it, with either {"missed": (number, record) of each
            opening}, or the whole state and the sender's "history", or nothing if the run has
            not begun and this rank has copied that state before. With it go the "seconds" that
            fetching took.
        """
        start = time.perf_counter()
        address = f"{metadata}{step}"
        records, initial_state = self._load_from_address(f"{address}/{HISTORY}", timeout)
        history = dict(records)
        openings = self._openings()
        missed = [(number, history.get(number)) for number in range(openings, step)]
        # Others may have started from different anchors.
        first_missed = history.get(openings, {})
        same_anchors = first_missed.get("before") == self._history.chain
        received: dict[str, Any]
        if step == 0 and initial_state == self._initial_state:
            received = {}
        elif same_anchors and all(record for _, record in missed):
            received = {"missed": missed}
        else:
            received = self._load_from_address(f"{address}/{WHOLE_STATE}", timeout)
            received["history"] = history
            self._initial_state = initial_state
        received["seconds"] = time.perf_counter() - start
        counters = {"step": step, "batches_committed": 0}
        return {"user": {"default": received}, "torchft": counters}
