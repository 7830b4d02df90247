"""Records of simulated trainings: a file of them, to which missing ones are added."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.losses.simulation.training import Training, train
from command_line import option

RECORDS = "runs/simulated.json"
DEFAULTS = {f.name: f.default for f in fields(Training) if f.default is not MISSING}


@dataclass(frozen=True)
class Machine:
    """Where the runs execute; this changes results only by rounding."""

    workers: int = option(2, "runs at once, each in a process of one thread; a GPU takes one")
    device: str = option("cpu", "device of the runs")
    compile: bool = option(False, "compile gradients: worth it from millions of parameters on")


def write(file: Path, records: Sequence[dict[str, Any]]) -> None:
    """Write a JSON object atomically, with one record per line."""
    head = f'{{"torch": {json.dumps(torch.__version__)},\n'
    lines = ",\n".join(json.dumps(record, allow_nan=False) for record in records)
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".tmp")
    unfinished.write_text(f'{head}"records": [\n{lines}\n]}}\n')
    unfinished.replace(file)


def map_trainings(pending: Sequence[Training], machine: Machine) -> Iterator[dict[str, Any]]:
    """Yield the records of runs as they end; a GPU takes one at a time."""
    workers = machine.workers if machine.device == "cpu" else 1
    run = partial(_train, device=machine.device, compiled=machine.compile)
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        yield from pool.imap_unordered(run, pending)


def _train(training: Training, device: str, compiled: bool) -> dict[str, Any]:
    torch.set_num_threads(1)  # the tensors are small
    return train(training, device, compiled=compiled)


def known(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record, completed with defaults of settings added since it was made."""
    return {**DEFAULTS, **record}


def record_of(training: Training, records: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the record of a run, if there is one."""
    settings = asdict(training).items()
    return next((r for r in map(known, records) if settings <= r.items()), None)


def add_missing(
    wanted: Sequence[Training], file: Path, command: str, machine: Machine
) -> list[dict[str, Any]]:
    """Train the runs that have no record in a file, and add them; return all wanted records."""
    records = json.loads(file.read_text("utf-8"))["records"] if file.exists() else []

    pending = [training for training in wanted if record_of(training, records) is None]
    for number, record in enumerate(map_trainings(pending, machine), start=1):
        records.append({**record, "command": command})
        write(file, records)
        print(f"[{number}/{len(pending)}] {record['seconds']:.0f} s", flush=True)
    return [r for training in wanted if (r := record_of(training, records)) is not None]
