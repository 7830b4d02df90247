"""Checkpoints: one folder per step, complete or absent, which any layout can resume.

Each holds ``sha256``, the digests of all other files in the format of sha256sum. A run resumes from
the newest checkpoint whose digests match; earlier ones are fallbacks.
"""

import dataclasses
import hashlib
import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

DIGESTS = "sha256"


@dataclasses.dataclass
class Progress:
    """A run's progress, saved in checkpoints beside weights and optimizer state."""

    step: int = 0
    """Steps done."""
    wire_bytes: int = 0
    """Payload of the first rank's collectives in training."""
    sent_bytes: float = 0.0
    """The fewest bytes that a rank must send for them."""
    crossing_bytes: float = 0.0
    """The same for collectives that cross nodes."""
    optimizer_bytes: int = 0
    """Payload of the optimizer's collectives."""
    seconds: float = 0.0
    """Time spent training, without evaluation and checkpoints."""
    open_gates: int = 0
    """Steps at which replicas synchronised."""
    val_loss: float = float("nan")
    """Held-out loss when it was last measured."""
    drift: float = float("nan")
    """Drift of the replicas when it was last measured."""


def save(folder: Path, model: nn.Module, optimizer: Optimizer, progress: Progress) -> Path:
    """Write ``folder/step-N``; collective. A crash leaves nothing that :func:`all_in` would find.

    Every rank writes the shards it holds; of ranks with the same shard, one writes it.

    Args:
        folder: of all checkpoints.
        model: whose shards are written.
        optimizer: whose state is written.
        progress: of the run.
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
        progress_file.write_text(json.dumps(dataclasses.asdict(progress)) + "\n", encoding="utf-8")
    dist.barrier()
    written = digests(unfinished)
    if first:
        (unfinished / DIGESTS).write_bytes(written)
        shutil.rmtree(final, ignore_errors=True)  # a damaged one that the resumed run replaces
        os.replace(unfinished, final)
    return final


def digests(folder: Path) -> bytes:
    """Return one line per file of a checkpoint, its SHA-256 and its name; collective.

    The files are divided among the ranks; all return the same.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    names = sorted(file.name for file in folder.iterdir() if file.name != DIGESTS)
    shared: list[list[str]] = [names]
    dist.broadcast_object_list(shared)
    mine = {name: sha256(folder / name) for name in shared[0][rank::ranks]}
    found: list[dict[str, str]] = [{} for _ in range(ranks)]
    dist.all_gather_object(found, mine)
    digest_of = {name: digest for share in found for name, digest in share.items()}
    return "".join(f"{digest_of[name]}  {name}\n" for name in shared[0]).encode()


def sha256(file: Path) -> str:
    """Return the digest of a file, or the error that prevents reading it."""
    digest = hashlib.sha256()
    try:
        with file.open("rb") as content:
            while chunk := content.read(1 << 20):
                digest.update(chunk)
    except OSError as error:
        return f"unreadable: {error}"
    return digest.hexdigest()


def damage(folder: Path) -> str | None:
    """Return what is wrong with a checkpoint's files, or None; collective.

    All ranks return the same. A checkpoint without digests, of an earlier version, passes with a
    warning.
    """
    found = digests(folder)
    written: list[bytes | None] = [None]
    if dist.get_rank() == 0 and (folder / DIGESTS).exists():
        written = [(folder / DIGESTS).read_bytes()]
    dist.broadcast_object_list(written)
    if written[0] is None:
        say(f"{folder} has no file {DIGESTS}: an earlier version saved it, and it is not verified")
        return None
    if found == written[0]:
        return None
    lines = {*found.splitlines()} ^ {*written[0].splitlines()}
    names = sorted({line.decode(errors="replace").partition("  ")[2] for line in lines})
    return f"{', '.join(names) or DIGESTS} not as {DIGESTS} has it"


def say(text: str) -> None:
    """Warn on the first rank."""
    if dist.get_rank() == 0:
        warnings.warn(text, stacklevel=2)


def all_in(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, the newest first."""
    return sorted(folder.glob("step-*"), reverse=True)


def resume(folder: Path, model: nn.Module, optimizer: Optimizer) -> Progress | None:
    """Load the newest undamaged checkpoint of a folder; None if there is none; collective.

    Raises:
        RuntimeError: if all are damaged.
    """
    found: list[list[Path]] = [all_in(folder)]
    dist.broadcast_object_list(found)
    complaints: list[str] = []
    for path in found[0]:
        complaint = damage(path)
        if complaint is None:
            if complaints:
                say(f"resumes from {path}, an earlier checkpoint: {'; '.join(complaints)}")
            return load(path, model, optimizer)
        complaints.append(f"{path} is damaged ({complaint})")
    if complaints:
        raise RuntimeError(
            f"no checkpoint is left to resume from: {'; '.join(complaints)}. Restore the files, or "
            f"start a new run in another folder."
        )
    return None


def load(path: Path, model: nn.Module, optimizer: Optimizer) -> Progress:
    """Read a checkpoint into the model and the optimizer, in their current layout; collective.

    The checkpoint may come from another gate or sync.
    """
    weights, state = get_state_dict(model, optimizer)
    state_dict_loader.load({"model": weights}, checkpoint_id=path)
    # Another gate or sync has other keys, and starts afresh.
    partly = DefaultLoadPlanner(allow_partial_load=True)
    held: dict[str, Any] = {"optimizer": state}
    state_dict_loader.load(held, checkpoint_id=path, planner=partly)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=held["optimizer"])
    return Progress(**json.loads((path / "progress.json").read_text("utf-8")))
