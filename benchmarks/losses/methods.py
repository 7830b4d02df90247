"""The ways to train replicas that train_processes.py compares.

A method is built from a model, the ranks that hold its replicas, a learning rate and its own
settings. With AdamW the learning rate applies to all parameters; with Dion to matrices, and the
other parameters take the share ``elementwise`` of it. All other settings are the example's
defaults.
"""

import sys
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import curvadion
from benchmarks.common.sent_elements import POWERSGD_DENSE_STEPS
from benchmarks.losses.diloco import DiLoCo
from curvadion import Dion, Replicated
from curvadion.comm.collectives import mean_
from curvadion.integrations.ddp import keep_gradients_local
from gpt import GPT
from train_gpt import Config, build_optimizer

PUBLISHED_THRESHOLD = 0.1
# Learning rate of AdamW parameters beside Dion, as a share of the matrices'.
ELEMENTWISE_SHARE = 0.5
MUONS_REST = 0.15  # the same beside torch's Muon
NEVER = sys.maxsize  # a max_local_steps that is never reached


class Method:
    """Trains one replica; all replicas take every step.

    Attributes:
        module: the module to run forward and backward through before a step.
        optimizer: the optimizer whose learning rates follow the schedule.
        open_steps: number of steps so far at which replicas synchronised.
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer):
        self.module, self.optimizer = module, optimizer
        self.open_steps = 0

    def step(self) -> None:
        """Take a step with the current gradients; collective."""
        self.optimizer.step()
        self.open_steps += 1

    def settle(self) -> None:
        """Wait for pending exchanges."""

    def finish(self) -> None:
        """Synchronise replicas after the last step, if the method ever does; collective."""


class Gated(Method):
    """A CurvaDion, Dion or Replicated, on replicas whose gradients stay local."""

    optimizer: Dion | Replicated

    def __init__(self, model: GPT, replicas: dist.ProcessGroup, optimizer: Optimizer):
        module = DistributedDataParallel(model, process_group=replicas)
        super().__init__(keep_gradients_local(module), optimizer)
        self.model, self.replicas = model, replicas

    def step(self) -> None:
        self.optimizer.step()
        report = self.optimizer.report
        self.open_steps += report is not None and report.gate_open

    def settle(self) -> None:
        self.optimizer.sync.settle()

    @torch.no_grad()
    def finish(self) -> None:
        sync = self.optimizer.sync
        if sync.sends_codes:
            self.optimizer.synchronize(exact=False)
        elif sync.ends_drift and self.optimizer.progress.local_steps:
            mean_([X.detach() for X in self.model.parameters()], self.replicas)


def _gated(model: GPT, replicas: dist.ProcessGroup, config: Config) -> Gated:
    return Gated(model, replicas, build_optimizer(config, model, replicas))


class LocalThenOuter(Method):
    """DiLoCo around an optimizer of one replica."""

    def __init__(self, model: GPT, replicas: dist.ProcessGroup, inner: Optimizer, **outer: Any):
        super().__init__(model, inner)
        self.diloco = DiLoCo(model.parameters(), self.optimizer, replicas, **outer)

    def step(self) -> None:
        self.open_steps += self.diloco.step()

    def finish(self) -> None:
        if self.diloco.local_steps:
            self.diloco.synchronize()


def adamw(
    model: GPT, replicas: dist.ProcessGroup, lr: float, *, bucket_cap_mb: int | None = None
) -> Method:
    """AdamW on gradients that DDP averages at every step: the dense baseline.

    Args:
        model: that this replica trains.
        replicas: their group.
        lr: the learning rate.
        bucket_cap_mb: of DDP, in MiB; None: its default.
    """
    module = DistributedDataParallel(model, process_group=replicas, bucket_cap_mb=bucket_cap_mb)
    return Method(module, build_optimizer(Config(optimizer="adamw", lr=lr), model, None))


def powersgd(model: GPT, replicas: dist.ProcessGroup, lr: float, *, rank: int) -> Method:
    """AdamW on gradients that PyTorch's PowerSGD hook compresses, with error feedback.

    Args:
        model: that this replica trains.
        replicas: their group.
        lr: the learning rate.
        rank: of the approximation of each gradient.
    """
    # The hook starts a bucket's second collective when its first is done. With several buckets,
    # ranks may start these in different orders and deadlock.
    one_bucket = 1 + sum(p.nbytes for p in model.parameters()) // 2**20
    method = adamw(model, replicas, lr, bucket_cap_mb=one_bucket)
    state = PowerSGDState(
        replicas,
        matrix_approximation_rank=rank,
        start_powerSGD_iter=POWERSGD_DENSE_STEPS,
        orthogonalization_epsilon=1e-8,
    )
    assert isinstance(method.module, DistributedDataParallel)
    method.module.register_comm_hook(state, powerSGD_hook)
    return method


def dion(model: GPT, replicas: dist.ProcessGroup, lr: float, **settings: Any) -> Method:
    """Dion, synchronised at every step; settings: ``rank_fraction``."""
    return _gated(model, replicas, _dion_config(lr, optimizer="dion", **settings))


def dion_nesterov(model: GPT, replicas: dist.ProcessGroup, lr: float, **settings: Any) -> Method:
    """Dion with a look-ahead, synchronised at every step; settings: ``rank_fraction``."""
    return dion(model, replicas, lr, look_ahead=1.0, **settings)


def muon(model: GPT, replicas: dist.ProcessGroup, lr: float, **settings: Any) -> Method:
    """Muon on gradients that replicas average at every step; Nesterov's look-ahead by default."""
    return dion(model, replicas, lr, **{"direction": "polar", "look_ahead": 1 / 0.95, **settings})


