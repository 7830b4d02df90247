"""Contenders of the step benchmark: the optimizers of this package, torch and other libraries.

Other libraries take part if they can be imported: ``dion`` is microsoft/dion, and
``emerging_optimizers`` is NVIDIA's Emerging-Optimizers. Each keeps its own defaults, and on a GPU
uses its own Triton kernels.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from traceback import extract_tb
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import AdamW, Optimizer

from benchmarks.common.timing import Contenders
from curvadion import RMMC, CurvaDion, Dion, FixedPeriod, QuantizedAverage, ops
from curvadion.layout.dtensor import local
from curvadion.update.elementwise import Elementwise, elementwise_step

OPENING = "opening"
MICROSOFTS = ("Muon", "NorMuon", "Dion2", "NorDion2")
# Directions that begin with a polar factor, by their names in records.
POLAR = {"Dion, polar": "polar", "NorMuon": "normuon", "Dion2": "dion2", "NorDion2": "nordion2"}
ALONE = "fused operations alone"

Weights = list[torch.nn.Parameter]
Make = Callable[[], Any]


@dataclass(frozen=True)
class Model:
    """Parameters with gradients.

    Attributes:
        matrices: the parameters that take a direction.
        others: the parameters that take AdamW.
        mesh: the ranks over which rows are sharded; None if parameters are whole.
    """

    matrices: Weights
    others: Weights
    mesh: DeviceMesh | None = None

    @property
    def both(self) -> Weights:
        """All parameters."""
        return [*self.matrices, *self.others]

    @property
    def replicas(self) -> dist.ProcessGroup | None:
        """The ranks that hold whole parameters, if there are several."""
        return dist.group.WORLD if dist.is_initialized() and self.mesh is None else None

    @property
    def on_a_gpu(self) -> bool:
        """Whether the parameters are on a GPU."""
        return self.matrices[0].is_cuda

    def groups(self, matrices: dict[str, Any], others: dict[str, Any]) -> list[dict[str, Any]]:
        """Parameter groups with these options."""
        both = (self.matrices, matrices), (self.others, others)
        return [{"params": parameters, **options} for parameters, options in both if parameters]


class Several:
    """Optimizers that step together."""

    def __init__(self, *optimizers: Optimizer) -> None:
        self.optimizers = optimizers

    def step(self) -> None:
        """Take a step with each."""
        for optimizer in self.optimizers:
            optimizer.step()


def _groups(model: Model) -> list[dict[str, Any]]:
    return model.groups({"algorithm": "dion", "lr": 1e-3}, {"algorithm": "adamw", "lr": 1e-4})


def _dion(model: Model, **options: Any) -> Dion:
    return Dion(_groups(model), replicas=model.replicas, **options)


def _curvadion(model: Model, **options: Any) -> CurvaDion:
    return CurvaDion(_groups(model), max_local_steps=None, replicas=model.replicas, **options)


def _local(model: Model, **options: Any) -> CurvaDion:
    """Return an optimizer that takes local steps, with the settings of averages in codes."""
    gate = FixedPeriod(options.pop("period", 2**30))
    return _curvadion(model, gate=gate, sync=QuantizedAverage(), look_ahead=4.0, **options)


def _beside_adamw(muon: Optimizer, model: Model) -> Several:
    """Pair a Muon that takes only matrices with AdamW for the others."""
    return Several(muon, *([AdamW(model.others)] if model.others else []))


def _microsoft_dion(model: Model) -> Any:
    # Its outer shards are FSDP's rows; its inner shards are those of tensor parallelism.
    groups = model.groups({"rank_fraction": 0.25}, {"algorithm": "adamw"})
    return importlib.import_module("dion").Dion(groups, outer_shard_mesh=model.mesh)


def _microsoft(kind: str, model: Model) -> Any:
    """Microsoft's Muon, NorMuon, Dion2 or NorDion2."""
    return getattr(importlib.import_module("dion"), kind)(
        model.groups({}, {"algorithm": "adamw"}),
        distributed_mesh=model.mesh,
        use_triton=model.on_a_gpu,
    )


def _nvidia_muon(model: Model) -> Several:
    # Its default float32 precision, "medium", iterates in bfloat16, as the others do.
    library = importlib.import_module("emerging_optimizers.orthogonalized_optimizers")
    return _beside_adamw(library.Muon(model.matrices, use_syrk=model.on_a_gpu), model)


