"""The parts of report.py: functions that yield their findings one after another.

python -m benchmarks.gpu.parts steps --device cuda --output found.json
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore, TCPStore
from torch.multiprocessing.spawn import spawn
from torch.profiler import ProfilerActivity, profile

from benchmarks.common.model_shapes import MODELS, Model
from benchmarks.common.step_contenders import Several
from curvadion import (
    CodedGradients,
    CurvaDion,
    Dion,
    FixedPeriod,
    QuantizedAverage,
    ReplicaOptimizer,
    ops,
)
from curvadion.comm.background import background_of
from curvadion.ops.backends import refused
from curvadion.optim.group_keys import DirectionName
from curvadion.update.newton_schulz import SMALLEST_IN_HALF, passes_in_half, polar_express

Found = dict[str, Any]
Findings = Iterator[tuple[str, Any]]

MODULE = "benchmarks.gpu.parts"
TOY = Model([(24, 8), (8, 8), (32, 8), (8, 32)], [(8,)] * 2, [(50, 8)] * 2, 2)
SMALL = [(96, 64), (64, 96), (128, 128)]


class Skipped(Exception):
    """This part cannot run here; the text says why."""


@dataclass(frozen=True)
class Setting:
    """Where a part runs.

    Attributes:
        device: a GPU, or a CPU on which parts only try themselves.
        ends: the value of time.monotonic() at which the part is stopped.
    """

    device: torch.device
    ends: float = math.inf

    @property
    def large(self) -> bool:
        """Whether there is a GPU."""
        return self.device.type == "cuda"

    @property
    def models(self) -> dict[str, Model]:
        """The models whose steps are measured."""
        if not self.large:
            return {"toy": TOY}
        return {name: MODELS[name] for name in ("gpt2-160m", "llama-1.3b")}


def parameters(
    matrices: list[tuple[int, int]], others: list[tuple[int, ...]], device: torch.device
) -> tuple[list[nn.Parameter], list[dict[str, Any]]]:
    """Return weights and their groups: matrices for Dion, all others for AdamW."""
    torch.manual_seed(0)
    X = [nn.Parameter(torch.randn(shape).to(device)) for shape in matrices]
    rest = [nn.Parameter(torch.randn(shape).to(device)) for shape in others]
    return [*X, *rest], [{"params": X}, {"params": rest, "algorithm": "adamw", "lr": 1e-3}]


def give_gradients(X: list[nn.Parameter], step: int, rank: int = 0) -> None:
    """Set gradients, the same on every device."""
    for i, x in enumerate(X):
        generator = torch.Generator().manual_seed(10_000 * step + 100 * rank + i)
        x.grad = torch.randn(x.shape, generator=generator).to(x.device)


@contextmanager
def one_rank(backend: str) -> Iterator[None]:
    """A default process group with this process only."""
    with tempfile.TemporaryDirectory() as folder:
        store = FileStore(f"{folder}/store", 1)
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def wait(device: torch.device) -> None:
    """Wait until the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def empty(device: torch.device) -> None:
    """Give freed memory back to the device."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


# -------------------------------------------------------------------- ceilings

LAUNCHES, ADDITIONS = 200, 10**6


def ceilings(setting: Setting) -> Findings:
    """Measure what no step can exceed, and the host's price of a launch."""
    device = setting.device
    large = setting.large
    bytes_each = 2**30 if large else 2**16
    source = torch.ones(bytes_each, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = fastest(partial(target.copy_, source), device)
    yield "copy_TB_s", 2 * bytes_each / seconds / 1e12
    n = 8192 if large else 64
    A = torch.randn(n, n, device=device, dtype=torch.bfloat16)
    seconds = fastest(partial(torch.mm, A, A), device)
    yield "bf16_TFLOP_s", 2 * n**3 / seconds / 1e12
    x = torch.zeros(64, device=device)
    yield "host_us_torch_operation", host_microseconds(partial(x.add_, 1.0), device)
    if large:
        B = torch.randn(12, 768, 768, device=device, dtype=torch.float16)
        launch = partial(ops.symmetric_product, B, B, torch.empty_like(B))
        with ops.use_backend("triton"), rule_says("symmetric", "gains", True):
            yield "host_us_triton_launch", host_microseconds(launch, device)
    else:
        yield "host_us_triton_launch", {"skipped": "no CUDA device"}
    total = 0
    begin = time.perf_counter()
    for i in range(ADDITIONS):
        total += i
    yield "python_ns_addition", 1e9 * (time.perf_counter() - begin) / ADDITIONS


def fastest(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the fastest of twenty calls, each waited for."""
    call()
    times = []
    for _ in range(20):
        wait(device)
        begin = time.perf_counter()
        call()
        wait(device)
        times.append(time.perf_counter() - begin)
    return min(times)


def host_microseconds(call: Callable[[], object], device: torch.device) -> float:
    """Return what a call costs the host, which does not wait for the device meanwhile."""
    call()
    times = []
    for _ in range(5):
        wait(device)
        begin = time.perf_counter()
        for _ in range(LAUNCHES):
            call()
        times.append(time.perf_counter() - begin)
    wait(device)
    return 1e6 * min(times) / LAUNCHES


# -------------------------------------------------------------------- time of a step

# Steps until kernels are compiled, a step has been captured and it has been replayed.
WARM_UP = 8
# Timed steps: at most and at least, and seconds after which there are enough.
MOST, LEAST, ENOUGH = 30, 5, 1.5
LONGEST = 20  # kernels listed by name


@dataclass(frozen=True)
class Weights:
    """A model's parameters with gradients: matrices, and the others."""

    matrices: list[nn.Parameter]
    others: list[nn.Parameter]

    @classmethod
    def of(cls, model: Model, device: torch.device) -> Weights:
        """Draw those of a model on the device itself."""
        torch.manual_seed(0)
        found = cls(
            [nn.Parameter(0.02 * torch.randn(s, device=device)) for s in model.matrices()],
            [nn.Parameter(0.02 * torch.randn(s, device=device)) for s in model.others()],
        )
        for x in (*found.matrices, *found.others):
            x.grad = 0.01 * torch.randn_like(x)
        return found

    def groups(self, **of_matrices: Any) -> list[dict[str, Any]]:
        """Groups for an optimizer that has AdamW for the others."""
        return [
            {"params": self.matrices, "lr": 1e-3, **of_matrices},
            {"params": self.others, "algorithm": "adamw", "lr": 1e-4},
        ]


Make = Callable[[Weights], Any]
EAGER, CAPTURED = "Dion, polar, eager", "Dion, polar, captured"
LOW_RANK = "Dion, low rank"


def dion(weights: Weights, **options: Any) -> Dion:
    """One replica's optimizer."""
    return Dion(weights.groups(), replicas="single", **options)


def local_step(weights: Weights) -> CurvaDion:
    """An optimizer whose steps are local ones, with the settings of averages in codes."""
    return CurvaDion(
        weights.groups(), gate=FixedPeriod(2**30), max_local_steps=None, sync=QuantizedAverage(),
        look_ahead=4.0, replicas="single",
    )  # fmt: skip


OURS: dict[str, Make] = {
    EAGER: partial(dion, direction="polar", capture=False),
    CAPTURED: partial(dion, direction="polar", capture=True),
    "local step, polar": local_step,
    "NorMuon": partial(dion, direction="normuon"),
    "Dion2": partial(dion, direction="dion2", rank_fraction=0.5),
    LOW_RANK: dion,
}
STATES: dict[str, Make] = {
    f"{states}, {how}": partial(dion, direction="polar", state_dtype=states, capture=capture)
    for states in ("float32", "bfloat16", "int8")
    for how, capture in (("eager", False), ("captured", True))
}


def steps(setting: Setting) -> Findings:
    """Measure steps; fail if an operation of polar factors was refused."""
    yield from steps_of(OURS, setting.models, setting)


def states(setting: Setting) -> Findings:
    """Measure polar steps with each dtype of momenta and of AdamW's moments."""
    # One model: with larger matrices, products take most of the time.
    name, model = next(iter(setting.models.items()))
    yield from steps_of(STATES, {name: model}, setting)


def steps_of(optimizers: dict[str, Make], models: dict[str, Model], setting: Setting) -> Findings:
    """Measure steps of optimizers; fail if an operation of polar factors was refused.

    Args:
        optimizers: how to make them, by name.
        models: whose weights they step, by name.
        setting: of the part.
    """
    found: dict[str, Found] = {}
    # All times come before the first profile, because a profiler may leave launches slower.
    for measure in (timed, profiled):
        for name, model in models.items():
            weights = Weights.of(model, setting.device)
            for kind, make in optimizers.items():
                key = f"{kind}, {name}"
                earlier = found.setdefault(key, {})
                if earlier.keys() & ENDED:
                    continue
                earlier |= attempt(measure, make, weights, setting) | earlier
                if kind != LOW_RANK and earlier.get("refused"):
                    earlier["wrong"] = "operations were refused"
                elif is_to_capture(make) and earlier.get("captured") is False:
                    earlier["wrong"] = "the step was not captured"
                yield key, earlier
            del weights
            empty(setting.device)
    if failed := [key for key, each in found.items() if each.keys() & {"error", "wrong"}]:
        raise AssertionError(f"{failed}: see their findings")


def is_to_capture(make: Make) -> bool:
    """Whether an optimizer was told to capture its steps."""
    return isinstance(make, partial) and bool(make.keywords.get("capture"))


# Keys of findings after which there is nothing more to measure.
ENDED = {"skipped", "error"}
Measure = Callable[[Any, torch.device], Found]


def attempt(measure: Measure, make: Make, weights: Weights, setting: Setting) -> Found:
    """Return the measurements of an optimizer's steps, or why there are none.

    Args:
        measure: takes the optimizer after its first steps.
        make: makes it.
        weights: of the model.
        setting: of the part.
    """
    if not setting.large and is_to_capture(make):
        return {"skipped": "no CUDA device"}
    try:
        with warmed_up(make, weights, setting) as (optimizer, told):
            found = told | measure(optimizer, setting.device)
        del optimizer
    except Exception:
        found = {"error": traceback.format_exc()[-1500:]}
    empty(setting.device)
    return found


@contextmanager
def warmed_up(make: Make, weights: Weights, setting: Setting) -> Iterator[tuple[Any, Found]]:
    """An optimizer after its first steps, and what these have shown."""
    refused.clear()
    begin = time.perf_counter()
    with warnings.catch_warnings(record=True) as warned, choices() as declined:
        warnings.simplefilter("always")
        optimizer = make(weights)
        for _ in range(WARM_UP):
            optimizer.step()
        wait(setting.device)
    told: Found = {
        "first_steps_s": time.perf_counter() - begin,
        "refused": dict(refused - declined),
        "torch_was_chosen_for": dict(declined),
        "warnings": sorted({str(each.message)[:300] for each in warned}),
    }
    if (report := getattr(optimizer, "report", None)) is not None:
        told["captured"] = report.captured
    try:
        yield optimizer, told
    finally:
        if hasattr(optimizer, "release"):
            optimizer.release()


# The rules by which kernels leave an operation to torch.bmm: module, function, operation.
RULES = [
    ("newton_schulz", "grams_gain", "grams"),
    ("newton_schulz", "gains", "inverse_root"),
    ("symmetric", "gains", "symmetric_product"),
]


@contextmanager
def choices() -> Iterator[Counter[str]]:
    """Count how often a rule of the kernels prefers torch.bmm, by operation.

    The backend then refuses the operation, too, but nothing is wrong.
    """
    declined: Counter[str] = Counter()
    with ExitStack() as patches:
        for module, function, operation in RULES if ops.lacking("triton") is None else ():
            kernels_of = importlib.import_module(f"curvadion_kernels.{module}")
            rule = getattr(kernels_of, function)
            counted = partial(counted_rule, rule, declined, operation)
            patches.enter_context(mock.patch.object(kernels_of, function, counted))
        yield declined


def counted_rule(
    rule: Callable[..., bool], declined: Counter[str], operation: str, *about: Any
) -> bool:
    """Return what a rule says, and count that it says no.

    Args:
        rule: of the kernels.
        declined: the counts.
        operation: what the rule is for.
        about: the rule's arguments.
    """
    gains = rule(*about)
    if not gains:
        declined[operation] += 1
    return gains


def timed(optimizer: Any, device: torch.device) -> Found:
    """Return milliseconds of steps, and the memory that they need beside what is held."""
    host: list[float] = []
    wall: list[float] = []
    first = time.perf_counter()
    while len(host) < LEAST or (len(host) < MOST and time.perf_counter() - first < ENOUGH):
        wait(device)
        begin = time.perf_counter()
        optimizer.step()
        host.append(1e3 * (time.perf_counter() - begin))
        wait(device)
        wall.append(1e3 * (time.perf_counter() - begin))
    begin = time.perf_counter()
    for _ in host:
        optimizer.step()
    wait(device)
    together = 1e3 * (time.perf_counter() - begin)
    found: Found = {
        "host_ms": min(host),
        "host_median_ms": statistics.median(host),
        "wall_ms": min(wall),
        "wall_median_ms": statistics.median(wall),
        "back_to_back_ms": together / len(host),
        "timed_steps": len(host),
        "peak_bytes": None,
    }
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device)
        optimizer.step()
        wait(device)
        found["peak_bytes"] = torch.cuda.max_memory_allocated(device) - held
        empty(device)
        # What a graph keeps for its intermediate results is reserved, but not allocated.
        allocated = torch.cuda.memory_allocated(device)
        found["reserved_beyond_allocated_bytes"] = torch.cuda.memory_reserved(device) - allocated
    return found


def profiled(optimizer: Any, device: torch.device) -> Found:
    """Return what a step does on the device: busy milliseconds, kernels and copies."""
    if device.type != "cuda":
        return {"device_ms": None}
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        optimizer.step()
        wait(device)
    # The device's timeline also holds spans of record_function.
    events = [
        e for e in record.events() if e.device_type.name == "CUDA" and not e.is_user_annotation
    ]
    milliseconds: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    for e in events:
        milliseconds[e.name[:100]] += e.device_time / 1e3
        launches[e.name[:100]] += 1
    copies = sum(e.name.startswith("Memcpy") for e in events)
    fills = sum(e.name.startswith("Memset") for e in events)
    return {
        "device_ms": sum(milliseconds.values()),
        "kernels": len(events) - copies - fills,
        "copies": copies,
        "fills": fills,
        "longest": {
            name: {"ms": ms, "launches": launches[name]}
            for name, ms in milliseconds.most_common(LONGEST)
        },
    }


# -------------------------------------------------------------------- correctness

DIRECTIONS: dict[DirectionName, Found] = {
    "polar": {},
    "normuon": {},
    "dion2": {"rank_fraction": 0.5},
    "nordion2": {"rank_fraction": 0.5},
    "low_rank": {"rank_fraction": 0.25},
}
STEPS, NAN_STEP = 20, 12
MATRICES = [(768, 768)] * 3 + [(2304, 768), (768, 3072)]
# Kernels may round in another order than torch.bmm, but not worse by this factor.
WORSE = 4


def correctness(setting: Setting) -> Findings:
    """Compare captured and eager steps, and results with what they must be."""
    wrong = []
    checks: list[Callable[[Setting], Findings]] = [
        *(partial(captured_steps, direction) for direction in DIRECTIONS),
        idle_rows,
        against_float64,
        deficient_ranks,
    ]
    for check in checks:
        for name, finding in whole(check(setting)):
            if not finding.get("good", True):
                wrong.append(name)
            yield name, finding
        empty(setting.device)
    if wrong:
        raise AssertionError(f"wrong: {wrong}")


def whole(findings: Findings) -> Findings:
    """Yield the findings of a check and, if it raised an error, what that says."""
    try:
        yield from findings
    except Exception as error:
        said = traceback.format_exc()[-1500:]
        yield f"{type(error).__name__}: {error}"[:100], {"good": False, "error": said}


def captured_steps(direction: DirectionName, setting: Setting) -> Findings:
    """Take the same steps captured and eagerly; all bits must be equal."""
    name = f"captured steps, {direction}"
    if not setting.large:
        yield name, {"skipped": "no CUDA device"}
        return
    eager, _ = trajectory(direction, capture=False, device=setting.device)
    replayed, captured = trajectory(direction, capture=True, device=setting.device)
    pairs = list(zip(eager, replayed, strict=True))
    other = sum(not torch.equal(a, b) for a, b in pairs)
    finite = all(bool(torch.isfinite(t).all()) for t in replayed)
    yield (
        name,
        {
            "good": not other and finite and captured > 0,
            "captured": captured,
            "steps": STEPS,
            "tensors": len(pairs),
            "tensors_with_other_bits": other,
            "largest_difference": max(float((a - b).abs().max()) for a, b in pairs),
            "finite": finite,
        },
    )


def trajectory(
    direction: DirectionName, *, capture: bool, device: torch.device
) -> tuple[list[Tensor], int]:
    """Return weights and states after some steps, and how many of these were captured."""
    X, groups = parameters(MATRICES, [(1000,), (300, 50)], device)
    optimizer = Dion(
        groups, direction=direction, replicas="single", capture=capture, **DIRECTIONS[direction]
    )
    rates = [group["lr"] for group in optimizer.param_groups]
    captured = 0
    earlier = []  # alive, so that new gradients have addresses of their own
    for step in range(STEPS):
        torch.manual_seed(1000 + step)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * (1 - step / (2 * STEPS))
        for x in X:
            earlier.append(x.grad)
            x.grad = torch.randn_like(x)
        if step == NAN_STEP:
            X[0].grad[0, 0] = math.nan  # type: ignore[index]
        optimizer.step()
        assert optimizer.report is not None
        captured += optimizer.report.captured
    states = [t for x in X for t in optimizer.state[x].values() if isinstance(t, Tensor)]
    return [*(x.detach() for x in X), *states], captured


def idle_rows(setting: Setting) -> Findings:
    """Take steps of a matrix with a row that has no gradient."""
    for direction, options in DIRECTIONS.items():
        torch.manual_seed(0)
        X = nn.Parameter(torch.randn(256, 128, device=setting.device))
        optimizer = Dion([X], direction=direction, replicas="single", **options)
        for _ in range(3):
            X.grad = torch.randn_like(X)
            X.grad[7] = 0
            optimizer.step()
        yield f"a row without gradient, {direction}", {"good": bool(torch.isfinite(X).all())}


def against_float64(setting: Setting) -> Findings:
    """Compare products and roots with float64's, and their errors with those of torch.bmm."""
    torch.manual_seed(0)
    device = setting.device
    sizes = ((12, 768), (7, 2048)) if setting.large else ((2, 64),)
    dtypes = (torch.float16, torch.bfloat16) if setting.large else (torch.float32,)
    for k, n in sizes:
        for dtype in dtypes:
            kind = f"k={k}, n={n}, {dtype}".replace("torch.", "")
            # Lengths as in a step.
            B = (torch.randn(k, 4 * n, n, device=device) * 32 / n).to(dtype)
            G = B.mT @ B
            yield (
                f"grams, {kind}",
                beside(lambda b: grams_of([b])[0], B, torch.bmm(B.double().mT, B.double())),
            )
            unit = (G / G.float().norm(dim=(1, 2), keepdim=True)).to(dtype)
            wide = unit.double()
            yield f"symmetric_product, {kind}", beside(square, unit, torch.bmm(wide, wide))
            for bound in ops.Bound:
                root = partial(root_of, bound=bound)
                of = unit if bound is ops.Bound.ONE else G
                with ops.use_backend("torch"):
                    exact = root(of.double())
                yield f"inverse_root, {bound.name}, {kind}", beside(root, of, exact)
            del B, G, unit, wide
            empty(device)
    if setting.large:
        A = torch.randn(12, 768, 768, device=device)
        A = A + A.mT
        exact = torch.bmm(A.double(), A.double())
        yield "symmetric_product, k=12, n=768, float32", beside(square, A, exact)


def beside(operation: Callable[[Tensor], Tensor], of: Tensor, exact: Tensor) -> Found:
    """Return the relative errors of an operation by kernels and by PyTorch alone."""
    refused.clear()
    with ExitStack() as rules:
        for module, function, _ in RULES if ops.lacking("triton") is None else ():
            rules.enter_context(rule_says(module, function, True))
        error = distance(operation(of).double(), exact) / float(exact.norm())
    left_to_torch = dict(refused)
    with ops.use_backend("torch"):
        plain = distance(operation(of).double(), exact) / float(exact.norm())
    eps = torch.finfo(of.dtype).eps
    good = error <= WORSE * (plain + eps)
    return {"good": good, "error": error, "error_of_torch": plain, "refused": left_to_torch}


def square(A: Tensor) -> Tensor:
    """Return A A."""
    return ops.symmetric_product(A, A, torch.empty_like(A))


def grams_of(B: Sequence[Tensor]) -> list[Tensor]:
    """Return B^T B of each stack."""
    out = [b.new_empty(len(b), b.shape[-1], b.shape[-1]) for b in B]
    ops.grams(B, out)
    return out


# Of the first pass in half precision.
COEFFICIENTS = passes_in_half(polar_express(4, SMALLEST_IN_HALF))[0]


def root_of(G: Tensor, bound: ops.Bound) -> Tensor:
    """Return what the first pass of iterations makes of Gram matrices, which it keeps."""
    return ops.inverse_root(G.clone(), COEFFICIENTS, bound).Z


def deficient_ranks(setting: Setting) -> Findings:
    """Take a step with r = 64 from a gradient of rank 8, where products may round float32."""
    for interface in ("highest", "high", "fp32_precision"):
        if interface == "fp32_precision":
            torch.backends.cuda.matmul.fp32_precision = "tf32"
        else:
            torch.set_float32_matmul_precision(interface)
        torch.manual_seed(0)
        X = nn.Parameter(torch.zeros(512, 256, device=setting.device))
        optimizer = Dion([X], rank_fraction=0.25, weight_decay=0.0, replicas="single")
        factors = [torch.randn(s, device=setting.device) for s in ((512, 8), (8, 256))]
        # A product whose factors are rounded still has rank 8.
        X.grad = (factors[0].double() @ factors[1].double()).float()
        optimizer.step()
        values = torch.linalg.svdvals(X.detach().double())
        rank = int((values > 0.01 * values[0]).sum())
        yield f"rank of a step from rank 8, {interface}", {"good": rank == 8, "rank": rank}


# -------------------------------------------------------------------- kernels

SQUARES = [(12, 768), (48, 768), (7, 2048), (24, 2048), (96, 2048)]


def kernels(setting: Setting) -> Findings:
    """Measure operations on the device alone, and which way the kernels' rules choose.

    Every call of an operation on a list also copies its table to the device.
    """
    if not setting.large:
        raise Skipped("no CUDA device")
    with ops.use_backend("triton"), torch.no_grad():
        for k, n in SQUARES:
            yield f"symmetric_product, k={k}, n={n}", symmetric_speed(k, n, setting.device)
            yield f"inverse_root, k={k}, n={n}", root_speed(k, n, setting.device)
            empty(setting.device)
        for name, blocks in (("gpt2-160m", 1), ("gpt2-160m", 12), ("llama-1.3b", 1)):
            yield f"grams, {name}, blocks={blocks}", grams_speed(name, blocks, setting.device)
            empty(setting.device)
        yield "grams, llama-1.3b, blocks=24", grams_speed("llama-1.3b", 24, setting.device)
        empty(setting.device)
        yield from lists_speed(Weights.of(MODELS["gpt2-160m"], setting.device))


def bench(call: Callable[[], object]) -> float:
    """Return milliseconds of a call on the device, without the host's."""
    from triton.testing import do_bench_cudagraph

    return float(do_bench_cudagraph(call, rep=10, return_mode="min"))


@contextmanager
def rule_says(module: str, function: str, gains: bool) -> Iterator[None]:
    """Let a rule of the kernels always say the same."""
    kernels_of = importlib.import_module(f"curvadion_kernels.{module}")
    with mock.patch.object(kernels_of, function, lambda *_: gains):
        yield


def plainly(call: Callable[[], object]) -> Callable[[], object]:
    """Return the call by PyTorch alone."""

    def run() -> None:
        with ops.use_backend("torch"):
            call()

    return run


def compared(rule: tuple[str, str, str], call: Callable[[], object], floor_ms: float = 0) -> Found:
    """Return milliseconds by the kernel, without it and by torch.bmm, and what the rule says.

    Args:
        rule: module, function and operation.
        call: runs the operation.
        floor_ms: what else the call does, which does not count.
    """
    module, function, operation = rule
    refused.clear()
    call()
    chosen = not refused[operation]
    with rule_says(module, function, True):
        refused.clear()
        kernel = bench(call) - floor_ms
        possible = not refused[operation]
    with rule_says(module, function, False):
        without = bench(call) - floor_ms
    plain = bench(plainly(call)) - floor_ms
    return {
        "chosen": chosen,
        "possible": possible,
        # Products of one operation may still be other kernels of ours.
        "chosen_rightly": chosen == (kernel < without) if possible else None,
        "kernel_ms": kernel,
        "without_kernel_ms": without,
        "torch_ms": plain,
        "torch_over_kernel": plain / kernel,
    }


def rates(found: Found, flop: float) -> Found:
    """Return the findings with TFLOP/s, counted as if products were computed in full."""
    return found | {
        f"{way}_TFLOP_s": flop / found[f"{way}_ms"] / 1e9
        for way in ("kernel", "without_kernel", "torch")
    }


def symmetric_speed(k: int, n: int, device: torch.device) -> Found:
    """Measure a product of symmetric matrices."""
    A = torch.randn(k, n, n, device=device, dtype=torch.float16)
    A = (A + A.mT) * n**-0.5
    call = partial(ops.symmetric_product, A, A, torch.empty_like(A))
    return rates(compared(RULES[2], call), 2.0 * k * n**3)


def root_speed(k: int, n: int, device: torch.device) -> Found:
    """Measure the iterations of one pass, all launches together."""
    B = torch.randn(k, 2 * n, n, device=device, dtype=torch.float16) * (64 / (2 * n * n) ** 0.5)
    G = torch.bmm(B.mT, B)
    del B
    trace = G.diagonal(dim1=1, dim2=2).sum(-1, dtype=torch.float32)
    work = torch.empty_like(G)

    def call() -> None:
        work.copy_(G)  # the operation overwrites it
        ops.inverse_root(work, COEFFICIENTS, ops.Bound.TIGHT, torch.float16, trace)

    floor_ms = bench(partial(work.copy_, G))
    products = 4 * len(COEFFICIENTS) - 3
    return rates(compared(RULES[1], call, floor_ms), 2.0 * products * k * n**3)


def grams_speed(name: str, blocks: int, device: torch.device) -> Found:
    """Measure the Gram matrices of all matrices of some blocks."""
    B = []
    for (m, n), count in Counter(MODELS[name].block).items():
        stack = torch.randn(count * blocks, m, n, device=device, dtype=torch.float16)
        B.append(stack if m >= n else stack.mT)
    out = [b.new_empty(len(b), b.shape[-1], b.shape[-1]) for b in B]
    flop = sum(2.0 * b.numel() * b.shape[-1] for b in B)
    return rates(compared(RULES[0], partial(ops.grams, B, out)), flop)


def lists_speed(weights: Weights) -> Findings:
    """Measure operations on lists; bytes are those that they must move."""
    X = [x.detach() for x in weights.matrices]
    G = [x.grad for x in weights.matrices if x.grad is not None]
    M = [torch.zeros_like(x) for x in X]
    U = [g.half() for g in G]
    zeros, ones, most = ([number] * len(X) for number in (0.0, 1.0, 0.9))
    elements = sum(x.numel() for x in X)
    norms, _ = ops.lengths(M, G, most, ones)
    yield "lengths", speed(partial(ops.lengths, M, G, most, ones), 8 * elements)
    ahead = partial(ops.ahead_, M, G, most, ones, U, norms)
    yield "ahead_, to float16", speed(ahead, 14 * elements)
    step = partial(ops.local_step_, X, U, zeros, ones, moves=None)
    yield "local_step_, from float16", speed(step, 10 * elements)
    del X, M, U
    Y = [y.detach() for y in weights.others]
    E_grad = [y.grad for y in weights.others if y.grad is not None]
    means = [torch.zeros_like(y) for y in Y]
    squares = [torch.zeros_like(y) for y in Y]
    counters = [torch.ones((), device=y.device) for y in Y]
    total = 28 * sum(y.numel() for y in Y)
    lr, weight_decay, beta1, beta2, eps = (
        [number] * len(Y) for number in (0.0, 0.0, 0.9, 0.95, 1e-8)
    )
    ours = partial(
        ops.adamw_, Y, E_grad, means, squares, counters, lr, weight_decay, beta1, beta2, eps
    )
    yield "adamw_", speed(ours, total)
    theirs = partial(
        torch._fused_adamw_, Y, E_grad, means, squares, [], counters, lr=0.0, beta1=0.9, beta2=0.95,
        weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip
    yield "torch._fused_adamw_", speed(theirs, total)


def speed(call: Callable[[], object], total_bytes: int) -> Found:
    """Measure an operation that moves some bytes."""
    refused.clear()
    ms = bench(call)
    return {"ms": ms, "TB_s": total_bytes / ms / 1e9, "refused": dict(refused)}


# -------------------------------------------------------------------- peers

MICROSOFTS, GRAPH = "Microsoft's Muon, compiled", "Microsoft's Muon, compiled, CUDA graph"
RATIOS = ("wall_ms", "back_to_back_ms", "device_ms")


def torch_muon(weights: Weights) -> Several:
    """torch's Muon, with its fused AdamW for the others."""
    rest = torch.optim.AdamW(weights.others, lr=1e-4, fused=True)
    return Several(torch.optim.Muon(weights.matrices, lr=1e-3), rest)


def microsoft(weights: Weights) -> Any:
    """Microsoft's Muon with its own Triton kernels; it compiles the rest."""
    library = importlib.import_module("dion")
    return library.Muon(weights.groups(algorithm="muon"), use_triton=True)


def microsoft_graph(weights: Weights) -> Any:
    """Microsoft's Muon, captured after three steps."""
    library = importlib.import_module("dion.cuda_graph")
    return library.CudaGraphOptimizer(microsoft(weights), warmup_steps=3)


THEIRS: dict[str, Make] = {
    "torch.optim.Muon and fused AdamW": torch_muon,
    MICROSOFTS: microsoft,
    GRAPH: microsoft_graph,
}


def peers(setting: Setting) -> Findings:
    """Measure other libraries beside ours, in one process; they compile for minutes."""
    begin = time.monotonic()
    failed: list[str] = []
    for name, model in setting.models.items():
        # A model takes about as long as the one before.
        now = time.monotonic()
        if now + (now - begin) > setting.ends:
            yield name, {"skipped": "too little time is left"}
            continue
        failed += yield from peers_of(name, Weights.of(model, setting.device), setting)
        empty(setting.device)
    if failed:
        raise AssertionError(f"{failed}: see their findings")


def peers_of(
    name: str, weights: Weights, setting: Setting
) -> Generator[tuple[str, Any], None, list[str]]:
    """Measure all steps of one model, then their ratios; return what failed."""
    contenders = {kind: OURS[kind] for kind in (EAGER, CAPTURED)} | THEIRS
    found: dict[str, Found] = {kind: {} for kind in contenders}
    for measure in (timed, profiled):
        for kind, make in contenders.items():
            record = found[kind]
            if record.keys() & ENDED:
                continue
            reason = absent(kind, setting)
            if reason is None:
                record |= attempt(measure, make, weights, setting) | record
            else:
                record["skipped"] = reason
            yield f"{kind}, {name}", record
        yield f"ours / theirs, {name}", ratios(found)
    return [f"{kind}, {name}" for kind, record in found.items() if "error" in record]


def absent(kind: str, setting: Setting) -> str | None:
    """Return why a contender cannot take part."""
    if kind not in (MICROSOFTS, GRAPH):
        return None
    if importlib.util.find_spec("dion") is None:
        return "there is no package dion"
    return None if setting.large else "no CUDA device"


def ratios(found: dict[str, Found]) -> Found:
    """Return our times over theirs, of those that both have."""
    return {
        f"{ours} / {theirs}": {
            key: found[ours][key] / found[theirs][key]
            for key in RATIOS
            if found[ours].get(key) and found[theirs].get(key)
        }
        for ours in (EAGER, CAPTURED)
        for theirs in THEIRS
        if "wall_ms" in found[ours] and "wall_ms" in found[theirs]
    }


# -------------------------------------------------------------------- waits


def waits(setting: Setting) -> Findings:
    """Find where the host waits; fail if a closed step of a schedule waits more than once."""
    if not setting.large:
        raise Skipped("no CUDA device")
    closed: dict[str, int] = {}
    with one_rank("gloo"):
        for name, options in {
            "schedule, polar": {"gate": FixedPeriod(3), "sync": QuantizedAverage(2)},
            "schedule, low rank": {"gate": FixedPeriod(3)},
            "RMMC": {"threshold": 0.3},
        }.items():
            X, groups = parameters(SMALL * 4, [(300,), (40, 30)], setting.device)
            optimizer = CurvaDion(groups, replicas=dist.group.WORLD, **options)  # type: ignore[arg-type]
            for step in range(9):
                give_gradients(X, step)
                places = warned(optimizer)
                report = optimizer.report
                assert report is not None
                if step < 6:
                    continue
                key = f"{name}, step {step}, {report.reason}"
                if report.reason == "closed":
                    closed[key] = sum(places.values())
                yield key, places
    if max(closed.values()) > 1:
        raise AssertionError(f"closed steps wait: {closed}")


def warned(optimizer: ReplicaOptimizer) -> dict[str, int]:
    """Return the places of a step that torch's debug mode warns about, and how often."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    of_torch = [w for w in told if "synchronizing" in str(w.message)]
    return dict(Counter(f"{Path(w.filename).name}:{w.lineno}" for w in of_torch))


# -------------------------------------------------------------------- processes


PROGRAMS: dict[str, Callable[[], dict[str, Any]]] = {
    "openings in codes": lambda: {"gate": FixedPeriod(3), "sync": QuantizedAverage(4)},
    "openings in codes, delay 2": lambda: {
        "gate": FixedPeriod(3), "sync": QuantizedAverage(4, delay=2)
    },
    "gradients in codes": lambda: {"sync": CodedGradients(4)},
    "low rank": lambda: {"gate": FixedPeriod(3)},
}  # fmt: skip


def processes(setting: Setting) -> Findings:
    """Compare weights with a CPU's after eight steps: largest distance over distance moved."""
    device = setting.device
    far: dict[str, float] = {}
    start = [x.detach().cpu() for x in parameters(SMALL, [(300,)], device)[0]]
    for ranks in (2, 4) if setting.large else (2,):
        here = trained(ranks, device)
        there = trained(ranks, torch.device("cpu")) if setting.large else here
        for name in PROGRAMS:
            moved = max(map(distance, here[name], start))
            key = f"{name}, {ranks} processes"
            far[key] = max(map(distance, here[name], there[name])) / moved
            yield key, far[key]
    if max(far.values()) > 0.5:  # codes may round differently, but trajectories must stay close
        raise AssertionError(f"too far from a CPU's: {far}")


def distance(one: Tensor, other: Tensor) -> float:
    """In the Frobenius norm."""
    return float((one - other).norm())


def trained(ranks: int, device: torch.device) -> dict[str, list[Tensor]]:
    """Return rank 0's weights after eight steps of each program on one device."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        given = ranks, str(device), store.port, folder
        spawn(train_rank, given, nprocs=ranks)
        weights: dict[str, list[Tensor]] = torch.load(f"{folder}/weights.pt", weights_only=True)
    return weights


def train_rank(rank: int, ranks: int, device: str, port: int, folder: str) -> None:
    """Run one process of :func:`trained`.

    Args:
        rank: of this process.
        ranks: how many processes.
        device: which they share.
        port: of the store at which they meet.
        folder: for rank 0's weights.
    """
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False)
    seconds = timedelta(seconds=40)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=seconds)
    found = {}
    for name, options in PROGRAMS.items():
        X, groups = parameters(SMALL, [(300,)], torch.device(device))
        optimizer = CurvaDion(groups, replicas=dist.group.WORLD, **options())
        for step in range(8):
            give_gradients(X, step, rank)
            optimizer.step()
        optimizer.synchronize()
        found[name] = [x.detach().cpu() for x in X]
    if rank == 0:
        torch.save(found, f"{folder}/weights.pt")
    dist.destroy_process_group()


# -------------------------------------------------------------------- background


def background(setting: Setting) -> Findings:
    """Run fifty exchanges in their own thread and group while the device computes."""
    device = setting.device
    backend = "nccl" if setting.large else "gloo"
    with one_rank(backend):
        exchanges = background_of(dist.group.WORLD, device)  # type: ignore[arg-type]
        n = 1024 if setting.large else 64
        a = torch.randn(n, n, device=device)
        begin = time.perf_counter()
        under_way = []
        for i in range(50):
            sent = torch.full((1 << 16,), float(i), device=device)

            def work(sent: Tensor = sent) -> Tensor:
                dist.all_reduce(sent, group=exchanges.group)
                return sent + 1

            under_way.append(exchanges.begin(f"exchange {i}", work))
            a = a @ a / a.norm()
        wrong = [i for i, e in enumerate(under_way) if not bool((e.result() == i + 1).all())]
        seconds = time.perf_counter() - begin
    if wrong:
        raise AssertionError(f"exchanges {wrong} gave other numbers")
    yield "backend", backend
    yield "seconds", seconds


# -------------------------------------------------------------------- sanitizer


def sanitizer(setting: Setting) -> Findings:
    """Run compute-sanitizer on a small step with each backend."""
    tool = shutil.which("compute-sanitizer")
    if not setting.large:
        raise Skipped("no CUDA device")
    if tool is None:
        raise Skipped("compute-sanitizer is not on PATH")
    for backend in ("triton", "cuda"):
        command = [tool, "--error-exitcode", "9", sys.executable, "-m", MODULE, "operations"]
        said = subprocess.run(
            [*command, "--device", "cuda", "--output", os.devnull],
            env={**os.environ, "CURVADION_BACKEND": backend},
            capture_output=True, text=True, timeout=48, check=False,
        )  # fmt: skip
        if said.returncode:
            raise AssertionError(f"{backend}: {said.stdout[-1500:]}{said.stderr[-500:]}")
        yield backend, said.stdout.splitlines()[-1]


def operations(setting: Setting) -> Findings:
    """Call every operation once, through steps of both directions and codes; for the sanitizer."""
    with one_rank("gloo"):
        for name, options in PROGRAMS.items():
            X, groups = parameters(SMALL, [(300,)], setting.device)
            optimizer = CurvaDion(groups, replicas=dist.group.WORLD, **options())
            for step in range(4):
                give_gradients(X, step)
                optimizer.step()
            del optimizer
            yield name, "ran"


# -------------------------------------------------------------------- graphs


def graphs(setting: Setting) -> Findings:
    """Compare captured and eager operations of each backend."""
    if not setting.large:
        raise Skipped("no CUDA device")
    wrong = []
    for backend in ("triton", "cuda"):
        found = ops.lacking(backend) or captured(backend, setting.device)
        if not found:
            wrong.append(backend)
        yield backend, found
    if wrong:
        raise AssertionError(f"other results in graphs: {wrong}")


def captured(backend: str, device: torch.device) -> bool:
    """Capture two graphs on the default capture stream and replay them in reverse."""
    lists = [[torch.randn(s, device=device) for s in SMALL] for _ in range(4)]
    G = [torch.randn(s, device=device) for s in SMALL]

    def work(M: list[Tensor], X: list[Tensor]) -> Tensor:
        norms = ops.momentum_norms(M, G, [0.9] * len(G))
        ops.local_step_(X, G, [0.1] * len(G), [0.99] * len(G), M, [0.9] * len(G), moves=None)
        return norms

    with ops.use_backend(backend):
        work(*([t.clone() for t in each] for each in lists[:2]))
        expected = [[t.clone() for t in each] for each in lists]
        made = [torch.cuda.CUDAGraph() for _ in range(2)]
        norms = []
        for i, graph in enumerate(made):
            with torch.cuda.graph(graph):
                norms.append(work(*lists[2 * i : 2 * i + 2]))
        same = True
        for i in (1, 0, 1):
            made[i].replay()
            wanted = work(*expected[2 * i : 2 * i + 2])
            torch.cuda.synchronize()
            same &= torch.allclose(norms[i], wanted, rtol=1e-5)
    for each, wanted_each in zip(lists, expected, strict=True):
        for a, b in zip(each, wanted_each, strict=True):
            same &= torch.allclose(a, b, rtol=1e-5, atol=1e-6)
    return same


# -------------------------------------------------------------------- command line

PARTS: dict[str, Callable[[Setting], Findings]] = {
    part.__name__: part
    for part in (
        ceilings, steps, correctness, kernels, peers, states,
        waits, processes, background, sanitizer, operations, graphs,
    )
}  # fmt: skip


def write(found: Found, path: Path) -> None:
    """Write the findings so far; one who stops this process finds them whole."""
    if path == Path(os.devnull):
        return
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(json.dumps(found) + "\n")
    unfinished.replace(path)


def main() -> int:
    """Run one part; write its findings after each, or why it was skipped."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=[*PARTS])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which it is stopped")
    options = parser.parse_args()
    ends = time.monotonic() + options.seconds
    setting = Setting(torch.device(options.device), ends)
    found: Found = {}
    try:
        for name, finding in PARTS[options.part](setting):
            found[name] = finding
            write(found, options.output)
    except Skipped as reason:
        write({"skipped": str(reason)}, options.output)
    except Exception:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