def _dion_config(lr: float, *, elementwise: float = ELEMENTWISE_SHARE, **settings: Any) -> Config:
    rates: dict[str, Any] = {
        f"{kind}_lr": elementwise * lr for kind in ("embedding", "head", "vector")
    }
    return Config(lr=lr, **rates, **settings)


def averaging(
    model: GPT, replicas: dist.ProcessGroup, lr: float, *, period: int, **settings: Any
) -> Method:
    """Local Dion steps of a quarter of the rank; every ``period``-th is synchronised.

    Before that step, weights and AdamW's moments are averaged exactly.

    Args:
        model: that this replica trains.
        replicas: their group.
        lr: the learning rate of matrices.
        period: steps between synchronisations.
        settings: others of the optimizer.
    """
    settings |= {"period": period, "max_local_steps": period}
    config = _dion_config(lr, optimizer="curvadion", **settings)
    return _gated(model, replicas, config)


def published(
    model: GPT,
    replicas: dist.ProcessGroup,
    lr: float,
    *,
    threshold: float = PUBLISHED_THRESHOLD,
    local_step: Literal["gradient", "dion"] = "gradient",
    **settings: Any,
) -> Method:
    """CurvaDion as published: RMMC gate, local gradient steps, weights never averaged.

    Args:
        model: that this replica trains.
        replicas: their group.
        lr: the learning rate of matrices.
        threshold: of the RMMC, above which replicas synchronise.
        local_step: between openings.
        settings: others of the optimizer.
    """
    config = _dion_config(
        lr,
        optimizer="curvadion",
        threshold=threshold,
        local_step=local_step,
        sync="low_rank_unaveraged",
        max_local_steps=NEVER,
        **settings,
    )
    return _gated(model, replicas, config)


def authors(model: GPT, replicas: dist.ProcessGroup, lr: float, **settings: Any) -> Method:
    """CurvaDion as in its authors' code: as published, but with local Dion steps."""
    return published(model, replicas, lr, local_step="dion", **settings)


