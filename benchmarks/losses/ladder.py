r"""Climb to models of ten and thirty million parameters, within minutes of one GPU.

    python -m benchmarks.losses.ladder --device cuda --compile --minutes 6
    python -m benchmarks.losses.ladder --device cuda --compile --rung 30M --minutes 60

Eight replicas train on 8,192 tokens each at a step, 20 tokens for each parameter, with bfloat16
products, on the sources of Linux (pack_text.py says how to make the file). The list is in order of
importance: synchronous Muon and 1 % of the bytes first, then other rates and 10 %. A run that the
minutes do not reach for is left out after its first steps. Records are those of simulate.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.records import command_of
from benchmarks.common.tasks import SIZES
from benchmarks.losses.claim import TAIL, tail_decay
from benchmarks.losses.simulate import table
from benchmarks.losses.simulation.records import Machine, add_missing
from benchmarks.losses.simulation.training import Training
from command_line import option, parse
from curvadion import checks

REPLICAS = 8


@dataclass(frozen=True)
class Options(Machine):
    """Train large models on one GPU, synchronously and at 1 and 10 % of the bytes."""

    rung: tuple[str, ...] = option(("10M",), "of tasks.SIZES")
    corpus: str = option("linux", "the text")
    tokens: float = option(20.0, "tokens per parameter")
    seed: tuple[int, ...] = option((0,), "of the weights and of the data order")
    minutes: float = option(6.0, "how long a GPU may take")
    out: str = option("runs/ladder.json", "the records")


def trainings(options: Options) -> Iterator[Training]:
    """Yield the runs: of each size the most important ones of all seeds first."""
    for size in options.rung:
        by_seed = [rung(size, options.corpus, options.tokens, seed) for seed in options.seed]
        for of_seeds in zip(*by_seed, strict=True):
            yield from of_seeds


def rung(size: str, corpus: str, tokens: float, seed: int) -> Iterator[Training]:
    """Yield the trainings of one size, the most important ones first."""
    checks.one_of("rung", size, tuple(SIZES))
    task = SIZES[size]
    steps = task.steps(tokens, REPLICAS)
    where: dict[str, Any] = {
        "size": size, "corpus": corpus, "batch_size": task.batch_size, "replicas": REPLICAS,
        "steps": steps, "seed": seed, "autocast": True,
        "tail_decay": tail_decay(steps), **TAIL,
    }  # fmt: skip
    ahead: dict[str, Any] = {"look_ahead": 2.0}
    one: dict[str, Any] = {"budget": 0.01, "bits": 2, "up": 1}
    ten: dict[str, Any] = {"budget": 0.1, "bits": 3}
    yield Training("muon", 0.04, 0.25, **ahead, **where)
    yield Training("ours", 0.08, 0.25, **one, **where)
    yield Training("ours", 0.06, 0.25, **ten, **where)
    yield Training("muon", 0.02, 0.25, **ahead, **where)
    yield Training("ours", 0.04, 0.25, **one, **where)
    yield Training("muon", 0.028, 0.25, **ahead, **where)
    yield Training("ours", 0.056, 0.25, **one, **where)
    yield Training("adamw", 0.002, weight_decay=0.1, **where)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the trainings that have no record yet, as far as the time reaches; print all."""
    options = parse(Options, arguments)
    command = command_of("benchmarks.losses.ladder", arguments)
    try:
        wanted = list(trainings(options))
    except ValueError as error:
        raise SystemExit(f"ladder: {error}") from error
    records = add_missing(wanted, Path(options.out), command, options, 60 * options.minutes)
    print(table(records))


if __name__ == "__main__":
    main()
