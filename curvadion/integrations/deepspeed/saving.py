"""Checkpoints: replicas agree before one of them is written, and all load what it wrote."""

from __future__ import annotations

import inspect
import pickle
import zipfile
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from curvadion.integrations.deepspeed.process_groups import data_parallel_group
from curvadion.integrations.saving import warn_of_own_weights
from curvadion.optim.dion import Dion


def synchronize_before_saving(engine: Any, optimizer: Dion) -> None:
    """Only one replica's weights and state are written, and all load these: they must agree."""
    save_checkpoint = engine.save_checkpoint

    # Trainer reads which arguments save_checkpoint takes.
    @wraps(save_checkpoint)
    def synchronize_and_save(*args: Any, **kwargs: Any) -> Any:
        optimizer.synchronize(exact=True)
        if optimizer._replicas.replica.number > 0:
            # From stage 1 on each replica would write files of the same names.
            engine.save_non_zero_checkpoint = engine.save_zero_checkpoint = False
        return save_checkpoint(*args, **kwargs)

    engine.save_checkpoint = synchronize_and_save
    # Accelerate gathers weights without save_16bit_model, also on all ranks.
    for name in ("save_16bit_model", "_zero3_consolidated_16bit_state_dict"):
        setattr(engine, name, _after_meeting(getattr(engine, name), optimizer))
    warn_of_own_weights(engine.module, [optimizer], "engine.basic_optimizer.eval()")


def _after_meeting(method: Callable[..., Any], optimizer: Dion) -> Callable[..., Any]:
    @wraps(method)
    def meet_first(*args: Any, **kwargs: Any) -> Any:
        optimizer.eval()
        return method(*args, **kwargs)

    return meet_first


def check_shards_before_loading(engine: Any) -> None:
    """Raise ValueError before ZeRO reads files of another kind of shards or number of ranks."""
    load = engine.load_checkpoint
    signature = inspect.signature(load)

    @wraps(load)
    def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        said = given.arguments
        states = said["load_optimizer_states"] and not said["load_module_only"]
        cuts_weights = engine.zero_optimization_partition_weights()  # stage 3, in the files too
        if states or cuts_weights:
            folder = _folder(said["load_dir"], said["tag"])
            _check_stage(folder, engine.zero_optimization_stage(), cuts_weights=cuts_weights)
            _check_shards(folder, data_parallel_group(engine).size(), cuts_weights=cuts_weights)
        return load(*args, **kwargs)

    engine.load_checkpoint = load_checkpoint


def _folder(load_dir: Any, tag: Any) -> Path:
    latest = Path(load_dir, "latest")
    if tag is None and latest.is_file():
        tag = latest.read_text("utf-8").strip()
    return Path(load_dir) if tag is None else Path(load_dir, str(tag))


def _check_stage(folder: Path, stage: int, *, cuts_weights: bool) -> None:
    """Raise ValueError if weights in the files are cut and those here are not, or otherwise."""
    whole = (folder / "mp_rank_00_model_states.pt").is_file()
    cut = (folder / "zero_pp_rank_0_mp_rank_00_model_states.pt").is_file()
    if whole == cut or cut == cuts_weights:  # or there are none, or those of both
        return
    saved = "3, which shards the weights" if cut else "2 or less, which does not shard the weights"
    raise ValueError(
        f"The checkpoint {folder} was saved with ZeRO stage {saved}, and "
        f"zero_optimization.stage={stage} here: set the stage with which it was saved. To change "
        f"it, load the weights alone into the model before deepspeed.initialize, as "
        f"deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint gives them."
    )


def _check_shards(folder: Path, here: int, *, cuts_weights: bool) -> None:
    saved = _saved_ranks(folder, cuts_weights=cuts_weights)
    if saved not in (None, here):
        raise ValueError(
            f"The checkpoint {folder} was saved with {saved} ranks in a replica (DeepSpeed's "
            f"data-parallel world size), and here are {here}: ZeRO loads it with the same number "
            f"only. Set optimizer.params.replica_size={saved}, with as many replicas as you like."
        )


def _saved_ranks(folder: Path, *, cuts_weights: bool) -> int | None:
    """Among how many ranks ZeRO cut what a folder holds; None if it holds nothing of ZeRO.

    The files are no more than a hint: those of more ranks stay where a tag is used again.
    """
    first = folder / f"{'zero_pp_rank_0_' if cuts_weights else ''}mp_rank_00_model_states.pt"
    if not (first.is_file() and any(folder.glob("*zero_pp_rank_*_optim_states.pt"))):
        return None
    # Tensors stay on the disk, except in the format that torch wrote long ago.
    mapped = zipfile.is_zipfile(first)
    try:
        states = torch.load(first, map_location="cpu", mmap=mapped, weights_only=True)
    except pickle.UnpicklingError:  # a user's own objects: DeepSpeed decides whether to load them
        return None
    ranks: int | None = states.get("dp_world_size")
    return ranks
