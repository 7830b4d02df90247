"""Simulate training eight replicas in one process, and record losses and bytes.

    python -m benchmarks.losses.simulate --method muon --lr 0.02 0.04 0.08 --elementwise 0.25 0.5 1
    python -m benchmarks.losses.simulate --method ours --budget 0.01 --lr 0.04 0.08 --seed 0 1 2

Flags with several values span a grid. Replicas are the leading dimension of every tensor, nothing
is sent, and bytes are computed. tests/benchmarks/test_simulation.py compares the simulation with
real processes. Runs that are already in --out are not repeated.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from benchmarks.common.records import command_of
from benchmarks.common.tasks import SIZES
from benchmarks.losses.simulation.records import DEFAULTS, RECORDS, Machine, add_missing
from benchmarks.losses.simulation.training import (
    AVERAGED,
    DIRECTIONS,
    OURS,
    SPARSE,
    SYNCHRONISED,
    Method,
    Training,
)
from command_line import option, parse
from curvadion.ops.code_format import Bits
from curvadion.sync.coded_mean import bits_of_weights, bits_within
from demo import aligned

BEST_OF = ("method", "size", "corpus", "budget", "batch_size", "replicas", "steps")
WITH_BITS = ("ours", "replicated_adamw", "coded_gradients", "diloco", "muloco")


@dataclass(frozen=True)
class Options(Machine):
    """Simulate training several replicas; record losses and computed bytes."""

    method: tuple[Method, ...] = option(("ours",), "how replicas train and synchronise")
    lr: tuple[float, ...] = option((0.04,), "the highest learning rates of matrices")
    elementwise: tuple[float, ...] = option((0.5,), "rates of other parameters, as shares of it")
    weight_decay: tuple[float, ...] = option((0.01,), "of matrices")
    look_ahead: tuple[float, ...] = option((), "weight of the gradient beside the momentum")
    update_scale: tuple[str, ...] = option(("spectral",), "one of curvadion's UPDATE_SCALES")
    budget: tuple[float, ...] = option((0.01,), "shares of the bytes, for methods with a budget")
    bits: tuple[int, ...] = option(
        (), "bits of a code, 0 for float32; default 2, for our methods the package's choice"
    )
    up: tuple[int, ...] = option((), "ours and coded_gradients: bits of codes to owners; as bits")
    fragments: tuple[int, ...] = option((1,), "ours: number of fragments")
    strided: bool = option(False, "ours: a fragment is every n-th parameter; default: equal sizes")
    delay: tuple[int, ...] = option((0,), "ours: steps until means arrive")
    align: tuple[float, ...] = option((1.0,), "ours: strength of momentum alignment")
    polar: tuple[float, ...] = option((1.0,), "ours: strength of the polar correction")
    outer_lr: tuple[float, ...] = option((0.7,), "DiLoCo, MuLoCo and SparseLoCo: outer rate")
    outer_momentum: tuple[float, ...] = option((0.9,), "DiLoCo and MuLoCo: outer momentum")
    kept: tuple[int, ...] = option((64,), "SparseLoCo: elements kept of each chunk of 4096")
    size: tuple[str, ...] = option(("small",), f"of {', '.join(SIZES)}")
    corpus: tuple[str, ...] = option(("python",), "the text: python, cpp or a file of runs/texts")
    batch_size: tuple[int, ...] = option((8,), "sequences of 64 tokens per replica and step")
    replicas: tuple[int, ...] = option((8,), "number of replicas")
    steps: tuple[int, ...] = option((300,), "optimizer steps")
    seed: tuple[int, ...] = option((0,), "seeds of the weights and of the data order")
    warmdown: tuple[float, ...] = option((0.2,), "share of the steps over which rates fall")
    spectrum_decay: tuple[float, ...] = option((0.8,), "ours: weight of earlier openings")
    elementwise_warmdown: tuple[float, ...] = option((), "likewise of other parameters; the same")
    overrun: tuple[float, ...] = option((0.0,), "how far beyond the last step rates reach zero")
    tail: tuple[float, ...] = option((0.0,), "weight of an average of the last weights")
    tail_decay: tuple[float, ...] = option((0.96,), "weight of its past at a step")
    cosine: bool = option(False, "rates fall by a cosine to a tenth")
    warmup: tuple[int, ...] = option((20,), "steps of linear warm-up")
    beta2: tuple[float, ...] = option((0.95,), "of AdamW")
    clip: tuple[float, ...] = option((), "the most that gradients' norm may be")
    sequences: tuple[int, ...] = option((), "of all replicas at a step; replicas x batch_size")
    autocast: bool = option(False, "the model's products are bfloat16")
    evaluate_every: int = option(0, "steps between evaluations; 0: the end only")
    exact_momenta: bool = option(
        False, "ours: average momenta exactly at no cost; an experiment, not a method"
    )
    residual_dtype: tuple[str, ...] = option(("float32",), "ours: of what codes have lost")
    out: str = option(RECORDS, "the records")


def trainings(options: Options) -> Iterator[Training]:
    """Yield the runs of the grid; each method gets only the settings it has."""
    given = {f.name: getattr(options, f.name) for f in fields(Training)}
    for key in ("look_ahead", "bits", "up", "elementwise_warmdown", "clip", "sequences"):
        given[key] = given[key] or (None,)
    for key in ("strided", "exact_momenta", "cosine", "autocast", "evaluate_every"):
        given[key] = (given[key],)
    seen = set()
    for values in itertools.product(*given.values()):
        settings = dict(zip(given, values, strict=True))
        method, fixed = settings["method"], list[str]()
        if settings["bits"] is None:
            chosen = _chosen_bits(settings)
            settings["bits"] = chosen.down
            if settings["up"] is None and chosen.up != chosen.down:
                settings["up"] = chosen.up
        fixed += OURS if method not in AVERAGED else ()
        fixed += ["budget"] if method in SYNCHRONISED else []
        fixed += ["outer_momentum"] if method not in ("diloco", "muloco") else []
        fixed += ["outer_lr"] if method not in ("diloco", "muloco", *SPARSE) else []
        fixed += ["kept"] if method not in SPARSE else []
        fixed += ["bits"] if method not in WITH_BITS else []
        fixed += ["elementwise", "update_scale"] if DIRECTIONS.get(method) == "adamw" else []
        training = Training(**{**settings, **{key: DEFAULTS[key] for key in fixed}})
        if training not in seen:
            seen.add(training)
            yield training


def _chosen_bits(settings: Mapping[str, Any]) -> Bits:
    """Return the default bits of a code on each way; for our methods the package's choice."""
    if settings["method"] in AVERAGED:
        return bits_of_weights(settings["budget"], settings["fragments"])
    bits = int(DEFAULTS["bits"])
    if settings["method"] == "coded_gradients":
        bits = bits_within(settings["budget"])
    return Bits(bits, bits)


