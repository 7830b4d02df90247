"""What a rank does in a soak's trial: play a script, and write down what it holds on the way."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import pickle
import signal
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import curvadion
import shards
from curvadion import CurvaDion, WireMeter
from curvadion.integrations import fsdp
from curvadion.layout.flat_shard import declare_flat_shard
from soak_trials import Moment, Parameter, Trial

# Keys of the optimizer's state, and what the references call them.
STATE = {
    "momentum": "M",
    "Q": "Q",
    "anchor": "anchor",
    "residual": "residual",
    "exp_avg": "m",
    "exp_avg_sq": "v",
    "step": "t",
}


@dataclass
class Event:
    """After a step, or after ``synchronize()``.

    held: by parameter, the shards by the references' names, flat; "Q" is whole. bad: whether this
    rank gave a gradient that is not finite. sent: bytes of the step.
    """

    number: int
    synchronized: str | None
    held: dict[str, dict[str, Tensor]]
    report: Any = None
    bad: bool = False
    sent: float = 0.0


@dataclass
class Record:
    """replica, place: of this rank. indices: the flat ones of what it holds, by parameter."""

    replica: int
    place: int
    indices: dict[str, Tensor]
    events: list[Event]


BEFORE_A_FREEZE = "exact, before a freeze"


def play(rank: int, trial: Trial, mode: str, folder: str) -> Record:
    """mode: "straight", "disturbed", "killed" or "resumed"."""
    placed = place(rank, trial)
    optimizer = build(trial, placed)
    first = 0
    if mode == "resumed":
        first = last_checkpoint(trial, folder)
        if first:
            load(f"{folder}/{first}", trial.script[first].disturb, rank, placed, optimizer)
            freeze(trial, placed, first + 1)
    events = []
    for number in range(first, len(trial.script)):
        moment = trial.script[number]
        if number > first or not first:
            events += _before(trial, moment, number, placed, optimizer)
            if moment.disturb and mode == "disturbed":
                placed, optimizer = disturb(rank, trial, placed, optimizer, number, folder)
            elif moment.disturb and mode == "killed":
                save(f"{folder}/{number}", moment.disturb, rank, placed, optimizer)
        bad = give_gradients(rank, trial, placed, number)
        if mode == "killed" and trial.kill == (rank, number):
            os.kill(os.getpid(), signal.SIGKILL)
        with WireMeter() as meter:
            optimizer.step()
        now = held(placed, optimizer)
        events.append(Event(number, None, now, optimizer.report, bad, meter.total_sent))
    return Record(placed.replica, placed.place, placed.indices, events)


def _before(
    trial: Trial, moment: Moment, number: int, placed: Placed, optimizer: CurvaDion
) -> Iterator[Event]:
    """What comes before the step's gradients."""
    if moment.lr is not None:
        group, factor = moment.lr
        if group < len(optimizer.param_groups):
            optimizer.param_groups[group]["lr"] *= factor
    if moment.freeze:
        optimizer.synchronize(exact=True)
        yield _synchronized(number, BEFORE_A_FREEZE, placed, optimizer)
    freeze(trial, placed, number + 1)
    if moment.synchronize:
        if moment.synchronize == "default":
            optimizer.synchronize()
        else:
            cheap = {"exact": False} if moment.synchronize == "cheap" else {"exact": True}
            optimizer.synchronize(**cheap)
        default = "cheap" if trial.quantized else "exact"
        how = default if moment.synchronize == "default" else moment.synchronize
        yield _synchronized(number, how, placed, optimizer)


def _synchronized(number: int, how: str, placed: Placed, optimizer: CurvaDion) -> Event:
    return Event(number, how, held(placed, optimizer))


# ------------------------------------------------------------------------------- the model


class Bag(nn.Module):
    """Parameters by name."""

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        super().__init__()
        for name, parameter in parameters.items():
            self.register_parameter(name, parameter)


# A parameter's whole gradient -> what this rank holds of it.
Cut = Callable[[Tensor, Parameter], Tensor]


@dataclass
class Placed:
    """A trial's parameters as this rank holds them; group: the replicas."""

    model: nn.Module
    group: Any
    replica: int
    place: int
    indices: dict[str, Tensor]
    cut: Cut

    @property
    def X(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())


