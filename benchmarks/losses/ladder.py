r"""Climb to models of ten and thirty million parameters, within minutes of one GPU.

    python -m benchmarks.losses.ladder --device cuda --compile --minutes 6
    python -m benchmarks.losses.ladder --device cuda --compile --rung 30M --minutes 60
    python -m benchmarks.losses.ladder --device cuda --compile --method "1 %" --lr 0.04 --seed 0 1

Eight replicas train on 8,192 tokens each at a step, 20 tokens for each parameter, with bfloat16
products, on the sources of Linux (pack_text.py says how to make the file). The list is in order of
importance: every method at its first rate, then at the others. A run that would not end within the
minutes is left out after its first steps. Records are those of simulate.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common.records import command_of
from benchmarks.common.tasks import SIZES
from benchmarks.losses.claim import TAIL, tail_decay
from benchmarks.losses.simulate import table
from benchmarks.losses.simulation.records import Machine, add_missing
from benchmarks.losses.simulation.training import Training
from command_line import option, parse
from curvadion import checks

REPLICAS = 8
# Of shorter runs the average of the last weights would be longer than they are.
LEAST_TOKENS = 1.0


class Method(NamedTuple):
    """A way to train.

    Attributes:
        settings: of its trainings, but for the rate.
        rates: to try, the most promising first; of AdamW's parameters for AdamW, else of matrices.
    """

    settings: dict[str, Any]
    rates: tuple[float, ...]


METHODS = {
    "muon": Method(
        {"method": "muon", "elementwise": 0.25, "look_ahead": 2.0},
        (0.04, 0.02, 0.028, 0.056),
    ),
    "1 %": Method(
        {"method": "ours", "elementwise": 0.25, "budget": 0.01, "bits": 2, "up": 1},
        (0.08, 0.04, 0.056),
    ),
    "10 %": Method(
        {"method": "ours", "elementwise": 0.25, "budget": 0.1, "bits": 3},
        (0.06, 0.04),
    ),
    "10 %, gradients in codes": Method(
        {
            "method": "coded_gradients", "elementwise": 0.25, "look_ahead": 2.0,
            "budget": 0.1, "bits": 3,
        },
        (0.04,),
    ),
    "adamw": Method({"method": "adamw", "weight_decay": 0.1}, (0.002, 0.004)),
}  # fmt: skip


@dataclass(frozen=True)
class Options(Machine):
    """Train large models on one GPU, synchronously and at 1 and 10 % of the bytes."""

    rung: tuple[str, ...] = option(("10M",), "of tasks.SIZES")
    method: tuple[str, ...] = option(tuple(METHODS), "which of these to train; quote '1 %'")
    lr: tuple[float, ...] = option((), "rates of matrices; none: each method's own")
    adamw_lr: tuple[float, ...] = option((), "rates of AdamW; none: its own")
    corpus: str = option("linux", "the text")
    tokens: float = option(20.0, "tokens per parameter")
    seed: tuple[int, ...] = option((0,), "of the weights and of the data order")
    minutes: float = option(6.0, "how long a GPU may take")
    out: str = option("runs/ladder.json", "the records")


def trainings(options: Options) -> Iterator[Training]:
    """Yield the runs, without repetition.

    Of each size these are all methods at their first rate, each with all seeds; then all at their
    second rate, and so on.

    Raises:
        ValueError: a value that no run can have.
    """
    for argument in ("rung", "method", "seed"):
        if not getattr(options, argument):
            raise ValueError(f"{argument} must have one value at least")
    for name in options.method:
        checks.one_of("method", name, tuple(METHODS))
    if options.tokens < LEAST_TOKENS:
        raise ValueError(f"tokens={options.tokens} must be at least {LEAST_TOKENS}")
    yield from dict.fromkeys(_in_order(options))


def _in_order(options: Options) -> Iterator[Training]:
    """Yield the runs, the most important ones first."""
    rates_of_methods = [_rates(name, options) for name in options.method]
    for size in options.rung:
        where = settings_of(size, options)
        for rates in itertools.zip_longest(*rates_of_methods):
            for name, lr in zip(options.method, rates, strict=True):
                if lr is None:  # the method has fewer rates than another
                    continue
                for seed in options.seed:
                    yield Training(lr=lr, seed=seed, **METHODS[name].settings, **where)


def _rates(name: str, options: Options) -> tuple[float, ...]:
    """Return the rates of a method, the most promising first."""
    chosen = options.adamw_lr if name == "adamw" else options.lr
    return chosen or METHODS[name].rates


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
        records = add_missing(wanted, Path(options.out), command, options, 60 * options.minutes)
    except ValueError as error:
        raise SystemExit(f"ladder: {error}") from error
    print(table(records))


if __name__ == "__main__":
    main()
