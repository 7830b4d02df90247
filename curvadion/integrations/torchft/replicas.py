"""Replicas that come and go: each opening is one of those that torchft finds alive."""

from __future__ import annotations

import os
import random
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from enum import Enum, auto
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torchft.manager import Manager

from curvadion import checks
from curvadion.comm.collectives import checksum
from curvadion.comm.exchange_thread import Exchange, Worker
from curvadion.comm.lost import MemberLost, may_lose_members
from curvadion.comm.members import Exchanges, Members
from curvadion.comm.waiting import waiting
from curvadion.integrations.torchft.client import Client, name_of
from curvadion.integrations.torchft.environment import chosen_name, manager_arguments
from curvadion.integrations.torchft.group import MemberGroup
from curvadion.integrations.torchft.handover import (
    bytes_of_states,
    check_stateful,
    checksum_of_anchors,
    hand_over,
    shared_settings,
    take_over,
)
from curvadion.integrations.torchft.history import History
from curvadion.integrations.torchft.lighthouse import living
from curvadion.integrations.torchft.transport import Transport
from curvadion.metering import wire
from curvadion.metering.events import Event, EventLog, Kind, logger
from curvadion.optim.replica_optimizer import RETRY_AFTER, ReplicaOptimizer

CANNOT_TAKE_PART = -1  # instead of a checksum, which is not negative
# Until the Lighthouse's page has told who is alive, while others wait for this replica.
SECONDS_FOR_PAGE = 1.0


class Stage(Enum):
    """How far this replica is with an opening.

    | stage     | method             | next stage                                            |
    |-----------|--------------------|-------------------------------------------------------|
    | NONE      | meet()             | UNDER_WAY                                             |
    |           | meet(ahead=True)   | AHEAD                                                 |
    | AHEAD     | meet()             | UNDER_WAY, the same opening                           |
    |           | meet(ahead=True)   | AHEAD, the same opening                               |
    | UNDER_WAY | commit()           | NONE, whether it is applied or not                    |
    |           | start()            | AHEAD, if the run has begun: the sync takes this one  |
    |           | meet()             | UNDER_WAY or AHEAD, of another: an error has left the |
    |           |                    | last one without a commit()                           |

    A meet() that raises, as without an answer of the Lighthouse, leaves NONE.
    """

    # ``group``, ``present`` and ``fresh`` are still those of the last opening. If there is a
    # patience, arrived() asks the Lighthouse.
    NONE = auto()
    # Members are connected, or have failed to connect, and what they sent has been applied.
    # arrived() is True.
    AHEAD = auto()
    # As AHEAD; gather(), agree() and begin() may be called. With a delay it lasts until the
    # step at which means are due; if there is a patience, arrived() is False until then.
    UNDER_WAY = auto()


