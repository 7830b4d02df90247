"""Replicas that come and go, through torchft (the extra ``torchft``).

torchft's Lighthouse tracks which replicas are alive; an opening is a transaction among them. Start
``torchft_lighthouse`` once, and set ``TORCHFT_LIGHTHOUSE`` in the environment of every replica.
"""

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
from curvadion.comm.members import LOST, Members, Opening
from curvadion.comm.worker import Exchange, Worker
from curvadion.metering import wire
from curvadion.optim.handover import checksum_of_anchors, hand_over, shared_settings, take_over
from curvadion.optim.outer import RETRY_AFTER, ReplicaOptimizer
from curvadion.update.plan import Plan

SHORTEST_REQUEST = timedelta(seconds=5)
logger = logging.getLogger("curvadion")


class Replicas(Members):
    """Replicas that may die and rejoin: ``replicas=Replicas()`` of CurvaDion or Replicated.

    Call :meth:`start` before the training loop::

        replicas = curvadion.integrations.torchft.Replicas()
        optimizer = curvadion.CurvaDion(groups, lr=0.02, replicas=replicas, wire_budget=0.01)
        replicas.start(optimizer, scheduler=scheduler)

    If a member is lost during an opening, no member applies it, and the next step (with a delay:
    the next opening) tries again. A joining replica copies another one's state. A late one applies
    the means that it missed; with ``CodedGradients`` it copies everything. Each rank of a replica
    (FSDP2, tensor parallelism) creates its own Replicas.

    Args:
        begins: whether to begin a run if none is found. None means False in a process that torchrun
            has restarted (others may be alive but not found yet), and True otherwise.
        min_replicas: an opening with fewer members fails. Pass the same number to
            ``torchft_lighthouse --min_replicas``, so that openings wait for them.
        timeout: seconds after which an exchange with a hanging peer fails; dead peers are noticed
            at once. It must exceed the time to copy the whole state to a newcomer.
        quorum_timeout: seconds after which an opening raises an error because others did not
            arrive. It must exceed the slowest replica's time from one opening to the next.
        patience: seconds that this replica waits at an opening for the others. Then it trains on,
            and opens at the first step at which they have arrived. None: no limit. Pass less than a
            step takes, on all but the slowest replica, if replicas differ in speed.
        kept: number of openings whose means a member keeps for late replicas; each uses ``bits``
            bits of CPU memory per element.
        replica_id: a name for logs, by which members are sorted; None uses REPLICA_GROUP_ID from
            the environment, or a random name.

    Attributes:
        events: a log, a list of (seconds since the epoch, text).
        openings: number of openings applied since the run began.
        present: number of members of the last opening.

    Raises:
        TypeError, ValueError: naming the argument and its value.
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
        self._stateful: dict[str, Any] = {}
        self._started: ReplicaOptimizer | None = None
        self._ready: _Opening | None = None
        self._uncommitted = False  # whether an opening has neither been applied nor failed
        self._given: dict[str, Any] = {}  # from another replica
        self._begun = False  # whether the run has begun, as the ranks of this replica have heard
        self._starts = False  # whether the next comparison is that of a start
        self._chain = 0  # checksum of all means so far: if it is equal, so are anchors
        # NCCL cannot abort what waits for a lost peer without ending the process.
        self._group = ProcessGroupGloo(timeout=timedelta(seconds=timeout))
        self._create_manager = partial(
            Manager,
            pg=self._group,
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
        """Created by start(): others would wait for a replica that is known but not ready."""
        transport = _Transport(self._create_manager.keywords["timeout"], self)
        manager = self._create_manager(checkpoint_transport=transport)
        manager._client = _Client(manager)
        return manager

    @cached_property
    def _worker(self) -> Worker:
        wire.install_kernels()  # a meter may start while the thread communicates
        return Worker(self._optimizer._present_plan().device)

    def start(self, optimizer: ReplicaOptimizer, **stateful: Any) -> None:
        """Join the run before the first step: begin it, or copy another replica's state.

        Args:
            optimizer: the optimizer that was built with these replicas.
            stateful: other objects whose state a newcomer copies, with ``state_dict`` and
                ``load_state_dict``, such as a scheduler; of a torch.nn.Module the buffers are
                copied.
        """
        if optimizer._replicas.members is not self or self._started not in (None, optimizer):
            raise ValueError(
                f"optimizer={type(optimizer).__name__} has other replicas, or shares these with "
                f"another optimizer: pass replicas= to its constructor, each its own."
            )
        if self._patience is not None and optimizer.sync.every_step:
            raise ValueError(
                f"patience={self._patience!r} with sync={optimizer.sync!r}: every step is an "
                f"opening, so no replica trains on alone. Leave patience out."
            )
        plan = optimizer._present_plan()
        _check(plan, self._create_manager.keywords["world_size"])
        self._started, self._stateful, self._starts = optimizer, stateful, True
        optimizer._create_states(plan)
        optimizer.sync.finish(plan, optimizer._step_of_members(plan))  # perhaps a checkpoint's
        self._chain = checksum_of_anchors(optimizer)
        if not self._begins:
            logger.warning(
                "This replica was restarted, so it does not begin a run but waits to join one. If "
                "all replicas have died, start all of them again from a checkpoint."
            )
        while not self._join(optimizer):
            time.sleep(RETRY_AFTER)

    def _join(self, optimizer: ReplicaOptimizer) -> bool:
        """Try to join the run; return whether this replica has."""
        opening = self.begin()
        if self._begun:
            self._ready = opening
            if not optimizer.sync.every_step:
                return optimizer.open_without_step()
            opening.fresh = False  # the first gradient will already use the copied weights
            return True
        # Nobody has begun, or the others are between openings.
        try:
            failed = not any(may for [may] in opening.gather([float(self._begins)]))
            opening.agree()
        except LOST as error:
            logger.warning("The run does not begin yet: %s", error)
            failed = True
        return opening.commit(failed=failed, record={})

    def changed(self) -> None:
        if self._started is not None and not self._starts:
            self._chain = checksum_of_anchors(self._started)
            self._history.clear()  # its means do not apply to these weights
        self._starts = False

    def meet(self) -> None:
        self._ready = self.begin()

    def arrived(self) -> bool:
        if self._patience is None or self._ready is not None:
            return True
        if self._uncommitted:  # with a delay: it is written when its means are due
            return False
        return all(self._everybody(self._manager._client.ask(self._patience)))

    def begin(self) -> _Opening:
        if (ready := self._ready) is not None:
            self._ready = None
            return ready
        optimizer = self._optimizer
        try:
            self._manager.start_quorum()
        except Exception as error:
            self._manager._quorum_future = None  # else it raises this error again
            raise RuntimeError(
                f"No opening could begin ({error}): restart the Lighthouse at TORCHFT_LIGHTHOUSE "
                f"if it is down, or raise quorum_timeout if other replicas took longer."
            ) from error
        self._uncommitted = True
        opening = _Opening(self)
        self._take_over(opening, optimizer)
        before, self.present = self.present, self._manager.num_participants()
        if self.present != before:
            self._note(f"{self.present} members instead of {before}")
        return opening

    @property
    def _optimizer(self) -> ReplicaOptimizer:
        if self._started is None:
            raise RuntimeError(
                "replicas=Replicas() has not joined the run: call replicas.start(optimizer) before "
                "step()."
            )
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
            self._group.shutdown()

    def _note(self, text: str) -> None:
        self.events.append((time.time(), text))

    def _remember(self, number: int, record: dict[str, Any]) -> None:
        """Note an opening that has been applied, for members that are late."""
        if self._optimizer.sync.replays:
            self._history.append((number, {**record, "before": self._chain}))
        elif self.present == 1:  # the mean was exact, and nobody else has it
            self._chain = random.getrandbits(32)
        for codes in record["codes"]:
            if codes is not None:
                self._chain = zlib.crc32(codes.numpy().tobytes(), self._chain)

    def _everybody(self, own: Any) -> list[Any]:
        """Gather a value from each rank of this replica; collective in the replica."""
        group = self._optimizer._present_plan().inside
        if group is None:
            return [own]
        said = [None] * group.size()
        dist.all_gather_object(said, own, group=group)
        return said

    def _take_over(self, opening: _Opening, optimizer: ReplicaOptimizer) -> None:
        """Apply what others handed over, if it is the same kind on all ranks."""
        given = dict(self._given)
        self._given.clear()
        told = self._everybody((self.openings, sorted(given)))
        self._begun = max(openings for openings, _ in told) > 0
        # At the beginning each rank may take the weights of another replica.
        if self._begun and any(each != told[0] for each in told):
            opening.strayed = True
        elif "missed" in given:
            plan = optimizer._present_plan()
            for number, record in given["missed"]:
                optimizer.sync.catch_up(plan, record)
                self._remember(number, record)
            self._note(f"caught up with {len(given['missed'])} openings")
        elif given:
            # Ranks may have received their parts from different replicas, with different counters.
            shared = {key: given[key] for key in ("groups", "record", "stateful")}
            given |= self._everybody(shared)[0] if self._begun else {}
            take_over(optimizer, given, **self._stateful)
            self._chain, opening.fresh = given["chain"], True
            self._history.clear()
            self._history.extend(given["history"].items())
            held = [v for s in given["states"] for v in s.values() if isinstance(v, tuple)]
            size = sum(v[0].nbytes for v in held)
            self._note(f"took over from another replica: {size} bytes")

    def __repr__(self) -> str:
        return "Replicas()"


class _Opening(Opening):
    """An opening of torchft's quorum."""

    # Whether this rank will copy everything, since most hold other anchors, or its replica's ranks
    # were given different things.
    strayed = False

    def __init__(self, replicas: Replicas) -> None:
        self._replicas, self._manager = replicas, replicas._manager
        # The wrapper's rank is 0 on every replica, and its group changes at the next quorum.
        self.group = replicas._group._pg

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        told: list[list[float]] = []
        lost = None
        try:
            self._compare()
            told = self._all_gather(numbers)
        except LOST as error:
            lost = str(error)
        # Either all ranks of a replica continue, or none does.
        for reason in self._replicas._everybody(lost):
            if reason is not None:
                raise RuntimeError(reason)
        return told

    def _compare(self) -> None:
        """Raise RuntimeError if a member cannot take part, or if members differ."""
        if self.group is None:
            raise RuntimeError("the members could not connect")
        optimizer = self._replicas._optimizer
        # Who cannot take part says so, or the others would wait for it until a timeout.
        broken = self.strayed or self._manager.errored() is not None
        chain = -1.0 if broken else float(self._replicas._chain)
        word = checksum((optimizer._present_plan().checksum, shared_settings(optimizer)))
        chains, words = zip(*self._all_gather([chain, word]), strict=True)
        if -1.0 in chains:
            raise RuntimeError("a member could not take part")
        if len(set(words)) > 1:
            raise RuntimeError("members have different parameters, groups or syncs")
        if len(set(chains)) > 1:
            # Some opened while others were not found. The larger part goes on.
            self.strayed = max(chains, key=chains.count) != chain
            raise RuntimeError("members hold different anchors")

    def _all_gather(self, numbers: Sequence[float]) -> list[list[float]]:
        own = torch.tensor(list(numbers), dtype=torch.float64)
        told = [torch.empty_like(own) for _ in range(self.group.size())]
        dist.all_gather(told, own, group=self.group)
        return [each.tolist() for each in told]

    def agree(self) -> None:
        # An exchange may have succeeded here and failed elsewhere.
        dist.all_reduce(torch.zeros(()), group=self.group)

    def begin(self, what: str, work: Callable[[], Any]) -> Exchange[Any]:
        return self._replicas._worker.begin(what, work)

    def commit(self, *, failed: bool, record: dict[str, Any]) -> bool:
        replicas, manager = self._replicas, self._manager
        replicas._uncommitted = False
        told = replicas._everybody((self.strayed, manager.current_step()))
        number = min(step for _, step in told)
        if failed:
            manager.report_error(RuntimeError("a member was lost at an opening"))
        committed = bool(manager.should_commit())
        if any(strayed for strayed, _ in told):
            # torchft then copies everything to this replica at the next opening.
            manager.load_state_dict({"step": max(number - 1, 0), "batches_committed": 0})
            replicas._note("others hold different anchors: will take over theirs")
        elif not committed:
            replicas._note("an opening failed: nothing of it was written")
        elif record:
            replicas._remember(number, record)
        return committed


