"""Collectives beside the training: in a thread and a process group of their own, in order."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from curvadion.comm.groups import BACKGROUND, new_group, timeout_of

Result = TypeVar("Result")
_Job = Callable[[], None]
_of_group: weakref.WeakKeyDictionary[dist.ProcessGroup, Background]
_of_group = weakref.WeakKeyDictionary()


class _Working(NamedTuple):
    """What a thread needs that outlives its owner, who goes with the user's process group."""

    jobs: SimpleQueue[_Job | None]
    group: weakref.ref[dist.ProcessGroup]
    owner: weakref.ref[Background]
    timeout: float  # of the group, in seconds


_threads: dict[threading.Thread, _Working] = {}


def background_of(like: dist.ProcessGroup, device: torch.device) -> Background:
    """That of a process group: one for all who use it. The first call is collective over it.

    device: of the tensors that are sent.
    """
    if like not in _of_group:
        _of_group[like] = Background(like, device)
    return _of_group[like]


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
    """Does exchanges one after the other, in the order in which they begin, the same on all ranks.

    The process group has the ranks of another one, but connections of its own: what the training
    sends meanwhile neither waits for the exchanges nor gets between them.
    """

    def __init__(self, like: dist.ProcessGroup, device: torch.device) -> None:
        """Collective over the ranks of ``like``.

        device: of the tensors that are sent.
        """
        _destroy_abandoned()
        self.group = group = new_group(
            dist.get_process_group_ranks(like),
            [like],
            backend=dist.get_backend(like),
            description=BACKGROUND,
        )
        self._device = device
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        thread = threading.Thread(
            target=_work_off, args=(self._jobs, device), name="curvadion exchanges", daemon=True
        )
        timeout = timeout_of([group]).total_seconds()
        _threads[thread] = _Working(self._jobs, weakref.ref(group), weakref.ref(self), timeout)
        thread.start()
        # The thread holds the queue only, so that it ends with its owner.
        weakref.finalize(self, self._jobs.put, None)
        # NCCL connects ranks at the first collective of each kind. During training, kernels of
        # other groups would be running then, and might wait for a rank that is still connecting.
        self.begin(
            "Connecting replicas for exchanges beside the training", lambda: _connect(group, device)
        ).result()

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


def _connect(group: dist.ProcessGroup, device: torch.device) -> None:
    words = torch.zeros(group.size(), dtype=torch.uint8, device=device)
    dist.all_reduce(words, group=group)
    dist.all_to_all_single(torch.empty_like(words), words, group=group)


def _destroy_abandoned() -> None:
    """Destroy the groups whose owner no longer exists, which torch would keep for ever.

    This is not done when the owner is collected, because that can happen in any thread and while
    torch iterates over its groups.
    """
    for thread, working in list(_threads.items()):
        if working.owner() is not None:
            continue
        thread.join(1.0)  # it may still be in an exchange that nobody waits for
        if thread.is_alive():
            continue
        del _threads[thread]
        group = working.group()
        # To destroy a group of NCCL may wait for ranks that have not come so far.
        known = group is not None and group in dist.distributed_c10d._world.pg_map
        if known and dist.get_backend(group) == "gloo":
            dist.destroy_process_group(group)


@atexit.register
def _finish_all() -> None:
    # Other ranks may still wait for what has begun here. If one is lost, the exchange fails with an
    # error, but a wait for a GPU never ends: wait no longer than a collective may take.
    for working in _threads.values():
        working.jobs.put(None)
    begun = time.monotonic()
    for thread, working in list(_threads.items()):
        thread.join(max(0.0, begun + working.timeout - time.monotonic()))
    # The threads of gloo's groups release tensors, which needs the interpreter: end them before it.
    # (To destroy a group of NCCL may wait for ranks that are lost.)
    stuck = [working.owner() for thread, working in _threads.items() if thread.is_alive()]
    for background in list(_of_group.values()):
        if background._device.type != "cuda" and background not in stuck:
            with suppress(ValueError):  # the program has destroyed it
                dist.destroy_process_group(background.group)
            del background.group
    _of_group.clear()
