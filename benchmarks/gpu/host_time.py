"""What a step on a GPU costs in Python, measured without one: kernels are replaced by nothing.

    python -m benchmarks.gpu.host_time --out benchmarks/results/gpu/host.json

The parameters have the pattern of GPT-2 160M (48 matrices, 27 other tensors) and few elements. A
captured step is the host's part of a replay; an eager one is all that the host does, but for the
launches themselves. Beside them stands torch's fused AdamW for all parameters, which computes.
Milliseconds are thread time, so other processes matter little.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

# Kernels can be imported without a GPU only for the interpreter, which is never called here.
os.environ["TRITON_INTERPRET"] = "1"
os.environ["CURVADION_BACKEND"] = "triton"

import torch
from torch import Tensor, nn

import curvadion_kernels
from benchmarks.common.records import environment, program
from curvadion import Dion
from curvadion.agreement.meeting import Meeting, Outcome
from curvadion.layout import exchange
from curvadion.optim import capture, replica_optimizer
from curvadion.update import newton_schulz, orthonormalize, polar, power_iteration

WIDTH, BLOCKS = 16, 12
DIRECTIONS: dict[str, dict[str, Any]] = {
    "polar": {"direction": "polar"},
    "normuon": {"direction": "normuon"},
    "dion2": {"direction": "dion2", "rank_fraction": 0.5},
    "low_rank": {"direction": "low_rank"},
}
FINE = Outcome(signal=0.0, parameter=None, finite=True, all_zero=False)


class NoGraph:
    """A CUDA graph whose replay takes no time."""

    def __init__(self, device: torch.device) -> None:
        pass

    def record(self, body: Callable[[], None]) -> None:
        """Do once what the host does."""
        body()

    def between(self, call: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        """Do nothing."""

    def replay(self) -> None:
        """Do nothing."""

    def release(self) -> None:
        """Do nothing."""


def nothing(*arguments: Any, **constants: Any) -> None:
    """A launch that takes no time."""


def no_product(A: Tensor, B: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Stand in for torch.bmm."""
    return A.new_empty(len(A), A.shape[1], B.shape[2]) if out is None else out


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Let optimizers on a CPU do what the host of a GPU does."""
    devices = ("cuda", "cpu")
    with ExitStack() as stack:
        for module in vars(curvadion_kernels).values():
            if hasattr(module, "run"):
                stack.enter_context(mock.patch.object(module, "run", nothing))
        for module in (newton_schulz, polar, exchange):
            half = mock.patch.object(module, "dtype_of_products", lambda rows: torch.float16)
            stack.enter_context(half)
        for module in (power_iteration, orthonormalize):
            stack.enter_context(mock.patch.object(module, "GROUPED", devices))
        for patch in (
            mock.patch.object(torch, "bmm", no_product),
            mock.patch.object(capture, "DEVICES", devices),
            mock.patch.object(capture, "make_graph", NoGraph),
            mock.patch.object(replica_optimizer, "RUNS_AHEAD", devices),
            mock.patch.object(Meeting, "read", lambda meeting: FINE),  # which no kernel has written
        ):
            stack.enter_context(patch)
        yield


def parameters() -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Matrices and others, with gradients."""
    d = WIDTH
    matrices = [(3 * d, d), (d, d), (4 * d, d), (d, 4 * d)] * BLOCKS
    others = [(d,)] * 2 * BLOCKS + [(50, d), (50, d), (10, d)]
    X = [nn.Parameter(0.02 * torch.randn(shape)) for shape in matrices]
    Y = [nn.Parameter(0.02 * torch.randn(shape)) for shape in others]
    for p in (*X, *Y):
        p.grad = torch.zeros_like(p)
    return X, Y


def milliseconds(step: Callable[[], object], calls: int) -> dict[str, float]:
    """Thread time of a step: the shortest and the median."""
    seconds = []
    for _ in range(calls):
        begin = time.thread_time()
        step()
        seconds.append(time.thread_time() - begin)
    return {"min_ms": 1e3 * min(seconds), "median_ms": 1e3 * statistics.median(seconds)}


def measured(calls: int) -> dict[str, dict[str, float]]:
    """Each direction eagerly and captured, and torch's AdamW, one after another."""
    found = {}
    for name, options in DIRECTIONS.items():
        for wanted in (False, None):
            with as_on_a_gpu():
                X, Y = parameters()
                rest = {"params": Y, "algorithm": "adamw", "lr": 1e-3}
                groups: list[dict[str, Any]] = [{"params": X}, rest]
                optimizer = Dion(groups, replicas="single", capture=wanted, **options)
                for _ in range(capture.EQUAL_STEPS + 3):
                    optimizer.step()
                assert optimizer.report is not None
                assert optimizer.report.captured == (wanted is None)
                kind = "eager" if wanted is False else "captured"
                found[f"{name}, {kind}"] = milliseconds(optimizer.step, calls)
    X, Y = parameters()
    adamw = torch.optim.AdamW([*X, *Y], fused=True)
    adamw.step()
    found["torch's fused AdamW"] = milliseconds(adamw.step, calls)
    return found


def main() -> None:
    """Measure, print, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="a JSON file")
    parser.add_argument("--calls", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    steps = measured(options.calls)
    record = {
        "command": " ".join(["python", *program()]),
        "environment": environment(torch.device("cpu")),
        "steps": steps,
    }
    for name, numbers in steps.items():
        print(f"{name:22} {numbers['min_ms']:6.2f} ms, median {numbers['median_ms']:6.2f}")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
