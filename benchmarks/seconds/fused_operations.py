r"""Time every fused operation on model shapes, against foreach, torch.compile and memory speed.

    OMP_NUM_THREADS=1 python -m benchmarks.seconds.fused_operations \
        --models gpt2-160m --dtype float32
    OMP_NUM_THREADS=1 python -m benchmarks.seconds.fused_operations \
        --models 100x500000 --blocks 32 --bits 2 \
        --operations encode decode_ "encode and decode" encode_difference_ decode_add_
    python -m benchmarks.seconds.fused_operations --device cuda

It prints a line for each operation: the fastest fused backend beside the fastest other way, which
is foreach, torch.bmm, torch.compile or plain PyTorch.

Each record has the seconds of an operation under one contender, the fewest bytes it must move, and
its speed as a share of the bound: a copy of as many bytes in the same run. Operations on codes have
one more contender, "numbers": a copy of as many float32 elements.

Symmetric products are batched as in the optimizer: B^T B ("gram"), and the square of that
("symmetric_product"). Their records count the FLOPs of full products, little more than half of
which are needed; the contender "bmm" is torch.bmm.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.common.model_shapes import MODELS
from benchmarks.common.pictures import axes_to_save
from benchmarks.common.records import environment, write
from benchmarks.common.timing import Contenders, copy_of, interleaved, summary
from curvadion import ops
from curvadion.ops import backends, coding, operations
from curvadion.ops.code_format import BITS, BLOCK, Bits, block_bytes, blocks_of
from curvadion.ops.newton_schulz import most_of_squares

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BACKENDS = ("torch", "cpu", "triton", "cuda")
BUSY = 0.5  # a load average at which something else is likely to run


class Problem:
    """Weights, momenta, gradients and factors of a model's matrices."""

    def __init__(
        self, shapes: Sequence[tuple[int, int]], rank: float, dtype: torch.dtype, where: Any
    ) -> None:
        def draw() -> list[Tensor]:
            return [torch.randn(s, device=where).to(dtype) for s in shapes]

        self.X, self.M, self.G = draw(), draw(), draw()
        ranks = [max(1, round(rank * min(shape))) for shape in shapes]
        self.P = [torch.randn(m, r, device=where) for (m, _), r in zip(shapes, ranks, strict=True)]
        self.Q = [torch.randn(n, r, device=where) for (_, n), r in zip(shapes, ranks, strict=True)]
        # Matrices of one shape are batched, as the optimizer does.
        stacks: dict[tuple[int, ...], list[Tensor]] = {}
        for q in self.Q:
            stacks.setdefault(tuple(q.shape), []).append(q)
        self.R = [torch.stack(stack) for stack in stacks.values()]
        self.sums = [ops.column_sum_of_squares(R) for R in self.R]
        self.floors = [torch.zeros_like(sums) for sums in self.sums]
        self.mu, self.step, self.decay, self.feedback = (
            [number] * len(shapes) for number in (0.95, 1e-9, 1 - 1e-9, 1e-9)
        )


def _size(tensors: Sequence[Tensor]) -> int:
    return sum(t.numel() * t.itemsize for t in tensors)


def _operations(p: Problem) -> dict[str, tuple[Callable[[Any], object], int]]:
    """Map each operation to a call, which takes a backend module, and the bytes it must move."""

    def columns(backend: Any) -> None:
        for R, sums, floor in zip(p.R, p.sums, p.floors, strict=True):
            backend.column_normalize(R, sums, floor)

    def low_rank(backend: Any) -> None:
        backend.low_rank_update_(p.X, p.P, p.Q, p.step, p.decay, p.M, p.Q, p.feedback, moves=None)

    matrix, factors = _size(p.X), _size(p.P) + 2 * _size(p.Q)
    return {
        "momentum_norms": (lambda b: b.momentum_norms(p.M, p.G, p.mu), 2 * matrix),
        "accumulate_": (lambda b: b.accumulate_(p.M, p.G, p.mu, moves=None), 3 * matrix),
        "column_normalize_": (columns, 2 * _size(p.R)),
        "low_rank_update_": (low_rank, 4 * matrix + factors),
        "local_step_": (
            lambda b: b.local_step_(p.X, p.G, p.step, p.decay, p.M, p.mu, moves=None),
            5 * matrix,
        ),
    }


