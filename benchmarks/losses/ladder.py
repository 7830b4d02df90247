r"""Climb to models of ten and thirty million parameters, within minutes of one GPU.

    python -m benchmarks.losses.ladder --device cuda --compile --minutes 6
    python -m benchmarks.losses.ladder --device cuda --compile --rung 30M --minutes 60
    python -m benchmarks.losses.ladder --device cuda --compile --method "1 %" --lr 0.04 --seed 0 1

Eight replicas train on 8,192 tokens each at a step, 20 tokens for each parameter, with bfloat16
products, on the sources of Linux (pack_text.py says how to make the file). The list is in order of
importance: every method at its first rate, then at the others. A run that the minutes do not reach
for is left out after its first steps. Records are those of simulate.py.
"""

from __future__ import annotations

import itertools
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
# Of each method the settings, and the rates to try, the most promising first.
OURS: dict[str, Any] = {"method": "ours", "elementwise": 0.25}
METHODS: dict[str, tuple[dict[str, Any], tuple[float, ...]]] = {
    "muon": (
        {"method": "muon", "elementwise": 0.25, "look_ahead": 2.0},
        (0.04, 0.02, 0.028, 0.056),
    ),
    "1 %": (
        {**OURS, "budget": 0.01, "bits": 2, "up": 1},
        (0.08, 0.04, 0.056),
    ),
    "10 %": (
        {**OURS, "budget": 0.1, "bits": 3},
        (0.06, 0.04),
    ),
    "10 % of gradients": (
        {"method": "coded_gradients", "elementwise": 0.25, "look_ahead": 2.0,
         "budget": 0.1, "bits": 3},
        (0.04,),
    ),
    "adamw": ({"method": "adamw", "weight_decay": 0.1}, (0.002, 0.004)),
}  # fmt: skip


@dataclass(frozen=True)
class Options(Machine):
    """Train large models on one GPU, synchronously and at 1 and 10 % of the bytes."""

    rung: tuple[str, ...] = option(("10M",), "of tasks.SIZES")
    method: tuple[str, ...] = option(tuple(METHODS), "which of these to train; quote '1 %'")
    lr: tuple[float, ...] = option((), "rates of all chosen methods; none: each method's own")
    corpus: str = option("linux", "the text")
    tokens: float = option(20.0, "tokens per parameter")
    seed: tuple[int, ...] = option((0,), "of the weights and of the data order")
    minutes: float = option(6.0, "how long a GPU may take")
    out: str = option("runs/ladder.json", "the records")


def trainings(options: Options) -> Iterator[Training]:
    """Yield the runs: of each size the most important ones of all seeds first."""
    for name in options.method:
        checks.one_of("method", name, tuple(METHODS))
    rates = {name: options.lr or METHODS[name][1] for name in options.method}
    most = max(map(len, rates.values()))
    for size, place in itertools.product(options.rung, range(most)):
        where = settings_of(size, options)
        for name, seed in itertools.product(options.method, options.seed):
            for lr in rates[name][place : place + 1]:
                yield Training(lr=lr, seed=seed, **METHODS[name][0], **where)


def settings_of(size: str, options: Options) -> dict[str, Any]:
    """Return the settings that all trainings of a size share."""
    checks.one_of("rung", size, tuple(SIZES))
    task = SIZES[size]
    steps = task.steps(options.tokens, REPLICAS)
    return {
        "size": size,
        "corpus": options.corpus,
        "batch_size": task.batch_size,
        "replicas": REPLICAS,
        "steps": steps,
        "autocast": True,
        "tail_decay": tail_decay(steps),
        **TAIL,
    }


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
