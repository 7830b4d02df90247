"""Runs a function on every rank of a real gloo process group, in worker processes that are reused.

    def total(rank, x):                      # at module level: workers find it by its name
        tensor = torch.tensor(x * rank)
        dist.all_reduce(tensor)
        return tensor

    assert distributed.run(2, total, 3.0) == [torch.tensor(3.0)] * 2

    @distributed.on_ranks(2)                 # a test that is the same on every rank
    def test_total(rank):
        assert total(rank, 3.0) == 3.0

Each call gets fresh process groups, and the torch seed 0 on every rank. Module state of the code
under test survives from call to call, as it does in a notebook. After any failure all workers are
replaced, and so they are when groups of past calls that something still holds become many.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import gc
import inspect
import multiprocessing
import os
import pickle
import random
import reprlib
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

GRACE = 2.0  # seconds that the other ranks get to answer once one has failed
START = 60.0  # seconds for a worker to start
CLEAN_UP = 90.0  # seconds for a worker to meet the others after a call; its imports may be slow
POLLING = 12  # threads of a worker that poll, one a group, before it is replaced

PRELOADED = [
    "curvadion",
    "hypothesis",
    "numpy",
    "pytest",
    "torch",
    "torch._dynamo",  # what the first optimizer step imports
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.debug",
    "torch.distributed.tensor.parallel",
    "tests.support.runs.warm",  # found where pytest runs at the root
]
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(PRELOADED)
_pool: _Pool | None = None
_frozen = 0  # of a worker, the modules imported when it last froze what there was


# ---------------------------------------------------------------- for tests


class RankFailure(AssertionError):
    """Some ranks raised, died or did not answer; the text says which, how and where."""


def run(
    world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 60.0
) -> list[Any]:
    """What ``function(rank, *args)`` returns on every rank of a new default process group.

    The function, of a module, its arguments and its results must pickle. A rank that raises, dies
    or does not answer within ``timeout`` seconds is a RankFailure.
    """
    global _pool
    call = pickle.dumps((function, args))
    if _pool is None:
        _pool = _Pool()
    try:
        results = _pool.run(world_size, call, timeout)
    except BaseException:
        shutdown()  # ranks may be anywhere
        raise
    if _pool.is_worn():
        shutdown()
    return results


def preload(modules: set[str]) -> None:
    """Before the first call: import these once, where there are any, and not in every worker."""
    _context.set_forkserver_preload([*PRELOADED, *sorted(modules)])


def on_ranks(world_size: int, *, timeout: float = 60.0) -> Callable[..., Any]:
    """Makes a test of what every rank does: it fails if one raises.

    What pytest gives the test, every rank is given: it must pickle.
    """

    def made(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def test(**given: Any) -> None:
            run(world_size, _test_on_rank, test, given, timeout=timeout)

        _, *others = inspect.signature(function).parameters.values()
        cast(Any, test).__signature__ = inspect.Signature(others)
        return test

    return made


def _test_on_rank(rank: int, test: Any, given: dict[str, Any]) -> None:
    test.__wrapped__(rank, **given)


def gathered(value: Any) -> list[Any]:
    """In a worker: what each rank passes, by rank."""
    import torch.distributed as dist

    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return every


def free_port() -> int:
    """A port of this machine that nobody listens at, and that no connection will be given.

    Systems give connections those from 32768 on, or higher ones.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with socket.socket() as one, suppress(OSError):
            one.bind(("127.0.0.1", port))
            return port


def of_forkserver(target: Callable[..., None], args: tuple[Any, ...]) -> Any:
    """A new process, not started yet, that has imported what workers have."""
    return _context.Process(target=target, args=args)


@contextmanager
def as_torchrun_starts(rank: int, port: int) -> Iterator[None]:
    """In a worker: no process group inside, but the environment from which torchrun's are made."""
    import torch.distributed as dist

    world, before = str(dist.get_world_size()), dict(os.environ)
    dist.barrier()
    dist.destroy_process_group()
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=world, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def own_workers() -> Iterator[None]:
    """New workers for what runs inside; those that there were wait, with what they imported."""
    global _pool
    others, _pool = _pool, None
    try:
        yield
    finally:
        shutdown()
        _pool = others


