"""Counts what optimizer steps would do on a GPU, with fake CUDA tensors: no GPU is needed.

    export PYTHONPATH=tests
    python -m support.devices.counted_steps --out benchmarks/results/fake_cuda/steps.md

Each line of the table is a step: operations (about one kernel launch each), reads by the host,
blocking copies from it, and the fused operations that the Triton backend refused.

    python -m support.devices.counted_steps --tables

prints the budgets of tests/fake_cuda/test_steps.py instead, to be pasted there.
"""

from __future__ import annotations

import argparse
import json
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from curvadion import CodedGradients, CurvaDion, Dion, FixedPeriod, QuantizedAverage
from support.devices.fake_cuda import CUDA, Answer, Count, fake_cuda

Shape = tuple[int, ...]
COMMAND = "PYTHONPATH=tests python -m support.devices.counted_steps"


# ---------------------------------------------------------------- models


def _gpt2(layers: int = 12) -> tuple[list[Shape], list[Shape]]:
    d = 768
    matrices = [(3 * d, d), (d, d), (4 * d, d), (d, 4 * d)] * layers
    vectors = [(d,), (d,), (3 * d,), (d,), (d,), (d,), (4 * d,), (d,)] * layers
    return matrices, [*vectors, (d,), (d,), (50257, d), (1024, d)]


def _gpt2_160m(layers: int = 12) -> tuple[list[Shape], list[Shape]]:
    """The GPT-2 of the benchmarks: without biases, and with a head of its own."""
    d = 768
    matrices = [(3 * d, d), (d, d), (4 * d, d), (d, 4 * d)] * layers
    return matrices, [(50257, d), (50257, d), (1024, d), *[(d,)] * (2 * layers)]


def _llama() -> tuple[list[Shape], list[Shape]]:
    d, hidden, layers = 2048, 5504, 24
    matrices = [*[(d, d)] * 4, (hidden, d), (hidden, d), (d, hidden)] * layers
    return matrices, [*[(d,)] * (2 * layers + 1), (32000, d), (32000, d)]


MODELS = {
    "GPT-2": _gpt2,
    "three blocks of GPT-2": partial(_gpt2, layers=3),
    "GPT-2 160M": _gpt2_160m,
    "a block of GPT-2 160M": partial(_gpt2_160m, layers=1),
    "Llama 1.3B": _llama,
}


# ---------------------------------------------------------------- cases

LOW_RANK = {"rank_fraction": 0.25}


def _average() -> QuantizedAverage:
    return QuantizedAverage(2)


class Case(NamedTuple):
    """An optimizer of a model's parameters on one of some ranks.

    model: of MODELS. build: makes the optimizer of parameter groups. opens: whether the gate is
    open at each step that is counted. sharded: whether the ranks are one replica in shards.
    """

    model: str
    dtype: torch.dtype
    ranks: int
    build: Callable[..., Dion]
    opens: tuple[bool, ...]
    sharded: bool = False


def _dion(model: str, dtype: torch.dtype, ranks: int, **keys: Any) -> Case:
    return Case(model, dtype, ranks, partial(Dion, **keys), (True, True))


def _coded(model: str, dtype: torch.dtype, ranks: int, **keys: Any) -> Case:
    build = partial(CurvaDion, sync=CodedGradients(), **keys)
    return Case(model, dtype, ranks, build, (True, True))


def _local(model: str, dtype: torch.dtype, ranks: int, **keys: Any) -> Case:
    """Replicas step by themselves, but at every other step."""
    if "threshold" not in keys:
        keys["gate"] = FixedPeriod(2)
    return Case(model, dtype, ranks, partial(CurvaDion, **keys), (False, True, False))


def _alone(model: str, dtype: torch.dtype, **keys: Any) -> Case:
    """Local steps of one replica, whose gate stays closed."""
    build = partial(CurvaDion, gate=FixedPeriod(100), max_local_steps=None, **keys)
    return Case(model, dtype, 1, build, (False, False))


