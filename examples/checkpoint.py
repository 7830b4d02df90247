"""Checkpoints: a folder per step, complete or absent; any number of replicas can resume it."""

import dataclasses
import os
import shutil
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from optional import need


@dataclasses.dataclass
class Progress:
    """How far a run is: what a checkpoint holds besides weights and optimizer state."""

    step: int = 0
    """Steps done."""
    wire_bytes: int = 0
    """Bytes that one replica sent in training."""
    seconds: float = 0.0
    """Time spent training, without evaluation and checkpoints."""
    open_gates: int = 0
    """Steps at which replicas synchronised."""
    val_loss: float = float("nan")
    """Held-out loss when it was last measured."""
    drift: float = float("nan")
    """How far the replicas were apart when it was last measured."""


def save(folder: Path, model: nn.Module, optimizer: Optimizer, progress: Progress) -> Path:
    """Write ``folder/step-N``; a crash leaves nothing that :func:`latest` would find."""
    safetensors = need("safetensors.torch", "--checkpoint-every")
    final = folder / f"step-{progress.step:08d}"
    unfinished = folder / f".{final.name}"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    safetensors.save_model(model, str(unfinished / "model.safetensors"))
    torch.save(
        {"optimizer": optimizer.state_dict(), "progress": dataclasses.asdict(progress)},
        unfinished / "optimizer.pt",
    )
    os.replace(unfinished, final)
    return final


def latest(folder: Path) -> Path | None:
    """Return the checkpoint of the highest step in a folder, if there is one."""
    return max(folder.glob("step-*"), default=None)


def load(path: Path, model: nn.Module, optimizer: Optimizer) -> Progress:
    """Read a checkpoint into the model and the optimizer, on whatever devices they are."""
    safetensors = need("safetensors.torch", "--resume")
    safetensors.load_model(model, str(path / "model.safetensors"))
    state = torch.load(path / "optimizer.pt", map_location="cpu", weights_only=True)
    optimizer.load_state_dict(state["optimizer"])
    return Progress(**state["progress"])
