"""What a soak's trials are made of, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

BAD = (float("nan"), float("inf"), float("-inf"))


@dataclass(frozen=True)
class Layout:
    """sizes: of the mesh. replicas: the mesh axis that they lie along, or None for one replica.

    kind: "plain" tensors, "dtensor" cut by hand, "fully_shard", or "flat" ranges.
    """

    name: str
    kind: str
    sizes: tuple[int, ...]
    replicas: int | None

    @property
    def world(self) -> int:
        return self.replica_count * self.shards

    @property
    def replica_count(self) -> int:
        return 1 if self.replicas is None else self.sizes[self.replicas]

    @property
    def shards(self) -> int:
        """Ranks of one replica."""
        count = 1
        for axis, size in enumerate(self.sizes):
            count *= 1 if axis == self.replicas else size
        return count


# With how often each is drawn.
LAYOUTS = {
    Layout("one process", "plain", (1,), None): 1,
    Layout("plain 2", "plain", (2,), 0): 5,
    Layout("plain 4", "plain", (4,), 0): 3,
    Layout("fsdp 2", "dtensor", (2,), None): 1,
    Layout("fsdp x tp", "dtensor", (2, 2), None): 1,
    Layout("hsdp 2x2", "dtensor", (2, 2), 0): 2,
    Layout("fully_shard 2x2", "fully_shard", (2, 2), 0): 2,
    Layout("dp x tp", "dtensor", (2, 2), 0): 3,
    Layout("flat 2x2", "flat", (2, 2), 0): 2,
}


@dataclass(frozen=True)
class Parameter:
    """cut: one word a mesh axis (tests/support/shards.py), or where the ranks' flat ranges end."""

    name: str
    shape: tuple[int, ...]
    algorithm: str
    cut: tuple[str, ...] | tuple[int, ...] = ()


@dataclass
class Moment:
    """What happens at one step, in this order.

    lr: the group and the factor of its rate. freeze, thaw: a parameter's name; ``synchronize()``
    goes before a freeze. synchronize: "exact", "cheap" or "default". disturb: how the optimizer
    is saved and loaded in the disturbed run. missing: (replica, name) without a gradient.
    shards_missing: (rank, name) without its shard of one. bad: (rank, name, what is not finite).
    """

    lr: tuple[int, float] | None = None
    freeze: str | None = None
    thaw: str | None = None
    synchronize: str | None = None
    disturb: str | None = None
    missing: set[tuple[int, str]] = field(default_factory=set)
    shards_missing: set[tuple[int, str]] = field(default_factory=set)
    bad: tuple[int, str, float] | None = None

    def __repr__(self) -> str:
        said = {k: v for k, v in vars(self).items() if v}
        return "(" + ", ".join(f"{k}={v}" for k, v in said.items()) + ")"


@dataclass(frozen=True)
class Trial:
    """gate: a kind and its numbers. sync: a kind and its arguments. options: of the optimizer.

    kill: the rank and the step. checkpoint_every: of a trial with a kill.
    """

    seed: int
    layout: Layout
    parameters: tuple[Parameter, ...]
    dtype: str
    gate: tuple[object, ...]
    sync: tuple[str, dict[str, object]]
    options: dict[str, object]
    script: list[Moment]
    kill: tuple[int, int] | None
    checkpoint_every: int

    @property
    def world(self) -> int:
        return self.layout.world

    @property
    def quantized(self) -> bool:
        return self.sync[0] == "QuantizedAverage"

    @property
    def scheduled(self) -> bool:
        """Whether replicas tell each other nothing at closed steps."""
        kind, *numbers = self.gate
        by_signals = kind == "RMMC" or "rmmc" in numbers
        return self.layout.replica_count > 1 and kind != "AlwaysOpen" and not by_signals

    def kinds(self) -> list[str]:
        """What the soak counts."""
        apart = self.sync[1].get("average_weights") is False
        sync = self.sync[0] + (" without averages" if apart else "")
        kinds = [self.layout.name, str(self.gate[0]), sync, self.dtype]
        disturbed = {m.disturb for m in self.script if m.disturb}
        return [*kinds, *disturbed, *(["kill"] if self.kill else [])]

    def description(self) -> str:
        shapes = ", ".join(f"{p.name} {p.shape} {p.algorithm} {p.cut}" for p in self.parameters)
        script = "; ".join(f"{i}: {moment}" for i, moment in enumerate(self.script))
        return (
            f"{self.layout.name}, {self.dtype}, gate {self.gate}, sync {self.sync}, "
            f"{self.options}; {shapes}; {script}; kill {self.kill}, "
            f"checkpoint_every {self.checkpoint_every}"
        )