def ours(
    model: GPT,
    replicas: dist.ProcessGroup,
    lr: float,
    *,
    wire_budget: float,
    bits: int | None = None,
    parts: int = 1,
    momenta: bool = True,
    polar: bool = True,
    spectra: float = 0.8,
    direction: Literal["low_rank", "polar"] = "polar",
    delay: int = 0,
    **settings: Any,
) -> Method:
    """CurvaDion under a budget of bytes.

    The rank does not change what is sent, so it is full. Records call arguments of QuantizedAverage
    by the shorter names below.

    Args:
        model: that this replica trains.
        replicas: their group.
        lr: the learning rate of matrices.
        wire_budget: share of DDP's bytes.
        bits: of a code, on both ways; None: the default of the budget.
        parts: its ``fragments``.
        momenta: its ``align_momentum``.
        polar: its ``polar_correction``.
        spectra: its ``spectrum_decay``.
        direction: of a local step.
        delay: its ``delay``.
        settings: others of the optimizer.
    """
    config = _dion_config(
        lr,
        optimizer="curvadion",
        wire_budget=wire_budget,
        bits=() if bits is None else (bits,),
        fragments=parts,
        delay=delay,
        align_momentum=momenta,
        polar_correction=polar,
        spectrum_decay=spectra,
        direction=direction,
        max_local_steps=NEVER,
        **settings,
    )
    return _gated(model, replicas, config)


def ours_low_rank(model: GPT, replicas: dist.ProcessGroup, lr: float, **settings: Any) -> Method:
    """Like :func:`ours`, with the same settings, but full-rank power iterations as directions."""
    return ours(model, replicas, lr, direction="low_rank", **settings)


def diloco_adamw(model: GPT, replicas: dist.ProcessGroup, lr: float, **outer: Any) -> Method:
    """DiLoCo with AdamW inside; settings of :class:`DiLoCo`."""
    inner = build_optimizer(Config(optimizer="adamw", lr=lr), model, None)
    return LocalThenOuter(model, replicas, inner, **outer)


def diloco_dion(
    model: GPT,
    replicas: dist.ProcessGroup,
    lr: float,
    *,
    elementwise: float = ELEMENTWISE_SHARE,
    **outer: Any,
) -> Method:
    """DiLoCo with full-rank local Dion inside.

    Args:
        model: that this replica trains.
        replicas: their group.
        lr: the learning rate of matrices.
        elementwise: share of that rate for all other parameters.
        outer: settings of :class:`DiLoCo`.
    """
    config = _dion_config(lr, optimizer="dion", rank_fraction=1.0, elementwise=elementwise)
    return LocalThenOuter(model, replicas, build_optimizer(config, model, None), **outer)


def averaged_weights(
    model: GPT, replicas: dist.ProcessGroup, lr: float, *, period: int, **settings: Any
) -> Method:
    """Full-rank Dion inside; weights alone are averaged exactly, every ``period`` steps.

    This is DiLoCo whose outer step goes to the mean.

    Args:
        model: that this replica trains.
        replicas: their group.
        lr: the learning rate of matrices.
        period: steps between averages.
        settings: others of :func:`diloco_dion`.
    """
    outer = {"period": period, "outer_lr": 1.0, "outer_momentum": 0.0}
    return diloco_dion(model, replicas, lr, **outer, **settings)


class Together(Optimizer):
    """Several optimizers as one, for loops that expect one."""

    def __init__(self, *each: Optimizer) -> None:
        self.each = each
        super().__init__([group for one in each for group in one.param_groups], {})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for one in self.each:
            one.step()


def _torch(model: GPT, lr: float, *, matrices: bool) -> list[Optimizer]:
    """Return torch's AdamW, or its Muon for matrices and AdamW for the rest."""
    if not matrices:
        return [build_optimizer(Config(optimizer="adamw", lr=lr), model, None)]
    groups = curvadion.param_groups(model)
    of_muon = [(g["algorithm"] == "dion", [x for _, x in g["params"]]) for g in groups]
    weights, others = ([x for is_muon, xs in of_muon if is_muon == w for x in xs] for w in (1, 0))
    adamw = torch.optim.AdamW(others, lr=MUONS_REST * lr, betas=(0.9, 0.95), weight_decay=0.0)
    return [torch.optim.Muon(weights, lr=lr, weight_decay=0.01), adamw]