class _Client:
    """The manager's client, which can ask ahead who takes part in the next opening."""

    def __init__(self, manager: Manager) -> None:
        self._manager, self._client = manager, manager._client
        self._asked: Future[Any] | None = None
        self._last: dict[str, Any] = {}  # the arguments of the last request

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def ask(self, patience: float) -> bool:
        """Whether others have come, after as many seconds if this asks first."""
        if self._asked is not None:
            patience = 0.0
        else:
            self._asked, manager = Future(), self._manager
            now = {"step": manager.current_step(), "commit_failures": manager._commit_failures}
            given = self._asked, {**self._last, **now}
            # No executor: Python would wait for its thread at exit.
            Thread(target=self._answer, args=given, daemon=True).start()
        done, _ = wait([self._asked], patience)
        return bool(done)

    def _answer(self, asked: Future[Any], given: dict[str, Any]) -> None:
        try:
            asked.set_result(self._repeat(**given))
        except Exception as error:
            asked.set_exception(error)

    def _quorum(self, **given: Any) -> Any:
        asked, self._asked, self._last = self._asked, None, given
        return self._repeat(**given) if asked is None else asked.result()

    def _repeat(self, *, timeout: timedelta, **given: Any) -> Any:
        """Ask again now and then: a Lighthouse that has restarted has forgotten the request.

        A quorum that closes between two requests of a member is lost, so they follow at once.
        """
        end = time.monotonic() + timeout.total_seconds()
        each = min(timeout, max(timeout / 10, SHORTEST_REQUEST))
        while True:
            since = time.monotonic()
            try:
                return self._client._quorum(timeout=each, **given)
            except Exception:
                if since + each.total_seconds() >= end:
                    raise
                if time.monotonic() < since + RETRY_AFTER:  # nobody listens there
                    time.sleep(RETRY_AFTER)


