r"""Compare the bytes that leave a rank's network interface with those the wire meter counts.

    sudo PYTHONPATH=examples/gpt .venv/bin/python -m benchmarks.bytes.interface_bytes \
        --output benchmarks/results/scaling/headers.json

Every rank is a process with gloo in its own network namespace (limited_network.py; needs root).
Beyond the meter's ``total.sent`` the interface sends headers, acknowledgements and gloo's own
messages: a number of bytes per collective that does not depend on its size.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import curvadion
from benchmarks.common.limited_network import bytes_sent, network
from benchmarks.common.records import write
from train_gpt import leave_process_group

Record = dict[str, Any]

MODULE = "benchmarks.bytes.interface_bytes"
CALLS = 20
PAYLOADS = (16, 64 * 1024, 4 * 1024 * 1024)
MATRICES = {"66k": [(128, 128)] * 4, "3M": [(512, 512)] * 12}
SHARE = 0.01
STEPS = 44  # about nine openings, of which the first comes at step 10


def worker(rank: int, ranks: int) -> None:
    """Measure everything and print it as JSON."""
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    records = [_collective(kind, payload) for kind in KINDS for payload in PAYLOADS]
    records += [_training(name, rank) for name in MATRICES]
    print(json.dumps(records), flush=True)
    dist.barrier()
    leave_process_group()


KINDS = ("all_reduce", "all_to_all", "all_gather", "reduce_scatter", "broadcast")


def _collective(kind: str, payload: int) -> Record:
    ranks = dist.get_world_size()
    whole = torch.zeros(payload // 4)
    other, part = torch.zeros_like(whole), torch.zeros(payload // 4 // ranks)
    call: Callable[[], object] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
        "all_gather": lambda: dist.all_gather(list(whole.chunk(ranks)), part),
        "reduce_scatter": lambda: dist.reduce_scatter(part, list(whole.chunk(ranks))),
        "broadcast": lambda: dist.broadcast(whole, 0),
    }[kind]
    call()
    return {"what": kind, "payload": payload} | _measured(call, CALLS)


def _training(name: str, rank: int) -> Record:
    X = [nn.Parameter(torch.zeros(shape)) for shape in MATRICES[name]]
    optimizer = curvadion.CurvaDion(
        X, replicas=dist.group.WORLD, wire_budget=SHARE, local_step="gradient"
    )
    generator = torch.Generator().manual_seed(rank)

    def step() -> None:
        for x in X:
            x.grad = torch.randn(x.shape, generator=generator)
        optimizer.step()

    for _ in range(STEPS):
        step()
    return {"what": "wire_budget", "model": name} | _measured(step, STEPS)


def _measured(call: Callable[[], object], calls: int) -> Record:
    dist.barrier()
    before = bytes_sent()
    with curvadion.WireMeter() as meter:
        for _ in range(calls):
            call()
    dist.barrier()
    return {
        "total_sent": meter.total.sent / calls,
        "interface_bytes": (bytes_sent() - before) / calls,
    }


def measure(ranks: int) -> list[Record]:
    """Return the measurements of ``ranks`` ranks, averaged over them."""
    with network(ranks, "reno") as net:
        workers = [net.start(rank, MODULE) for rank in range(ranks)]
        try:
            answers = [json.loads(process.communicate()[0]) for process in workers]
        finally:
            for process in workers:
                process.kill()
                process.wait()
    records = []
    for by_rank in zip(*answers, strict=True):
        record = {"ranks": ranks} | by_rank[0]
        for key in ("total_sent", "interface_bytes"):
            record[key] = mean(r[key] for r in by_rank)
        record["ratio"] = round(record["interface_bytes"] / record["total_sent"], 3)
        records.append(record)
    return records


def command_line() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", nargs="+", type=int, default=[2, 4], help="of replicas")
    parser.add_argument("--output", type=Path, help="JSON file")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    return parser


def main() -> None:
    """Measure, print and write the record."""
    options = command_line().parse_args()
    if options.worker is not None:
        worker(options.worker, options.worlds[0])
        return
    records = [record for ranks in options.worlds for record in measure(ranks)]
    for record in records:
        print(json.dumps(record))
    if options.output:
        write(options.output, torch.device("cpu"), records)


if __name__ == "__main__":
    main()
