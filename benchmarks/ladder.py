"""Measure the loss gap at 1 % of the bytes to the best synchronous method, as models and runs grow.

    python benchmarks/ladder.py --size small medium --tokens 20
    python benchmarks/ladder.py --size large largest --device cuda   # one GPU
    python benchmarks/ladder.py --out benchmarks/results/convergence/simulated.json --draw gaps.png

Trains each rung (with the best settings of the smallest one, at its rates and lower ones) and adds
the results to the records of simulate.py. Steps are rounded to two digits. --draw trains nothing:
it draws and prints the gaps of all records.
"""

from __future__ import annotations

import itertools
import json
import math
import shlex
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[1:1] = [str(ROOT / folder) for folder in ("", "kernels", "examples")]

from command_line import option, parse
from corpora import Corpus
from curvadion import checks
from demo import aligned
from grids import SIZES
from simulate import DEFAULTS, RECORDS, Machine, add_missing, known
from simulation.training import SYNCHRONISED, Training

REPLICAS, BUDGET, FRAGMENTS = 8, 0.01, 3
WARMDOWN = DEFAULTS["warmdown"]  # other schedules are in their own table
SPECTRUM_DECAY = DEFAULTS["spectrum_decay"]


@dataclass(frozen=True)
class Options(Machine):
    """Measure the gap to the best synchronous method on larger models and longer runs."""

    size: tuple[str, ...] = option(("small", "medium"), "of grids.SIZES")
    corpus: tuple[Corpus, ...] = option(("python",), "the text")
    tokens: tuple[float, ...] = option((20.0,), "tokens per parameter")
    seed: tuple[int, ...] = option((0,), "seed of the weights and of the data order")
    out: str = option(RECORDS, "the records")
    draw: str | None = option(None, "draw the gaps of all records into this file; train nothing")


def rung(size: str, corpus: str, tokens: float, seed: int) -> Iterator[Training]:
    """Yield the trainings of one size at one length."""
    checks.one_of("size", size, tuple(SIZES))
    task = SIZES[size]
    exact = tokens * task.shapes().parameters / (REPLICAS * task.batch_size * task.context)
    steps = int(float(f"{exact:.2g}"))
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


class Place(NamedTuple):
    """A setting in which methods are compared."""

    size: str
    corpus: str
    batch_size: int
    replicas: int
    steps: int
    tokens_per_parameter: float


class Gap(NamedTuple):
    """Mean losses over seeds, at the best settings tried.

    seeds: how many; the smaller number of the baseline's and ours.
    """

    baseline: float
    ours: float
    rival: float | None
    seeds: int

    @property
    def percent(self) -> float:
        """How far ours is above the baseline."""
        return 100 * (self.ours / self.baseline - 1)


def gaps(records: Sequence[dict[str, Any]]) -> dict[Place, Gap]:
    """Return the gap at each place with records of a synchronous method and of ours at 1 %.

    Ours is that in fragments. Only the settings with most seeds count, so that a single lucky seed
    cannot win. Ours without spectra over openings counts only where ours with them has no record.
    Exact momenta at no cost do not count. The loss of a run that diverged is infinite.
    """
    found: dict[Place, dict[str, dict[str, list[float]]]] = defaultdict(lambda: defaultdict(dict))
    for r in map(known, records):
        if r["budget"] not in (0.0, BUDGET) or r["warmdown"] != WARMDOWN:
            continue
        if r["method"] == "ours" and (r["fragments"] != FRAGMENTS or r["exact_momenta"]):
            continue
        loss = math.inf if r["loss"] is None else r["loss"]
        settings = {k: r[k] for k in Training.__dataclass_fields__ if k != "seed"}
        place = Place(*(r[name] for name in Place._fields))
        found[place][_kind(r)].setdefault(json.dumps(settings), []).append(loss)
    for kinds in found.values():
        if without := kinds.pop("ours without spectra", None):
            kinds.setdefault("ours", without)
    best = {place: {k: _best(v) for k, v in kinds.items()} for place, kinds in found.items()}
    return {
        place: Gap(of["baseline"][0], of["ours"][0], of.get("rival", (None,))[0],
                   min(of["baseline"][1], of["ours"][1]))
        for place, of in sorted(best.items())
        if "baseline" in of and "ours" in of
    }  # fmt: skip


def _kind(record: dict[str, Any]) -> str:
    if record["method"] in SYNCHRONISED:
        return "baseline"
    if record["method"] != "ours":
        return "rival"
    return "ours" if record["spectrum_decay"] == SPECTRUM_DECAY else "ours without spectra"


def _best(losses: Mapping[str, Sequence[float]]) -> tuple[float, int]:
    """Return the lowest mean loss among the settings with most seeds, and the number of seeds."""
    seeds = max(map(len, losses.values()))
    return min(sum(x) / seeds for x in losses.values() if len(x) == seeds), seeds


def main(arguments: Sequence[str] | None = None) -> None:
    """Train what has no record yet, or draw; print the gaps."""
    options = parse(Options, arguments)
    if options.draw is None:
        given = sys.argv[1:] if arguments is None else arguments
        rungs = itertools.product(options.size, options.corpus, options.tokens, options.seed)
        try:
            wanted = [training for each in rungs for training in rung(*each)]
        except ValueError as error:
            raise SystemExit(f"ladder.py: {error}") from error
        command = shlex.join(["python", "benchmarks/ladder.py", *given])
        add_missing(wanted, Path(options.out), command, options)
    records = json.loads(Path(options.out).read_text("utf-8"))["records"]
    found = gaps(records)
    if options.draw is not None:
        from ladder_plot import draw

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
