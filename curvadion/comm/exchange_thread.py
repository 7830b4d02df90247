"""Exchanges in a separate thread during training."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Generic, TypeVar

import torch

from curvadion.comm.lost import MemberLost

Result = TypeVar("Result")


class Exchange(Generic[Result]):
    """A pending exchange; ``what``: its name in errors."""

    def __init__(self, what: str, device: torch.device) -> None:
        self.what = what
        self._device = device
        self._future: Future[Result] = Future()
        # The work may read what the training's stream is still computing at this moment.
        self._begun: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._begun = torch.cuda.current_stream(device).record_event()

    def run(self, work: Callable[[], Result]) -> None:
        """Do the work in this thread, and keep its result or its error."""
        try:
            if self._begun is None:
                self._future.set_result(work())
                return
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(self._begun)
            result = work()
            # The training's stream may use the result as soon as the host has it.
            stream.synchronize()
            self._future.set_result(result)
        except MemberLost as lost:
            # The traceback would keep the group, and so the connections to the others.
            self._future.set_exception(MemberLost(str(lost)))
        except BaseException as error:
            self._future.set_exception(error)

    def result(self) -> Result:
        """Wait for the result.

        Raises:
            MemberLost: with the exchange's name, if a member was lost.
            RuntimeError: with its name, if it failed for another reason.
        """
        try:
            return self._future.result()
        except Exception as error:
            if isinstance(error, MemberLost):
                raise MemberLost(f"{self.what} failed: {error}") from error
            raise RuntimeError(
                f"{self.what} failed: {error}. A replica may have ended: restart from the "
                f"last checkpoint."
            ) from error


class Worker:
    """A thread that runs exchanges in the order in which they were begun."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()  # None: the end
        self._thread = threading.Thread(target=_run, args=(self._jobs, device), daemon=True)
        self._thread.start()

    def begin(self, what: str, work: Callable[[], Result]) -> Exchange[Result]:
        """Run work in the thread; what: its name in errors."""
        exchange: Exchange[Result] = Exchange(what, self._device)
        self._jobs.put(lambda: exchange.run(work))
        return exchange

    def end(self, seconds: float) -> None:
        """End the thread, waiting ``seconds`` at most."""
        self._jobs.put(None)
        self._thread.join(seconds)


def _run(jobs: SimpleQueue[Callable[[], None] | None], device: torch.device) -> None:
    """Run jobs until one is None."""
    if device.type == "cuda":
        # A thread begins on device 0. This sets its device, and a stream whose exchanges do
        # not wait for the training's kernels.
        torch.cuda.set_stream(torch.cuda.Stream(device))
    for job in iter(jobs.get, None):
        job()
        del job  # frees its tensors before the wait for the next
