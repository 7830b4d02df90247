"""Replicas that come and go, through torchft (the extra ``torchft``).

torchft's Lighthouse tracks which replicas are alive; an opening is a transaction among them. Start
``torchft_lighthouse`` once, and set ``TORCHFT_LIGHTHOUSE`` in the environment of every replica.
"""

from __future__ import annotations

import logging
import math
import os
import random
import socket
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from functools import cached_property
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore
from torchft.checkpointing.http_transport import HTTPTransport
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

from curvadion import checks
from curvadion.comm.collectives import checksum
from curvadion.comm.members import LOST, Members, Opening
from curvadion.comm.worker import Exchange, Worker
from curvadion.metering import wire
from curvadion.optim.handover import hand_over, shared_settings, shared_weights, take_over
from curvadion.optim.outer import RETRY_AFTER, ReplicaOptimizer
from curvadion.update.plan import Plan

SAY_AFTER = 60.0  # seconds
SHORTEST_REQUEST = timedelta(seconds=5)
logger = logging.getLogger("curvadion")


class Replicas(Members):
    """Replicas that may die and rejoin: ``replicas=Replicas()`` of CurvaDion or Replicated.

    Call :meth:`start` before the training loop::

        replicas = curvadion.integrations.torchft.Replicas()
        optimizer = curvadion.CurvaDion(groups, lr=0.02, replicas=replicas, wire_budget=0.01)
        replicas.start(optimizer, scheduler=scheduler)

    If a member is lost during an opening, no member applies it: weights, momenta and residuals stay
    unchanged, and the next step opens again with the remaining members. With a delay the next
    opening does, and with ``CodedGradients`` no replica takes the step. A joining replica copies
    anchors, momenta, counters, gate and schedulers from another one. A late replica applies the
    means that it missed, and keeps its own progress since then; with ``CodedGradients`` it copies
    everything.

    A replica may have several ranks (FSDP2, tensor parallelism): each rank creates its own
    Replicas. Parameters live on a mesh of the replica's own ranks.

    Args:
        begins: whether to begin a run if none is found. None means False in a process that torchrun
            has restarted (others may be alive but not found yet), and True otherwise.
        min_replicas: an opening with fewer members fails, and replicas continue on their own. Pass
            the same number to ``torchft_lighthouse --min_replicas``, so that openings wait for
            them.
        timeout: seconds after which an exchange with a hanging peer fails; dead peers are noticed
            at once. It must exceed the time to copy weights and states to a newcomer, for which the
            others wait.
        quorum_timeout: seconds after which an opening raises an error because others did not
            arrive. It must exceed the time that the slowest replica takes from one opening to the
            next.
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
        for name, seconds in (("timeout", timeout), ("quorum_timeout", quorum_timeout)):
            checks.number(name, seconds, least=1e-3)
        if patience is not None:
            checks.number("patience", patience)
        if begins is None:
            begins = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        self._begins = begins
        self.events: list[tuple[float, str]] = []
        self._history: deque[tuple[int, dict[str, Any]]] = deque(maxlen=kept)
        self._stateful: dict[str, Any] = {}
        self._started: ReplicaOptimizer | None = None
        self._ready: _Opening | None = None
        self.present = 0
        self._patience, self._uncommitted = patience, False
        self._given: dict[str, Any] | None = None
        self._worker: Worker | None = None
        self._begun = False  # whether the run has begun, as the ranks of this replica have heard
        self._starts = False  # whether the next comparison is that of a start
        self._chain = 0  # checksum of all means so far: if it is equal, so are anchors
        self._timeouts = timedelta(seconds=timeout), timedelta(seconds=quorum_timeout)
        self._min_replicas = min_replicas
        self._replica_id = replica_id or os.environ.get("REPLICA_GROUP_ID")
        self._environment = _environment()

    @cached_property
    def _manager(self) -> Manager:
        """Created by start(): others would wait for a replica that is known but not ready."""
        timeout, quorum_timeout = self._timeouts
        manager = Manager(
            pg=self._group,
            load_state_dict=self._load,
            state_dict=self._save,
            min_replica_size=self._min_replicas,
            use_async_quorum=False,
            timeout=timeout,
            quorum_timeout=quorum_timeout,
            checkpoint_transport=_Transport(timeout, self),
            replica_id=self._replica_id,
            **self._environment,
        )
        manager._client = _Client(manager)
        return manager

    @cached_property
    def _group(self) -> ProcessGroupGloo:
        # NCCL cannot abort what waits for a lost peer without ending the process.
        return ProcessGroupGloo(timeout=self._timeouts[0])

    def start(self, optimizer: ReplicaOptimizer, **stateful: Any) -> None:
        """Join the run before the first step: begin it, or copy another replica's state.

        Args:
            optimizer: the optimizer that was built with these replicas.
            stateful: other objects whose state a newcomer copies, with ``state_dict`` and
                ``load_state_dict``, such as a scheduler; of a torch.nn.Module the buffers are
                copied.
        """
        if optimizer._replicas.members is not self:
            raise ValueError(
                f"optimizer={type(optimizer).__name__} was not built with these replicas: pass "
                f"replicas= to its constructor."
            )
        if self._started is not None:
            raise ValueError("replicas.start() was called before: each optimizer needs replicas.")
        if self._patience is not None and optimizer.sync.every_step:
            raise ValueError(
                f"patience={self._patience!r} with sync={optimizer.sync!r}: every step is an "
                f"opening, so no replica trains on alone. Leave patience out."
            )
        _check(optimizer._present_plan(), self._environment["world_size"])
        self._started, self._stateful, self._starts = optimizer, stateful, True
        try:
            self._join(optimizer)
        except BaseException:
            self._started = None  # it may be tried again
            raise

    def _join(self, optimizer: ReplicaOptimizer) -> None:
        plan = optimizer._present_plan()
        optimizer._create_states(plan)
        optimizer.sync.finish(plan, optimizer._step_of_members(plan))  # perhaps a checkpoint's
        self._chain = checksum_of_anchors(optimizer)
        since = time.monotonic()
        while True:
            opening = self.begin()
            if self._begun and optimizer.sync.every_step:
                # The first gradient will already use the weights that were taken over.
                self._ready, opening.fresh = opening, False
                return
            if self._begun:
                self._ready = opening
                joined = optimizer.open_without_step()
            else:  # nobody has begun, or the others are between openings
                try:
                    failed = not any(may for [may] in opening.gather([float(self._begins)]))
                    opening.agree()
                except LOST as error:
                    logger.warning("The run does not begin yet: %s", error)
                    failed = True
                joined = opening.commit(failed=failed, record={})
            if joined:
                return
            if not self._begins and time.monotonic() > since + SAY_AFTER:
                since = math.inf
                logger.warning(
                    "This replica was restarted, so it does not begin a run but waits to join one. "
                    "If all replicas have died, start all of them again from a checkpoint."
                )
            time.sleep(RETRY_AFTER)

    def changed(self) -> None:
        if self._started is not None and not self._starts:
            self._chain = checksum_of_anchors(self._started)
            self._history.clear()  # its means do not apply to these weights
        self._starts = False

    def meet(self) -> None:
        """Begin the opening that :meth:`begin` returns next."""
        self._ready = self.begin()

    def arrived(self) -> bool:
        if self._patience is None or self._ready is not None:
            return True
        if self._uncommitted:  # with a delay: it is written when its means are due
            return False
        client: _Client = self._manager._client
        waits = 0.0 if client.asked else self._patience
        done, _ = wait([client.ask()], waits)
        return all(self._everybody(bool(done)))

    def begin(self) -> _Opening:
        """Meet the members that are present; a peer's weights and states may replace these."""
        if (ready := self._ready) is not None:
            self._ready = None
            return ready
        optimizer, self._given = self._optimizer, None
        try:
            self._manager.start_quorum()
        except Exception as error:
            self._manager._quorum_future = None  # else it raises this error again
            raise RuntimeError(
                f"No opening could begin ({error}): the Lighthouse at TORCHFT_LIGHTHOUSE may be "
                f"down, or other replicas took longer than quorum_timeout. Restart the Lighthouse, "
                f"or raise quorum_timeout."
            ) from error
        self._uncommitted = True
        opening = _Opening(self)
        self._take_over(opening, optimizer)
        present = self._manager.num_participants()
        if present != self.present:
            self._note(f"{present} members instead of {self.present}")
        self.present = present
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
        if self._worker is not None:
            self._worker.end(seconds=1.0)
        if "_manager" in vars(self):
            self._manager.shutdown(wait=False)
            self._group.shutdown()

    def _written(self, number: int, record: dict[str, Any], *, alone: bool) -> None:
        """Remember an opening for members that are late."""
        before = self._chain
        codes = [c for c in record["codes"] if c is not None]
        for each in codes:
            self._chain = zlib.crc32(each.numpy().tobytes(), self._chain)
        if alone and not codes:  # the mean was exact, and nobody else has it
            self._chain = random.getrandbits(32)
        if self._optimizer.sync.replays:
            self._history.append((number, {**record, "before": before, "chain": self._chain}))

    def _note(self, text: str) -> None:
        self.events.append((time.time(), text))

    # ---------------------------------------------------------------- handing over

    def _save(self) -> dict[str, Any]:
        more = {name: _state_of(one) for name, one in self._stateful.items()}
        held = {"stateful": more, "chain": self._chain}
        return {
            "history": list(self._history),
            # Called if somebody fetches it: it copies all state from a GPU.
            "whole": lambda: held | {"optimizer": hand_over(self._optimizer)},
        }

    def _load(self, given: dict[str, Any]) -> None:
        self._given = given

    def _inside(self) -> dist.ProcessGroup | None:
        """The ranks of this replica; None for one rank."""
        return self._optimizer._present_plan().inside

    def _everybody(self, own: Any) -> list[Any]:
        """Gather a value from each rank of this replica; collective in the replica."""
        if (group := self._inside()) is None:
            return [own]
        said = [None] * group.size()
        dist.all_gather_object(said, own, group=group)
        return said

    def _take_over(self, opening: _Opening, optimizer: ReplicaOptimizer) -> None:
        """Apply what others handed over, if it is the same kind on all ranks."""
        given = self._given or {}
        told = self._everybody((self.openings, sorted(given)))
        self._begun = max(openings for openings, _ in told) > 0
        # At the beginning each rank may take the weights of another replica.
        if self._begun and any(each != told[0] for each in told):
            opening.fail()
            return
        if not given:
            return
        if "missed" in given:
            plan = optimizer._present_plan()
            for number, record in given["missed"]:
                optimizer.sync.catch_up(plan, record)
                self._chain = record["chain"]
                self._history.append((number, record))
            self._note(f"caught up with {len(given['missed'])} openings")
            return
        # Ranks may have received their parts from different replicas, with different counters.
        whole = given["whole"]
        shared = {"stateful": whole["stateful"], "optimizer": dict(whole["optimizer"])}
        own = {key: shared["optimizer"].pop(key) for key in ("settings", "weights", "states")}
        shared = self._everybody(shared)[0] if self._begun else shared
        theirs = shared["stateful"]
        if theirs.keys() != self._stateful.keys():
            raise ValueError(
                f"replicas.start() got {sorted(self._stateful)} here, but {sorted(theirs)} on the "
                f"replica whose state this one copies: pass the same arguments on every replica."
            )
        for name, state in theirs.items():
            _load_into(self._stateful[name], state)
        take_over(optimizer, {**shared["optimizer"], **own})
        self._chain = whole["chain"]
        self._history.clear()
        self._history.extend(given["history"])
        opening.fresh = True
        held = [v for s in own["states"] for v in s.values() if isinstance(v, tuple)]
        size = sum(v[0].nbytes for v in held)
        self._note(f"took over from another replica: {size} bytes")

    def __repr__(self) -> str:
        return "Replicas()"