class ElasticReplicas(Members):
    """Replicas that may die and rejoin: ``replicas=ElasticReplicas()`` of an optimizer.

    Set TORCHFT_LIGHTHOUSE to the address of a ``torchft_lighthouse``, and call :meth:`start`
    before the loop. If a member is lost during an opening, no member applies it. TypeError or
    ValueError for wrong arguments.

    Args:
        begins: whether to begin a run if none is found and all replicas that are alive have
            come. None: not after a restart by torchrun.
        min_replicas: an opening with fewer members fails. Pass the same number to
            ``torchft_lighthouse --min_replicas``.
        timeout: seconds until an exchange with a hanging peer fails; more than it takes to
            copy the whole state.
        connect_timeout: seconds until an opening is given up because members cannot connect,
            as with one that has just died; more than connecting to all of them takes.
        quorum_timeout: seconds until an opening raises an error if others do not come.
        patience: seconds until this replica trains on and opens once others have come. None:
            no limit. Pass less than a step takes if others are slower.
        kept: number of openings whose codes are kept on the CPU for late replicas.
        replica_id: a name to sort members by. None: $REPLICA_GROUP_ID, or a random one.
        event_log: a file to which events are appended as lines of JSON; replicas may share it.
            None: $CURVADION_EVENT_LOG, or no file. The logger "curvadion" gets all events.

    Attributes:
        openings: number of openings applied since the run began.
        present: number of members of the last opening.
        names: of these members, in order.
        leaving: whether to end the loop, because :meth:`leave` has been called and an opening
            since then has sent this replica's steps.
    """

    def __init__(
        self,
        *,
        begins: bool | None = None,
        min_replicas: int = 1,
        timeout: float = 300.0,
        connect_timeout: float = 5.0,
        quorum_timeout: float = 600.0,
        patience: float | None = None,
        kept: int = 8,
        replica_id: str | None = None,
        event_log: str | Path | None = None,
    ) -> None:
        checks.integer("min_replicas", min_replicas, 1)
        checks.integer("kept", kept, 0)
        checks.number("timeout", timeout, least=1e-3)
        checks.number("connect_timeout", connect_timeout, least=1e-3)
        checks.number("quorum_timeout", quorum_timeout, least=1e-3)
        if patience is not None:
            checks.number("patience", patience)
        if begins is None:
            begins = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        checks.boolean("begins", begins)
        self._begins = begins
        self._patience = patience
        self.present = 0
        self.names: tuple[str, ...] = ()
        self.leaving = False
        self._asked_to_leave = False
        self._closed = False
        self._stage = Stage.NONE
        # Whether this rank's anchors are not the others', so that commit() makes it copy
        # everything at the next opening. Holds from meet() to commit(), in any stage.
        self._strayed = False
        # By how many steps this replica's count is behind the other members'; set by gather().
        self._lag = 0
        self._history = History(kept)
        # What another replica has sent; empty except during meet().
        self._received: dict[str, Any] = {}
        self._started: ReplicaOptimizer | None = None  # what start() was called with
        self._stateful: dict[str, Any] = {}
        # Whether the next changed() is the first since start(), which tells of the states with
        # which start() began.
        self._change_known = False
        self._told_reason: str | None = None  # why the run does not begin, as last told
        self._told_names: set[str] = set()  # of several members, as told
        self._started_at = self._met_at = 0.0  # when start() and the last opening began
        self._timeout = timedelta(seconds=timeout)
        self._gloo = MemberGroup(
            connect_timeout=timedelta(seconds=connect_timeout), timeout=self._timeout
        )
        self._manager_arguments: dict[str, Any] = {
            "min_replica_size": min_replicas,
            "quorum_timeout": timedelta(seconds=quorum_timeout),
            "replica_id": chosen_name(replica_id),
            **manager_arguments(),
        }
        self._name = self._manager_arguments["replica_id"] or "unnamed"  # for events
        self._log = EventLog(event_log, first=self._manager_arguments["rank"] == 0)
        self._created_manager: Manager | None = None
        self._created_worker: Worker | None = None

    # --- the parts of this replica

    @property
    def _manager(self) -> Manager:
        """Created by start(): others would wait for a replica that is not ready."""
        if self._created_manager is None:
            transport = Transport(
                self._timeout, self._history, lambda: self.openings, self._whole_state
            )
            address = self._manager_arguments["lighthouse_addr"]
            # torchft says nothing while it waits, which takes a minute if nobody answers.
            logger.info("Connecting to the Lighthouse at %s", address)
            try:
                manager = Manager(
                    pg=self._gloo,
                    load_state_dict=self._received.update,
                    state_dict=dict,  # the transport knows what to send
                    use_async_quorum=False,
                    timeout=self._timeout,
                    checkpoint_transport=transport,
                    **self._manager_arguments,
                )
            except RuntimeError as error:
                transport.shutdown(wait=False)
                raise RuntimeError(
                    f"No opening could begin ({error}): start a Lighthouse at {address}, or set "
                    f"TORCHFT_LIGHTHOUSE to where one answers."
                ) from error
            manager._client = Client(manager)
            self._created_manager = manager
        return self._created_manager

    @property
    def _worker(self) -> Worker:
        """The thread of exchanges during training, created when a sync first needs it."""
        if self._created_worker is None:
            wire.install_kernels()  # a meter may start while the thread communicates
            self._created_worker = Worker(self._optimizer._collective_plan().device)
        return self._created_worker

    @property
    def _optimizer(self) -> ReplicaOptimizer:
        self.check_ready()
        assert self._started is not None
        return self._started

    @property
    def openings(self) -> int:
        if self._created_manager is None:
            return 0
        return int(self._created_manager.current_step())

    @property
    def events(self) -> list[Event]:
        """What has happened, as :class:`curvadion.metering.events.Event`."""
        return self._log.events

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "ElasticReplicas cannot be copied or pickled, nor can their optimizer be pickled: save "
            "its state_dict(), and load it into one with ElasticReplicas of its own."
        )

    # --- begin and end

    def start(self, optimizer: ReplicaOptimizer, **stateful: Any) -> None:
        """Begin the run, or join it with a copy of another replica's state.

        Args:
            optimizer: built with these replicas.
            stateful: what else to copy: schedulers and the like, and buffers of modules.
        """
        self._check(optimizer)
        check_stateful(stateful)
        plan = optimizer._collective_plan()
        self._started = optimizer
        self._stateful = stateful
        self._change_known = True
        self._started_at = time.perf_counter()
        try:
            optimizer._create_states(plan)
            # A checkpoint may hold a pending opening.
            optimizer.sync.finish(plan, optimizer._resting_step(plan))
            self._history.chain = checksum_of_anchors(optimizer)
            while not self._begin_or_join(optimizer):
                # At random, or three could find each other in pairs for ever.
                time.sleep(random.SystemRandom().uniform(0.0, RETRY_AFTER))
        except BaseException:
            # Others would wait for it as long as this process lives. It may be tried again.
            self._disappear()
            self._created_manager = None
            self._stage = Stage.NONE
            self._started = None
            raise

    def _check(self, optimizer: ReplicaOptimizer) -> None:
        """Raise ValueError if these replicas cannot be this optimizer's."""
        if optimizer.replicas.members is not self or self._started is not None:
            raise ValueError(
                f"optimizer={type(optimizer).__name__} needs replicas of its own, passed to "
                f"its constructor, and is started once."
            )
        if self._patience is not None and optimizer.sync.every_step:
            raise ValueError(
                f"Leave out patience={self._patience!r}: with {optimizer.sync!r} all steps open."
            )
        ranks = self._manager_arguments["world_size"]
        if ranks == 1:
            return
        plan = optimizer._collective_plan()
        for p in plan.parameters:
            # Ranks may copy their states from different replicas.
            if plan.inside is None or plan.copies_inside(p) > 1:
                raise ValueError(
                    f"{p.name} is not sharded over all {ranks} ranks of this replica: "
                    f"fully_shard the model, or make every rank a replica."
                )
            if p.matrices and p.group["direction"] == "low_rank":
                raise ValueError(f'{p.name}: replicas of several ranks need direction="polar".')

    def _begin_or_join(self, optimizer: ReplicaOptimizer) -> bool:
        """Try to begin or join the run; return whether this replica takes part in it."""
        self.meet()
        if not any(self._of_all_ranks(self.openings)):
            return self._begin_run()
        self._stage = Stage.AHEAD  # the sync's meet() takes part in this opening
        if optimizer.sync.every_step:
            self.fresh = False  # the first gradient will use the copied weights
        elif not optimizer.open_without_step():
            return False
        steps = optimizer.progress.steps
        text = f"joined the run at step {steps}, with {_members(self.present)}"
        self._note("joined", text, since=self._started_at)
        return True

    def _begin_run(self) -> bool:
        """Try to begin the run by an opening in which nothing is exchanged.

        It fails if nobody may begin one, or if a replica is alive that has not come: it may be
        between openings of a run.
        """
        error = None
        missing = self._missing()
        try:
            told = self.gather([self._begins, missing is not None])
            if not any(begins for begins, _ in told):
                error = "restarted replicas wait for a run; if all have died, start all again"
            elif any(misses for _, misses in told):
                error = missing or "another replica has not found all that are alive"
            self.agree()
        except MemberLost as lost:
            error = str(lost)
        if error is not None and error != self._told_reason:
            self._note("waiting", f"The run does not begin yet: {error}", since=self._started_at)
            self._told_reason = error
        begun = self.commit(error=error, record={})
        if begun:
            steps = self._optimizer.progress.steps
            text = f"Beginning a new run at step {steps}, with {_members(self.present)}"
            self._note("began", text, since=self._started_at)
        return begun

    def _missing(self) -> str | None:
        """Why this opening may lack a replica that is alive; None if it does not."""
        address = self._manager_arguments["lighthouse_addr"]
        members = self._manager._client.members
        try:
            alive = living(address)
        except OSError as error:
            return f"{address}/status cannot be read ({error}); restart the Lighthouse"
        if not members <= alive:
            return f"{address}/status does not list all members"
        if others := sorted(alive - members):
            return f"{', '.join(others)} lives but has not come; this waits until it comes or dies"
        return None

    def leave(self) -> None:
        """Ask this replica to leave after its next opening, as in a handler of SIGTERM.

        ``leaving`` is True from then on, on all its ranks. Train on until then: the others
        expect it there, and nothing that it has learnt is lost.
        """
        self._asked_to_leave = True

    def close(self) -> None:
        """Leave the run; ``optimizer.synchronize()`` before sends this replica's last steps.

        torchft has no message for it: an opening of the others within the Lighthouse's
        heartbeat timeout after this waits for the rest of that time, as after a death.
        """
        if self._closed:
            return
        if self._created_worker is not None:
            self._created_worker.end(seconds=1.0)
        self._disappear()
        if self._started is not None:
            self._note("left", f"{self._name} has left the run")
        self._closed = True

    def _disappear(self) -> None:
        """Be dead to the other replicas."""
        if self._created_manager is not None:
            self._created_manager.shutdown(wait=False)
        self.disconnect()

    def check_ready(self) -> None:
        if self._closed:
            raise RuntimeError(
                "replicas.close() has been called: to go on, build an optimizer with new "
                "ElasticReplicas(), load this one's state_dict(), and start them."
            )
        if self._started is None:
            raise RuntimeError("call replicas.start(optimizer) before step().")

    def changed(self) -> None:
        if self._started is not None and not self._change_known:
            # The means that are kept do not apply to these weights.
            self._history.restart(checksum_of_anchors(self._started), {})
        self._change_known = False

    # --- an opening

    def arrived(self) -> bool:
        if self._patience is None or self._stage is Stage.AHEAD:
            return True
        if self._stage is Stage.UNDER_WAY:
            return False
        arrived = self._manager._client.ask(self._patience)
        return all(self._of_all_ranks(arrived))

    def meet(self, *, ahead: bool = False) -> None:
        if self._stage is not Stage.AHEAD:
            self._stage = Stage.NONE
            self._meet()
        self._stage = Stage.AHEAD if ahead else Stage.UNDER_WAY

    def _meet(self) -> None:
        """Find the members, connect to them, and copy what this replica lacks."""
        optimizer = self._optimizer
        manager = self._manager
        client = manager._client
        previous_members = client.members
        self._met_at = time.perf_counter()
        try:
            with waiting():
                manager.start_quorum()
        except Exception as error:
            manager._quorum_future = None  # else it raises this error again
            self._note("failed", f"no opening could begin: {error}", since=self._met_at)
            raise RuntimeError(
                f"No opening could begin ({error}): restart the Lighthouse if it is down, or "
                f"raise quorum_timeout."
            ) from error
        except BaseException:  # a signal's: others must not wait for this member
            asked = manager._quorum_future
            if asked is not None:
                asked.add_done_callback(lambda _: self.disconnect())
            raise
        self.fresh = False
        self._strayed = False
        self._lag = 0
        self.group = self._gloo._pg  # the wrapper's own rank is 0 on every replica
        self._name = name_of(client.own)
        try:
            self._apply_received(optimizer)
        except BaseException:
            self.disconnect()  # others may wait for this member
            raise
        self.present = manager.num_participants()
        self.names = tuple(map(name_of, sorted(client.members)))
        self._warn_of_equal_names()
        if previous_members:
            self._note_changes(previous_members, client.members)

    def _warn_of_equal_names(self) -> None:
        """Warn once of members with one name, whose data and events may be the same."""
        equal = {name for name in self.names if self.names.count(name) > 1} - self._told_names
        self._told_names |= equal
        for name in sorted(equal):
            logger.warning(
                "Two members are called %r: give each replica a replica_id= or REPLICA_GROUP_ID "
                "of its own, by which data and events are told apart.",
                name,
            )

    def _note_changes(self, previous: set[str], present: set[str]) -> None:
        """Tell of members that are gone and of those that have come, by their identifiers."""
        members = f"{_members(len(present))} instead of {len(previous)}"
        gone = sorted(previous - present)
        alive: set[str] = set()
        if gone:
            address = self._manager_arguments["lighthouse_addr"]
            with suppress(OSError):
                alive = living(address, timeout=SECONDS_FOR_PAGE)
        for identifier in gone:
            name = name_of(identifier)
            if identifier in alive:
                self._note("late", f"{name} is late: {members}", member=name)
            else:
                self._note("left", f"{name} is gone: {members}", member=name)
        for identifier in sorted(present - previous):
            name = name_of(identifier)
            self._note("joined", f"{name} has come: {members}", member=name)

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        numbers_by_member: list[list[float]] = []
        error = ""
        try:
            self._compare()
            numbers_by_member = self._all_gather(numbers)
        except MemberLost as lost:
            error = str(lost) or "a member was lost"
        if error:
            self.disconnect()
        # Either all ranks of a replica continue, or none does.
        for error_of_rank in self._of_all_ranks(error):
            if error_of_rank:
                raise MemberLost(error_of_rank)
        return numbers_by_member

    def _compare(self) -> None:
        """Raise MemberLost if a member cannot take part, or if members differ.

        Otherwise note by how many steps the furthest is ahead of this one.
        """
        if self.group is None:
            raise MemberLost("the members could not connect")
        error = self._manager.errored()
        chain = self._history.chain
        if self._strayed or error is not None:
            # Members that cannot take part say so, or the others would wait for them.
            chain = CANNOT_TAKE_PART
        checksum_of_plan = self._optimizer._collective_plan().checksum
        settings = checksum((checksum_of_plan, shared_settings(self._optimizer)))
        steps = self._optimizer.progress.steps + self.with_step
        # A count that has just been copied may lack the other's present step.
        gathered = self._all_gather([chain, settings, 0 if self.fresh else steps])
        chains = [member_chain for member_chain, *_ in gathered]
        if CANNOT_TAKE_PART in chains:
            reason = getattr(error, "original_exception", "see its log")
            raise MemberLost(f"a member could not take part ({reason})")
        if any(member_settings != settings for _, member_settings, _ in gathered):
            raise MemberLost("members have different parameters, groups or syncs")
        if len(set(chains)) > 1:
            # Some opened while others were not found. The larger part goes on.
            self._strayed = max(chains, key=chains.count) != chain
            raise MemberLost("members hold different anchors")
        self._lag = int(max(member_steps for *_, member_steps in gathered)) - steps

    def _all_gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """Gather each member's numbers, which float64 holds exactly."""
        sent = torch.tensor(numbers, dtype=torch.float64)
        received = [torch.empty_like(sent) for _ in range(self.size)]
        with may_lose_members():
            dist.all_gather(received, sent, group=self.group)
        return [numbers_of_member.tolist() for numbers_of_member in received]

    def agree(self) -> None:
        # An exchange may have succeeded here and failed elsewhere.
        with may_lose_members():
            dist.all_reduce(torch.zeros(()), group=self.group)

    def disconnect(self) -> None:
        """Close the connections to the members of an opening that has failed here.

        In a collective a member waits for some of the others. Only those that waited for a
        member that has died learn of it; the rest wait for them, until they, too, lose a
        connection. gloo closes connections when nothing refers to the group any more, not by
        ``abort()``.
        """
        self.group = None
        self._gloo.shutdown()

    def during_training(self, device: torch.device) -> Exchanges:
        return self

    def begin(self, what: str, work: Callable[[], Any]) -> Exchange[Any]:
        """Run work in the thread of exchanges; what: its name in errors."""
        return self._worker.begin(what, work)

    def commit(self, *, error: str | None, record: dict[str, Any]) -> bool:
        if self._closed:  # of an opening that was under way: the others go on without this one
            return False
        manager = self._manager
        self._stage = Stage.NONE
        if error is not None:
            self.disconnect()
        own = self._strayed, manager.current_step(), self._asked_to_leave
        ranks = self._of_all_ranks(own)
        number = min(openings for _, openings, _ in ranks)
        if error is not None:
            manager.report_error(RuntimeError(error))
        committed: bool = manager.should_commit()
        if any(strayed for strayed, *_ in ranks):
            # Who counts fewer openings than others copies from them at the next one.
            manager.load_state_dict({"step": max(number - 1, 0), "batches_committed": 0})
            text = "others hold different anchors: this replica will take over theirs"
            self._note("strayed", text, since=self._met_at)
        elif record and not committed:
            reason = error or "another rank failed, or members are too few"
            text = f"An opening failed and will be tried again: {reason}"
            self._note("failed", text, since=self._met_at)
        elif record:
            self._remember(number, record)
            # All members count the same steps from here on, and end at the same time.
            self._optimizer.progress.steps += self._lag
            leaves = any(asked for *_, asked in ranks)
            if leaves and not self.leaving:
                self._note("leaving", f"{self._name} was asked to leave, and has sent its steps")
            self.leaving = leaves
        return committed

    # --- what late members lack

    def _remember(self, number: int, record: Mapping[str, Any]) -> None:
        """Note that an opening's means have been applied."""
        replays = self._optimizer.sync.replays
        if self.present == 1 and not replays:
            # One member alone sends no codes, and nobody else has its mean.
            self._history.chain = secrets.randbits(32)
        self._history.append(number, record, replays=replays)

    def _whole_state(self) -> dict[str, Any]:
        """Return what take_over() copies, and the chain of the anchors among it."""
        state = hand_over(self._optimizer, **self._stateful)
        return {**state, "chain": self._history.chain}

    def _apply_received(self, optimizer: ReplicaOptimizer) -> None:
        """Apply what another replica has sent, if all ranks have received the same kind."""
        since = time.perf_counter() - self._received.pop("seconds", 0.0)
        received = dict(self._received)
        self._received.clear()
        ranks = self._of_all_ranks((self.openings, sorted(received)))
        begun = any(openings for openings, _ in ranks)
        if begun and any(rank != ranks[0] for rank in ranks):
            self._strayed = True  # a rank could not fetch its part
        elif "missed" in received:
            missed = received["missed"]
            plan = optimizer._collective_plan()
            for number, record in missed:
                optimizer.sync.catch_up(plan, record)
                self._remember(number, record)
            size = sum(codes.nbytes for _, record in missed for codes in record["codes"])
            text = f"caught up with {len(missed)} openings"
            self._note("caught up", text, since=since, bytes=size)
        elif received:
            if begun:
                # Ranks may have received their shards from different replicas, whose settings
                # may differ.
                unsharded = {key: received[key] for key in ("groups", "record", "stateful")}
                received |= self._of_all_ranks(unsharded)[0]
            changes = take_over(optimizer, received, **self._stateful)
            self._history.restart(received["chain"], received["history"])
            self.fresh = True
            size = bytes_of_states(received)
            text = f"took over from another replica: {size} bytes"
            self._note("copied", text, since=since, bytes=size)
            if changes:
                self._note("settings", f"took over settings: {', '.join(changes)}")

    # --- small parts

    def _of_all_ranks(self, value: Any) -> list[Any]:
        """Gather a value from each rank of this replica."""
        group = self._optimizer._collective_plan().inside
        if group is None:
            return [value]
        values = [None] * group.size()
        dist.all_gather_object(values, value, group=group)
        return values

    def _note(
        self,
        kind: Kind,
        text: str,
        *,
        member: str | None = None,
        since: float | None = None,
        bytes: int | None = None,
    ) -> None:
        """Tell of an event.

        Args:
            kind: what happened.
            text: the same for people.
            member: to whom; None: to this replica.
            since: when it began, by time.perf_counter(); None: it took no time.
            bytes: that were received.
        """
        event = Event(
            kind,
            text,
            member=member or self._name,
            replica=self._name,
            step=self._optimizer.progress.steps,
            opening=self.openings,
            seconds=None if since is None else time.perf_counter() - since,
            bytes=bytes,
        )
        self._log.add(event)


def _members(count: int) -> str:
    return "1 member" if count == 1 else f"{count} members"
