"""Replicas that come and go, as torchft tracks them (the extra ``torchft``)."""

from __future__ import annotations

import logging
import os
import random
import socket
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from datetime import timedelta
from functools import cached_property, partial
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torchft.checkpointing.http_transport import HTTPTransport
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

from curvadion import checks
from curvadion.comm.collectives import checksum
from curvadion.comm.exchange_thread import Exchange, Worker
from curvadion.comm.members import LOST, Members
from curvadion.metering import wire
from curvadion.optim.handover import (
    checksum_of_anchors,
    hand_over,
    shared_settings,
    take_over,
)
from curvadion.optim.outer import RETRY_AFTER, ReplicaOptimizer

SHORTEST_REQUEST = timedelta(seconds=5)
logger = logging.getLogger("curvadion")


class ElasticReplicas(Members):
    """Replicas that may die and rejoin: ``replicas=ElasticReplicas()`` of an optimizer.

    Set TORCHFT_LIGHTHOUSE to the address of a ``torchft_lighthouse``, and call :meth:`start`
    before the loop. If a member is lost during an opening, no member applies it. TypeError or
    ValueError for wrong arguments.

    Args:
        begins: whether to begin a run if none is found. None: not after a restart by
            torchrun.
        min_replicas: an opening with fewer members fails. Pass the same number to
            ``torchft_lighthouse --min_replicas``.
        timeout: seconds until an exchange with a hanging peer fails; more than it takes to
            copy the whole state.
        quorum_timeout: seconds until an opening raises an error if others do not come.
        patience: seconds until this replica trains on and opens once others have come. None:
            no limit. Pass less than a step takes if others are slower.
        kept: number of openings whose codes are kept on the CPU for late replicas.
        replica_id: a name to sort members by. None: $REPLICA_GROUP_ID, or a random one.

    Attributes:
        events: a log, a list of (seconds since the epoch, text).
        openings: number of openings applied since the run began.
        present: number of members of the last opening.
    """

    def __init__(
        self,
        *,
        begins: bool | None = None,
        min_replicas: int = 1,
        timeout: float = 300.0,
        quorum_timeout: float = 600.0,
        patience: float | None = None,
        kept: int = 8,
        replica_id: str | None = None,
    ) -> None:
        checks.integer("min_replicas", min_replicas, 1)
        checks.integer("kept", kept, 0)
        checks.number("timeout", timeout, least=1e-3)
        checks.number("quorum_timeout", quorum_timeout, least=1e-3)
        if patience is not None:
            checks.number("patience", patience)
        if begins is None:
            begins = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        self._begins, self._patience = begins, patience
        self.events: list[tuple[float, str]] = []
        self.present = 0
        self._history: deque[tuple[int, dict[str, Any]]] = deque(maxlen=kept)
        self._started: ReplicaOptimizer | None = None
        self._told: str | None = None  # why the run does not begin
        self._ready = False  # whether an opening has begun ahead
        self._uncommitted = False  # whether an opening has not ended
        self._given: dict[str, Any] = {}  # from another replica
        # NCCL cannot abort what waits for a lost peer without ending the process.
        self._gloo = ProcessGroupGloo(timeout=timedelta(seconds=timeout))
        self._create_manager = partial(
            Manager,
            pg=self._gloo,
            load_state_dict=self._given.update,
            state_dict=dict,  # the transport knows what to send
            min_replica_size=min_replicas,
            use_async_quorum=False,
            timeout=timedelta(seconds=timeout),
            quorum_timeout=timedelta(seconds=quorum_timeout),
            replica_id=replica_id or os.environ.get("REPLICA_GROUP_ID"),
            **_environment(),
        )

    @cached_property
    def _manager(self) -> Manager:
        """Created by start(): others would wait for a replica that is not ready."""
        transport = _Transport(self._create_manager.keywords["timeout"], self)
        manager = self._create_manager(checkpoint_transport=transport)
        manager._client = _Client(manager)
        return manager

    @cached_property
    def _worker(self) -> Worker:
        wire.install_kernels()  # a meter may start while the thread communicates
        return Worker(self._optimizer._present_plan().device)

    def start(self, optimizer: ReplicaOptimizer, **stateful: Any) -> None:
        """Begin the run, or join it with a copy of another replica's state.

        Args:
            optimizer: built with these replicas.
            stateful: what else to copy: schedulers and the like, and buffers of modules.
        """
        if optimizer._replicas.members is not self or self._started is not None:
            raise ValueError(
                f"optimizer={type(optimizer).__name__} needs replicas of its own, passed to "
                f"its constructor, and is started once."
            )
        if self._patience is not None and optimizer.sync.every_step:
            raise ValueError(
                f"Leave out patience={self._patience!r}: with {optimizer.sync!r} all steps open."
            )
        plan, ranks = optimizer._present_plan(), self._create_manager.keywords["world_size"]
        for p in plan.parameters if ranks > 1 else ():
            # Ranks may copy their states from different replicas.
            if plan.inside is None or plan.copies_inside(p) > 1:
                raise ValueError(
                    f"{p.name} is not sharded over all {ranks} ranks of this replica: "
                    f"fully_shard the model, or make every rank a replica."
                )
            if p.matrices and p.group["direction"] == "low_rank":
                raise ValueError(f'{p.name}: replicas of several ranks need direction="polar".')
        self._started, self._stateful = optimizer, stateful
        self._starts = True  # the next comparison is that of a start
        optimizer._create_states(plan)
        # A checkpoint may hold a pending opening.
        optimizer.sync.finish(plan, optimizer._step_of_members(plan))
        # A checksum of all means so far: if it is equal, so are anchors.
        self._chain = checksum_of_anchors(optimizer)
        try:
            while not self._join(optimizer):
                time.sleep(RETRY_AFTER)
        except BaseException:
            self._started = None  # it may be tried again
            raise

    def _join(self, optimizer: ReplicaOptimizer) -> bool:
        """Try to join the run; return whether this replica has."""
        self.meet()
        if any(self._everybody(self.openings)):
            self._ready = True
            if not optimizer.sync.every_step:
                return optimizer.open_without_step()
            self.fresh = False  # the first gradient will use the copied weights
            return True
        # Nobody has begun, or the others are between openings.
        error = None
        try:
            if not any(may for [may] in self.gather([self._begins])):
                error = "restarted replicas wait for a run; if all have died, start all again"
            self.agree()
        except LOST as lost:
            error = str(lost)
        if error not in (None, self._told):
            logger.warning("The run does not begin yet: %s", error)
            self._told = error
        return self.commit(error=error, record={})

    def changed(self) -> None:
        if self._started is not None and not self._starts:
            self._chain = checksum_of_anchors(self._started)
            self._history.clear()  # its means do not apply to these weights
        self._starts = False

    def arrived(self) -> bool:
        if self._patience is None or self._ready:
            return True
        if self._uncommitted:  # with a delay: it is written when its means are due
            return False
        return all(self._everybody(self._manager._client.ask(self._patience)))

    def meet(self, *, ahead: bool = False) -> None:
        if self._ready:
            self._ready = ahead
            return
        optimizer = self._optimizer
        try:
            self._manager.start_quorum()
        except Exception as error:
            self._manager._quorum_future = None  # else it raises this error again
            raise RuntimeError(
                f"No opening could begin ({error}): restart the Lighthouse if it is down, or "
                f"raise quorum_timeout."
            ) from error
        self._uncommitted, self.fresh = True, False
        self._strayed = False  # whether this rank must copy everything next
        self.group = self._gloo._pg  # the wrapper's own rank is 0 on every replica
        self._take_over(optimizer)
        before, self.present = self.present, self._manager.num_participants()
        if self.present != before:
            self._note(f"{self.present} members instead of {before}")
        self._ready = ahead

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        told, lost = list[list[float]](), ""
        try:
            self._compare()
            told = self._all_gather(numbers)
        except LOST as error:
            lost = str(error) or "a member was lost"
        # Either all ranks of a replica continue, or none does.
        for reason in filter(None, self._everybody(lost)):
            raise RuntimeError(reason)
        return told

    def _compare(self) -> None:
        """Raise RuntimeError if a member cannot take part, or if members differ."""
        if self.group is None:
            raise RuntimeError("the members could not connect")
        plan = self._optimizer._present_plan()
        # Who cannot take part says so, or others would wait for it.
        broken = self._strayed or self._manager.errored() is not None
        chain = -1 if broken else self._chain
        word = checksum((plan.checksum, shared_settings(self._optimizer)))
        chains, words = zip(*self._all_gather([chain, word]), strict=True)
        if -1 in chains:
            own = getattr(self._manager.errored(), "original_exception", "see its log")
            raise RuntimeError(f"a member could not take part ({own})")
        if len(set(words)) > 1:
            raise RuntimeError("members have different parameters, groups or syncs")
        if len(set(chains)) > 1:
            # Some opened while others were not found. The larger part goes on.
            self._strayed = max(chains, key=chains.count) != chain
            raise RuntimeError("members hold different anchors")

    def _all_gather(self, numbers: Sequence[float]) -> list[list[float]]:
        own = torch.tensor(numbers, dtype=torch.float64)
        told = [torch.empty_like(own) for _ in range(self.group.size())]
        dist.all_gather(told, own, group=self.group)
        return [each.tolist() for each in told]

    def agree(self) -> None:
        # An exchange may have succeeded here and failed elsewhere.
        dist.all_reduce(torch.zeros(()), group=self.group)

    def begin(self, what: str, work: Callable[[], Any]) -> Exchange[Any]:
        return self._worker.begin(what, work)

    def commit(self, *, error: str | None, record: dict[str, Any]) -> bool:
        manager, self._uncommitted = self._manager, False
        told = self._everybody((self._strayed, manager.current_step()))
        number = min(step for _, step in told)
        if error is not None:
            manager.report_error(RuntimeError(error))
        committed: bool = manager.should_commit()
        if record and not committed:
            reason = error or "another rank failed, or members are too few"
            logger.warning("An opening failed and will be tried again: %s", reason)
        if any(strayed for strayed, _ in told):
            # torchft then copies everything to this replica at the next opening.
            manager.load_state_dict({"step": max(number - 1, 0), "batches_committed": 0})
            self._note("others hold different anchors: will take over theirs")
        elif not committed:
            self._note("an opening failed: nothing of it was written")
        elif record:
            self._remember(number, record)
        return committed

    @property
    def _optimizer(self) -> ReplicaOptimizer:
        if self._started is None:
            raise RuntimeError("call replicas.start(optimizer) before step().")
        return self._started

    @property
    def openings(self) -> int:
        return int(self._manager.current_step()) if "_manager" in vars(self) else 0

    def close(self) -> None:
        """Leave the run, so that others do not have to wait for a timeout."""
        if "_worker" in vars(self):
            self._worker.end(seconds=1.0)
        if "_manager" in vars(self):
            self._manager.shutdown(wait=False)
            self._gloo.shutdown()

    def _note(self, text: str) -> None:
        self.events.append((time.time(), text))

    def _remember(self, number: int, record: dict[str, Any]) -> None:
        """Note an applied opening for late members."""
        if self._optimizer.sync.replays:
            self._history.append((number, {**record, "before": self._chain}))
        elif self.present == 1:  # the mean was exact, and nobody else has it
            self._chain = random.getrandbits(32)
        for codes in record["codes"]:
            self._chain = zlib.crc32(codes.numpy().tobytes(), self._chain)

    def _everybody(self, own: Any) -> list[Any]:
        """Gather a value from each rank of this replica."""
        group = self._optimizer._present_plan().inside
        if group is None:
            return [own]
        said = [None] * group.size()
        dist.all_gather_object(said, own, group=group)
        return said

    def _take_over(self, optimizer: ReplicaOptimizer) -> None:
        """Apply what others gave, if it is the same kind on all ranks."""
        given = dict(self._given)
        self._given.clear()
        told = self._everybody((self.openings, sorted(given)))
        begun = any(openings for openings, _ in told)
        if begun and any(each != told[0] for each in told):
            self._strayed = True
        elif "missed" in given:
            plan = optimizer._present_plan()
            for number, record in given["missed"]:
                optimizer.sync.catch_up(plan, record)
                self._remember(number, record)
            self._note(f"caught up with {len(given['missed'])} openings")
        elif given:
            if begun:  # ranks may have received their parts from different replicas
                shared = {key: given[key] for key in ("groups", "record", "stateful")}
                given |= self._everybody(shared)[0]
            take_over(optimizer, given, **self._stateful)
            self._chain, self.fresh = given["chain"], True
            self._history = deque(given["history"].items(), self._history.maxlen)
            values = (value for state in given["states"] for value in state.values())
            size = sum(value[0].nbytes for value in values if isinstance(value, tuple))
            self._note(f"took over from another replica: {size} bytes")


