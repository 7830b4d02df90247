"""What a closed step of Replicated costs beyond the optimizer inside, in time of the CPU.

Both optimizers take turns, step by step, so that what else the machine does meets both. The
smallest of many steps is the cost of the work itself; the median says how it is on a machine
that other work shares.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.common.records import write
from curvadion import FixedPeriod, Replicated

SIDE = 64
WARM_UP = 20  # steps that are not measured


def parameters(count: int) -> list[nn.Parameter]:
    """As many matrices as vectors, with gradients."""
    torch.manual_seed(0)
    tensors = []
    for i in range(count):
        X = nn.Parameter(torch.randn(SIDE, SIDE) if i % 2 else torch.randn(SIDE))
        X.grad = 1e-3 * torch.randn_like(X)
        tensors.append(X)
    return tensors


def adamw(tensors: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer that is measured alone and inside."""
    return torch.optim.AdamW(tensors, lr=1e-4, fused=True)


def measured(count: int, steps: int) -> dict[str, Any]:
    """Milliseconds of a step of fused AdamW, alone and inside Replicated.

    Args:
        count: number of parameters.
        steps: that each optimizer takes after the warm-up.
    """
    alone = adamw(parameters(count))
    gate = FixedPeriod(10**6)
    inside = Replicated(
        adamw(parameters(count)), gate=gate, max_local_steps=None, replicas="single"
    )
    seconds: dict[str, list[float]] = {"alone": [], "replicated": []}
    for _ in range(WARM_UP + steps):
        for name, optimizer in (("alone", alone), ("replicated", inside)):
            start = time.thread_time()
            optimizer.step()
            seconds[name].append(time.thread_time() - start)
    record: dict[str, Any] = {"tensors": count}
    for statistic in (min, statistics.median):
        times = {name: 1e3 * statistic(taken[WARM_UP:]) for name, taken in seconds.items()}
        times["extra"] = times["replicated"] - times["alone"]
        record[f"{statistic.__name__}_ms"] = {k: round(v, 3) for k, v in times.items()}
    return record


def main() -> None:
    """Measure, print and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensors", type=int, nargs="+", default=[20, 75, 132, 300])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    records = [measured(count, options.steps) for count in options.tensors]
    for record in records:
        print(record)
    if options.output is not None:
        write(options.output, torch.device("cpu"), records)


if __name__ == "__main__":
    main()