def polling(process: int | None) -> int:
    """How many threads of a process poll for gloo's groups; 0 where no Linux lists them."""
    count = 0
    for name in Path(f"/proc/{process}/task").glob("*/comm"):
        with suppress(OSError):  # it has ended
            count += name.read_text().strip() == "gloo_tcp_loop"
    return count


@atexit.register
def shutdown() -> None:
    """End all workers; the next :func:`run` starts new ones."""
    global _pool
    if _pool is not None:
        _pool.kill()
        _pool = None


# ---------------------------------------------------------------- the workers, as pytest sees them


class _Pool:
    def __init__(self) -> None:
        import torch.distributed as dist

        self._folder = tempfile.TemporaryDirectory(prefix="curvadion-ranks-")
        # Ranks meet sooner than in a file, which each would read again and again.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._workers: list[_Worker] = []
        self._calls = 0

    def run(self, world_size: int, call: bytes, timeout: float) -> list[Any]:
        folder = Path(self._folder.name)
        started = len(self._workers)
        for index in range(started, world_size):
            self._workers.append(_Worker(folder / f"stack{index}", self._store.port))
        for worker in self._workers[started:]:
            worker.wait_until_ready(START)
        workers = self._workers[:world_size]
        self._calls += 1
        test = os.environ.get("PYTEST_CURRENT_TEST", "")
        for rank, worker in enumerate(workers):
            worker.connection.send((sys.path, test, self._calls, rank, world_size, timeout, call))
        values = _collect(workers, timeout)
        for worker in workers:
            worker.wait_until_ready(CLEAN_UP)
        return values

    def is_worn(self) -> bool:
        """Whether something holds many groups of past calls, as DeepSpeed's engines do."""
        return any(polling(worker.process.pid) > POLLING for worker in self._workers)

    def kill(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.connection.close()
        self._folder.cleanup()


class _Worker:
    def __init__(self, stack_file: Path, port: int) -> None:
        self.connection, theirs = _context.Pipe()
        self.process = _context.Process(target=_serve, args=(theirs, stack_file, port), daemon=True)
        self.process.start()
        theirs.close()
        self._stack_file = stack_file

    def answer(self) -> Any:
        """Its next message; if it died, that it raised, and how it died."""
        try:
            return self.connection.recv()
        except (EOFError, ConnectionError):
            self.process.join(GRACE)
            last = self._stack_file.read_text("utf-8") if self._stack_file.exists() else ""
            return True, f"died with exit code {self.process.exitcode}\n{last}"

    def wait_until_ready(self, seconds: float) -> None:
        problem = self.answer() if self.connection.poll(seconds) else f"not ready after {seconds} s"
        if problem:
            raise RankFailure(
                "A worker failed between calls. After a call all ranks meet in a barrier: has each "
                f"of them taken part in the same collectives?\n\n{problem}"
            )

    def stack(self) -> str:
        """Where the worker is now."""
        with suppress(ProcessLookupError):
            os.kill(cast(int, self.process.pid), signal.SIGUSR1)
        time.sleep(0.2)
        return self._stack_file.read_text("utf-8")


def _collect(workers: list[_Worker], timeout: float) -> list[Any]:
    values: dict[int, bytes] = {}
    failures: dict[int, str] = {}
    silent = set(range(len(workers)))
    rank_of = {worker.connection: rank for rank, worker in enumerate(workers)}
    deadline = time.monotonic() + timeout
    while silent and (left := deadline - time.monotonic()) > 0:
        for ready in wait([workers[rank].connection for rank in silent], left):
            rank = rank_of[cast(Any, ready)]
            silent.remove(rank)
            raised, answer = workers[rank].answer()
            if raised:
                failures[rank] = answer
                deadline = min(deadline, time.monotonic() + GRACE)
            else:
                values[rank] = answer
    complaint = "was still running" if failures else f"did not answer within {timeout} s"
    for rank in sorted(silent):
        failures[rank] = f"{complaint}:\n{workers[rank].stack()}"
    if failures:
        raise RankFailure(_describe(failures, len(workers)))
    return [pickle.loads(values[rank]) for rank in range(len(workers))]


def _describe(failures: dict[int, str], world_size: int) -> str:
    ranks_by_text: dict[str, list[str]] = {}
    for rank, text in failures.items():
        ranks_by_text.setdefault(text, []).append(str(rank))
    lines = [f"{len(failures)} of {world_size} ranks failed."]
    for text, ranks in ranks_by_text.items():
        lines.append(f"rank {', '.join(ranks)} {text.rstrip()}")
    return "\n\n".join(lines)


# ---------------------------------------------------------------- a worker


def _serve(connection: Connection, stack_file: Path, port: int) -> None:
    """A worker's life: say that it is ready, take a call, answer, clean up."""
    import torch
    import torch.distributed as dist

    from support.runs import seeded

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    seeded.shift_seeds()
    stack = stack_file.open("w")
    faulthandler.register(signal.SIGUSR1, file=stack)
    faulthandler.enable(stack)  # where it was when it died of a signal
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    # A collection would write to all that has been imported, and so copy the forkserver's memory.
    _freeze_modules()
    problem = None
    try:
        while True:
            connection.send(problem)
            connection.send(_answer(store, connection.recv()))
            problem = _clean_up()
    except (EOFError, ConnectionError):
        return  # the parent is gone


def _answer(store: Any, message: tuple[Any, ...]) -> tuple[bool, bytes | str]:
    import torch
    import torch.distributed as dist

    path, test, number, rank, world_size, timeout, call = message
    try:
        sys.path[:] = path
        os.environ["PYTEST_CURRENT_TEST"] = test
        function, args = pickle.loads(call)
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"call {number}", store),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=2 * timeout),  # the parent loses patience first
        )
        torch.manual_seed(0)
        return False, pickle.dumps(function(rank, *args))
    except BaseException as error:
        return True, f"raised\n{traceback.format_exc()}{_values(error)}"