class _Client:
    """The manager's client, which can ask ahead who takes part in the next opening."""

    def __init__(self, manager: Manager) -> None:
        self._manager, self._client = manager, manager._client
        self._asked: Future[Any] | None = None
        self._last: dict[str, Any] = {}  # the arguments of the last request

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def ask(self, patience: float) -> bool:
        """Whether others have come, after ``patience`` at the first call."""
        if self._asked is not None:
            return self._asked.done()
        self._asked, manager = Future(), self._manager
        now = {"step": manager.current_step(), "commit_failures": manager._commit_failures}
        # No executor: Python would wait for its thread at exit.
        Thread(target=self._answer, args=(self._asked, self._last | now), daemon=True).start()
        return bool(wait([self._asked], patience).done)

    def _answer(self, asked: Future[Any], given: dict[str, Any]) -> None:
        try:
            asked.set_result(self._repeat(**given))
        except Exception as error:
            asked.set_exception(error)

    def _quorum(self, **given: Any) -> Any:
        asked, self._asked, self._last = self._asked, None, given
        return self._repeat(**given) if asked is None else asked.result()

    def _repeat(self, *, timeout: timedelta, **given: Any) -> Any:
        """Ask again now and then: a restarted Lighthouse has forgotten the request."""
        end = time.monotonic() + timeout.total_seconds()
        each = min(timeout, max(timeout / 10, SHORTEST_REQUEST))
        while True:
            since = time.monotonic()
            try:
                return self._client._quorum(timeout=each, **given)
            except Exception:  # again at once, or a quorum might close meanwhile
                if since + each.total_seconds() >= end:
                    raise
                if time.monotonic() < since + RETRY_AFTER:  # nobody listens
                    time.sleep(RETRY_AFTER)


