r"""Measure collectives and training steps over limited links, and compare them with the cost model.

    sudo OMP_NUM_THREADS=1 PYTHONPATH=examples/gpt .venv/bin/python \
        -m benchmarks.seconds.limited_links --rounds 3 \
        --output benchmarks/results/scaling/link.json

Every rank is a real process with gloo in its own network namespace (limited_network.py; needs
root). Ranks run over each link in turn, and between links without limits, which measures compute
and software alone. From these seconds and the wire meter's bytes the cost model predicts the
seconds of a step over the link: once with a ring's rounds and bytes, once with gloo's, measured by
small messages and the interfaces' counters.

Seconds are the fastest call of each kind, because other work on the machine only adds to them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import curvadion
from benchmarks.common.limited_network import ask, bytes_sent, network
from benchmarks.common.records import write
from benchmarks.seconds.cost_model import Link
from benchmarks.seconds.link_predictions import (
    LARGE,
    MEGABIT,
    SECONDS,
    SMALL,
    Record,
    compared_collectives,
    compared_steps,
    gloo_costs,
    table,
)
from gpt import GPT, GPTConfig
from train_gpt import leave_process_group

MODULE = "benchmarks.seconds.limited_links"

LINKS = (Link(100 * MEGABIT, 1e-3), Link(20 * MEGABIT, 1e-3), Link(20 * MEGABIT, 10e-3))
WORLDS = (2, 4)
KINDS = ("all_reduce", "all_to_all", "all_gather")
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


# ---------------------------------------------------------------- all ranks


def measure(
    ranks: int, links: Sequence[Link], rounds: int, congestion_control: str
) -> tuple[list[Record], list[Record]]:
    """Measure collectives and steps, without limits and then over each link.

    Args:
        ranks: how many.
        links: between any two of them.
        rounds: of each measurement.
        congestion_control: of TCP, as Linux calls it.

    Returns:
        Records of collectives, and of steps.
    """
    collectives: list[Record] = []
    steps: list[Record] = []
    with network(ranks, congestion_control) as net:
        workers = [net.start(rank, MODULE) for rank in range(ranks)]
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
        raise SystemExit(f"limited_links: {error}") from None
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
