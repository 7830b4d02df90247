"""Checkpoints: a folder per step, complete or absent, that any layout can resume."""

import dataclasses
import json
import os
import shutil
from pathlib import Path

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer


@dataclasses.dataclass
class Progress:
    """How far a run is: what a checkpoint holds besides weights and optimizer state."""

    step: int = 0
    """Steps done."""
    wire_bytes: int = 0
    """Payloads of the first rank's collectives in training."""
    sent_bytes: float = 0.0
    """Bytes that a rank must send at least for them."""
    optimizer_bytes: int = 0
    """Payloads of the optimizer's."""
    seconds: float = 0.0
    """Time spent training, without evaluation and checkpoints."""
    open_gates: int = 0
    """Steps at which replicas synchronised."""
    val_loss: float = float("nan")
    """Held-out loss when it was last measured."""
    drift: float = float("nan")
    """How far the replicas were apart when it was last measured."""


def save(folder: Path, model: nn.Module, optimizer: Optimizer, progress: Progress) -> Path:
    """Write ``folder/step-N``; collective. A crash leaves nothing that :func:`latest` would find.

    Every rank writes the pieces it holds, one of several that hold the same.
    """
    final = folder / f"step-{progress.step:08d}"
    unfinished = folder / f".{final.name}"
    first = dist.get_rank() == 0
    if first:
        shutil.rmtree(unfinished, ignore_errors=True)
    dist.barrier()
    weights, state = get_state_dict(model, optimizer)
    state_dict_saver.save({"model": weights, "optimizer": state}, checkpoint_id=unfinished)
    if first:
        progress_file = unfinished / "progress.json"
        progress_file.write_text(json.dumps(dataclasses.asdict(progress)) + "\n")
        os.replace(unfinished, final)
    return final


def latest(folder: Path) -> Path | None:
    """Return the checkpoint of the highest step in a folder, if there is one."""
    return max(folder.glob("step-*"), default=None)


def load(path: Path, model: nn.Module, optimizer: Optimizer) -> Progress:
    """Read a checkpoint into the model and the optimizer, as they are laid out; collective."""
    weights, state = get_state_dict(model, optimizer)
    state_dict_loader.load({"model": weights, "optimizer": state}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    return Progress(**json.loads((path / "progress.json").read_text(encoding="utf-8")))