class _Transport(HTTPTransport):  # type: ignore[misc, unused-ignore]
    """Serves the means of the last openings, or the whole state."""

    def __init__(self, timeout: timedelta, replicas: ElasticReplicas) -> None:
        super().__init__(timeout, num_chunks=0)
        self._replicas = replicas
        self._chunks = self  # each is made when somebody fetches it

    def __getitem__(self, number: int) -> Any:
        replicas = self._replicas
        if number == 0:
            return list(replicas._history)
        whole = hand_over(replicas._optimizer, **replicas._stateful)
        return {**whole, "chain": replicas._chain}

    def send_checkpoint(self, *, step: int, **_: Any) -> None:
        self.allow_checkpoint(step)

    def recv_checkpoint(self, *, metadata: str, step: int, timeout: timedelta, **_: Any) -> Any:
        address = f"{metadata}{step}"
        history = dict(self._load_from_address(f"{address}/0", timeout))
        here = self._replicas.openings
        missed = [(number, history.get(number)) for number in range(here, step)]
        # Others may have started from different anchors.
        same = history.get(here, {}).get("before") == self._replicas._chain
        if same and all(record for _, record in missed):
            given = {"missed": missed}
        else:
            given = self._load_from_address(f"{address}/1", timeout)
            given["history"] = history
        counters = {"step": step, "batches_committed": 0}
        return {"user": {"default": given}, "torchft": counters}


