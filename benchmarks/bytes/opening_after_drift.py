r"""Measure what an opening of ``LowRank`` sends after local steps, in dense all-reduces.

    python -m benchmarks.bytes.opening_after_drift \
        --output benchmarks/results/bytes/opening_after_drift.json

Trains the GPT of ``make demo`` on two ranks, which are replicas, for some local steps, and counts
the bytes of the opening after them. A dense all-reduce is that of all gradients in float32.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from benchmarks.common.records import write
from curvadion import CurvaDion, FixedPeriod, LowRank, WireMeter, param_groups
from gpt import GPT, GPTConfig

PERIOD = 4
VOCABULARY = 256
BATCH, CONTEXT = 2, 128  # of the demo, with fewer sequences: bytes depend on shapes only


def train(rank: int, store: str, output: Path | None) -> None:
    """Take the steps up to the first opening; rank 0 prints and writes what this one sends."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=VOCABULARY, layers=4, heads=4, dim=128))
    optimizer = CurvaDion(
        param_groups(model), gate=FixedPeriod(PERIOD), sync=LowRank(), replicas=dist.group.WORLD
    )
    torch.manual_seed(rank)
    sent = 0
    for _ in range(PERIOD):
        tokens = torch.randint(VOCABULARY, (BATCH, CONTEXT + 1))
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        with WireMeter() as meter:
            optimizer.step()
        optimizer.zero_grad()
        sent = meter.total.bytes
    assert optimizer.report is not None
    assert optimizer.report.gate_open
    if rank == 0:
        record = _record(optimizer, sent)
        print(record)
        if output is not None:
            write(output, torch.device("cpu"), [record])
    dist.barrier()
    dist.destroy_process_group()


def _record(optimizer: CurvaDion, sent: int) -> dict[str, Any]:
    """What has been counted; sent: bytes of the opening's step."""
    elements = {"dion": 0, "adamw": 0}
    for group in optimizer.param_groups:
        elements[group["algorithm"]] += sum(X.numel() for X in group["params"])
    total = sum(elements.values())
    return {
        "model": "the GPT of make demo",
        "elements": total,
        "share_of_adamw": elements["adamw"] / total,
        "bytes": sent,
        "dense_all_reduces": sent / (4 * total),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Start two ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="the record; without it, only print")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        spawn(train, (f"{folder}/store", options.output), nprocs=2)


if __name__ == "__main__":
    main()
