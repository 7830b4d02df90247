r"""Reproduce nanoGPT's shakespeare_char, and train it on eight replicas.

    python -m benchmarks.losses.characters --recipe cpu --seed 0 1 2
    python -m benchmarks.losses.characters --recipe gpu --device cuda --compile --minutes 4

The recipes are those of nanoGPT's README (github.com/karpathy/nanoGPT): on a CPU 4 layers of width
128, 12 sequences of 64 characters, 2,000 steps, where it reports a loss of 1.88; on a GPU 6 layers
of width 384 with dropout, 64 sequences of 256 characters, 5,000 steps, where it reports 1.4697, the
best of the evaluations every 250 steps. The text is tiny Shakespeare, 1,115,394 characters, which
the user puts into runs/texts/shakespeare.txt.

Eight replicas split the sequences of a step as evenly as they go: of 12, every second replica reads
2 and the others 1. Three things differ from nanoGPT: windows are read in a random order instead of
being drawn with replacement, the whole held-out text is evaluated instead of a sample, and queries,
keys and values are matrices of their own. Embeddings do not decay.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.common.records import command_of
from benchmarks.losses.simulation.records import Machine, add_missing
from benchmarks.losses.simulation.training import Training
from command_line import option, parse
from curvadion import checks
from demo import aligned

REPLICAS = 8
REPORTED = {"cpu": 1.88, "gpu": 1.4697}
RECIPES: dict[str, dict[str, Any]] = {
    "cpu": {"size": "characters-12", "batch_size": 2, "sequences": 12, "steps": 2000},
    "gpu": {
        "size": "characters-64", "batch_size": 8, "sequences": 64, "steps": 5000, "autocast": True
    },
}  # fmt: skip
COMMON: dict[str, Any] = {
    "corpus": "shakespeare",
    "replicas": REPLICAS,
    "evaluate_every": 250,
    "beta2": 0.99,
}
# nanoGPT's AdamW: a cosine to a tenth, gradients clipped to a norm of 1.
ADAMW: dict[str, Any] = {"weight_decay": 0.1, "cosine": True, "warmup": 100, "clip": 1.0}
METHODS: dict[str, dict[str, Any]] = {
    "adamw": {"method": "adamw"},
    "muon": {"method": "muon", "look_ahead": 2.0},
    "1 %": {"method": "ours", "budget": 0.01, "bits": 2, "up": 1},
    "10 %": {"method": "ours", "budget": 0.1, "bits": 3},
    "10 %, gradients in codes": {
        "method": "coded_gradients", "budget": 0.1, "bits": 3, "look_ahead": 2.0
    },
    "adamw at 1 %": {"method": "replicated_adamw", "budget": 0.01, "bits": 2, "up": 1},
}  # fmt: skip


@dataclass(frozen=True)
class Options(Machine):
    """Train nanoGPT's model of Shakespeare's characters, as it does and on eight replicas."""

    recipe: Literal["cpu", "gpu"] = option("cpu", "nanoGPT's recipe")
    method: tuple[str, ...] = option(tuple(METHODS), "which of these to train; quote '1 %'")
    lr: tuple[float, ...] = option((0.02,), "rates of matrices of Muon and ours")
    elementwise: tuple[float, ...] = option((0.1,), "rates of their other parameters, as shares")
    warmdown: tuple[float, ...] = option((0.7,), "share of their steps over which rates fall")
    weight_decay: tuple[float, ...] = option((0.05,), "of their matrices")
    tail: tuple[float, ...] = option(
        (0.0,), "weight of the average of their last weights; their rates then end above zero"
    )
    adamw_lr: tuple[float, ...] = option((1e-3,), "rates of AdamW")
    seed: tuple[int, ...] = option((0,), "of the weights and of the data order")
    minutes: float = option(1e4, "how long a GPU may take; a CPU trains all")
    out: str = option("runs/characters.json", "the records")


def trainings(options: Options) -> Iterator[Training]:
    """Yield the runs."""
    where = {**COMMON, **RECIPES[options.recipe]}
    for seed, method in itertools.product(options.seed, options.method):
        checks.one_of("method", method, tuple(METHODS))
        of_method = METHODS[method]
        if of_method["method"] in ("adamw", "replicated_adamw"):
            for lr in options.adamw_lr:
                yield Training(lr=lr, seed=seed, **ADAMW, **of_method, **where)
            continue
        for lr, elementwise, warmdown, decay, tail in itertools.product(
            options.lr, options.elementwise, options.warmdown, options.weight_decay, options.tail
        ):
            yield Training(
                lr=lr,
                elementwise=elementwise,
                warmdown=warmdown,
                weight_decay=decay,
                tail=tail,
                tail_decay=0.98,
                overrun=0.06 if tail else 0.0,
                seed=seed,
                **of_method,
                **where,
            )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the trainings that have no record yet; print all."""
    options = parse(Options, arguments)
    command = command_of("benchmarks.losses.characters", arguments)
    try:
        wanted = list(trainings(options))
    except ValueError as error:
        raise SystemExit(f"characters: {error}") from error
    records = add_missing(wanted, Path(options.out), command, options, 60 * options.minutes)
    rows = [["method", "budget", "lr", "others", "seed", "bytes", "last", "best"]]
    for r in records:
        rates = [f"{r['lr']}", f"{r['elementwise']}", f"{r['seed']}"]
        losses = [f"{r['loss']}", f"{r['best_loss']}"]
        rows.append([r["method"], f"{r['budget']:.0%}", *rates, f"{r['share']:.2%}", *losses])
    print(aligned(rows))
    print(f"nanoGPT reports {REPORTED[options.recipe]}, the best of its evaluations, for AdamW.")


if __name__ == "__main__":
    main()
