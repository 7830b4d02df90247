r"""Find the best learning rates, by the width of a model and the size of its vocabulary.

    export OUT=benchmarks/results/param_groups/learning_rates.json
    python -m benchmarks.losses.learning_rates --out $OUT --kinds matrix --widths 64 128 256
    python -m benchmarks.losses.learning_rates --table --picture docs/learning_rates.png

One process trains a GPT of two layers on Python's standard library. Its tokens are bytes and, with
a larger vocabulary, frequent pieces of the text (benchmarks.common.pieces). Matrices take polar
directions; embedding, head and vectors (the norms) take AdamW or Lion. The rate of one kind varies,
by powers of two of the rate in ``BASES``, and the others have that one. The kind "rest" stands for
embedding, head and vectors at one rate.

The best rate of a row is where a parabola through the losses of the best rate and its two
neighbours has its minimum, in the logarithm of the rate. A row whose best rate is the first or the
last of the grid has none. Runs that are already in the record are not repeated.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.common.corpora import text
from benchmarks.common.pieces import tokens_of, vocabulary_of
from benchmarks.common.records import RESULTS, command_of
from benchmarks.losses.one_process import add_missing, held_out_loss
from command_line import option, parse
from curvadion import Dion, param_groups
from demo import aligned
from gpt import GPT, GPTConfig
from token_data import Split, Tokens, TrainingBatches, validation_batches
from train_gpt import Config

RECORD = RESULTS / "param_groups" / "learning_rates.json"
TEXT_BYTES = 20_000_000  # at most
CONTEXT = 64
SEQUENCES = 16  # of a step
LAYERS = 2
HEAD_DIM = 32
HELD_OUT_TOKENS = 32_768
# Rates of matrices by their scale, and of the parameters beside them.
MATRIX_BASES = {"spectral": 0.02, "original": 0.02, "match_rms_adamw": 0.01}
BASES = {
    "adamw": {"embedding": 0.01, "head": 0.003, "vector": 0.01, "rest": 0.01},
    "lion": {"embedding": 0.003, "head": 0.001, "vector": 0.003, "rest": 0.003},
}
KINDS = ("matrix", "embedding", "head", "vector", "rest")


class Row(NamedTuple):
    """The settings that the runs of a row have in common."""

    kind: str
    update_scale: str
    elementwise: str
    vocabulary: int
    width: int
    steps: int


@dataclass(frozen=True)
class Options:
    """Train at every rate of a grid and record held-out losses."""

    out: str = option("runs/learning_rates.json", "the record")
    kinds: tuple[str, ...] = option(("matrix",), f"whose rate varies: {', '.join(KINDS)}")
    scales: tuple[str, ...] = option(("spectral",), f"of matrices: {', '.join(MATRIX_BASES)}")
    elementwise: tuple[str, ...] = option(("adamw",), "what runs beside matrices: adamw, lion")
    vocabularies: tuple[int, ...] = option((256,), "numbers of tokens")
    widths: tuple[int, ...] = option((64, 128), f"multiples of {HEAD_DIM}")
    powers: tuple[int, ...] = option((-2, -1, 0, 1, 2), "logarithms of rates to base 2")
    seeds: tuple[int, ...] = option((0,), "seeds of the weights and of the data order")
    steps: int = option(200, f"optimizer steps of {SEQUENCES * CONTEXT} tokens")
    table: bool = option(False, "only print the table of the record in benchmarks/results")
    picture: str = option("", "with --table: also draw losses over rates")


def runs(options: Options) -> Iterator[dict[str, Any]]:
    """Yield the settings of each run, cheap ones first."""
    cells = product(
        options.vocabularies, options.widths, options.kinds, options.scales, options.elementwise
    )
    for seed, cell, power in product(options.seeds, cells, options.powers):
        vocabulary, width, kind, scale, elementwise = cell
        bases = BASES[elementwise]
        base = MATRIX_BASES[scale] if kind == "matrix" else bases[kind]
        row = Row(kind, scale, elementwise, vocabulary, width, options.steps)
        yield row._asdict() | {"rate": base * 2.0**power, "seed": seed}


def train(run: Mapping[str, Any]) -> float:
    """Return the held-out loss after a run, in nats per token."""
    training, held_out = _data(run["vocabulary"])
    torch.manual_seed(run["seed"])
    width = run["width"]
    model = GPT(GPTConfig(run["vocabulary"], LAYERS, width // HEAD_DIM, width))
    varied = ("embedding", "head", "vector") if run["kind"] == "rest" else (run["kind"],)
    rates = {kind: base for kind, base in BASES[run["elementwise"]].items() if kind != "rest"}
    rates["matrix"] = MATRIX_BASES[run["update_scale"]]
    rates |= dict.fromkeys(varied, run["rate"])
    groups = param_groups(
        model,
        elementwise=run["elementwise"],
        options={kind: {"lr": rate} for kind, rate in rates.items()},
    )
    optimizer = Dion(groups, direction="polar", update_scale=run["update_scale"])
    batches = TrainingBatches(training, CONTEXT, SEQUENCES, 1, 1, run["seed"])
    return held_out_loss(model, optimizer, batches, held_out, Config(steps=run["steps"]))


@lru_cache(maxsize=1)
def _data(vocabulary_size: int) -> tuple[Split, list[Any]]:
    """The training split and the held-out batches; the vocabulary is that of the former."""
    contents: list[bytes] = []
    for part in text("python", TEXT_BYTES):
        of_part = part.tokens.read(part.start, part.stop - part.start)
        contents.append(of_part.astype(np.uint8).tobytes())
    vocabulary = vocabulary_of(contents[0], vocabulary_size)
    splits = []
    for content in contents:
        tokens = Tokens([tokens_of(content, vocabulary)], vocabulary_size)
        splits.append(Split(tokens, 0, len(tokens)))
    training, held_out = splits
    return training, validation_batches(held_out, CONTEXT, SEQUENCES, HELD_OUT_TOKENS)


def rows_of(records: Sequence[Mapping[str, Any]]) -> dict[Row, dict[float, float]]:
    """The mean losses over seeds by the rate, by row."""
    losses: dict[Row, dict[float, list[float]]] = {}
    for record in records:
        row = Row(*(record[key] for key in Row._fields))
        losses.setdefault(row, {}).setdefault(record["rate"], []).append(record["loss"])
    rows = {}
    for row in sorted(losses):
        of_rate = losses[row]
        rows[row] = {rate: sum(of_rate[rate]) / len(of_rate[rate]) for rate in sorted(of_rate)}
    return rows


def best_rate(losses: Mapping[float, float]) -> float | None:
    """Where a parabola in the logarithm of the rate has its minimum; None at the grid's ends.

    Args:
        losses: by the rate, in ascending order and equal ratios.
    """
    rates = list(losses)
    i = min(range(len(rates)), key=lambda j: losses[rates[j]])
    if i in (0, len(rates) - 1):
        return None
    before, lowest, after = (losses[rates[j]] for j in (i - 1, i, i + 1))
    # The parabola through (-1, before), (0, lowest), (1, after)
    place = (before - after) / (2 * (before - 2 * lowest + after))
    ratio = rates[i + 1] / rates[i]
    return rates[i] * float(ratio**place)


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """The losses of each row, with the best rate."""
    lines = [[*Row._fields, "best rate", "loss at rate"]]
    for row, losses in rows_of(records).items():
        best = best_rate(losses)
        found = ", ".join(f"{loss:.3f} at {rate:.2g}" for rate, loss in losses.items())
        lines.append([*map(str, row), "" if best is None else f"{best:.2g}", found])
    return aligned(lines)


def draw(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw losses over rates: of matrices by scale, and of the parameters beside them."""
    import matplotlib.pyplot as plt

    from curvadion.metering.picture import STYLE

    panels: dict[str, list[tuple[str, dict[float, float]]]] = {
        **{f"matrices, {scale}": [] for scale in MATRIX_BASES},
        **{kind: [] for kind in ("head", "embedding", "vector")},
    }
    for row, losses in rows_of(records).items():
        if row.elementwise == "adamw":
            title = f"matrices, {row.update_scale}" if row.kind == "matrix" else row.kind
            if title in panels:  # "rest" has none: it is three kinds at one rate
                panels[title].append((f"{row.vocabulary:,} tokens, width {row.width}", losses))
    with plt.rc_context(STYLE):
        figure, axes_of = plt.subplots(2, 3, figsize=(9.6, 6.4), layout="constrained")
        for axes, (title, lines) in zip(axes_of.flat, panels.items(), strict=True):
            for label, losses in lines:
                lowest = min(losses.values())
                above = [100 * (loss / lowest - 1) for loss in losses.values()]
                axes.plot(list(losses), above, "o-", ms=4, label=label)
            rates = sorted({rate for _, losses in lines for rate in losses})
            axes.set_xscale("log", base=2)
            axes.set_xticks(rates, [f"{rate:.2g}" for rate in rates], rotation=45)
            axes.set(title=title, xlabel="learning rate")
            if lines:
                axes.legend(frameon=False, fontsize="small")
        for axes in axes_of[:, 0]:
            axes.set_ylabel("loss above the line's lowest, %")
        figure.savefig(path, dpi=120)
        plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train what has no record yet, and print the table."""
    options = parse(Options, arguments)
    if options.table:
        records = json.loads(RECORD.read_text())["records"]
        print(table(records))
        if options.picture:
            draw(records, Path(options.picture))
        return
    command = command_of("benchmarks.losses.learning_rates", arguments)
    records = add_missing(
        runs(options), lambda run: {"loss": train(run)}, Path(options.out), command
    )
    print(table(records))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