class _Opening(Opening):
    """An opening of torchft's quorum."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas, self._manager = replicas, replicas._manager
        self._failed = False
        self._strayed = False  # whether to copy everything, because most hold other anchors

    @cached_property
    def group(self) -> dist.ProcessGroup:  # type: ignore[override]
        # The wrapper's rank is 0 on every replica, and its group changes at the next quorum.
        group: dist.ProcessGroup | None = self._replicas._group._pg
        if group is None:
            raise RuntimeError("the members could not connect")
        return group

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        told, why = None, None
        try:
            told = self._gather(numbers)
        except LOST as error:
            why = str(error)
        # Either all ranks of a replica continue, or none does.
        for reason in self._replicas._everybody(why):
            if reason is not None:
                raise RuntimeError(reason)
        assert told is not None
        return told

    def _gather(self, numbers: Sequence[float]) -> list[list[float]]:
        replicas = self._replicas
        error = self._manager.errored()
        broken = self._failed or error is not None
        # Who cannot take part says so, or the others would wait for it until a timeout.
        chain = -1.0 if broken else float(replicas._chain)
        optimizer = replicas._optimizer
        word = checksum((optimizer._present_plan().checksum, shared_settings(optimizer)))
        told = self._all_gather([chain, word])
        chains, settings = zip(*told, strict=True)
        if -1.0 in chains:
            why = "" if error is None else f": {error.original_exception}"
            raise RuntimeError(f"a member could not take part{why}")
        if len(set(settings)) > 1:
            raise RuntimeError("members have different parameters, groups or syncs")
        if len(set(chains)) > 1:
            # Some opened while others were not found. The larger part goes on.
            self._strayed = max(chains, key=chains.count) != chain
            raise RuntimeError("members hold different anchors")
        return self._all_gather(numbers)

    def _all_gather(self, numbers: Sequence[float]) -> list[list[float]]:
        own = torch.tensor(list(numbers), dtype=torch.float64)
        told = [torch.empty_like(own) for _ in range(self.group.size())]
        dist.all_gather(told, own, group=self.group)
        return [each.tolist() for each in told]

    def fail(self) -> None:
        """Make this opening fail; the ranks of this replica copy everything at the next one."""
        self._failed = self._strayed = True

    def agree(self) -> None:
        # An exchange may have succeeded here and failed elsewhere.
        if (error := self._manager.errored()) is not None:
            raise RuntimeError(f"the members could not meet: {error.original_exception}")
        dist.all_reduce(torch.zeros(()), group=self.group)

    def begin(self, what: str, work: Callable[[], Any]) -> Exchange[Any]:
        if self._replicas._worker is None:
            wire.install_kernels()  # a meter may start while the thread communicates
            device = self._replicas._optimizer._present_plan().device
            self._replicas._worker = Worker(device)
        return self._replicas._worker.begin(what, work)

    def commit(self, *, failed: bool, record: dict[str, Any]) -> bool:
        replicas = self._replicas
        replicas._uncommitted = False
        told = replicas._everybody((self._strayed, self._manager.current_step()))
        self._strayed = any(strayed for strayed, _ in told)
        number = min(step for _, step in told)
        if failed:
            self._manager.report_error(RuntimeError("a member was lost at an opening"))
        committed = bool(self._manager.should_commit())
        if self._strayed:
            # torchft then copies everything to this replica at the next opening.
            behind = max(number - 1, 0)
            self._manager.load_state_dict({"step": behind, "batches_committed": 0})
            replicas._note("others hold different anchors: will take over theirs")
        elif not committed:
            replicas._note("an opening failed: nothing of it was written")
        elif record:
            replicas._written(number, record, alone=self.group.size() == 1)
        return committed


class _Client:
    """The manager's client, which can ask ahead who takes part in the next opening."""

    def __init__(self, manager: Manager) -> None:
        self._manager, self._client = manager, manager._client
        self.asked: Future[Any] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def ask(self) -> Future[Any]:
        """The answer, once others have come; :meth:`_quorum` takes it."""
        if (asked := self.asked) is None:
            asked = self.asked = Future()
            manager = self._manager
            given = {
                "group_rank": manager._group_rank,
                "step": manager.current_step(),
                "checkpoint_metadata": manager._checkpoint_transport.metadata(),
                "shrink_only": False,
                "timeout": manager._quorum_timeout,
                "init_sync": manager._init_sync,
                "commit_failures": manager._commit_failures,
            }
            # No executor: Python would wait for its thread at exit.
            Thread(target=self._answer, args=(asked, given), daemon=True).start()
        return asked

    def _answer(self, asked: Future[Any], given: dict[str, Any]) -> None:
        try:
            asked.set_result(self._repeat(**given))
        except Exception as error:
            asked.set_exception(error)

    def _quorum(self, **given: Any) -> Any:
        asked, self.asked = self.asked, None
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
    """Serves the means of the last openings, and full states if those are not enough."""

    def __init__(self, timeout: timedelta, replicas: Replicas) -> None:
        super().__init__(timeout, num_chunks=0)
        self._replicas = replicas

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta
    ) -> None:
        own = state_dict["user"]["default"]
        self._chunks = _Chunks(
            lambda: [own["history"], state_dict["torchft"]],
            lambda: [{**state_dict, "user": {"default": {"whole": own["whole"]()}}}],
        )
        self.allow_checkpoint(step)

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        address = f"{metadata}{step}"
        history, counters = self._load_from_address(f"{address}/0", timeout)
        here, there = self._replicas.openings, dict(history)
        known = here > 0 and all(number in there for number in range(here, step))
        # Others may have started from different anchors.
        if known and there[here]["before"] == self._replicas._chain:
            missed = [(number, there[number]) for number in range(here, step)]
            return {"user": {"default": {"missed": missed}}, "torchft": counters}
        [whole] = self._load_from_address(f"{address}/1", timeout)
        whole["user"]["default"]["history"] = history
        return whole


