"""A replica of the storm: it trains a tiny GPT, and logs each step and each opening."""

from __future__ import annotations

import json
import logging
import os
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import curvadion
from benchmarks.common.tasks import Batches, Task, data
from token_data import TrainingBatches

TASK = Task(
    layers=1,
    dim=32,
    heads=2,
    context=32,
    batch_size=4,
    data_bytes=2_000_000,
    validation_tokens=65_536,
)
LEARNING_RATE = 0.02


@dataclass(frozen=True)
class Run:
    """What all replicas of a run are told.

    ``steps`` are those of the run, ``period`` of them lie between openings, and each takes at least
    ``step_seconds``. Logs and weights go to ``folder``. ``readers`` is the number of replicas.
    """

    folder: str
    readers: int
    steps: int
    period: int
    step_seconds: float
    seed: int


@dataclass(frozen=True)
class Shared:
    """Arrays of integers in shared memory, by replica; without locks, which the killed might hold.

    ``ready`` says whether a replica has told the Lighthouse that it lives, ``joined`` whether it
    takes part in the run, ``steps`` and ``openings`` how many of the run it has counted, ``ports``
    where its store listens. ``cut_off`` has an array for each replica: whom it cannot reach.
    Replicas begin when the only element of ``begin`` is not 0.
    """

    ready: Any
    joined: Any
    steps: Any
    openings: Any
    ports: Any
    cut_off: Any
    begin: Any


def replica(slot: int, lighthouse: str, run: Run, shared: Shared) -> None:
    """Train until the run ends, and write the final weights.

    Args:
        slot: the replica's number, from 0.
        lighthouse: its address.
        run: what all replicas are told.
        shared: what replicas tell the program that disturbs them.
    """
    from benchmarks.elastic.links import go_by_links
    from curvadion.integrations.torchft import ElasticReplicas

    os.environ["TORCHFT_LIGHTHOUSE"] = lighthouse
    torch.set_num_threads(1)
    torch.manual_seed(run.seed)
    path = Path(run.folder, f"{slot}-{os.getpid()}.jsonl")
    # torchft's servers and torch's stores write there what they lose.
    with path.with_suffix(".txt").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    log = Log(path)
    logging.getLogger("curvadion").addHandler(log)
    training, _ = data(TASK)
    batches = TrainingBatches(training, TASK.context, TASK.batch_size, run.readers, 1, run.seed)
    model = TASK.model()
    replicas = ElasticReplicas(replica_id=f"replica_{slot}")
    optimizer = curvadion.CurvaDion(
        curvadion.param_groups(model, elementwise_lr=LEARNING_RATE / 2),
        lr=LEARNING_RATE,
        replicas=replicas,
        gate=curvadion.FixedPeriod(run.period),
        sync=curvadion.QuantizedAverage(),
    )
    # Tells the Lighthouse that this replica lives. The run begins with all who live, and else
    # the first would begin alone.
    _ = replicas._manager
    shared.ports[slot] = replicas._manager_arguments["store_port"]
    go_by_links(slot, shared.cut_off[slot], shared.ports)
    shared.ready[slot] = 1
    while not shared.begin[0]:
        time.sleep(0.02)
    replicas.start(optimizer)
    shared.steps[slot] = optimizer.progress.steps
    shared.openings[slot] = replicas.openings
    shared.joined[slot] = 1
    log.write(joined=replicas.openings, step=optimizer.progress.steps)
    parameters = list(model.parameters())
    events = 0
    while optimizer.progress.steps < run.steps:
        begun = time.monotonic()
        [(inputs, targets)] = batches(optimizer.progress.steps, slot)
        model(inputs, targets).backward()
        # As if a GPU were busy: the replicas of a storm share few cores.
        time.sleep(max(0.0, begun + run.step_seconds - time.monotonic()))
        optimizer.step()
        optimizer.zero_grad()
        shared.steps[slot] = optimizer.progress.steps
        line = {"step": optimizer.progress.steps}
        if replicas.openings != shared.openings[slot]:
            shared.openings[slot] = replicas.openings
            anchors = [optimizer.state[p]["anchor"] for p in parameters]
            line |= {"opening": replicas.openings, "members": replicas.present}
            line |= {"anchors": checksum(anchors)}
        log.write(**line)
        for event in replicas.events[events:]:
            log.write(event=event.text, kind=event.kind, at=event.time)
        events = len(replicas.events)
    optimizer.synchronize()
    log.write(ended=optimizer.progress.steps, weights=checksum(parameters))
    torch.save(model.state_dict(), Path(run.folder, f"{slot}.pt"))
    replicas.close()
    os._exit(0)  # no thread of a lost connection may keep the process


class Log(logging.Handler):
    """A file of JSON lines, each with its time; also takes the warnings of Curvadion."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = path.open("a", buffering=1)

    def write(self, **line: Any) -> None:
        """Write a line."""
        print(json.dumps({"time": time.time(), **line}), file=self._file)

    def emit(self, record: logging.LogRecord) -> None:
        self.write(warning=record.getMessage())


def checksum(tensors: Sequence[torch.Tensor]) -> int:
    """A checksum of the bits of all tensors."""
    chain = 0
    for tensor in tensors:
        chain = zlib.crc32(tensor.detach().numpy().tobytes(), chain)
    return chain


@torch.no_grad()
def held_out_loss(weights: Path) -> float:
    """The held-out loss of weights that a replica has written."""
    model = TASK.model()
    model.load_state_dict(torch.load(weights))
    batches: Batches
    _, batches = data(TASK)
    losses = [float(model(inputs, targets)) for inputs, targets in batches]
    return sum(losses) / len(losses)
