"""Records of simulated trainings: a file of them, to which missing ones are added."""

from __future__ import annotations

import json
import math
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.corpora import check_corpus
from benchmarks.losses.simulation.training import Training, train
from command_line import option

RECORDS = "runs/simulated.json"
DEFAULTS = {f.name: f.default for f in fields(Training) if f.default is not MISSING}


@dataclass(frozen=True)
class Machine:
    """Where the runs execute; this changes results only by rounding."""

    workers: int = option(2, "runs at once on a CPU, each in a process of one thread")
    device: str = option("cpu", "device of the runs")
    compile: bool = option(False, "compile gradients: worth it from millions of parameters on")


def write(file: Path, records: Sequence[dict[str, Any]]) -> None:
    """Write a JSON object atomically, with one record per line."""
    lines = ",\n".join(json.dumps(record, allow_nan=False) for record in records)
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".tmp")
    unfinished.write_text(f'{{"records": [\n{lines}\n]}}\n')
    unfinished.replace(file)


def map_trainings(
    pending: Sequence[Training], machine: Machine, ends: float = math.inf
) -> Iterator[dict[str, Any]]:
    """Yield the records of runs as they end.

    A GPU takes one run at a time, in this process, so that what is compiled serves the next one.

    Args:
        pending: the runs.
        machine: where they execute.
        ends: the value of ``time.monotonic()`` by which runs on a GPU must end; others are left
            out.
    """
    if machine.device != "cpu":
        for training in pending:
            try:
                yield train(training, machine.device, compiled=machine.compile, ends=ends)
            except TimeoutError as error:
                print(f"left out {training.method} at {training.lr}: {error}", flush=True)
        return
    with multiprocessing.get_context("spawn").Pool(machine.workers) as pool:
        yield from pool.imap_unordered(partial(_train, compiled=machine.compile), pending)


def _train(training: Training, compiled: bool) -> dict[str, Any]:
    torch.set_num_threads(1)  # the tensors are small
    return train(training, compiled=compiled)


def known(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record, completed with defaults of settings added since it was made."""
    return {**DEFAULTS, **record}


def record_of(training: Training, records: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the record of a run, if there is one."""
    settings = asdict(training).items()
    return next((r for r in map(known, records) if settings <= r.items()), None)


def add_missing(
    wanted: Sequence[Training],
    file: Path,
    command: str,
    machine: Machine,
    seconds: float = math.inf,
) -> list[dict[str, Any]]:
    """Train the runs that have no record in a file, and add them.

    Args:
        wanted: the runs.
        file: the records.
        command: made them.
        machine: where they execute.
        seconds: how long a GPU may take; runs that would take longer are left out.

    Returns:
        The records of the wanted runs, as far as there are any.
    """
    ends = time.monotonic() + seconds
    records = json.loads(file.read_text("utf-8"))["records"] if file.exists() else []

    pending = [training for training in wanted if record_of(training, records) is None]
    for corpus in {training.corpus for training in pending}:
        check_corpus(corpus)
    for number, record in enumerate(map_trainings(pending, machine, ends), start=1):
        records.append({**record, "command": command})
        write(file, records)
        told = [f"{record['method']} at {record['lr']}", f"budget {record['budget']}"]
        told += [f"loss {record['loss']}", f"{record['seconds']:.0f} s"]
        print(f"[{number}/{len(pending)}] {', '.join(told)}", flush=True)
    return [r for training in wanted if (r := record_of(training, records)) is not None]
