"""Exchanges in a separate thread during training."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Generic, TypeVar

import torch

Result = TypeVar("Result")


class Exchange(Generic[Result]):
    """A pending exchange; ``what``: its name in errors."""

    def __init__(self, what: str, device: torch.device) -> None:
        self.what, self._device = what, device
        self._future: Future[Result] = Future()
        cuda = device.type == "cuda"
        self._begun = torch.cuda.current_stream(device).record_event() if cuda else None

    def run(self, work: Callable[[], Result]) -> None:
        try:
            if self._begun is None:
                self._future.set_result(work())
                return
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(self._begun)
            result = work()
            stream.synchronize()
            self._future.set_result(result)
        except BaseException as error:
            self._future.set_exception(error)

    def result(self) -> Result:
        """Wait for the result; RuntimeError with its name if it failed."""
        try:
            return self._future.result()
        except Exception as error:
            raise RuntimeError(
                f"{self.what} failed: {error}. A replica may have ended: restart from the "
                f"last checkpoint."
            ) from error


class Worker:
    """A thread that runs exchanges in the order in which they were begun."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
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
    if device.type == "cuda":  # sets the thread's stream and device
        torch.cuda.set_stream(torch.cuda.Stream(device))
    for job in iter(jobs.get, None):
        job()
        del job  # frees its tensors before the wait for the next
