"""The gap at 1 % of the bytes to the best synchronous method, from records of simulations."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.losses.simulation.records import DEFAULTS, known
from benchmarks.losses.simulation.training import SYNCHRONISED, Training

BUDGET, FRAGMENTS = 0.01, 3
# Runs with other schedules, averages of the last weights or codes are compared elsewhere.
AT_DEFAULTS = ("warmdown", "elementwise_warmdown", "overrun", "tail", "up", "cosine", "autocast")
SPECTRUM_DECAY = DEFAULTS["spectrum_decay"]


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
        if r["budget"] not in (0.0, BUDGET) or any(r[key] != DEFAULTS[key] for key in AT_DEFAULTS):
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