def _environment() -> dict[str, Any]:
    """Manager's arguments; a single process has a store of its own."""
    if "TORCHFT_LIGHTHOUSE" not in os.environ:
        raise ValueError(
            "TORCHFT_LIGHTHOUSE is not set: start torchft_lighthouse, and set it to the "
            "address, such as http://host:29510."
        )
    found: dict[str, Any] = {"lighthouse_addr": os.environ["TORCHFT_LIGHTHOUSE"]}
    # One rank need not call init_process_group, which may host the store at MASTER_PORT.
    if os.environ.get("WORLD_SIZE", "1") == "1" or "MASTER_ADDR" not in os.environ:
        address, port = socket.gethostname(), _port_of_a_store()
        return {
            **found,
            "rank": 0,
            "world_size": 1,
            "store_addr": address,
            "store_port": port,
        }
    of_torchrun = {"rank": "RANK", "world_size": "WORLD_SIZE", "store_port": "MASTER_PORT"}
    found |= {name: int(os.environ[key]) for name, key in of_torchrun.items()}
    return {**found, "store_addr": os.environ["MASTER_ADDR"]}


_stores: list[TCPStore] = []  # which live as long as the process


def _port_of_a_store() -> int:
    # Another program may listen at one address on a port that the system chooses.
    for port in random.SystemRandom().sample(range(20_000, 32_000), 50):
        with suppress(RuntimeError):  # in use
            _stores.append(TCPStore("localhost", port, is_master=True, wait_for_workers=False))
            return port
    raise RuntimeError("no port between 20000 and 32000 is free")
