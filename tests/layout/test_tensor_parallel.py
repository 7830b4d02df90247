"""Tensor parallelism, alone and under FSDP and replicas, trains to the weights of one process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.torch_version import TorchVersion

from curvadion import Dion
from curvadion.layout.placements import place_gradients
from support.references.tolerance import Rounding, assert_close
from support.runs import distributed
from support.runs.tensor_parallel_training import LAYOUTS, setup
from support.runs.training import OPEN_STEPS, STEPS, assert_trains_like_whole_replicas

pytestmark = pytest.mark.numeric


@pytest.mark.parametrize(
    ("layout", "local_step", "clip", "sparing", "schedule", "steps"),
    [
        pytest.param(
            *("tp", "gradient", 0.5, False, OPEN_STEPS, STEPS),
            marks=pytest.mark.skipif(
                TorchVersion(torch.__version__) < (2, 13),
                reason="clip_grad_norm_ of this torch scales partial gradients twice",
            ),
        ),
        ("fsdp x tp", "dion", 0.5, False, OPEN_STEPS, STEPS),
        ("hsdp x tp", "dion", None, True, (1, 3), 4),
    ],
)
def test_replicas_drift_and_meet_as_whole_ones_do(
    layout, local_step, clip, sparing, schedule, steps
):
    """Clipped or not, and with experts that some replicas or nobody uses."""
    options = (("local_step", local_step), ("local_lr", 0.1), ("look_ahead", 1.5))
    how = {"schedule": schedule, "steps": steps, "clip": clip, "sparing": sparing}
    assert_trains_like_whole_replicas(setup, layout, *LAYOUTS[layout], options=options, **how)


# -------------------------------------------------------------------- gradients of other placements


def summands(full, placements, mesh):
    """A DTensor of the full tensor's values, as summands where placements are Partial."""
    share = 1.0
    for axis, placement in enumerate(placements):
        if isinstance(placement, Partial):
            share *= (0.25, 0.75)[mesh.get_local_rank(axis)]
    whole = [Replicate() if isinstance(p, Partial) else p for p in placements]
    piece = distribute_tensor(full, mesh, whole).to_local() * share
    return DTensor.from_local(
        piece, mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
    )


P, R, S = Partial(), Replicate(), Shard(0)
# Placements given and wanted.
SETTLED = [
    ((R, P), (R, R)),
    ((P, P), (R, R)),
    ((S, P), (S, R)),
    ((P, S), (R, S)),
    ((R, R), (R, S)),
    ((P, R), (S, R)),
    ((R, S), (R, R)),
]


@distributed.on_ranks(4)
def test_gradients_are_brought_to_their_parameters_placements(rank):
    """Of two parameters each, by a step that leaves the weights alone."""
    mesh = init_device_mesh("cpu", (2, 2))
    for given, wanted in SETTLED:
        full = [torch.full((6, 3), i + 1.0) + torch.arange(18.0).view(6, 3) for i in range(2)]
        X = [nn.Parameter(distribute_tensor(torch.ones(6, 3), mesh, wanted)) for _ in full]
        optimizer = Dion([{"params": X, "algorithm": "adamw", "lr": 0.0}])
        for x, gradient in zip(X, full, strict=True):
            x.grad = summands(gradient, given, mesh)
        optimizer.step()
        for x, gradient in zip(X, full, strict=True):
            assert x.grad.placements == tuple(wanted)
            rounding = Rounding(torch.float32, terms=4)
            assert_close(x.grad.full_tensor(), gradient, rounding, what=(given, wanted))


def inputs(step):
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(step))


@distributed.on_ranks(2)
def test_partial_sums_on_the_replicas_are_their_own_gradients(rank):
    """Of a batch that is a DTensor, sharded over replicas."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    start = torch.randn(9, 6)
    X, whole = nn.Parameter(distribute_tensor(start, mesh, [R])), nn.Parameter(start.clone())
    optimizer = Dion([X], replicas=mesh, rank_fraction=0.5)
    alone = Dion([whole], rank_fraction=0.5, replicas="single")
    for step in range(3):
        for each in (optimizer, alone):
            each.zero_grad()
        x = distribute_tensor(inputs(step), mesh, [S])
        (x @ X.mT).tanh().square().mean().full_tensor().backward()
        (inputs(step) @ whole.mT).tanh().square().mean().backward()
        for each in (optimizer, alone):
            each.step()
    rounding = Rounding(torch.float32, terms=9, condition=10, steps=3)  # tanh and its square
    assert_close(X.to_local(), whole, rounding)
    # The update does not see the gradient's scale; the momenta do, and their mean is the whole's.
    momenta = distributed.gathered(optimizer.state[X]["momentum"].to_local())
    assert_close((momenta[0] + momenta[1]) / 2, alone.state[whole]["momentum"], rounding)
    X.grad = DTensor.from_local(start + rank, mesh, [Partial("max")], run_check=False)
    place_gradients([X], dist.group.WORLD)  # which are no summands
    assert X.grad.to_local().equal(start + 1)