def table(records: Sequence[dict[str, Any]]) -> str:
    """Return one line per settings, averaged over seeds, the lowest loss first."""
    same: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        settings = {k: record[k] for k in Training.__dataclass_fields__ if k != "seed"}
        same.setdefault(json.dumps(settings), []).append(record)
    rows = []
    for text, each in same.items():
        settings, losses = json.loads(text), [r["loss"] for r in each]
        mean = float("inf") if None in losses else sum(losses) / len(losses)
        told = [f"{settings[k]}" for k in BEST_OF]
        rest = [
            f"{f.name}={settings[f.name]}"
            for f in fields(Training)
            if f.name not in (*BEST_OF, "seed") and settings[f.name] not in (f.default, None)
        ]
        rows.append((mean, [*told, " ".join(rest), f"{len(each)}", f"{each[0]['share']:.3%}"]))
    head = [*BEST_OF, "settings", "seeds", "bytes", "loss"]
    return aligned([head, *([*row, f"{mean:.4f}"] for mean, row in sorted(rows))])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the trainings that have no record yet, and print a table of all selected."""
    options = parse(Options, arguments)
    command = command_of("benchmarks.losses.simulate", arguments)
    try:
        wanted = list(trainings(options))
        records = add_missing(wanted, Path(options.out), command, options)
    except ValueError as error:
        raise SystemExit(f"simulate: {error}") from error
    print(table(records))


if __name__ == "__main__":
    main()
