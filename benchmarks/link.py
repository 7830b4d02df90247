"""Measure collectives and training steps over limited links, and compare them with the cost model.

Every rank is a real process with gloo in its own network namespace (network.py; needs root). Ranks
run over each link in turn, and between links without limits, which measures compute and software
alone. From these seconds and the wire meter's bytes the cost model predicts the seconds of a step
over the link: once with a ring's rounds and bytes, once with gloo's, measured by small messages and
the interfaces' counters.

Seconds are the fastest call of each kind, because other work on the machine only adds to them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from statistics import mean, median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(Path(__file__).parent)]

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import curvadion
from cost_model import Cost, Link, Traffic, step_seconds, total
from gpt import GPT, GPTConfig
from measure import write
from network import INTERFACE, ask, network
from train_gpt import leave_process_group

Record = dict[str, Any]
SECONDS = ("seconds", "open_seconds", "closed_seconds")

MEGABIT = 1e6
LINKS = (Link(100 * MEGABIT, 1e-3), Link(20 * MEGABIT, 1e-3), Link(20 * MEGABIT, 10e-3))
WORLDS = (2, 4)
KINDS = ("all_reduce", "all_to_all", "all_gather")
SMALL, LARGE = 16, 2 * 1024 * 1024
CALLS = {SMALL: 20, 256 * 1024: 6, LARGE: 3}  # by payload in bytes
STEPS = {"AdamW-DDP": 5, "Dion, rank 1/4": 5, "CurvaDion, wire_budget=0.01": 14}
BATCH, TIME = 4, 64
CONFIG = GPTConfig(vocab_size=256, layers=2, heads=4, dim=128)


# ---------------------------------------------------------------- a rank


class Training:
    """A small GPT with a method, one step at a time."""

    def __init__(self, method: str) -> None:
        torch.manual_seed(0)
        self.model = GPT(CONFIG)
        groups = curvadion.param_groups(self.model)
        replicas = dist.group.WORLD
        self.optimizer: torch.optim.Optimizer
        if method == "AdamW-DDP":
            self.module: torch.nn.Module = DistributedDataParallel(self.model)
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
            return
        self.module = self.model
        if method == "Dion, rank 1/4":
            self.optimizer = curvadion.Dion(groups, replicas=replicas)
        else:
            self.optimizer = curvadion.CurvaDion(
                groups, replicas=replicas, wire_budget=float(method.split("=")[1])
            )

    def step(self) -> bool:
        """Take a step; return whether replicas exchanged more than the gate's decision."""
        tokens = torch.randint(CONFIG.vocab_size, (2, BATCH, TIME))
        self.optimizer.zero_grad()
        self.module(tokens[0], tokens[1]).backward()
        self.optimizer.step()
        report = getattr(self.optimizer, "report", None)
        return report is None or bool(report.gate_open)


def worker(rank: int, ranks: int) -> None:
    """Run a round of measurements for every input line; answer with a line of JSON."""
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    trainings = {method: Training(method) for method in STEPS}
    torch.manual_seed(1 + rank)
    for training in trainings.values():
        for _ in range(8):
            training.step()
    for line in sys.stdin:
        collectives = [
            measured_collective(kind, size, calls)
            for kind in KINDS
            for size, calls in CALLS.items()
        ]
        steps = [measured_steps(m, t, STEPS[m] * int(line)) for m, t in trainings.items()]
        print(json.dumps({"collectives": collectives, "steps": steps}), flush=True)
    dist.barrier()
    leave_process_group()


def measured_collective(kind: str, payload: int, calls: int) -> Record:
    """Return the seconds of the fastest call, and the bytes per call on this rank's interface."""
    ranks = dist.get_world_size()
    # So that the smallest can be divided into one part per rank.
    whole = torch.zeros(payload, dtype=torch.uint8)
    if payload > SMALL:
        whole = whole.view(torch.float32)
    other = torch.zeros_like(whole)
    parts = list(other.chunk(ranks))
    call: Callable[[], object] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
        "all_gather": lambda: dist.all_gather(parts, whole[: len(parts[0])]),
    }[kind]
    dist.barrier()
    before, seconds = bytes_sent(), []
    with curvadion.WireMeter() as meter:
        for _ in range(calls):
            begin = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - begin)
    dist.barrier()
    return {
        "kind": kind,
        "payload_bytes": payload,
        "seconds": min(seconds),
        "least_bytes": meter.total.sent / calls,
        "interface_bytes": (bytes_sent() - before) / calls,
    }