class _Transport(HTTPTransport):  # type: ignore[misc, unused-ignore]
    """Serves the means of the last openings, and the whole state if those are not enough."""

    def __init__(self, timeout: timedelta, replicas: Replicas) -> None:
        super().__init__(timeout, num_chunks=0)
        self._replicas = replicas
        self._chunks = self  # each is made when somebody fetches it

    def __getitem__(self, number: int) -> Any:
        replicas = self._replicas
        if number == 0:
            return list(replicas._history)
        return {
            "chain": replicas._chain,
            **hand_over(replicas._optimizer, **replicas._stateful),  # copies all from a GPU
        }

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta
    ) -> None:
        self.allow_checkpoint(step)

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        history = dict(self._load_from_address(f"{metadata}{step}/0", timeout))
        here = self._replicas.openings
        known = here > 0 and all(number in history for number in range(here, step))
        # Others may have started from different anchors.
        if known and history[here]["before"] == self._replicas._chain:
            given = {"missed": [(number, history[number]) for number in range(here, step)]}
        else:
            given = self._load_from_address(f"{metadata}{step}/1", timeout)
            given["history"] = history
        counters = {"step": step, "batches_committed": 0}
        return {"user": {"default": given}, "torchft": counters}


def _check(plan: Plan, ranks: int) -> None:
    """Raise ValueError for what the ranks of a replica cannot copy from different replicas."""
    for p in plan.parameters if ranks > 1 else ():
        if plan.inside is None or plan.copies_inside(p) > 1:
            raise ValueError(
                f"{p.name} is not sharded over all {ranks} ranks of this replica: call "
                f"fully_shard(model), or start every rank as a replica of its own."
            )
        if p.matrices and p.group["direction"] == "low_rank":
            raise ValueError(
                f'direction="low_rank" for {p.name}: replicas of several ranks that come and go '
                f'need direction="polar".'
            )


