"""Tensor parallelism, alone and under FSDP and replicas, trains to the weights of one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.torch_version import TorchVersion

import distributed
import formulas
from curvadion import CurvaDion, Dion, WireMeter
from reference import relative_error
from tensor_parallel_training import LAYOUTS, setup
from tolerance import Rounding, assert_close, assert_within
from training import (
    OPEN_STEPS,
    STEPS,
    assert_trains_like_one_process,
    assert_trains_like_whole_replicas,
)

pytestmark = pytest.mark.numeric


# The others open the gates of a schedule below.
@pytest.mark.parametrize("layout", ["dp x tp", "fsdp x tp"])
def test_open_gate_trains_to_the_weights_of_one_process(layout):
    replicas, shards, copies = LAYOUTS[layout]
    assert_trains_like_one_process(setup, layout, replicas * shards, copies)


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
        ("dp x tp", "gradient", None, False, OPEN_STEPS, STEPS),
        ("dp x tp", "dion", None, True, OPEN_STEPS, STEPS),
        ("fsdp x tp", "dion", 0.5, False, OPEN_STEPS, STEPS),
        ("hsdp x tp", "dion", None, False, (1, 3), 4),
    ],
)
def test_replicas_drift_and_meet_as_whole_ones_do(
    layout, local_step, clip, sparing, schedule, steps
):
    """Clipped or not, and with experts that some replicas or nobody uses."""
    options = (("local_step", local_step), ("local_lr", 0.1), ("nesterov", 1.5))
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
# Placements given and wanted, and the collectives of any number of gradients.
SETTLED = [
    ((R, P), (R, R), 1),
    ((P, P), (R, R), 1),
    ((S, P), (S, R), 1),
    ((P, S), (R, S), 1),
    ((R, R), (R, S), 0),
    ((P, R), (S, R), None),
    ((R, S), (R, R), None),
]


def settle_all(rank):
    mesh = init_device_mesh("cpu", (2, 2))
    return [
        [settle(mesh, given, wanted, count) for count in ((1, 7) if collectives else (1,))]
        for given, wanted, collectives in SETTLED
    ]


def settle(mesh, given, wanted, count):
    """Errors of ``count`` gradients after a step that leaves the weights alone, and its calls."""
    full = [torch.full((6, 3), i + 1.0) + torch.arange(18.0).view(6, 3) for i in range(count)]
    X = [nn.Parameter(distribute_tensor(torch.ones(6, 3), mesh, wanted)) for _ in full]
    optimizer = Dion([{"params": X, "algorithm": "adamw", "lr": 0.0}])
    for x, gradient in zip(X, full, strict=True):
        x.grad = summands(gradient, given, mesh)
    with WireMeter() as meter:
        optimizer.step()
    assert all(x.grad.placements == tuple(wanted) for x in X)
    errors = [relative_error(x.grad.full_tensor(), g) for x, g in zip(X, full, strict=True)]
    return max(errors), meter.total_calls


def test_gradients_are_brought_to_their_parameters_placements():
    for of_rank in distributed.run(4, settle_all):
        for (given, wanted, collectives), settled in zip(SETTLED, of_rank, strict=True):
            gate = 1 if S in wanted else 0
            for error, calls in settled:
                assert_within(error, Rounding(torch.float32, terms=4), what=(given, wanted))
                assert collectives is None or calls == collectives + gate, (given, wanted)


def native_data_parallel(rank):
    """Weights and momentum after a batch cut over the replicas as a DTensor, and bytes a step."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    X = nn.Parameter(distribute_tensor(torch.randn(9, 6), mesh, [Replicate()]))
    optimizer = Dion([X], replicas=mesh, rank_fraction=0.5)
    for step in range(5):
        x = distribute_tensor(inputs(step), mesh, [Shard(0)])
        optimizer.zero_grad()
        (x @ X.mT).tanh().square().mean().full_tensor().backward()
        with WireMeter() as meter:
            optimizer.step()
    momentum = optimizer.state[X]["momentum"]
    return X.detach().to_local(), momentum.to_local(), meter.total_bytes


def inputs(step):
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(step))


def test_summands_on_the_replicas_are_their_own_gradients():
    torch.manual_seed(0)
    X = nn.Parameter(torch.randn(9, 6))
    optimizer = Dion([X], rank_fraction=0.5)
    for step in range(5):
        optimizer.zero_grad()
        (inputs(step) @ X.mT).tanh().square().mean().backward()
        optimizer.step()
    low_rank = formulas.open_step([formulas.held((9, 6), 3, replicas=2)])
    weights, momenta, sent = zip(*distributed.run(2, native_data_parallel), strict=True)
    rounding = Rounding(torch.float32, terms=9, condition=10, steps=5)  # tanh and its square
    for actual in weights:
        assert_close(actual, X, rounding)
    # The update does not see the gradient's scale; the momenta do, and their mean is the whole's.
    mean = (momenta[0] + momenta[1]) / 2
    assert_close(mean, optimizer.state[X]["momentum"], rounding)
    assert sent == (low_rank, low_rank)


# -------------------------------------------------------------------- what a step sends


RANK = 3


def step_of_a_stack(rank, shapes):
    """Bytes and the largest message of a tensor-parallel step; then the formulas'."""
    mesh = init_device_mesh("cpu", (2,))
    model = nn.ModuleList([nn.Linear(n, m, bias=False) for m, n in shapes])
    styles = [ColwiseParallel(), RowwiseParallel(input_layouts=Replicate())]
    plan = {str(i): styles[i % 2] for i in range(len(shapes))}
    parallelize_module(model, mesh, plan)
    optimizer = CurvaDion(
        model.parameters(), threshold=0.0, rank_fraction=1e-3, rank_multiple_of=RANK
    )
    for step in range(2):
        optimizer.zero_grad()
        torch.manual_seed(step)
        sum(layer(torch.randn(4, layer.in_features)).square().mean() for layer in model).backward()
        with WireMeter() as meter:
            optimizer.step()
    everything = [
        formulas.held(shape, RANK, **{("m_cuts", "n_cuts")[i % 2]: [("tp", 2, rank)]})
        for i, shape in enumerate(shapes)
    ]
    return (
        (meter.total_bytes, meter.largest),
        (
            formulas.open_step(everything, reads_momentum=True),
            formulas.largest_message(everything),
        ),
    )


def test_only_low_rank_factors_are_sent():
    shapes = [(50, 30), (50, 30), (30, 50), (30, 50), (40, 40), (42, 30)]
    for actual, expected in distributed.run(2, step_of_a_stack, shapes):
        assert actual == expected
        assert actual[1] < min(4 * m * n for m, n in shapes)
