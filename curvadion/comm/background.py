"""Collectives beside the training: in a thread and a process group of their own, in order."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Generic, TypeVar

import torch
import torch.distributed as dist

from curvadion.comm.groups import BACKGROUND, new_group, timeout_of

Result = TypeVar("Result")
_Job = Callable[[], None]
_of_group: dict[dist.ProcessGroup, Background] = {}


def background_of(like: dist.ProcessGroup, device: torch.device) -> Background:
    """That of a process group: one for all who use it. The first call is collective over it."""
    if like not in _of_group:
        for group in [group for group in _of_group if not _exists(group)]:
            _of_group.pop(group).end(seconds=1.0)
        _of_group[like] = Background(like, device)
    return _of_group[like]


def _exists(group: dist.ProcessGroup) -> bool:
    """Whether the program has not destroyed the group."""
    return group in dist.distributed_c10d._world.pg_map


def no_background() -> Background:
    """Stands for the exchanges of a step that has none: raises RuntimeError."""
    raise RuntimeError("This step was made without replicas: it has nothing to send in background.")


class Exchange(Generic[Result]):
    """An exchange under way; ``what`` it is, for errors."""

    def __init__(self, what: str, device: torch.device) -> None:
        self.what = what
        self._future: Future[Result] = Future()
        self._device = device
        self._begun: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._begun = torch.cuda.current_stream(device).record_event()

    def run(self, work: Callable[[], Result]) -> None:
        try:
            if self._begun is not None:
                torch.cuda.current_stream(self._device).wait_event(self._begun)
            result = work()
            if self._begun is not None:
                torch.cuda.current_stream(self._device).synchronize()
            self._future.set_result(result)
        except BaseException as error:
            self._future.set_exception(error)

    def result(self) -> Result:
        """What it gave, once it is done; RuntimeError with its name if it failed."""
        try:
            return self._future.result()
        except Exception as error:
            raise RuntimeError(
                f"{self.what} failed: {error}. A replica may have ended or lost its connection: "
                f"start again from the last checkpoint."
            ) from error


class Background:
    """Does exchanges one after the other, in the same order on all ranks, over its own group."""

    def __init__(self, like: dist.ProcessGroup, device: torch.device) -> None:
        ranks, backend = dist.get_process_group_ranks(like), dist.get_backend(like)
        self.group = group = new_group(ranks, [like], backend=backend, description=BACKGROUND)
        self.timeout = timeout_of([group]).total_seconds()
        self._device = device
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread = threading.Thread(
            target=_work_off, args=(self._jobs, device), name="curvadion exchanges", daemon=True
        )
        self._thread.start()

        # NCCL connects at the first collective of each kind. In mid-training kernels of other
        # groups would be running, and might wait for a rank that is still connecting.
        def connect() -> None:
            words = torch.zeros(group.size(), dtype=torch.uint8, device=device)
            dist.all_reduce(words, group=group)
            dist.all_to_all_single(torch.empty_like(words), words, group=group)

        self.begin("Connecting replicas for exchanges beside the training", connect).result()

    def begin(self, what: str, work: Callable[[], Result]) -> Exchange[Result]:
        """Let the thread do some work, which sends over ``group`` only; what: for errors."""
        exchange: Exchange[Result] = Exchange(what, self._device)
        self._jobs.put(lambda: exchange.run(work))
        return exchange

    def end(self, seconds: float) -> None:
        """End the thread, for which this waits so long, and the group, which torch would keep."""
        self._jobs.put(None)
        self._thread.join(seconds)
        # To destroy a group of NCCL may wait for ranks that are lost or have not come so far.
        if self._device.type != "cuda" and not self._thread.is_alive():
            if _exists(self.group):
                dist.destroy_process_group(self.group)
            del self.group  # with its threads, which release tensors


class Stopwatch:
    """Adds up the seconds inside its ``with`` blocks."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._since = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._since


def _work_off(jobs: SimpleQueue[_Job | None], device: torch.device) -> None:
    if device.type == "cuda":  # the thread's own, and with it its device
        torch.cuda.set_stream(torch.cuda.Stream(device))
    for job in iter(jobs.get, None):
        job()
        del job  # and the tensors that it holds, before the wait for the next


@atexit.register
def _finish_all() -> None:
    # Other ranks may wait for what has begun here, but a wait for a lost rank's GPU never ends.
    # The threads of gloo's groups release tensors, which needs the interpreter: end them before it.
    begun = time.monotonic()
    while _of_group:
        _, background = _of_group.popitem()
        background.end(max(0.0, begun + background.timeout - time.monotonic()))
