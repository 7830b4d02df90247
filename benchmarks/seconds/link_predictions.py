"""What limited_links.py measures, beside the cost model's predictions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from benchmarks.seconds.cost_model import Cost, Link, Traffic, step_seconds, total

Record = dict[str, Any]
SECONDS = ("seconds", "open_seconds", "closed_seconds")  # keys of records

MEGABIT = 1e6
SMALL, LARGE = 16, 2 * 1024 * 1024  # payloads in bytes from which rounds and bytes are found


def gloo_costs(collectives: Iterable[Record]) -> dict[int, dict[str, Cost]]:
    """Return rounds and bytes as multiples of a ring's, by number of ranks and kind.

    Rounds come from the seconds of small messages, bytes from the interfaces' counters for large
    ones, headers included.
    """
    unlimited, limited = _by_limit(collectives, ("ranks", "kind", "payload_bytes"))
    rounds: dict[tuple[int, str], list[float]] = {}
    sent: dict[tuple[int, str], list[float]] = {}
    for key, r in limited:
        where = (r["ranks"], r["kind"])
        if r["payload_bytes"] == SMALL:
            seconds = r["seconds"] - unlimited[key]["seconds"]
            ring = Traffic(r["kind"], 1, 0).rounds(r["ranks"]) * r["latency"]
            rounds.setdefault(where, []).append(seconds / ring)
        elif r["payload_bytes"] == LARGE:
            sent.setdefault(where, []).append(r["interface_bytes"] / r["least_bytes"])
    costs: dict[int, dict[str, Cost]] = {}
    for (ranks, kind), found in rounds.items():
        cost = Cost(round(median(found), 3), round(median(sent[ranks, kind]), 3))
        costs.setdefault(ranks, {})[kind] = cost
    return costs


def _by_limit(
    records: Iterable[Record], keys: Sequence[str]
) -> tuple[dict[tuple[Any, ...], Record], list[tuple[tuple[Any, ...], Record]]]:
    """Split records: the fastest without a limit, by some of their entries; those with a limit."""
    unlimited: dict[tuple[Any, ...], Record] = {}
    limited = []
    for r in records:
        key = tuple(r[name] for name in keys)
        if r["bandwidth"] is not None:
            limited.append((key, r))
            continue
        known = unlimited.setdefault(key, dict(r))
        for name in known.keys() & set(SECONDS):
            known[name] = min(known[name], r[name])
    return unlimited, limited


def _average(step: Record, fastest: Record) -> float:
    """Return the seconds of an average step, with the share of open steps in ``step``."""
    opened = step["open_steps"] / step["steps"]
    average: float = opened * fastest["open_seconds"] + (1 - opened) * fastest["closed_seconds"]
    return average


def compared_collectives(
    collectives: Iterable[Record], costs: dict[int, dict[str, Cost]]
) -> list[Record]:
    """Return the collectives over links, with the model's predictions."""
    unlimited, limited = _by_limit(collectives, ("ranks", "kind", "payload_bytes"))
    records = []
    for key, r in limited:
        traffic = [Traffic(r["kind"], 1, r["payload_bytes"])]
        records.append(r | _modelled(unlimited[key]["seconds"], traffic, r, costs))
    return records


def compared_steps(steps: Iterable[Record], costs: dict[int, dict[str, Cost]]) -> list[Record]:
    """Return the steps over links, with the model's predictions."""
    unlimited, limited = _by_limit(steps, ("ranks", "method"))
    records = []
    for key, r in limited:
        traffic = total(Traffic(*t) for t in r["traffic"])
        r = r | {"seconds": _average(r, r)}
        records.append(r | _modelled(_average(r, unlimited[key]), traffic, r, costs))
    return records


def _modelled(
    compute: float, traffic: Sequence[Traffic], r: Record, costs: dict[int, dict[str, Cost]]
) -> Record:
    """Return the seconds that the model predicts, as a ring and as gloo, and their errors.

    Args:
        compute: seconds without limits.
        traffic: of the step, or of the collective.
        r: the measured record.
        costs: gloo's, by number of ranks and kind of collective.
    """
    link = Link(r["bandwidth"], r["latency"])
    ring = step_seconds(compute, traffic, link, r["ranks"])
    gloo = step_seconds(compute, traffic, link, r["ranks"], costs=costs[r["ranks"]])
    return {
        "unlimited_seconds": compute,
        "ring_seconds": ring,
        "ring_error": ring / r["seconds"] - 1,
        "gloo_seconds": gloo,
        "gloo_error": gloo / r["seconds"] - 1,
    }


def table(records: Iterable[Record]) -> str:
    """Return a Markdown table of measured and modelled steps."""
    lines = [
        "| replicas | link | what | without limits, s | measured, s | a ring, s | error "
        "| gloo's rounds and bytes, s | error |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in records:
        link = f"{r['bandwidth'] / MEGABIT:.0f} Mb/s, {1e3 * r['latency']:.0f} ms"
        lines.append(
            f"| {r['ranks']} | {link} | {_what(r)} | {r['unlimited_seconds']:.3f} "
            f"| {r['seconds']:.3f} | {r['ring_seconds']:.3f} | {r['ring_error']:+.0%} "
            f"| {r['gloo_seconds']:.3f} | {r['gloo_error']:+.0%} |"
        )
    return "\n".join(lines)


def _what(r: Record) -> str:
    if "method" in r:
        return str(r["method"])
    return f"{r['kind']}, {r['payload_bytes']:,} bytes"