WIDE, NARROW = torch.float32, torch.bfloat16
POLAR = {"direction": "polar"}
CASES = {
    "Dion, low_rank": _dion("GPT-2", WIDE, 1),
    "Dion, polar, 8 ranks": _dion("GPT-2", NARROW, 8, direction="polar"),
    "Dion, polar, 8 shards": _dion("GPT-2", WIDE, 8, direction="polar")._replace(sharded=True),
    "LowRank, RMMC, low_rank": _local("GPT-2", NARROW, 1, threshold=0.3),
    "LowRank, RMMC, polar, 8 ranks": _local("GPT-2", WIDE, 8, threshold=0.3, direction="polar"),
    "LowRank, schedule, low_rank, 8 ranks": _local("GPT-2", WIDE, 8),
    "QuantizedAverage, schedule, polar, 8 ranks": _local("GPT-2", WIDE, 8, sync=_average()),
    "QuantizedAverage, RMMC, polar": _local("GPT-2", NARROW, 1, sync=_average(), threshold=0.3),
    "QuantizedAverage, RMMC, low_rank, 8 ranks": _local(
        "GPT-2", WIDE, 8, sync=_average(), threshold=0.3, **LOW_RANK
    ),
    "CodedGradients, polar, 8 ranks": _coded("GPT-2", WIDE, 8),
    "CodedGradients, low_rank, 8 ranks": _coded("GPT-2", NARROW, 8, **LOW_RANK),
    "160M: Dion, polar": _dion("GPT-2 160M", WIDE, 1, **POLAR),
    "160M: Dion, polar, states in 8 bits": _dion(
        "GPT-2 160M", WIDE, 1, **POLAR, state_dtype="int8"
    ),
    "160M: Dion, polar, bfloat16": _dion("GPT-2 160M", NARROW, 1, **POLAR),
    "160M: Dion, polar, bfloat16, stochastic rounding": _dion(
        "GPT-2 160M", NARROW, 1, **POLAR, stochastic_rounding=True
    ),
    "160M: Dion, polar, 8 shards": _dion("GPT-2 160M", WIDE, 8, **POLAR)._replace(sharded=True),
    "160M: Dion, normuon": _dion("GPT-2 160M", WIDE, 1, direction="normuon"),
    "160M: Dion, dion2": _dion("GPT-2 160M", WIDE, 1, direction="dion2", rank_fraction=0.5),
    "160M: Dion, low_rank": _dion("GPT-2 160M", WIDE, 1),
    "160M: local step, polar": _alone("GPT-2 160M", WIDE, sync=_average()),
    "1.3B: Dion, polar": _dion("Llama 1.3B", WIDE, 1, **POLAR),
    "1.3B: Dion, low_rank, 8 ranks": _dion("Llama 1.3B", NARROW, 8),
    "1.3B: QuantizedAverage, schedule, polar, 8 ranks": _local(
        "Llama 1.3B", WIDE, 8, sync=_average()
    ),
    "1.3B: LowRank, RMMC, low_rank, 8 ranks": _local("Llama 1.3B", WIDE, 8, threshold=0.3),
    "1.3B: Dion, polar, 8 shards": _dion("Llama 1.3B", WIDE, 8, direction="polar")._replace(
        sharded=True
    ),
}


def smaller(case: Case) -> Case:
    """What a test counts: what grows with the number of GPT-2's blocks shows with three of them.

    Of shards so few products would be too small for the kernels.
    """
    if case.model != "GPT-2" or case.sharded:
        return case
    return case._replace(model="three blocks of GPT-2")


# ---------------------------------------------------------------- the steps of a case


class Counted(NamedTuple):
    """What one step did.

    kind: "first", "open" or "closed". refusals, absent: fused operations that the backend refused,
    and that it does not have, by name.
    """

    kind: str
    operations: int
    reads: list[str]
    copies: list[str]
    refusals: Counter[str]
    absent: Counter[str]


def counted_steps(case: Case) -> list[Counted]:
    """The first step of a case and one later step of each kind that it has."""
    counted = []
    with fake_cuda(), replicas_of(case.ranks) as replicas:
        parameters, groups = parameters_of(case)
        optimizer = case.build(groups, replicas=None if case.sharded else replicas)
        for number, opens in enumerate(case.opens):
            for p in parameters:
                p.grad = torch.empty_like(p)
            with Count(answers_of(signal=1.0 if opens else 0.1)) as count:
                optimizer.step()
            assert optimizer.report is not None and optimizer.report.gate_open == opens
            kind = ("open" if opens else "closed") if number else "first"
            counted.append(
                Counted(
                    kind=kind,
                    operations=count.operations.total(),
                    reads=count.reads,
                    copies=count.copies,
                    refusals=count.refusals,
                    absent=count.absent,
                )
            )
    return counted