def place(rank: int, trial: Trial) -> Placed:
    """The trial's parameters, as they start, in its layout."""
    layout = trial.layout
    start = {p.name: weights(trial, p) for p in trial.parameters}
    if layout.kind == "plain":
        X = {name: nn.Parameter(x) for name, x in start.items()}
        indices = {name: torch.arange(x.numel()) for name, x in start.items()}
        group = dist.group.WORLD if layout.replicas is not None else None
        return Placed(Bag(X), group, rank, 0, indices, lambda whole, p: whole)
    names = ("replicate", "shard") if layout.replicas is not None else ("a", "b")
    mesh = init_device_mesh("cpu", layout.sizes, mesh_dim_names=names[: len(layout.sizes)])
    group, replica, number = None, 0, rank
    if layout.replicas is not None:
        group, replica = mesh.get_group("replicate"), mesh.get_local_rank("replicate")
        number = mesh.get_local_rank("shard")
    make = {"flat": _flat, "fully_shard": _fully_sharded, "dtensor": _distributed}[layout.kind]
    model, indices, cut = make(trial, start, mesh)
    return Placed(model, group, replica, number, indices, cut)


# A model, the flat indices of what this rank holds of its parameters, and how it is cut.
Made = tuple[nn.Module, dict[str, Tensor], Cut]


def _flat(trial: Trial, start: dict[str, Tensor], mesh: DeviceMesh) -> Made:
    number = mesh.get_local_rank("shard")
    ranges = {p.name: ((0, *p.cut)[number], p.cut[number]) for p in trial.parameters}

    def cut(whole: Tensor, p: Parameter) -> Tensor:
        return whole.flatten()[slice(*ranges[p.name])].clone()

    X = {p.name: nn.Parameter(cut(start[p.name], p)) for p in trial.parameters}
    for name, x in X.items():
        declare_flat_shard(x, start[name].shape, *ranges[name], mesh.get_group("shard"))
    return Bag(X), {name: torch.arange(*held) for name, held in ranges.items()}, cut


def _distributed(trial: Trial, start: dict[str, Tensor], mesh: DeviceMesh) -> Made:
    def cut(whole: Tensor, p: Parameter) -> Tensor:
        return shards.shard(whole, p.cut, mesh)

    whole = {p: torch.arange(start[p.name].numel()).view(p.shape) for p in trial.parameters}
    indices = {p.name: shards.piece(i, p.cut, mesh).flatten() for p, i in whole.items()}
    return Bag({p.name: nn.Parameter(cut(start[p.name], p)) for p in whole}), indices, cut


def _fully_sharded(trial: Trial, start: dict[str, Tensor], mesh: DeviceMesh) -> Made:
    _, indices, cut = _distributed(trial, start, mesh)
    model = fully_shard(Bag({name: nn.Parameter(x) for name, x in start.items()}), mesh=mesh)
    return fsdp.keep_gradients_local(model), indices, cut


def build(trial: Trial, placed: Placed) -> CurvaDion:
    kind, *numbers = trial.gate
    gate = getattr(curvadion, str(kind))(*numbers)
    kind, arguments = trial.sync
    # The reference rounds no residuals.
    exact = {"residual_dtype": "float32"} if trial.quantized else {}
    sync = getattr(curvadion, kind)(**arguments, **exact)
    by_algorithm: dict[str, list[Any]] = {}
    for p in trial.parameters:
        by_algorithm.setdefault(p.algorithm, []).append((p.name, placed.X[p.name]))
    groups = [{"params": X, "algorithm": algorithm} for algorithm, X in by_algorithm.items()]
    options: dict[str, Any] = {"direction": "low_rank", **trial.options}
    return CurvaDion(groups, replicas=placed.group, gate=gate, sync=sync, **options)


def freeze(trial: Trial, placed: Placed, steps: int) -> None:
    """Freeze what the first moments of the script leave frozen."""
    frozen = frozen_after(trial, steps)
    for name, x in placed.X.items():
        x.requires_grad_(name not in frozen)


def frozen_after(trial: Trial, steps: int) -> set[str]:
    frozen: set[str] = set()
    for moment in trial.script[:steps]:
        frozen |= {moment.freeze} if moment.freeze else set()
        frozen -= {moment.thaw} if moment.thaw else set()
    return frozen


# ------------------------------------------------------------------------------- gradients


def random(trial: Trial, *key: object, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(repr((trial.seed, *key)).encode()))
    return torch.randn(shape, generator=generator)


def weights(trial: Trial, p: Parameter) -> Tensor:
    return (0.3 * random(trial, "X", p.name, shape=p.shape)).to(getattr(torch, trial.dtype))


def gradient(trial: Trial, p: Parameter, number: int, replica: int) -> Tensor:
    """A replica's whole gradient, half of it common to all."""
    common = random(trial, "all", p.name, number, shape=p.shape)
    own = random(trial, "own", p.name, number, replica, shape=p.shape)
    return (common + own).to(getattr(torch, trial.dtype))


