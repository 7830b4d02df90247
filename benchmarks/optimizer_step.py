"""A whole optimizer step, gate open and gate closed, beside AdamW, Muon and Microsoft's Dion.

    OMP_NUM_THREADS=1 python benchmarks/optimizer_step.py --models gpt2-160m
    python benchmarks/optimizer_step.py --device cuda
    torchrun --nproc-per-node 2 benchmarks/optimizer_step.py --contenders opening "Muon and AdamW"

The last one, on two processes or more, also measures an opening: a local step, codes and all that
replicas do around them. Ranks then take turns together, and the times are the first one's.

Besides seconds, a record counts what a step launches and reads back, and its peak memory above what
lives between steps. Launches on a GPU are kernels, and reads are copies to the host; on a CPU they
are PyTorch operators (compiled operations, one call each, are not among them), and those that hand
a number to Python. FLOPs are those of matrix products, as torch counts them. "fused operations
alone" calls what a closed step with the gradient local step consists of, on lists prepared
beforehand.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).parent)]
sys.path.insert(1, str(Path(__file__).resolve().parent.parent / "kernels"))

from curvadion import RMMC, CurvaDion, FixedPeriod, QuantizedAverage, ops
from curvadion.ops.tensors import FixedTensors, Parameters, Tensors
from curvadion.update.scalar import elementwise_step
from measure import Contenders, axes_to_save, interleaved, summary, write
from models import MODELS

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Weights = list[torch.nn.Parameter]


def _weights(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, where: Any) -> Weights:
    return [torch.nn.Parameter(torch.randn(s, device=where).mul_(0.02).to(dtype)) for s in shapes]


def _curvadion(matrices: Weights, others: Weights, **options: Any) -> CurvaDion:
    groups: list[dict[str, Any]] = [{"params": matrices, "algorithm": "dion", "lr": 1e-3}]
    if others:
        groups.append({"params": others, "algorithm": "adamw", "lr": 1e-4})
    replicas = dist.group.WORLD if dist.is_initialized() else None
    return CurvaDion(groups, max_local_steps=None, replicas=replicas, **options)


def _local(matrices: Weights, others: Weights, **options: Any) -> CurvaDion:
    """What a replica does between two openings, as a look-ahead and codes ask for it."""
    gate = FixedPeriod(options.pop("period", 2**30))
    return _curvadion(matrices, others, gate=gate, sync=QuantizedAverage(), nesterov=4.0, **options)


def _microsoft(matrices: Weights, others: Weights) -> Optimizer | None:
    """Microsoft's Dion, if it is installed."""
    try:
        dion = importlib.import_module("dion")
    except ImportError:
        return None
    groups: list[dict[str, Any]] = [{"params": matrices, "rank_fraction": 0.25}]
    if others:
        groups.append({"params": others, "algorithm": "adamw"})
    optimizer: Optimizer = dion.Dion(groups, lr=1e-3)
    return optimizer


class _Several:
    """Optimizers that step together."""

    def __init__(self, *optimizers: Optimizer) -> None:
        self.optimizers = optimizers

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


def _alone(matrices: Weights, others: Weights) -> Callable[[], object]:
    """The operations of a closed step with the gradient local step, and nothing around them."""
    X = FixedTensors.of(Parameters(matrices))
    M = FixedTensors.of(Tensors(torch.zeros_like(x) for x in matrices))
    gradients = [x.grad for x in matrices if x.grad is not None]
    G = FixedTensors.gradients(gradients, X)
    ones, step, decay = ([n] * len(X) for n in (1.0, 1e-3, 1 - 1e-5))
    E, E_grad = list[Tensor](others), [x.grad for x in others if x.grad is not None]
    moments = [
        {"step": torch.zeros(()), "exp_avg": torch.zeros_like(x), "exp_avg_sq": torch.zeros_like(x)}
        for x in others
    ]
    options = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}

    @torch.no_grad()
    def call() -> None:
        ops.momentum_norms(M, G, ones)
        if others:
            ops.norms(E_grad)
        ops.local_step_(X, G, step, decay, M, ones)
        if others:
            elementwise_step("adamw", E, E_grad, moments, options)

    return call


def contenders(
    matrices: Weights, others: Weights, chosen: Sequence[str]
) -> tuple[Contenders, dict[str, float]]:
    """What is compared, by name, and the bytes of state of each, once its state is created."""
    both = [*matrices, *others]
    build: dict[str, Callable[[], Any]] = {
        # First, while replicas still hold the same weights.
        "opening": lambda: _local(matrices, others, period=1) if dist.is_initialized() else None,
        "closed gate, gradient step": lambda: _curvadion(
            matrices, others, gate=RMMC(1e30), local_step="gradient"
        ),
        "closed gate, Dion step": lambda: _curvadion(
            matrices, others, gate=RMMC(1e30), local_step="dion"
        ),
        "open gate": lambda: _curvadion(matrices, others, gate=RMMC(0.0)),
        "local step, polar": lambda: _local(matrices, others),
        "local step, power iteration of full rank": lambda: _local(
            matrices, others, direction="low_rank"
        ),
        "AdamW, fused": lambda: AdamW(both, fused=True),
        "AdamW, foreach": lambda: AdamW(both, foreach=True),
        "Muon and AdamW": lambda: _Several(
            torch.optim.Muon(matrices), *([AdamW(others)] if others else [])
        ),
        "Microsoft's Dion": lambda: _microsoft(matrices, others),
    }
    made: Contenders = {}
    states = {}
    for name, make in build.items():
        optimizer = make() if not chosen or name in chosen else None
        if optimizer is not None:
            made[name] = optimizer.step
            optimizer.step()  # creates the state, and compiles what is compiled
            states[name] = _state_bytes(optimizer)
    made["fused operations alone"] = _alone(matrices, others)
    return made, states