def parameters_of(case: Case) -> tuple[list[nn.Parameter], list[dict[str, Any]]]:
    matrices, others = (
        [nn.Parameter(torch.empty(shape, dtype=case.dtype, device=CUDA)) for shape in shapes]
        for shapes in MODELS[case.model]()
    )
    if case.sharded:
        matrices = [_sharded(x, case.ranks) for x in matrices]
    adamw = {"params": others, "algorithm": "adamw", "lr": 1e-3}
    return [*matrices, *others], [{"params": matrices}, adamw]


def _sharded(x: Tensor, ranks: int) -> nn.Parameter:
    """A matrix whose rows all ranks share; their number is a multiple of the ranks'."""
    with _disable_current_modes():
        mesh = DeviceMesh("cuda", list(range(ranks)))
    shard = x.detach()[: len(x) // ranks].clone()
    return nn.Parameter(DTensor.from_local(shard, mesh, [Shard(0)], run_check=False))


@contextmanager
def replicas_of(ranks: int) -> Iterator[dist.ProcessGroup | str]:
    """Ranks of which this process is one; the others exist in torch's fake group only."""
    if ranks == 1:
        yield "single"
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def answers_of(signal: float) -> dict[str, Answer]:
    """What the host reads: all is finite, replicas are equal, and their gradients are not."""
    bits = struct.unpack("i", struct.pack("f", signal))[0]

    def read(local: Mapping[str, Any]) -> list[int]:
        several = len(local["self"].words) > 1
        return [bits << 32, 0, 0] if several else [bits << 32]

    def verify(local: Mapping[str, Any]) -> list[float]:
        return [1, 1, 1, -1, -0.5, -0.5]

    return {"read": read, "verify_replicas": verify}


# ---------------------------------------------------------------- what is printed


def _as_markdown(steps: Mapping[str, list[Counted]]) -> Iterator[str]:
    """A line for each step."""
    yield f"Made with torch {torch.__version__} by `{COMMAND}`."
    yield ""
    yield "| case | dtype | step | operations | host reads | blocking copies | refused |"
    yield "|---|---|---|---:|---:|---:|---|"
    for name, steps_of_case in steps.items():
        dtype = str(CASES[name].dtype).removeprefix("torch.")
        for step in steps_of_case:
            numbers = f"{step.operations:,} | {len(step.reads)} | {len(step.copies)}"
            refused = ", ".join(f"{count} {each}" for each, count in step.refusals.items())
            yield f"| {name} | {dtype} | {step.kind} | {numbers} | {refused} |"


def _as_tables(steps: Mapping[str, list[Counted]]) -> Iterator[str]:
    """The dictionaries of the test that holds steps to their budgets."""
    yield "OPERATIONS = {"
    for name, steps_of_case in steps.items():
        yield f'    "{name}": {tuple(step.operations for step in steps_of_case)},'
    yield "}"
    yield from _names_by_case("REFUSED", {k: [s.refusals for s in v] for k, v in steps.items()})
    yield from _names_by_case("ABSENT", {k: [s.absent for s in v] for k, v in steps.items()})


def _names_by_case(table: str, counters: Mapping[str, list[Counter[str]]]) -> Iterator[str]:
    """A dictionary of the operations that the steps of each case have counted."""
    lines = []
    for case, counters_of_steps in counters.items():
        if operations := sorted({name for counter in counters_of_steps for name in counter}):
            lines.append(f'    "{case}": {{{", ".join(map(json.dumps, operations))}}},')
    yield "\n".join([f"{table} = {{", *lines, "}"]) if lines else f"{table} = {{}}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="a file for what is printed")
    parser.add_argument("--cases", default="", help="only cases whose name contains this")
    parser.add_argument("--tables", action="store_true", help="print the budgets of the test")
    arguments = parser.parse_args()
    cases = {name: case for name, case in CASES.items() if arguments.cases in name}
    if arguments.tables:
        cases = {name: smaller(case) for name, case in cases.items()}
    steps = {name: counted_steps(case) for name, case in cases.items()}
    lines = _as_tables(steps) if arguments.tables else _as_markdown(steps)
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
