"""Train in one process and add to a record; for programs that compare settings of an optimizer."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.common.records import environment
from benchmarks.common.tasks import Batches
from curvadion import Dion
from token_data import TrainingBatches
from train_gpt import Config, learning_rates, lr_scale, set_learning_rates


def held_out_loss(
    model: nn.Module,
    optimizer: Dion,
    batches: TrainingBatches,
    held_out: Batches,
    schedule: Config,
) -> float:
    """Train a model and return its held-out loss, in nats per token.

    Args:
        model: returns the loss of inputs and targets.
        optimizer: of the model, at its highest learning rates.
        batches: the training data.
        held_out: inputs and targets.
        schedule: how many steps to take, and which share of these rates.
    """
    highest = learning_rates(optimizer)
    for step in range(schedule.steps):
        set_learning_rates(optimizer, highest, lr_scale(step, schedule))
        for inputs, targets in batches(step, 0):
            model(inputs, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        losses = [float(model(inputs, targets)) for inputs, targets in held_out]
    return sum(losses) / len(losses)


def add_missing(
    runs: Iterable[dict[str, Any]],
    train: Callable[[dict[str, Any]], dict[str, Any]],
    file: Path,
    command: str,
) -> list[dict[str, Any]]:
    """Train what has no record yet, write the file after each run, and return all records.

    Args:
        runs: settings.
        train: returns what a run with some settings has found.
        file: the record: the commands that made it, the environment of the last one, and the runs.
        command: of this process.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    before = json.loads(file.read_text()) if file.exists() else {"commands": [], "records": []}
    commands = [*(c for c in before["commands"] if c != command), command]
    records: list[dict[str, Any]] = before["records"]
    for run in runs:
        if any(run.items() <= record.items() for record in records):
            continue
        records.append(run | train(run))
        content = {
            "commands": commands,
            "environment": environment(torch.device("cpu")),
            "records": records,
        }
        file.write_text(json.dumps(content, indent=1) + "\n")
        print(json.dumps(records[-1]), flush=True)
    return records