def _environment() -> dict[str, Any]:
    """Manager's arguments, from the environment; a single process has a store of its own."""
    if "TORCHFT_LIGHTHOUSE" not in os.environ:
        raise ValueError(
            "TORCHFT_LIGHTHOUSE is not set in the environment: start torchft_lighthouse, and "
            "set the variable to its address, such as http://host:29510."
        )
    found = {"lighthouse_addr": os.environ["TORCHFT_LIGHTHOUSE"]}
    if "RANK" not in os.environ or "MASTER_ADDR" not in os.environ:
        address, port = socket.gethostname(), _own_store().port
        return {**found, "rank": 0, "world_size": 1, "store_addr": address, "store_port": port}
    return {
        **found,
        "rank": int(os.environ["RANK"]),
        "world_size": int(os.environ["WORLD_SIZE"]),
        "store_addr": os.environ["MASTER_ADDR"],
        "store_port": int(os.environ["MASTER_PORT"]),
    }


_stores: list[TCPStore] = []  # which live as long as the process


def _own_store() -> TCPStore:
    # Not on a port that the system chooses: another program may listen on it at a single address,
    # and receive this store's traffic.
    for port in random.SystemRandom().sample(range(20_000, 32_000), 50):
        try:
            _stores.append(TCPStore("localhost", port, is_master=True, wait_for_workers=False))
            return _stores[-1]
        except RuntimeError:  # in use
            continue
    raise RuntimeError("no port between 20000 and 32000 is free for this replica's store")