def draw(seed: int) -> Trial:
    """The trial of a seed."""
    rng = random.Random(seed)
    layout = rng.choices(list(LAYOUTS), list(LAYOUTS.values()))[0]
    parameters = tuple(_parameters(rng, layout))
    how = rng.choice(["averaged", "quantized", "quantized", "quantized", "apart"])
    gate = _gate(rng, how, parameters)
    if gate[0] == "ByteBudget" and layout.replica_count == 1 < layout.world:
        gate = ("FixedPeriod", 3)  # one sharded replica has nothing to save
    options = _options(rng)
    sync = _sync(rng, how)
    if gate[0] == "ByteBudget":
        options["max_local_steps"], options["warmup_steps"] = None, 0
    elif gate[0] == "FixedPeriod" and options["max_local_steps"] is not None:
        options["max_local_steps"] = max(options["max_local_steps"], gate[1])
    steps = rng.randint(6, 14)
    killed = rng.random() < 0.12
    by_torch = layout.kind in ("plain", "flat")
    every = rng.randint(2, 4)
    script = list(_script(rng, layout, parameters, how, steps))
    if killed:
        for moment in script:
            moment.disturb = None
        for number in range(every, steps, every):
            script[number].disturb = "torch" if by_torch else "dcp"
    for moment in script:
        if moment.disturb == "dcp":
            moment.synchronize = "exact"
    dtype = rng.choices(["float32", "float64", "bfloat16"], [8, 1, 2])[0]
    kill = (rng.randrange(layout.world), rng.randint(every, steps - 1)) if killed else None
    return Trial(seed, layout, parameters, dtype, gate, sync, options, script, kill, every)


def _parameters(rng: random.Random, layout: Layout) -> Iterator[Parameter]:
    for i in range(rng.randint(2, 5)):
        # Some fill several blocks of codes, some are a row or a column.
        largest = rng.choice([6, 20, 20, 45])
        m, n = rng.randint(1, largest), rng.randint(1, largest)
        yield Parameter(f"w{i}", (m, n), "dion", _cut(rng, layout, (m, n)))
    algorithm = rng.choice(["adamw", "adamw", "lion"])
    for i in range(rng.randint(0, 2)):
        shape = (rng.randint(1, 300),) if rng.random() < 0.5 else (rng.randint(1, 15), 17)
        yield Parameter(f"v{i}", shape, algorithm, _cut(rng, layout, shape))
    if layout.name == "dp x tp":  # whose halves take 2 blocks of codes and 1
        yield Parameter("uneven", (25, 20), "dion", ("r", "0"))


def _cut(
    rng: random.Random, layout: Layout, shape: tuple[int, ...]
) -> tuple[str, ...] | tuple[int, ...]:
    numbers = 1
    for size in shape:
        numbers *= size
    if layout.kind == "flat":
        return (*sorted(rng.randint(0, numbers) for _ in range(layout.shards - 1)), numbers)
    dims = ["0", "1"][: len(shape)]
    if layout.name == "dp x tp":
        return ("r", rng.choice([*dims, "r"]))
    if layout.name == "fsdp x tp":
        return rng.choice([("0", "r"), ("0s", "0"), *([("0", "1")] if len(shape) > 1 else [])])
    return {"plain": (), "dtensor": ("r", "0")[-len(layout.sizes) :]}.get(layout.kind, ("r", "0"))


