"""What must hold of a soak's trial."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from quantized_reference import (
    Follower,
    Gradients,
    Leaf,
    QuantizedReference,
    deficient,
    elementwise_,
    oriented,
)
from reference import DionReference
from soak_ranks import BEFORE_A_FREEZE, Event, Record, frozen_after, gradient, weights
from soak_trials import Parameter, Trial
from tolerance import Rounding

# What a step may send beside codes: the gate, and checks of how replicas are built.
# A plan that has changed is agreed on first, and then the gate is asked again.
GATE_BYTES, CHECK_BYTES, FIRST_CHECK_BYTES = 16, 48 + 16 + 16, 512
MOST = 12  # problems told of one trial

# Per rank of a replica, the flat indices of what it holds of a parameter, and tensors by key.
Shards = Sequence[tuple[Tensor, Mapping[str, Tensor]]]


class LowRankReference(QuantizedReference):
    """Replicas whose open step is the papers': what reference.py does with each matrix.

    average: whether drifted replicas are averaged before it.
    """

    average: bool = True
    local_steps: int = 0

    def step(self, gradients: Sequence[Gradients], gate_open: bool) -> list[str]:
        for leaf in self.leaves.values():
            leaf.degenerate = False
        if gate_open and self.average and self.local_steps:
            for leaf in self.trainable:
                for key in ("X", "m", "v", "t"):
                    if held := getattr(leaf, key):
                        setattr(leaf, key, [sum(held) / len(held) + 0 for _ in held])
        for leaf in self.trainable:
            own = [g.get(leaf.name) for g in gradients]
            taking = [gate_open or G is not None for G in own]
            if all(G is None for G in own):
                continue
            zero = torch.zeros_like(leaf.X[0])
            G = [zero if one is None else one.double() for one in own]
            if leaf.algorithm == "dion":
                self._matrix(leaf, G, gate_open, taking)
                continue
            mean = sum(G) / len(G) if gate_open else zero
            for i in filter(taking.__getitem__, range(self.replicas)):
                elementwise_(leaf, i, mean if gate_open else G[i], self.wd, self.betas, self.eps)
        self.local_steps = 0 if gate_open else self.local_steps + 1
        return [leaf.name for leaf in self.trainable] if gate_open and self.average else []

    def _matrix(
        self, leaf: Leaf, G: Sequence[Tensor], gate_open: bool, taking: Sequence[bool]
    ) -> None:
        names = ("mu", "wd", "nesterov", "local_lr", "local_step", "momentum_rule", "right_factor")
        rule = {name: getattr(self, name) for name in names}
        whole = DionReference(
            leaf.X[0], self.replicas, leaf.r, leaf.lr, average_weights=False, **rule
        )
        whole.X, whole.M, whole.Q = list(leaf.X), list(leaf.M), list(leaf.Q)
        if gate_open or self.local_step == "dion":
            M = [whole.accumulated(M, g) for M, g in zip(leaf.M, G, strict=True)]
            B = [oriented(m + self.nesterov * g) for m, g in zip(M, G, strict=True)]
            leaf.degenerate = self._depends(B, leaf.Q, gate_open)
        whole.step(G, gate_open)
        for i in filter(taking.__getitem__, range(self.replicas)):
            leaf.X[i], leaf.M[i], leaf.Q[i] = whole.X[i], whole.M[i], whole.Q[i]

    def _depends(self, B: Sequence[Tensor], Q: Sequence[Tensor], gate_open: bool) -> bool:
        """Whether a column of P or of R is made of rounding errors."""
        P = [b @ q for b, q in zip(B, Q, strict=True)]
        if gate_open:
            P, B = [sum(P) / len(P)], [sum(B) / len(B)]
        if any(map(deficient, P)):
            return True
        R = [b.mT @ torch.linalg.qr(p).Q for b, p in zip(B, P, strict=True)]
        return self.right_factor == "qr" and any(map(deficient, R))

    def synchronize(self) -> None:
        super().synchronize()
        self.local_steps = 0


def reference_of(trial: Trial, records: Sequence[Record]) -> QuantizedReference:
    places = {record.place: record.indices for record in records}
    o, (_, of_sync) = trial.options, trial.sync
    known = {
        "lr": o["lr"],
        "mu": o["mu"],
        "wd": o["weight_decay"],
        **{key: o[key] for key in ("nesterov", "local_step", "local_lr", "momentum_rule")},
        **{key: o[key] for key in ("right_factor", "rank_fraction")},
    }
    if trial.quantized:
        known |= of_sync
    X0 = {p.name: weights(trial, p) for p in trial.parameters}
    algorithms = {p.name: p.algorithm for p in trial.parameters}
    make = QuantizedReference if trial.quantized else LowRankReference
    shards = [places[place] for place in sorted(places)]
    count = trial.layout.replica_count
    reference = make(X0, count, algorithms=algorithms, shards=shards, **known)
    reference.scheduled = trial.scheduled
    reference.average = of_sync.get("average_weights", False)
    return reference


# ------------------------------------------------------------------------------- the run


def check(trial: Trial, records: Sequence[Record]) -> list[str]:
    """Everything that is wrong with a straight run."""
    return Check(trial, records).run()


class Check:
    """Walks through a run's events beside the reference."""

    def __init__(self, trial: Trial, records: Sequence[Record]) -> None:
        self.trial, self.records = trial, records
        self.problems: list[str] = []
        self.reference = reference_of(trial, records)
        dtype = getattr(torch, trial.dtype)
        self.follower = Follower(self.reference, dtype, seed=trial.seed)
        self.follows = dtype is not torch.bfloat16
        self.held: list[dict[str, dict[str, object]]] = []
        self.local_steps = 0
        self.openings, self.taken = 0.0, 0

    def run(self) -> list[str]:
        for events in zip(*(record.events for record in self.records), strict=True):
            before, self.held = self.held, self.assembled(events)
            self.finite(events[0].number)
            if events[0].synchronized is not None:
                self.synchronized(events[0])
            else:
                self.step(events, before)
            if len(self.problems) > MOST:
                break
        self.budget()
        return self.problems

    def say(self, number: int, problem: str) -> None:
        self.problems.append(f"step {number}: {problem}")

    # ---------------------------------------------------------------------- events

    def synchronized(self, event: Event) -> None:
        self.alike(event.number, [p.name for p in self.trainable(event.number)])
        if event.synchronized != BEFORE_A_FREEZE:
            self.set_trainable(event.number)
        self.follower.before()
        for reference in (self.reference, self.follower.twin):
            for leaf in reference.leaves.values():
                leaf.codes, leaf.added_norm = [], 0.0
            if event.synchronized in ("exact", BEFORE_A_FREEZE):
                reference.synchronize()
            elif reference.fragments_apart:
                reference.come_together(reference.fragments_apart)
        self.compare(event.number)
        self.local_steps = 0

    def step(self, events: Sequence[Event], before: list[dict[str, dict[str, object]]]) -> None:
        number = events[0].number
        resting = self.resting(events, before)
        self.set_trainable(number)
        if all(resting):
            return
        event = next(e for e in events if not e.report.skipped)
        report = event.report
        if len({(e.report.gate_open, e.report.reason) for e in events if not e.report.skipped}) > 1:
            self.say(number, f"reports differ: {[e.report for e in events]}")
        if any(resting) and report.gate_open:
            self.say(number, f"the gate has opened without the replicas {resting}")
        gradients = [
            dict.fromkeys(self.reference.leaves) if rests else self.gradients(number, i)
            for i, rests in enumerate(resting)
        ]
        self.gate(event, gradients)
        self.bytes(events)
        for leaf in self.reference.leaves.values():
            leaf.lr = self.rate(leaf.name, number)
            if self.follower.twin is not None:
                self.follower.twin.leaves[leaf.name].lr = leaf.lr
        self.follower.before()
        opened = self.reference.step(gradients, report.gate_open)
        self.follower.twin.step([self.follower._shaken(g) for g in gradients], report.gate_open)
        self.alike(number, opened)
        self.compare(number)
        self.local_steps = 0 if report.gate_open else self.local_steps + 1
        self.taken += 1

    def resting(
        self, events: Sequence[Event], before: list[dict[str, dict[str, object]]]
    ) -> list[bool]:
        """Which replicas leave the step out, for a gradient that is not finite."""
        number, count = events[0].number, self.trial.layout.replica_count
        of: list[list[Event]] = [[] for _ in range(count)]
        for event, record in zip(events, self.records, strict=True):
            of[record.replica].append(event)
        bad = [any(e.bad for e in each) for each in of]
        skipped = [any(e.report.skipped for e in each) for each in of]
        if any(len({e.report.skipped for e in each}) > 1 for each in of):
            self.say(number, f"ranks of one replica skip and do not: {skipped}")
        # Of a schedule's closed steps each replica skips its own, but for the first of a run.
        alone = self.trial.scheduled and number > 0 and not all(skipped)
        if skipped != (bad if alone else [any(bad)] * count):
            self.say(number, f"skipped is {skipped}, but bad gradients are {bad}")
        for i in range(count):
            if skipped[i] and before and not _equal(self.held[i], before[i]):
                self.say(number, f"a skipped step has changed weights or states of replica {i}")
        if all(skipped) and not all(bad) and self.trial.scheduled and number > 0:
            self.due(number)
        return skipped

    def due(self, number: int) -> None:
        """Only at an opening replicas skip what is another's."""
        (kind, *numbers), options = self.trial.gate, self.trial.options
        longest = options["max_local_steps"]
        forced = number < options["warmup_steps"]
        forced |= longest is not None and self.local_steps >= longest
        if kind == "FixedPeriod" and not forced and self.local_steps + 1 < numbers[0]:
            self.say(number, "all replicas skip a closed step")

    def compare(self, number: int) -> None:
        if self.follows:
            for problem in self.follower.compare(self.held, feed_back=True):
                self.say(number, problem)
        else:
            self.follower.feed_back(self.held)

    # ---------------------------------------------------------------------- what the script says

    def trainable(self, number: int) -> list[Parameter]:
        """Before the freeze of this moment; synchronisations come before it."""
        frozen = frozen_after(self.trial, number)
        return [p for p in self.trial.parameters if p.name not in frozen]

    def set_trainable(self, number: int) -> None:
        frozen = frozen_after(self.trial, number + 1)
        for reference in filter(None, (self.reference, self.follower.twin)):
            before = reference.fragment_of()
            for name, leaf in reference.leaves.items():
                if leaf.trainable == (name in frozen):
                    reference.set_trainable(name, name not in frozen)
            after = reference.fragment_of()
            if reference.fragments_apart and list(before.values()) != list(after.values()):
                reference.fragments_apart = len(set(after.values()))

    def rate(self, name: str, number: int) -> float:
        order = list(dict.fromkeys(p.algorithm for p in self.trial.parameters))
        algorithm = self.reference.leaves[name].algorithm
        lr = float(self.trial.options["lr"])
        for moment in self.trial.script[: number + 1]:
            if moment.lr is not None and moment.lr[0] == order.index(algorithm):
                lr *= moment.lr[1]
        return lr

    def gradients(self, number: int, replica: int) -> dict[str, Tensor | None]:
        """What a replica's ranks have of them, with zeros for shards that some of them miss."""
        moment = self.trial.script[number]
        frozen = frozen_after(self.trial, number + 1)
        found: dict[str, Tensor | None] = {}
        for p in self.trial.parameters:
            found[p.name] = None
            if p.name in frozen or (replica, p.name) in moment.missing:
                continue
            G = gradient(self.trial, p, number, replica).flatten()
            missing = [
                rank
                for rank, record in enumerate(self.records)
                if record.replica == replica and (rank, p.name) in moment.shards_missing
            ]
            for rank in missing:
                G[self.records[rank].indices[p.name]] = 0
            if len(missing) < self.trial.layout.shards:
                found[p.name] = G.view(p.shape)
        return found

    # ---------------------------------------------------------------------- checks

    def assembled(self, events: Sequence[Event]) -> list[dict[str, dict[str, object]]]:
        """What each replica holds, put together; copies of a shard must be the same bits."""
        count = self.trial.layout.replica_count
        replicas: list[dict[str, dict[str, object]]] = [{} for _ in range(count)]
        for p in self.trial.parameters:
            for replica in range(count):
                whole: dict[str, object] = {}
                mine = [
                    (record.indices[p.name], event.held[p.name])
                    for record, event in zip(self.records, events, strict=True)
                    if record.replica == replica
                ]
                for key in dict.fromkeys(key for _, held in mine for key in held):
                    if key == "residual":
                        whole[key] = [held[key] for _, held in mine]
                    elif key == "t":
                        whole[key] = mine[0][1][key]
                    elif key == "Q":
                        whole[key] = self.right_factor(p, mine, events[0].number, replica)
                    else:
                        whole[key] = self.joined(p, p.shape, key, mine, events[0].number, replica)
                replicas[replica][p.name] = whole
        return replicas

    def right_factor(self, p: Parameter, mine: Shards, number: int, replica: int) -> Tensor:
        """Whole: where rounding has decided on its columns, the reference has them from here alone.

        Of a flat shard with fewer rows than columns, each rank holds the rows that its elements
        lie in.
        """
        m, n = p.shape
        if self.trial.layout.kind != "flat":
            return mine[0][1]["Q"]
        r = mine[0][1]["Q"].shape[1]
        rows = [(held // n).unique() if m < n else torch.arange(n) for held, _ in mine]
        indices = [(row[:, None] * r + torch.arange(r)).flatten() for row in rows]
        Q = [{"Q": held["Q"].flatten()} for _, held in mine]
        shape = min(m, n), r
        return self.joined(p, shape, "Q", list(zip(indices, Q, strict=True)), number, replica)

    def joined(
        self,
        p: Parameter,
        shape: tuple[int, ...],
        key: str,
        mine: Shards,
        number: int,
        replica: int,
    ) -> Tensor:
        whole, filled = None, torch.zeros(math.prod(shape), dtype=torch.bool)
        for indices, held in mine:
            shard = held[key]
            if whole is None:
                whole = torch.zeros(math.prod(shape), dtype=shard.dtype)
            both = filled[indices]
            # Ranks that hold a row of Q between them make it by products of other shapes.
            spacing = Rounding(shard.dtype, max(shape)).allowed if key == "Q" else 0.0
            here, there = whole[indices][both], shard[both]
            if not torch.allclose(here, there, spacing, spacing, equal_nan=True):
                self.say(number, f"ranks of replica {replica} hold different {key} of {p.name}")
            whole[indices] = shard
            filled[indices] = True
        assert whole is not None and filled.all()
        return whole.view(shape)

    def finite(self, number: int) -> None:
        for i, replica in enumerate(self.held):
            for name, held in replica.items():
                for key, tensor in held.items():
                    tensors = tensor if isinstance(tensor, list) else [tensor]
                    if not all(bool(t.isfinite().all()) for t in tensors):
                        self.say(number, f"{key} of {name} on replica {i} is not finite")

    def alike(self, number: int, names: Sequence[str]) -> None:
        """Replicas must hold the same bits of these weights."""
        for name in names:
            first = self.held[0][name]["X"]
            for i, replica in enumerate(self.held[1:], 1):
                if not torch.equal(replica[name]["X"], first):
                    self.say(number, f"{name} differs on replicas 0 and {i}")

    def gate(self, event: Event, gradients: Sequence[Gradients]) -> None:
        report, (kind, *numbers) = event.report, self.trial.gate
        longest, warmup = self.trial.options["max_local_steps"], self.trial.options["warmup_steps"]
        forced = event.number < warmup or (longest is not None and self.local_steps >= longest)
        if kind == "AlwaysOpen":
            wanted = True
        elif kind == "FixedPeriod":
            wanted = forced or self.local_steps + 1 >= numbers[0]
        elif kind == "RMMC" and self.follows and self.plain_signals(event.number):
            rmmc = self.rmmc(gradients)
            if not math.isclose(report.rmmc, rmmc, rel_tol=5e-3, abs_tol=1e-4):
                self.say(event.number, f"rmmc is {report.rmmc}, not {rmmc}")
            wanted = forced or report.rmmc > numbers[0]
        else:
            return
        if report.gate_open != wanted:
            self.say(
                event.number, f"gate_open is {report.gate_open} ({report.reason}), not {wanted}"
            )

    def plain_signals(self, number: int) -> bool:
        moment = self.trial.script[number]
        return not (moment.missing or moment.shards_missing) and all(
            not leaf.degenerate for leaf in self.reference.leaves.values()
        )

    def rmmc(self, gradients: Sequence[Gradients]) -> float:
        """By its definition."""
        largest = 0.0
        keeps = self.reference.momentum_rule == "error_feedback"
        for leaf in self.reference.trainable:
            if leaf.algorithm != "dion":
                continue
            for M, own in zip(leaf.M, gradients, strict=True):
                G = own[leaf.name]
                after = float(((1 if keeps else self.reference.mu) * M + G.double()).norm())
                before = float(M.norm())
                change = abs(after - before)
                largest = max(largest, change / before if before else math.inf if change else 0.0)
        return largest

    def bytes(self, events: Sequence[Event]) -> None:
        """What replicas that are one rank each send: openings' codes, and little beside."""
        if self.trial.layout.kind != "plain" or self.trial.world == 1:
            return
        event, n = events[0], self.trial.world
        sent = sum(e.sent for e in events) / n
        each = 2 * (n - 1) / n
        beside = GATE_BYTES + CHECK_BYTES + len(self.trial.parameters)
        if event.number == 0 or self.taken == 0:
            beside += FIRST_CHECK_BYTES
        codes = 0.0
        if event.report.gate_open:
            beside += 8 * len(self.trial.parameters)  # lengths, if some replica has rested
            if not self.trial.quantized:
                return
            fragment_of = self.reference.fragment_of()
            now = self.reference.next_fragment % len(set(fragment_of.values()))
            coming = [name for name, fragment in fragment_of.items() if fragment == now]
            codes = each * sum(map(self.codes, coming))
            self.openings += codes
        if not codes <= sent <= codes + each * beside:
            what = f"codes are {codes}, and beside them {each * beside} are allowed"
            self.say(event.number, f"sent {sent} bytes, but {what}")

    def codes(self, name: str) -> int:
        numbers = self.reference.leaves[name].X[0].numel()
        return -(-numbers // 256) * (32 * self.reference.bits + 2)

    def budget(self) -> None:
        """Codes within the share, up to the openings that the gate may be ahead of it."""
        kind, *numbers = self.trial.gate
        if kind != "ByteBudget" or self.trial.layout.kind != "plain" or self.trial.world == 1:
            return
        if any(moment.synchronize or moment.freeze for moment in self.trial.script):
            return
        n = self.trial.world
        dense = 4 * 2 * (n - 1) / n * sum(math.prod(p.shape) for p in self.trial.parameters)
        ahead = 3 * 2 * (n - 1) / n * sum(self.codes(p.name) for p in self.trial.parameters)
        allowed = numbers[0] * dense * self.taken + ahead
        if self.openings > allowed:
            self.problems.append(f"sent {self.openings} bytes of codes; the budget is {allowed}")


def _equal(these: object, those: object) -> bool:
    if isinstance(these, Tensor):
        return isinstance(those, Tensor) and torch.equal(these, those)
    if isinstance(these, dict):
        return these.keys() == those.keys() and all(_equal(these[k], those[k]) for k in these)
    return len(these) == len(those) and all(map(_equal, these, those))


# ------------------------------------------------------------------------------- run again


def same_end(trial: Trial, straight: Sequence[Record], again: Sequence[Record]) -> list[str]:
    """Where a run that was disturbed leaves the straight one: the first step, per rank."""
    problems = []
    for rank, (one, other) in enumerate(zip(straight, again, strict=True)):
        by_place = {(e.number, i): e for i, e in _numbered(one.events)}
        for i, event in _numbered(other.events):
            wanted = by_place.get((event.number, i))
            if wanted is None:
                problems.append(f"rank {rank}, step {event.number}: events differ")
                break
            different = _different(event, wanted)
            if different:
                problems.append(
                    f"rank {rank}, step {event.number}: {', '.join(different[:4])} differ from the "
                    f"straight run's"
                )
                break
    return problems


def _numbered(events: Sequence[Event]) -> Iterable[tuple[str, Event]]:
    """Events with what tells them from others of their step."""
    for event in events:
        yield str(event.synchronized), event


def _different(event: Event, wanted: Event) -> list[str]:
    different = [
        f"{key} of {name}"
        for name, held in wanted.held.items()
        for key in held
        if key not in event.held[name] or not torch.equal(event.held[name][key], held[key])
    ]
    if wanted.report is not None:
        for key in ("step", "gate_open", "reason", "rmmc", "local_steps", "skipped"):
            if getattr(wanted.report, key) != getattr(event.report, key):
                different.append(f"report.{key}")
    return different