def torch_muon(model: GPT, replicas: dist.ProcessGroup, lr: float) -> Method:
    """torch's Muon and AdamW, on gradients that DDP averages at every step."""
    module = DistributedDataParallel(model, process_group=replicas)
    return Method(module, Together(*_torch(model, lr, matrices=True)))


def replicated_adamw(
    model: GPT, replicas: dist.ProcessGroup, lr: float, *, matrices: bool = False, **how: Any
) -> Method:
    """``Replicated`` around torch's AdamW.

    Args:
        model: that this replica trains.
        replicas: their group.
        lr: the learning rate.
        matrices: whether these take torch's Muon instead.
        how: arguments of ``Replicated``.
    """
    inner = _torch(model, lr, matrices=matrices)
    optimizer = curvadion.Replicated(inner, replicas=replicas, max_local_steps=NEVER, **how)
    return Gated(model, replicas, optimizer)


def replicated_muon(model: GPT, replicas: dist.ProcessGroup, lr: float, **how: Any) -> Method:
    """``Replicated`` around torch's Muon and AdamW; how: its arguments."""
    return replicated_adamw(model, replicas, lr, matrices=True, **how)


def averaged_adamw(
    model: GPT, replicas: dist.ProcessGroup, lr: float, *, period: int, matrices: bool = False
) -> Method:
    """torch's AdamW on each replica; weights are averaged exactly every ``period`` steps.

    Args:
        model: that this replica trains.
        replicas: their group.
        lr: the learning rate.
        period: steps between averages.
        matrices: whether these take torch's Muon instead.
    """
    inner = Together(*_torch(model, lr, matrices=matrices))
    outer = {"period": period, "outer_lr": 1.0, "outer_momentum": 0.0}
    return LocalThenOuter(model, replicas, inner, **outer)


def averaged_muon(model: GPT, replicas: dist.ProcessGroup, lr: float, *, period: int) -> Method:
    """torch's Muon and AdamW on each replica; weights are averaged exactly every ``period`` steps.

    Args:
        model: that this replica trains.
        replicas: their group.
        lr: the learning rate of matrices.
        period: steps between averages.
    """
    return averaged_adamw(model, replicas, lr, period=period, matrices=True)


def coded_gradients(
    model: GPT, replicas: dist.ProcessGroup, lr: float, *, bits: int = 3, **settings: Any
) -> Method:
    """CurvaDion with gradients in codes at every step.

    Args:
        model: that this replica trains.
        replicas: their group.
        lr: the learning rate of matrices.
        bits: of a code.
        settings: others of the optimizer.
    """
    config = _dion_config(
        lr, optimizer="curvadion", sync="coded_gradients", period=1, bits=(bits,), **settings
    )
    return _gated(model, replicas, config)


CODED = ("ours", "ours_low_rank")  # average in codes
POLAR = ("muon", "ours", "coded_gradients")  # take polar factors as directions
LOOK_AHEAD = ("dion", "muon", "coded_gradients", *CODED)  # have a look-ahead to set
METHODS: dict[str, Callable[..., Method]] = {
    "adamw": adamw,
    "dion": dion,
    "dion_nesterov": dion_nesterov,
    "muon": muon,
    "powersgd": powersgd,
    "diloco_adamw": diloco_adamw,
    "diloco_dion": diloco_dion,
    "averaged_weights": averaged_weights,
    "averaging": averaging,
    "published": published,
    "authors": authors,
    "ours": ours,
    "ours_low_rank": ours_low_rank,
    "coded_gradients": coded_gradients,
    "torch_muon": torch_muon,
    "replicated_adamw": replicated_adamw,
    "replicated_muon": replicated_muon,
    "averaged_adamw": averaged_adamw,
    "averaged_muon": averaged_muon,
}
