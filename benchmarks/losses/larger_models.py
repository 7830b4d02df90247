r"""Measure the gap at 1 % of the bytes to the best synchronous method, as models and runs grow.

    python -m benchmarks.losses.larger_models --size small medium --tokens 20
    python -m benchmarks.losses.larger_models --size large --device cuda   # one GPU
    python -m benchmarks.losses.larger_models --draw gaps.png \
        --out benchmarks/results/convergence/simulated.json

Trains each rung (with the best settings of the smallest one, at its rates and lower ones) and adds
the results to the records of simulate.py. Steps are rounded to two digits. --draw trains nothing:
it draws and prints the gaps of all records.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.records import command_of
from benchmarks.common.tasks import SIZES
from benchmarks.losses.gaps import BUDGET, FRAGMENTS, Place, gaps
from benchmarks.losses.simulation.records import RECORDS, Machine, add_missing
from benchmarks.losses.simulation.training import Training
from command_line import option, parse
from curvadion import checks
from demo import aligned

REPLICAS = 8
RUNGS = ("small", "medium", "large")  # ladder.py trains larger ones


@dataclass(frozen=True)
class Options(Machine):
    """Measure the gap to the best synchronous method on larger models and longer runs."""

    size: tuple[str, ...] = option(("small", "medium"), f"of {', '.join(RUNGS)}")
    corpus: tuple[str, ...] = option(("python",), "the text")
    tokens: tuple[float, ...] = option((20.0,), "tokens per parameter")
    seed: tuple[int, ...] = option((0,), "seed of the weights and of the data order")
    out: str = option(RECORDS, "the records")
    draw: str | None = option(None, "draw the gaps of all records into this file; train nothing")


def rung(size: str, corpus: str, tokens: float, seed: int) -> Iterator[Training]:
    """Yield the trainings of one size at one length.

    Args:
        size: of RUNGS.
        corpus: the text.
        tokens: per parameter.
        seed: of the weights and of the data order.
    """
    checks.one_of("size", size, RUNGS)
    task = SIZES[size]
    steps = task.steps(tokens, REPLICAS)
    where: dict[str, Any] = {
        "size": size, "corpus": corpus, "steps": steps, "seed": seed, "replicas": REPLICAS
    }  # fmt: skip
    for lr in (0.02, 0.04):
        yield Training("dion", lr, look_ahead=2.0, **where)
        yield Training("muon", lr, look_ahead=2.0, **where)
    for lr in (0.02, 0.04, 0.08):
        yield Training("ours", lr, budget=BUDGET, fragments=FRAGMENTS, **where)
    outer: dict[str, Any] = {"bits": 1, "outer_lr": 1.0, "outer_momentum": 0.0}
    for lr in (0.02, 0.04):
        yield Training("muloco", lr, budget=BUDGET, **outer, **where)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train what has no record yet, or draw; print the gaps."""
    options = parse(Options, arguments)
    if options.draw is None:
        rungs = itertools.product(options.size, options.corpus, options.tokens, options.seed)
        try:
            wanted = [training for each in rungs for training in rung(*each)]
        except ValueError as error:
            raise SystemExit(f"larger_models: {error}") from error
        command = command_of("benchmarks.losses.larger_models", arguments)
        add_missing(wanted, Path(options.out), command, options)
    records = json.loads(Path(options.out).read_text("utf-8"))["records"]
    found = gaps(records)
    if options.draw is not None:
        from benchmarks.losses.larger_models_picture import draw

        draw(found, Path(options.draw))
    head = [*Place._fields, "seeds", "baseline", "ours", "rival", "ours above"]
    rows = [
        [*map(str, place), f"{gap.seeds}", f"{gap.baseline:.4f}", f"{gap.ours:.4f}",
         "" if gap.rival is None else f"{gap.rival:.4f}", f"{gap.percent:+.1f} %"]
        for place, gap in found.items()
    ]  # fmt: skip
    print(aligned([head, *rows]))


if __name__ == "__main__":
    main()