def _ours(model: Model) -> dict[str, Make]:
    # An opening comes first, while replicas still hold the same weights.
    opening = {OPENING: lambda: _local(model, period=1)} if model.replicas else {}
    return {
        **opening,
        "closed gate, gradient step": lambda: _curvadion(
            model, gate=RMMC(1e30), local_step="gradient"
        ),
        "closed gate, Dion step": lambda: _curvadion(model, gate=RMMC(1e30), local_step="dion"),
        "open gate": lambda: _curvadion(model, gate=RMMC(0.0)),
        "Dion, low rank": lambda: _dion(model),
        "Dion, polar": lambda: _dion(model, direction="polar"),
        "Dion, polar, states in 8 bits": lambda: _dion(
            model, direction="polar", state_dtype="int8"
        ),
        **{
            f"{name}, bfloat16 sent": partial(
                _dion, model, direction=direction, exchange_dtype="bfloat16"
            )
            for name, direction in POLAR.items()
        },
        "local step, polar": lambda: _local(model),
        "local step, power iteration of full rank": lambda: _local(model, direction="low_rank"),
    }


def _torch(model: Model) -> dict[str, Make]:
    return {
        "AdamW, fused": lambda: AdamW(model.both, fused=True),
        "AdamW, foreach": lambda: AdamW(model.both, foreach=True),
        "Muon and AdamW": lambda: _beside_adamw(torch.optim.Muon(model.matrices), model),
    }


def _peers(model: Model) -> dict[str, Make]:
    return {
        "NVIDIA's Muon and AdamW": lambda: _nvidia_muon(model),
        **{f"Microsoft's {kind}": partial(_microsoft, kind, model) for kind in MICROSOFTS},
        "Microsoft's Dion": lambda: _microsoft_dion(model),
    }


# Names of all contenders; only replicas have openings, and the last one is always measured.
_NONE = Model([], [])
NAMES = list(dict.fromkeys([OPENING, *_ours(_NONE), *_torch(_NONE), *_peers(_NONE), ALONE]))


def contenders(
    model: Model, chosen: Sequence[str], *, peers: bool, before: Callable[[], object]
) -> tuple[Contenders, dict[str, float], dict[str, str]]:
    """Build the contenders.

    Args:
        model: the parameters to step.
        chosen: names; empty for all.
        peers: whether other libraries take part if no names are given.
        before: called before each contender's first step.

    Returns:
        By name: the calls, the bytes of state on this rank, and the reasons for leaving out
        contenders.
    """
    others = _peers(model) if peers or chosen else {}
    calls: Contenders = {}
    states, absent = {}, {}
    for name, make in {**_ours(model), **_torch(model), **others}.items():
        if chosen and name not in chosen:
            continue
        before()
        try:
            optimizer = make()
            optimizer.step()  # creates the state and compiles
        except Exception as error:
            if name not in others:
                raise
            # The same on all ranks: a library is missing, or refuses, on all of them or on none.
            absent[name] = _reason(error)
        else:
            calls[name], states[name] = optimizer.step, _state_bytes(optimizer)
    before()
    calls[ALONE] = _alone(model)
    return calls, states, absent


def _reason(error: Exception) -> str:
    """One line; a bare assertion says at least where it stands."""
    said = str(error).splitlines() or [f"in {extract_tb(error.__traceback__)[-1].name}"]
    return f"{type(error).__name__}: {said[0]}"


def _state_bytes(optimizer: Any) -> float:
    each = optimizer.optimizers if isinstance(optimizer, Several) else [optimizer]
    return sum(
        local(value).nbytes
        for one in each
        for state in one.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    )


def _alone(model: Model) -> Callable[[], object]:
    """The operations of a closed step with the gradient local step, and nothing around them."""
    with torch.no_grad():
        matrices, others = ([local(x) for x in some] for some in (model.matrices, model.others))
    gradients, E_grad = (
        [local(x.grad) for x in some if x.grad is not None]
        for some in (model.matrices, model.others)
    )
    X, M, G = matrices, [torch.zeros_like(x) for x in matrices], gradients
    ones, step, decay = ([n] * len(X) for n in (1.0, 1e-3, 1 - 1e-5))
    moments = [
        {
            "step": x.new_zeros((), dtype=torch.float32),
            "exp_avg": torch.zeros_like(x),
            "exp_avg_sq": torch.zeros_like(x),
        }
        for x in others
    ]
    options = {"algorithm": "adamw", "lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8}
    options["weight_decay"] = 0.01

    @torch.no_grad()
    def call() -> None:
        ops.momentum_norms(M, G, ones)
        if others:
            ops.norms(E_grad)
        ops.local_step_(X, G, step, decay, M, ones, moves=None)
        if others:
            elementwise_step(
                [
                    Elementwise(x, g, state, {}, options)
                    for x, g, state in zip(others, E_grad, moments, strict=True)
                ]
            )

    return call