def _values(error: BaseException) -> str:
    """What a failed assertion has seen: nothing here rewrites assertions to tell it."""
    if not isinstance(error, AssertionError):
        return ""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    shown = reprlib.Repr()
    shown.maxother = shown.maxstring = 300
    return "".join(f"    {name} = {shown.repr(x)}\n" for name, x in frame.f_locals.items())


def _clean_up() -> str | None:
    import torch.distributed as dist

    try:
        if dist.is_initialized():
            dist.barrier()  # no rank hangs up while another still listens
            dist.destroy_process_group()
        _forget_meshes()
    except Exception:
        return traceback.format_exc()
    gc.collect()
    _freeze_modules()
    return None


def _forget_meshes() -> None:
    """Empty the caches of DTensor: they hold meshes, and so groups, each with a thread that polls.

    A thousand of these threads take two fifths of two cores.
    """
    from torch.distributed.tensor import _redistribute, debug

    cast(Any, debug)._clear_sharding_prop_cache()
    if hasattr(_redistribute, "clear_redistribute_planner_cache"):  # not in every torch
        _redistribute.clear_redistribute_planner_cache()
    for cached in _caches("torch.distributed.tensor.", len(sys.modules)):
        cached.cache_clear()


@functools.lru_cache(maxsize=1)
def _caches(prefix: str, modules: int) -> list[Any]:
    """The cached functions and methods of modules whose names begin so.

    modules: how many there are now; the search takes as long as a small call.
    """
    found = [module for name, module in tuple(sys.modules.items()) if name.startswith(prefix)]
    values = [value for module in found for value in vars(module).values()]
    for owner in {x for x in values if isinstance(x, type) and x.__module__.startswith(prefix)}:
        values += [getattr(owner, key, None) for key in vars(owner)]
    cached = [x for x in values if isinstance(x, functools._lru_cache_wrapper)]
    return [x for x in cached if x.__module__.startswith(prefix)]


def _freeze_modules() -> None:
    """Take what imports have made out of later collections, which they would make slow."""
    global _frozen
    if len(sys.modules) > _frozen:
        gc.freeze()
        _frozen = len(sys.modules)