def measured_steps(method: str, training: Training, steps: int) -> Record:
    """Return the seconds of the fastest open and closed steps, and the bytes of a step."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    dist.barrier()
    before = bytes_sent()
    with curvadion.WireMeter() as meter:
        for _ in range(steps):
            begin = time.perf_counter()
            opened = training.step()
            seconds[opened].append(time.perf_counter() - begin)
    after = bytes_sent()
    dist.barrier()
    return {
        "method": method,
        "steps": steps,
        "open_steps": len(seconds[True]),
        "open_seconds": min(seconds[True], default=0.0),
        "closed_seconds": min(seconds[False], default=0.0),
        "traffic": [
            [kind, count.calls / steps, count.bytes / steps]
            for kind, count in meter.by_collective.items()
        ],
        "least_bytes": meter.total.sent / steps,
        "interface_bytes": (after - before) / steps,
    }


def bytes_sent() -> int:
    """Return the bytes this rank's interface has sent, with headers and acknowledgements."""
    for line in Path("/proc/self/net/dev").read_text("utf-8").splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == INTERFACE:
            return int(numbers.split()[8])
    raise RuntimeError(f"{INTERFACE} is not in /proc/self/net/dev: run link.py without --worker")


# ---------------------------------------------------------------- all ranks


def measure(
    ranks: int, links: Sequence[Link], rounds: int, congestion_control: str
) -> tuple[list[Record], list[Record]]:
    """Measure collectives and steps of ``ranks`` ranks, without limits and then over each link."""
    collectives: list[Record] = []
    steps: list[Record] = []
    with network(ranks, congestion_control) as net:
        workers = [net.start(rank, __file__) for rank in range(ranks)]
        try:
            for link in [None, *chain.from_iterable((each, None) for each in links)]:
                if link is None:
                    net.limit(None, 0.0)
                else:
                    net.limit(link.bandwidth, link.latency)
                answers = ask(workers, f"{rounds}")
                where: Record = {
                    "ranks": ranks,
                    "bandwidth": link and link.bandwidth,
                    "latency": link and link.latency,
                }
                collectives += [where | r for r in _together(answers, "collectives")]
                steps += [where | r for r in _together(answers, "steps")]
                print(f"measured {where}", flush=True)
        finally:
            for process in workers:
                process.kill()
                process.wait()
    return collectives, steps


def _together(answers: Sequence[Any], what: str) -> list[Record]:
    """Return one record per measurement: means over ranks."""
    records = []
    for by_rank in zip(*(answer[what] for answer in answers), strict=True):
        record = dict(by_rank[0])
        for key in (*SECONDS, "least_bytes", "interface_bytes"):
            if key in record:
                record[key] = mean(r[key] for r in by_rank)
        if "traffic" in record:
            kinds = zip(*(r["traffic"] for r in by_rank), strict=True)
            record["traffic"] = [
                [kind[0][0], mean(t[1] for t in kind), mean(t[2] for t in kind)] for kind in kinds
            ]
        records.append(record)
    return records


# ---------------------------------------------------------------- comparison with the model


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


def command_line() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", nargs="+", type=int, default=list(WORLDS), help="of replicas")
    parser.add_argument("--rounds", type=int, default=1, help="factor on the number of steps")
    parser.add_argument(
        "--congestion-control", default="reno", help="TCP's algorithm; the kernel must have it"
    )
    parser.add_argument("--output", type=Path, help="JSON file")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    return parser


def main() -> None:
    """Measure what the command line asks for."""
    options = command_line().parse_args()
    if options.worker is not None:
        worker(options.worker, options.worlds[0])
        return
    collectives: list[Record] = []
    steps: list[Record] = []
    try:
        for ranks in options.worlds:
            found = measure(ranks, LINKS, options.rounds, options.congestion_control)
            collectives += found[0]
            steps += found[1]
    except PermissionError as error:
        raise SystemExit(f"link.py: {error}") from None
    costs = gloo_costs(collectives)
    record = {
        "congestion_control": options.congestion_control,
        "costs": [
            {"ranks": ranks, "kind": kind, **vars(cost)}
            for ranks, kinds in costs.items()
            for kind, cost in kinds.items()
        ],
        "steps": compared_steps(steps, costs),
        "collectives": compared_collectives(collectives, costs),
    }
    print(*record["costs"], table(record["collectives"]), table(record["steps"]), sep="\n")
    if options.output is not None:
        write(options.output, torch.device("cpu"), [record])


if __name__ == "__main__":
    main()
