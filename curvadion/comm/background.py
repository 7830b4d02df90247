"""Collectives beside the training: in a thread and a process group of their own, in order."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from queue import SimpleQueue
from typing import Generic, TypeVar

import torch
import torch.distributed as dist

Result = TypeVar("Result")
_Job = Callable[[], None]
# By thread: it outlives its owner, who goes with the process group, while it has work.
_queues: weakref.WeakKeyDictionary[threading.Thread, SimpleQueue[_Job | None]] = (
    weakref.WeakKeyDictionary()
)
_of_group: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, Background]]
_of_group = weakref.WeakKeyDictionary()


def background_of(like: dist.ProcessGroup, device: torch.device, lane: str = "") -> Background:
    """That of a process group: one for all who use it. The first call is collective over it.

    device: of the tensors that are sent. lane: what is sent in another lane is not waited for.
    """
    lanes = _of_group.setdefault(like, {})
    if lane not in lanes:
        lanes[lane] = Background(like, device)
    return lanes[lane]


def no_background() -> Background:
    """Stands for the exchanges of a step that has none.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError("This step was made without replicas: it has nothing to send in background.")


class Exchange(Generic[Result]):
    """An exchange under way.

    Attributes:
        what: what it is, for errors.
    """

    def __init__(self, what: str, device: torch.device) -> None:
        self.what = what
        self._future: Future[Result] = Future()
        self._device = device
        self._begun: torch.cuda.Event | None = None
        self._ended: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._begun, self._ended = torch.cuda.Event(), torch.cuda.Event()
            self._begun.record(torch.cuda.current_stream(device))

    def run(self, work: Callable[[], Result]) -> None:
        """Do the work, in the thread that is for it."""
        try:
            if self._begun is not None:
                torch.cuda.current_stream(self._device).wait_event(self._begun)
            result = work()
            if self._ended is not None:
                self._ended.record(torch.cuda.current_stream(self._device))
                # Whoever forgets the exchange may free its tensors.
                self._ended.synchronize()
            self._future.set_result(result)
        except BaseException as error:
            self._future.set_exception(error)

    def result(self) -> Result:
        """What it gave, once it is done.

        Raises:
            RuntimeError: if it failed, with its name and the backend's reason.
        """
        try:
            result = self._future.result()
        except Exception as error:
            raise RuntimeError(
                f"{self.what} failed: {error}. A replica may have ended or lost its connection: "
                f"start again from the last checkpoint."
            ) from error
        if self._ended is not None:
            # What the host has in its hands may still be on its way on the GPU.
            torch.cuda.current_stream(self._device).wait_event(self._ended)
        return result


class Background:
    """Does exchanges one after the other, in the order in which they begin, alike on all ranks.

    The process group has the ranks of another one, but connections of its own: what the training
    sends meanwhile neither waits for the exchanges nor gets between them.
    """

    def __init__(self, like: dist.ProcessGroup, device: torch.device) -> None:
        """Collective over the ranks of ``like``.

        device: of the tensors that are sent.
        """
        self.group = dist.new_group(
            dist.get_process_group_ranks(like),
            timeout=_timeout(like, device),
            backend=dist.get_backend_config(like),
            use_local_synchronization=True,
        )
        self._device = device
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        thread = threading.Thread(
            target=_work_off, args=(self._jobs, device), name="curvadion exchanges", daemon=True
        )
        _queues[thread] = self._jobs
        thread.start()
        # The thread holds the queue only, so that it ends with its owner.
        weakref.finalize(self, self._jobs.put, None)

    def begin(self, what: str, work: Callable[[], Result]) -> Exchange[Result]:
        """Let the thread do some work, which sends over ``group`` only.

        what: a name for it, in errors.
        """
        exchange: Exchange[Result] = Exchange(what, self._device)
        self._jobs.put(lambda: exchange.run(work))
        return exchange


class Stopwatch:
    """Adds up the seconds inside its ``with`` blocks."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._since = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._since


def _work_off(jobs: SimpleQueue[_Job | None], device: torch.device) -> None:
    if device.type != "cuda":
        _work_off_here(jobs)
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        _work_off_here(jobs)


def _work_off_here(jobs: SimpleQueue[_Job | None]) -> None:
    for job in iter(jobs.get, None):
        job()
        del job  # and the tensors that it holds, before the wait for the next


def _timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """That of a group; None for the default."""
    options = getattr(group._get_backend(device), "options", None)
    return getattr(options, "_timeout", None)


@atexit.register
def _finish_all() -> None:
    # Others may still wait for what has begun here. A lost one ends the wait with an error.
    for thread, jobs in list(_queues.items()):
        jobs.put(None)
        thread.join()
    # Groups that nobody else holds end with their own threads, which may need the interpreter.
    _of_group.clear()