def _state_bytes(optimizer: Any) -> float:
    each = optimizer.optimizers if isinstance(optimizer, _Several) else [optimizer]
    return sum(
        value.nbytes
        for one in each
        for state in one.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    )


class _Counter(TorchDispatchMode):
    """Counts dispatched operators, and those whose result goes to Python."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls, self.reads = 0, 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.calls += 1
        self.reads += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def counts(call: Callable[[], object], device: torch.device) -> dict[str, int]:
    """What one call launches and reads back, and its peak memory above that before it."""
    # Only in plain PyTorch does torch see all products.
    with FlopCounterMode(display=False) as flops, ops.use_backend("torch"):
        call()
    if device.type != "cuda":
        with _Counter() as counter:
            call()
        peak = _peak_on_the_cpu(call)
        return {
            "flops": flops.get_total_flops(),
            "launches": counter.calls,
            "host_reads": counter.reads,
            "peak_bytes": peak,
        }
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        call()
        torch.cuda.synchronize()
    names = [e.name for e in record.events() if e.device_type.name == "CUDA"]
    return {
        "flops": flops.get_total_flops(),
        "launches": sum(not name.startswith(("Memcpy", "Memset")) for name in names),
        "host_reads": sum(name.startswith("Memcpy DtoH") for name in names),
        "peak_bytes": peak,
    }


def _peak_on_the_cpu(call: Callable[[], object]) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        call()
    assert record.profiler is not None
    events = record.profiler.kineto_results.events()
    changes = [e for e in events if e.name() == "[memory]"]
    changes.sort(key=lambda e: e.start_ns())
    peak: int = max(accumulate((e.nbytes() for e in changes), initial=0))
    return peak


def measured(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The records of one model."""
    device, dtype = torch.device(options.device), DTYPES[options.dtype]
    model = MODELS[name]
    torch.manual_seed(0)  # replicas begin alike, and have gradients of their own
    matrices = _weights(model.matrices(options.blocks), dtype, device)
    shapes = [] if options.matrices_only else model.others(options.blocks)
    others = _weights(shapes, dtype, device)
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    for x in [*matrices, *others]:
        x.grad = torch.randn_like(x).mul_(0.01)
    calls, states = contenders(matrices, others, options.contenders)
    # Ranks that step together must take the same number of rounds.
    seconds = float("inf") if dist.is_initialized() else options.seconds
    times = interleaved(calls, device, rounds=options.rounds, seconds=seconds)
    alone = min(times["fused operations alone"])
    records = []
    for contender, seconds in times.items():
        found = summary(seconds)
        counted = counts(calls[contender], device)
        record = {
            "model": name,
            "blocks": options.blocks or model.blocks,
            "matrices_only": options.matrices_only,
            "contender": contender,
            "device": options.device,
            "dtype": options.dtype,
            "backend": ops.backend_for(device),
            "tensors": len(matrices) + len(others),
            "elements": sum(x.numel() for x in [*matrices, *others]),
            "replicas": dist.get_world_size() if dist.is_initialized() else 1,
            "weight_bytes": sum(x.nbytes for x in [*matrices, *others]),
            "state_bytes": states.get(contender, 0),
            **found,
            "times_the_fused_operations_alone": found["seconds"] / alone,
            **counted,
        }
        records.append(record)
        print(
            f"{name:14}{contender:27}{1e3 * found['seconds']:10.3f} ms"
            f"{found['seconds'] / alone:8.2f} x the fused operations alone  {counted}",
            flush=True,
        )
    return records


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.3g}"


def plot(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Bars: seconds of each contender's step, by model."""
    names = list(dict.fromkeys(r["contender"] for r in records))
    models = list(dict.fromkeys(r["model"] for r in records))
    width = 0.8 / len(names)
    with axes_to_save(path, (3 + 3.0 * len(models), 4)) as axes:
        for i, name in enumerate(names):
            seconds = {r["model"]: r["seconds"] for r in records if r["contender"] == name}
            shift = (i - len(names) / 2 + 0.5) * width
            places = [m + shift for m, model in enumerate(models) if model in seconds]
            bars = axes.bar(places, list(seconds.values()), width, label=name)
            axes.bar_label(bars, [_milliseconds(s) for s in seconds.values()], fontsize=6)
        axes.set_yscale("log")
        axes.set_xticks(range(len(models)), models)
        axes.set_ylabel("seconds a step (labels: milliseconds)")
        axes.legend(fontsize=7)


def command_line() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="+", default=["gpt2-160m"], choices=list(MODELS))
    parser.add_argument("--blocks", type=int, help="take that many blocks of each model")
    parser.add_argument("--matrices-only", action="store_true", help="no embeddings, no norms")
    parser.add_argument("--contenders", nargs="+", default=[], help="all if none is named")
    parser.add_argument("--dtype", default="float32", choices=list(DTYPES))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=60, help="limit for one model")
    parser.add_argument("--output", type=Path, help="JSON file")
    parser.add_argument("--plot", type=Path, help="picture of the records")
    return parser


def main() -> None:
    """Measure what the command line asks for."""
    options = command_line().parse_args()
    if "LOCAL_RANK" in os.environ:
        dist.init_process_group("gloo")
    first = not dist.is_initialized() or dist.get_rank() == 0
    records = []
    for name in options.models:
        records += measured(name, options)
        if options.output is not None and first:
            write(options.output, torch.device(options.device), records)
    if options.plot is not None and first:
        plot(records, options.plot)


if __name__ == "__main__":
    main()