def _gate(rng: random.Random, how: str, parameters: tuple[Parameter, ...]) -> tuple[object, ...]:
    kinds = ["RMMC", "FixedPeriod", "FixedPeriod", "AlwaysOpen"]
    numbers = sum(_numbers(p) for p in parameters)
    share = rng.choice([0.05, 0.1, 0.3])
    if how == "quantized" and 16 / (4 * numbers) < share / 2:
        kinds += ["ByteBudget"] * 3
    kind = rng.choice(kinds)
    if kind == "RMMC":
        return kind, rng.choice([0.05, 0.2, 0.3, 0.6])
    if kind == "FixedPeriod":
        return kind, rng.randint(1, 5)
    if kind == "ByteBudget":
        return kind, share, rng.choice(["period", "rmmc"])
    return (kind,)


def _numbers(parameter: Parameter) -> int:
    count = 1
    for size in parameter.shape:
        count *= size
    return count


def _options(rng: random.Random) -> dict[str, object]:
    return {
        "lr": rng.choice([0.01, 0.03]),
        "mu": rng.choice([0.9, 0.95]),
        "weight_decay": rng.choice([0.0, 0.01, 0.3]),
        "nesterov": rng.choice([0.0, 1.0, 2.5]),
        "rank_fraction": rng.choice([0.25, 0.5, 1.0]),
        "right_factor": rng.choice(["column_normalized", "qr"]),
        "momentum_rule": rng.choice(["error_feedback", "error_feedback", "plain"]),
        "local_step": rng.choice(["dion", "dion", "gradient"]),
        "local_lr": rng.choice([None, 0.005]),
        "max_local_steps": rng.choice([None, 2, 5, 50]),
        "warmup_steps": rng.choice([0, 0, 2]),
    }


def _sync(rng: random.Random, how: str) -> tuple[str, dict[str, object]]:
    if how != "quantized":
        return "LowRank", {"average_weights": how == "averaged"}
    return "QuantizedAverage", {
        "bits": rng.choice([1, 2, 2, 3, 4, 8]),
        "fragments": rng.choice([1, 1, 2, 3, 100]),
        "align_momentum": rng.random() < 0.7,
        "polar_correction": rng.random() < 0.7,
    }


def _script(
    rng: random.Random,
    layout: Layout,
    parameters: tuple[Parameter, ...],
    how: str,
    steps: int,
) -> Iterator[Moment]:
    frozen = None
    ways = ["state_dict", "dcp"] if layout.kind in ("dtensor", "fully_shard") else ["torch"]
    if layout.kind == "plain":
        ways += ["state_dict", "deepcopy", "pickle", "dcp"]
    matrices = [p for p in parameters if p.algorithm == "dion"]
    for step in range(steps):
        moment = Moment()
        if rng.random() < 0.15:
            moment.lr = (rng.randrange(2), rng.choice([0.5, 2.0, 0.1, 0.0]))
        if step and rng.random() < 0.12:
            if frozen is None:
                frozen = moment.freeze = rng.choice(matrices[1:]).name
            else:
                frozen, moment.thaw = None, frozen
        if step and rng.random() < 0.1:
            choices = ["exact", "default"] + ["cheap"] * (how == "quantized")
            moment.synchronize = rng.choice(choices)
        if step and rng.random() < 0.15:
            moment.disturb = rng.choice(ways)
        if rng.random() < 0.3:
            for _ in range(rng.randint(1, 3)):
                parameter = rng.choice(parameters)
                moment.missing.add((rng.randrange(layout.replica_count), parameter.name))
            if rng.random() < 0.2:  # on all replicas
                name = rng.choice(parameters).name
                moment.missing |= {(i, name) for i in range(layout.replica_count)}
        disjoint = [p for p in parameters if layout.shards > 1 and "r" not in p.cut[1:]]
        if disjoint and rng.random() < 0.1:
            moment.shards_missing.add((rng.randrange(layout.world), rng.choice(disjoint).name))
        if rng.random() < 0.1:
            name = rng.choice(parameters).name
            moment.bad = (rng.randrange(layout.world), name, rng.choice(BAD))
        yield moment