def give_gradients(rank: int, trial: Trial, placed: Placed, number: int) -> bool:
    """Set this step's; whether one is not finite here."""
    moment, bad = trial.script[number], False
    frozen = frozen_after(trial, number + 1)
    for p in trial.parameters:
        x = placed.X[p.name]
        x.grad = None
        missing = (placed.replica, p.name) in moment.missing
        if p.name in frozen or missing or (rank, p.name) in moment.shards_missing:
            continue
        x.grad = placed.cut(gradient(trial, p, number, placed.replica), p)
        if moment.bad is not None and moment.bad[:2] == (rank, p.name):
            shard = local(x.grad)
            if shard.numel():
                shard.view(-1)[-1] = moment.bad[2]
                bad = True
    return bad


# ------------------------------------------------------------------------------- what is held


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def held(placed: Placed, optimizer: CurvaDion) -> dict[str, dict[str, Tensor]]:
    found = {}
    for name, x in placed.X.items():
        state = optimizer.state.get(x, {})
        mine = {"X": local(x.detach()).flatten().clone()}
        for key, own in STATE.items():
            if key == "Q" and key in state:
                Q = state[key]
                mine[own] = (Q.full_tensor() if isinstance(Q, DTensor) else Q).clone()
            elif key in state:
                mine[own] = local(state[key]).flatten().clone()
        found[name] = mine
    return found


# ------------------------------------------------------------------------------- saves and loads


@contextlib.contextmanager
def unwarned() -> Iterator[None]:
    """Replicas that are apart may be saved here: each saves its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def disturb(
    rank: int, trial: Trial, placed: Placed, optimizer: CurvaDion, number: int, folder: str
) -> tuple[Placed, CurvaDion]:
    """The optimizer and its parameters, saved and loaded, or copied."""
    how = trial.script[number].disturb
    with unwarned():
        if how in ("deepcopy", "pickle"):
            twin = (
                copy.deepcopy(optimizer)
                if how == "deepcopy"
                else pickle.loads(pickle.dumps(optimizer))
            )
            names = [n for group in twin.param_groups for n in group["param_names"]]
            X = [x for group in twin.param_groups for x in group["params"]]
            bag = Bag(dict(zip(names, X, strict=True)))
            return Placed(bag, placed.group, rank, 0, placed.indices, placed.cut), twin
        if how == "state_dict":
            saved = copy.deepcopy(optimizer.state_dict())
            X = {name: x.detach().clone() for name, x in placed.X.items()}
            resumed = place(rank, trial)
            with torch.no_grad():
                for name, x in resumed.X.items():
                    local(x).copy_(local(X[name]))
            its_optimizer = build(trial, resumed)
            its_optimizer.load_state_dict(saved)
        else:
            where = f"{folder}/disturbed{number}"
            save(where, how, rank, placed, optimizer)
            resumed = place(rank, trial)
            its_optimizer = build(trial, resumed)
            load(where, how, rank, resumed, its_optimizer)
    freeze(trial, resumed, number + 1)
    return resumed, its_optimizer


def save(where: str, how: str, rank: int, placed: Placed, optimizer: CurvaDion) -> None:
    """how: "torch", each rank its own, or "dcp", one copy of each shard."""
    path = Path(where)
    path.mkdir(exist_ok=True)
    with unwarned():
        if how == "dcp":
            model_state, optimizer_state = get_state_dict(placed.model, optimizer)
            dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=where)
        else:
            X = {name: x.detach() for name, x in placed.X.items()}
            buffer = io.BytesIO()
            torch.save({"X": X, "optimizer": optimizer.state_dict()}, buffer)
            (path / f"{rank}.pt").write_bytes(buffer.getvalue())
    (path / f"{rank}.done").touch()


def load(where: str, how: str, rank: int, placed: Placed, optimizer: CurvaDion) -> None:
    path = Path(where)
    if how != "dcp":
        saved = torch.load(path / f"{rank}.pt", weights_only=True)
        with torch.no_grad():
            for name, x in placed.X.items():
                x.copy_(saved["X"][name])
        optimizer.load_state_dict(saved["optimizer"])
        return
    model_state, optimizer_state = get_state_dict(placed.model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=where)
    set_state_dict(
        placed.model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )


def last_checkpoint(trial: Trial, folder: str) -> int:
    """The last step whose checkpoint all ranks have written; 0 if there is none."""
    done = [
        number
        for number, moment in enumerate(trial.script)
        if moment.disturb
        and all(Path(f"{folder}/{number}/{rank}.done").exists() for rank in range(trial.world))
    ]
    return max(done, default=0)