class _Chunks:
    """What the transport serves, made when somebody asks for it."""

    def __init__(self, *made: Callable[[], list[Any]]) -> None:
        self._made = made

    def __getitem__(self, number: int) -> list[Any]:
        return self._made[number]()


def _check(plan: Plan, ranks: int) -> None:
    """Raise ValueError for what the ranks of a replica cannot copy from different replicas."""
    if ranks > 1 and plan.inside is None:
        raise ValueError(
            f"Each of the {ranks} ranks of this replica holds the whole model: call "
            f"fully_shard(model), or start every rank as a replica of its own."
        )
    for p in plan.parameters if plan.inside is not None else ():
        if (copies := plan.copies_inside(p)) > 1:
            raise ValueError(
                f"{copies} ranks of this replica hold the same elements of {p.name}: replicas that "
                f"come and go need every parameter sharded over all ranks of a replica, as "
                f"fully_shard(model) does."
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
    if "RANK" in os.environ and "MASTER_ADDR" in os.environ:
        rank, world_size, port = (
            int(os.environ[key]) for key in ("RANK", "WORLD_SIZE", "MASTER_PORT")
        )
        address = os.environ["MASTER_ADDR"]
    else:
        store = _own_store()
        _stores.append(store)  # lives as long as the process
        rank, world_size, port, address = 0, 1, store.port, socket.gethostname()
    return {
        "lighthouse_addr": os.environ["TORCHFT_LIGHTHOUSE"],
        "rank": rank,
        "world_size": world_size,
        "store_addr": address,
        "store_port": port,
    }


_stores: list[TCPStore] = []


def _own_store() -> TCPStore:
    # Not on a port that the system chooses: another program may listen on it at a single address,
    # and receive this store's traffic.
    for port in random.SystemRandom().sample(range(20_000, 32_000), 50):
        try:
            return TCPStore("localhost", port, is_master=True, wait_for_workers=False)
        except RuntimeError:  # in use
            continue
    raise RuntimeError("no port between 20000 and 32000 is free for this replica's store")


def checksum_of_anchors(optimizer: ReplicaOptimizer) -> int:
    """A checksum of the anchors, or of the weights if they never drift."""
    chain = 0
    for p in optimizer._present_plan().parameters:
        anchor = shared_weights(p).float().cpu()
        chain = zlib.crc32(anchor.contiguous().numpy().tobytes(), chain)
    return chain


def _state_of(one: Any) -> Any:
    if isinstance(one, nn.Module):
        return {name: buffer.cpu() for name, buffer in one.named_buffers()}
    return one.state_dict()


def _load_into(one: Any, state: Any) -> None:
    if not isinstance(one, nn.Module):
        one.load_state_dict(state)
        return
    buffers: dict[str, Tensor] = dict(one.named_buffers())
    for name, value in state.items():
        buffers[name].copy_(value)