RANKS = 4  # number of ranks whose codes average_codes_ averages


def _code_operations(p: Problem, bits: int) -> dict[str, tuple[Callable[[Any], object], int]]:
    """Like :func:`_operations`, for codes of weights, their anchors and residuals."""
    anchors = [x.float() for x in p.X]
    residuals = [torch.randn_like(a) for a in anchors]
    numbers = [torch.empty_like(a) for a in anchors]
    rows = sum(blocks_of(x.numel()) for x in p.X)
    codes = torch.zeros(rows, block_bytes(bits), dtype=torch.uint8, device=anchors[0].device)
    own = torch.randn(rows // RANKS, BLOCK, device=codes.device)
    received = codes[: RANKS * len(own)].view(RANKS, len(own), -1).clone()
    mean = torch.zeros_like(received[0])

    def encode(backend: Any, *more: Sequence[Tensor]) -> None:
        backend.encode_difference_(codes, p.X, *more, bits=bits)

    def decode_(backend: Any) -> None:
        backend.decode_add_(numbers, (), codes, bits)

    def both(backend: Any) -> None:
        encode(backend)
        decode_(backend)

    encode(ops)
    weights, wide, coded = _size(p.X), _size(anchors), _size([codes])
    return {
        "encode": (encode, weights + coded),
        "decode_": (decode_, wide + coded),
        "encode and decode": (both, weights + wide + 2 * coded),
        "encode_difference_": (
            lambda b: encode(b, anchors, residuals),
            weights + 3 * wide + coded,
        ),
        "decode_add_": (
            lambda b: b.decode_add_(p.X, anchors, codes, bits),
            coded + 2 * wide + weights,
        ),
        "average_codes_": (
            lambda b: b.average_codes_(mean, own, received, 0, Bits(bits, bits)),
            _size([received[1:], mean]) + 2 * _size([own]),
        ),
    }


def _products(p: Problem) -> dict[str, tuple[Callable[[Any], object], int, int]]:
    """Like :func:`_operations`, for symmetric products; also the FLOPs of full products."""
    stacks: dict[tuple[int, int], list[Tensor]] = {}
    for x in p.X:
        B = x if x.shape[0] >= x.shape[1] else x.mT
        stacks.setdefault((B.shape[0], B.shape[1]), []).append(B)
    most_in_a_stack = {n: most_of_squares(p.X[0].device) // n**2 for _, n in stacks}
    factors = [torch.stack(found[: max(1, most_in_a_stack[n])]) for (_, n), found in stacks.items()]
    # Scaled so that a square's elements are about as large as its factor's.
    squares = [B.mT @ (B / (B.shape[1] * B.shape[2]) ** 0.5) for B in factors]
    results = [torch.empty_like(G) for G in squares]

    def gram(backend: Any) -> None:
        for B, out in zip(factors, results, strict=True):
            backend.symmetric_product(B.mT, B, out)

    def symmetric_product(backend: Any) -> None:
        for G, out in zip(squares, results, strict=True):
            backend.symmetric_product(G, G, out)

    return {
        "gram": (gram, _size(factors) + _size(results), _flops(factors)),
        "symmetric_product": (symmetric_product, _size(squares) + _size(results), _flops(squares)),
    }


def _flops(B: Sequence[Tensor]) -> int:
    """FLOPs of B^T B, computed in full."""
    return sum(2 * b.numel() * b.shape[-1] for b in B)


class _WholeProducts:
    """torch.bmm under the operation's name."""

    @staticmethod
    def symmetric_product(A: Tensor, B: Tensor, out: Tensor) -> None:
        torch.bmm(A, B, out=out)


# The backend operation that a measurement runs, if its name differs.
NAMES = {
    "encode": "encode_difference_",
    "encode and decode": "encode_difference_",
    "decode_": "decode_add_",
    "column_normalize_": "column_normalize",
    "gram": "symmetric_product",
}


def _foreach(p: Problem) -> Contenders:
    """Return the torch._foreach versions, for operations that have one."""
    X, M, G = list(p.X), list(p.M), list(p.G)

    def momentum_norms() -> object:
        return torch._foreach_norm(torch._foreach_add(G, M, alpha=0.95))

    def accumulate_() -> None:
        torch._foreach_mul_(M, 0.95)
        torch._foreach_add_(M, G)

    def local_step_() -> None:
        torch._foreach_mul_(X, p.decay[0])
        torch._foreach_add_(X, G, alpha=-p.step[0])
        torch._foreach_mul_(M, 0.95)
        torch._foreach_add_(M, G)

    return {f.__name__: f for f in (momentum_norms, accumulate_, local_step_)}


def _forced(backend: str, call: Callable[[Any], object]) -> Callable[[], object]:
    def forced() -> object:
        with ops.use_backend(backend):
            return call(ops)

    return forced


def _compiled(call: Callable[[Any], object]) -> Callable[[], object]:
    """Return the torch.compile version of plain PyTorch."""
    compiled = torch.compile(lambda: call(ops), dynamic=False)

    def plain(*_: Any) -> None:
        return None

    def run() -> object:
        with (
            mock.patch.object(operations, "fused", plain),
            mock.patch.object(coding, "fused", plain),
        ):
            return compiled()

    return run


def measured(name: str, options: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """Yield the records of one model, operation by operation."""
    device, dtype = torch.device(options.device), DTYPES[options.dtype]
    shapes = MODELS[name].matrices(options.blocks)
    problem = Problem(shapes, options.rank_fraction, dtype, device)
    foreach, on_codes = _foreach(problem), _code_operations(problem, options.bits)
    products = _products(problem)
    flops = {name: count for name, (_, _, count) in products.items()}
    elements = sum(m * n for m, n in shapes)
    every = {**_operations(problem), **on_codes, **{k: v[:2] for k, v in products.items()}}
    for operation, (call, total_bytes) in every.items():
        if options.operations and operation not in options.operations:
            continue
        contenders: Contenders = {"copy": copy_of(total_bytes, device)}
        if operation in on_codes:
            contenders["numbers"] = copy_of(2 * 4 * elements, device)
        if operation in foreach:
            contenders["foreach"] = foreach[operation]
        if operation in products:
            contenders["bmm"] = partial(call, _WholeProducts)
        for backend in BACKENDS:
            if _has(backend, NAMES.get(operation, operation), device):
                contenders[backend] = _forced(backend, call)
        if options.compile and operation not in on_codes and operation not in products:
            contenders["torch.compile"] = _compiled(call)
        times = interleaved(contenders, device, rounds=options.rounds, seconds=options.seconds)
        bound = min(times["copy"])
        records = []
        for contender, seconds in times.items():
            found = summary(seconds)
            records.append(
                {
                    "model": name,
                    "blocks": options.blocks or MODELS[name].blocks,
                    "operation": operation,
                    "contender": contender,
                    "device": options.device,
                    "dtype": options.dtype,
                    "rank_fraction": options.rank_fraction,
                    "tensors": len(shapes),
                    "elements": elements,
                    "bits": options.bits if operation in on_codes else None,
                    "bytes": total_bytes,
                    **found,
                    "flops": flops.get(operation),
                    "teraflops_per_second": (
                        flops[operation] / found["seconds"] / 1e12 if operation in flops else None
                    ),
                    "gigabytes_per_second": total_bytes / found["seconds"] / 1e9,
                    "share_of_copy": bound / found["seconds"],
                    "copies_of_the_numbers": (
                        found["seconds"] / min(times["numbers"]) if "numbers" in times else None
                    ),
                    "times_faster_than_foreach": (
                        min(times["foreach"]) / found["seconds"] if "foreach" in times else None
                    ),
                    "times_faster_than_bmm": (
                        min(times["bmm"]) / found["seconds"] if "bmm" in times else None
                    ),
                }
            )
        print(_line(records), flush=True)
        yield records


def _has(backend: str, operation: str, device: torch.device) -> bool:
    """Return whether the backend runs the operation here, instead of falling back to PyTorch."""
    if backend == "torch":
        return True
    suits = device.type == ("cpu" if backend == "cpu" else "cuda")
    own = suits and ops.lacking(backend) is None and backends._operation(backend, operation)
    return bool(own)


FUSED = ("cpu", "triton", "cuda")
BOUNDS = ("copy", "numbers")  # contenders that are no way to compute an operation
HEADER = (
    f"{'operation':20}{'fused':>13}{'by':>8}{'best other':>13}{'by':>15}{'speed-up':>10}"
    f"{'of a copy':>11}"
)


def _machine(device: torch.device) -> str:
    """What measures, in a line."""
    known = environment(device)
    where = known.get("gpu") or f"{known['cpu'] or known['machine']}, {known['threads']} threads"
    return f"{where}, torch {known['torch']}"


def _warn_if_busy() -> None:
    """Say so if other processes run, which take memory bandwidth and cores."""
    load = os.getloadavg()[0]  # of the last minute
    if load > BUSY:
        print(
            f"warning: the load average is {load:.1f} before anything is measured: other processes "
            f"are busy, so wait until they have ended or compare contenders of one line only",
            file=sys.stderr,
        )


def _line(records: Sequence[dict[str, Any]]) -> str:
    """An operation: the fastest fused backend beside the fastest other way, in milliseconds."""
    ways = [r for r in records if r["contender"] not in BOUNDS]

    def best(*, fused: bool) -> dict[str, Any] | None:
        of_kind = [r for r in ways if (r["contender"] in FUSED) == fused]
        return min(of_kind, key=lambda r: r["seconds"], default=None)

    fused, other = best(fused=True), best(fused=False)
    line = f"{records[0]['operation']:20}"
    for found, by in ((fused, 8), (other, 15)):
        if found is None:
            line += f"{'none':>13}{'':{by}}"
        else:
            line += f"{1e3 * found['seconds']:10.3f} ms{found['contender']:>{by}}"
    if fused is None or other is None:
        return line
    return f"{line}{other['seconds'] / fused['seconds']:9.2f}x{fused['share_of_copy']:11.0%}"


def plot(records: Sequence[dict[str, Any]], path: Path, device: torch.device) -> None:
    """Draw bars: each contender's share of the memory bound, by model and operation.

    Args:
        records: of all contenders.
        path: of the picture.
        device: that was measured.
    """
    chosen = [r for r in records if r["contender"] not in BOUNDS]
    groups = list(dict.fromkeys((r["model"], r["operation"]) for r in chosen))
    names = list(dict.fromkeys(r["contender"] for r in chosen))
    width = 0.8 / len(names)
    with axes_to_save(path, (2 + 1.1 * len(groups), 4)) as axes:
        for i, name in enumerate(names):
            bars = {(r["model"], r["operation"]): r for r in chosen if r["contender"] == name}
            places = [g for g, group in enumerate(groups) if group in bars]
            heights = [bars[groups[g]]["share_of_copy"] for g in places]
            shift = (i - len(names) / 2 + 0.5) * width
            drawn = axes.bar([g + shift for g in places], heights, width, label=name)
            values = [f"{height:.0%}" for height in heights]
            axes.bar_label(drawn, values, rotation=90, padding=2, fontsize=6)
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.margins(y=0.15)
        axes.set_xticks(range(len(groups)), [f"{m}\n{o}" for m, o in groups], fontsize=7)
        axes.set_ylabel("bytes a second, as a share of a copy's")
        axes.set_title(f"Speed of operations, {chosen[0]['dtype']}\n{_machine(device)}", fontsize=9)
        axes.legend(fontsize=7)


def command_line() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="+", default=["gpt2-160m"], choices=list(MODELS))
    parser.add_argument("--operations", nargs="+", default=[])
    parser.add_argument("--blocks", type=int, help="use only this many blocks of each model")
    parser.add_argument("--dtype", default="float32", choices=list(DTYPES))
    parser.add_argument("--rank-fraction", type=float, default=0.25)
    parser.add_argument("--bits", type=int, default=2, choices=BITS, help="bits of a code")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=20, help="time limit per operation")
    parser.add_argument("--compile", action="store_true", help="also torch.compile the reference")
    parser.add_argument("--output", type=Path, help="JSON file")
    parser.add_argument("--plot", type=Path, help="picture of the records")
    return parser


def main() -> None:
    """Measure what the command line asks for."""
    options = command_line().parse_args()
    device = torch.device(options.device)
    _warn_if_busy()
    records = []
    with torch.no_grad():
        for name in options.models:
            print(f"{name}, {options.dtype}, on {_machine(device)}\n{HEADER}", flush=True)
            for more in measured(name, options):
                records += more
                # After each, so that an interrupted run keeps its records.
                if options.output is not None:
                    write(options.output, device, records)
    if options.plot is not None:
        plot(records, options.plot, device)


if __name__ == "__main__":
    main()
