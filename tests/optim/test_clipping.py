"""Clipping takes one norm over all replicas and their shards, and scales all by one factor."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate

import curvadion
import distributed
import fsdp_training
import tensor_parallel_training
import transformer
from curvadion import AlwaysOpen, CurvaDion, Dion, WireMeter
from curvadion.layout.flat_shard import declare_flat_shard
from shards import shard
from tolerance import Rounding, assert_close, assert_within

pytestmark = pytest.mark.numeric
NORM = Rounding(torch.float32, terms=256)  # of gradients, each of a backward pass in float32

SETUPS = {"fsdp": fsdp_training.setup, "tp": tensor_parallel_training.setup}
# Of each layout: whose setup, and replicas, shards of each, copies of each shard's batch.
LAYOUTS = {
    **{name: ("fsdp", *sizes, 1) for name, sizes in fsdp_training.LAYOUTS.items()},
    **{name: ("tp", *sizes) for name, sizes in tensor_parallel_training.LAYOUTS.items()},
}


def reference(replicas, shards, max_norm):
    """float64 norm and factor, of replicas that are whole models."""
    squares = []
    for replica in range(replicas):
        model = transformer.build(torch.float64)
        for reader in range(replica * shards, (replica + 1) * shards):
            (transformer.loss_of(model, 0, reader) / shards).backward()
        squares.append(sum(p.grad.square().sum() for p in model.parameters()))
    norm = math.sqrt(sum(squares) / replicas)
    return norm, min(1.0, max_norm / norm)


def gradients_of(model):
    """A copy of the local pieces of all gradients, as backward left them or as they are now."""
    return {
        name: curvadion.layout.dtensor.local(p.grad).clone()
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def clip(rank, setup, layout, max_norm):
    """The norm before, the one after, and the bytes of clipping a second time."""
    model, replicas, _, reader = SETUPS[setup](layout)
    optimizer = Dion(transformer.groups(model), replicas=replicas)
    transformer.loss_of(model, 0, reader).backward()
    norm = curvadion.clip_grad_norm_(optimizer, max_norm)
    with WireMeter() as meter:
        after = curvadion.clip_grad_norm_(optimizer, math.inf)
    return norm.item(), after.item(), meter.total_bytes, meter.total_calls


# The others leave gradients whose pieces lie as those of one of these.
ALIKE = {
    "fsdp 2": "fsdp 4",
    "hsdp 2x2, kept gathered": "hsdp 2x2",
    "hsdp 2x4, gathered in pairs": "hsdp 2x2",
    "FSDP1 SHARD_GRAD_OP": "FSDP1 FULL_SHARD",
    "tp": "dp x tp",
    "hsdp x tp": "fsdp x tp",  # with replicas: test_each_number_of_a_replica_counts_once
}


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout not in ALIKE])
def test_every_layout_takes_the_norm_of_whole_replicas(layout):
    setup, replicas, shards, _ = LAYOUTS[layout]
    if layout == "hsdp 2x2, reduced by FSDP":
        replicas, shards = 1, 4  # FSDP has averaged the replicas' gradients
    if layout == "FSDP1 NO_SHARD":
        replicas, shards = 1, 2
    norm, factor = reference(replicas, shards, 0.5)
    for before, after, sent, calls in distributed.run(
        math.prod(LAYOUTS[layout][1:]), clip, setup, layout, 0.5
    ):
        assert_close(before, norm, NORM)
        assert_close(after, norm * factor, NORM)
        alone = layout == "FSDP1 NO_SHARD"  # nothing is sharded and there are no replicas
        assert (sent, calls) == ((0, 0) if alone else (8, 1))


# ---------------------------------------------------------------- replicas of different gradients


def model_of(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.Linear(16, 5)).to(dtype)


def set_gradients(model, rank, scale):
    generator = torch.Generator().manual_seed(rank)
    for p in model.parameters():
        p.grad = (scale * torch.randn(p.shape, generator=generator)).to(p.dtype)


def apart(rank, how, max_norm):
    """What one step moves the weights by, of replicas whose gradients are 30 times apart."""
    model = model_of()
    optimizer = Dion(curvadion.param_groups(model), replicas=dist.group.WORLD)
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    set_gradients(model, rank, 30.0**rank)
    if how == "torch":
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    elif how == "ours":
        curvadion.clip_grad_norm_(optimizer, max_norm)
    optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach() - before


def test_clipping_changes_no_direction():
    """Dion and AdamW take no heed of the gradients' length, so a common factor changes nothing."""
    moved = {how: distributed.run(2, apart, how, 1.0)[0] for how in ("not", "torch", "ours")}
    distance = {how: ((v - moved["not"]).norm() / moved["not"].norm()) for how, v in moved.items()}
    assert distance["torch"] > 0.5  # each replica's own norm makes another mean of it
    # A step of 0.02 is taken from weights of size one.
    assert_within(distance["ours"], Rounding(torch.float32, terms=16, condition=1 / 0.02))


def plain(rank, dtype, max_norm, missing, options):
    model = model_of(dtype)
    optimizer = Dion(curvadion.param_groups(model), replicas=dist.group.WORLD)
    set_gradients(model, rank, 30.0**rank)
    if missing and rank == 1:
        model[0].weight.grad = None
    before = gradients_of(model)
    with WireMeter() as meter:
        norm = curvadion.clip_grad_norm_(optimizer, max_norm, **options)
    return before, norm, gradients_of(model), meter.bytes_by_collective


@pytest.mark.parametrize(
    ("dtype", "missing"),
    [
        (torch.float32, True),
        (torch.float64, False),
        (torch.bfloat16, True),
        (torch.float16, False),
    ],
)
def test_one_factor_for_all_replicas(dtype, missing):
    results = distributed.run(2, plain, dtype, 3.0, missing, {})
    squares = [sum(G.double().square().sum() for G in before.values()) for before, *_ in results]
    norm = (sum(squares) / 2).sqrt()
    for before, returned, after, sent in results:
        assert returned.shape == ()
        assert_close(returned, norm, NORM)
        assert sent == {"all_reduce": 8}
        for name, G in before.items():
            wanted = G.double() * 3.0 / (norm + 1e-6)
            assert after[name].dtype == dtype
            assert_close(after[name], wanted, Rounding(dtype), what=name)


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"norm_type": 2}])
def test_arguments_of_torchs_function_are_taken(options):
    for _, _, after, _ in distributed.run(2, plain, torch.float32, 3.0, False, options):
        assert max(G.norm() for G in after.values()) < 3.0 * math.sqrt(2) + 1e-3


def test_gradients_within_the_bound_stay_bit_for_bit():
    for before, _, after, _ in distributed.run(2, plain, torch.float32, 1e6, False, {}):
        assert all(torch.equal(after[name], G) for name, G in before.items())


# ---------------------------------------------------------------- faults


def spoiled(rank, value, where, error_if_nonfinite):
    model = model_of()
    optimizer = CurvaDion(
        curvadion.param_groups(model), replicas=dist.group.WORLD, gate=AlwaysOpen()
    )
    weights = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    set_gradients(model, rank, 100.0)
    if rank == where:
        model[1].bias.grad[2] = value
    before = gradients_of(model)
    raised = None
    try:
        norm = curvadion.clip_grad_norm_(optimizer, 1.0, error_if_nonfinite=error_if_nonfinite)
        assert not norm.isfinite()
    except RuntimeError as error:
        raised = str(error)
    after = gradients_of(model)
    unscaled = all(torch.equal(after[n], G) or rank == where for n, G in before.items())
    optimizer.step()
    stood = torch.equal(nn.utils.parameters_to_vector(model.parameters()), weights)
    return unscaled, optimizer.report.skipped, stood, raised


@pytest.mark.parametrize(
    ("value", "where"), [(math.nan, 0), (math.nan, 1), (math.inf, 0), (-math.inf, 1)]
)
def test_a_bad_gradient_anywhere_scales_nothing_and_skips_the_step_on_all(value, where):
    for *held, raised in distributed.run(2, spoiled, value, where, False):
        assert held == [True, True, True]
        assert raised is None


def test_a_bad_gradient_is_an_error_on_all_ranks_if_asked_for():
    for *held, raised in distributed.run(2, spoiled, math.nan, 1, True):
        assert held == [True, True, True]
        assert "error_if_nonfinite" in raised


def clip_each(rank, shards):
    """Ratios of norms to this replica's own, and bytes; replicas are 30 times apart."""
    mesh = init_device_mesh("cpu", (2, shards), mesh_dim_names=("replicate", "shard"))
    model, mine = model_of(), mesh.get_local_rank("replicate")
    set_gradients(model, mine, 30.0**mine)
    wanted = sum(p.grad.double().square().sum() for p in model.parameters()).sqrt()
    if shards > 1:
        whole = {name: p.grad for name, p in model.named_parameters()}
        fully_shard(model, mesh=mesh["shard"])
        for name, p in model.named_parameters():
            p.grad = shard(whole[name], ("0",), mesh["shard"])
    optimizer = Dion(curvadion.param_groups(model), replicas=mesh["replicate"])
    curvadion.clip_grad_norm_(optimizer, math.inf)  # makes process groups
    with WireMeter() as meter:
        norm = curvadion.clip_grad_norm_(optimizer, 0.5, across_replicas=False)
    after = curvadion.clip_grad_norm_(optimizer, math.inf, across_replicas=False)
    with pytest.raises(ValueError) as refused:
        curvadion.clip_grad_norm_(optimizer, 1.0, error_if_nonfinite=True, across_replicas=False)
    optimizer.step()
    ratios = (norm / wanted).item(), after.item() / min(0.5, wanted.item())
    return ratios, meter.total_bytes, str(refused.value)


def clip_and_step(rank, how):
    """What the first step tells of gradients that are clipped."""
    model = model_of()
    set_gradients(model, rank, 30.0**rank)
    optimizer = Dion(curvadion.param_groups(model), replicas=dist.group.WORLD)
    if how == "torch":
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    else:
        curvadion.clip_grad_norm_(optimizer, 0.5, across_replicas=how == "all")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        optimizer.step()
    return [str(w.message) for w in told]


def test_torchs_function_is_told_of_where_it_takes_each_replicas_norm():
    for told in distributed.run(2, clip_and_step, "torch"):
        [text] = told
        assert "torch.nn.utils.clip_grad_norm_ does" in text and "norm 0.5," in text
    assert distributed.run(2, clip_and_step, "all") == [[], []]
    assert distributed.run(2, clip_and_step, "own") == [[], []]


@pytest.mark.parametrize("shards", [1, 2])
def test_each_replica_may_take_its_own_norm(shards):
    for ratios, sent, refused in distributed.run(2 * shards, clip_each, shards):
        for ratio in ratios:
            assert_close(ratio, 1.0, NORM)
        assert sent == (0 if shards == 1 else 8)  # inside the replica
        assert "error_if_nonfinite=True needs across_replicas=True" in refused


def bad_arguments():
    model = model_of()
    optimizer = Dion(curvadion.param_groups(model))
    return [
        ((torch.optim.AdamW(model.parameters()), 1.0), {}, TypeError, "optimizer=AdamW"),
        ((model.parameters(), 1.0), {}, TypeError, "optimizer"),
        ((optimizer, 1.0), {"norm_type": 1.0}, ValueError, "norm_type=1.0"),
        ((optimizer, 1.0), {"norm_type": math.inf}, ValueError, "norm_type=inf"),
        ((optimizer, -1.0), {}, ValueError, "max_norm=-1.0"),
        ((optimizer, math.nan), {}, ValueError, "max_norm=nan"),
        ((optimizer, "1"), {}, TypeError, "max_norm='1'"),
        ((optimizer, 1.0), {"foreach": 3}, TypeError, "foreach=3"),
        ((optimizer, 1.0), {"error_if_nonfinite": None}, TypeError, "error_if_nonfinite=None"),
        ((optimizer, 1.0), {"across_replicas": 1}, TypeError, "across_replicas=1"),
    ]


@pytest.mark.parametrize("case", range(10))
def test_errors_name_the_argument(case):
    arguments, keywords, kind, message = bad_arguments()[case]
    with pytest.raises(kind, match=message):
        curvadion.clip_grad_norm_(*arguments, **keywords)


def test_no_gradient_at_all():
    optimizer = Dion(curvadion.param_groups(model_of()))
    assert curvadion.clip_grad_norm_(optimizer, 1.0).item() == 0.0


def test_under_a_grad_scaler_that_has_unscaled():
    model = model_of()
    optimizer = Dion(curvadion.param_groups(model))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    x = torch.randn(7, 12)
    scaler.scale(model(x).square().sum()).backward()
    scaler.unscale_(optimizer)
    norm = curvadion.clip_grad_norm_(optimizer, 1.0)
    other = model_of()
    other(x).square().sum().backward()
    wanted = sum(p.grad.square().sum() for p in other.parameters()).sqrt()
    assert_close(norm, wanted, NORM)
    scaler.step(optimizer)
    scaler.update()
    assert not optimizer.report.skipped


# ---------------------------------------------------------------- pieces


def pieces(rank, replicas):
    """Norm and bytes of one model of every kind of piece, on a mesh of two replicas of 2 x 2."""
    mesh = init_device_mesh("cpu", (replicas, 2, 2), mesh_dim_names=("replicate", "ep", "tp"))
    mine = mesh.get_local_rank("replicate")
    shapes = {
        "experts": (3, 8, 6), "uneven": (5, 3), "tp": (8, 6), "both": (7, 9), "norm": (6,),
        "summand": (6, 4),
    }  # fmt: skip
    layouts = {
        "experts": ("r", "0", "r"), "uneven": ("r", "0", "r"), "tp": ("r", "r", "1"),
        "both": ("r", "0", "1"), "norm": ("r", "r", "r"), "summand": ("r", "r", "r"),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    full = [
        {name: torch.randn(shape, generator=generator) * 10**i for name, shape in shapes.items()}
        for i in range(replicas)
    ]
    X = {n: nn.Parameter(shard(torch.ones(s), layouts[n], mesh)) for n, s in shapes.items()}
    for name, x in X.items():
        x.grad = shard(full[mine][name], layouts[name], mesh)
    placements = [Replicate(), Replicate(), Partial()]
    share = (0.25, 0.75)[mesh.get_local_rank("tp")]
    X["summand"].grad = DTensor.from_local(
        full[mine]["summand"] * share, mesh, placements, run_check=False
    )
    flat = nn.Parameter(torch.ones((7, 13)[mesh.get_local_rank("ep")]))
    start = (0, 7)[mesh.get_local_rank("ep")]
    declare_flat_shard(flat, (5, 4), start, start + len(flat), mesh.get_group("ep"))
    flat_gradient = torch.arange(20.0) * (mine + 1)
    flat.grad = flat_gradient[start : start + len(flat)].clone()
    plain_ = nn.Parameter(torch.ones(3))
    plain_.grad = torch.full((3,), 2.0 * (mine + 1))
    optimizer = Dion(
        [
            {"params": [X["experts"]], "stack_dims": 1},
            {"params": [X["uneven"], X["tp"], X["both"], flat]},
            {"params": [X["norm"], X["summand"], plain_], "algorithm": "adamw"},
        ],
        replicas=mesh["replicate"] if replicas > 1 else None,
    )
    norm = curvadion.clip_grad_norm_(optimizer, 1.0)
    with WireMeter() as meter:
        after = curvadion.clip_grad_norm_(optimizer, 1.0)
    squares = sum(G.double().square().sum() for one in full for G in one.values())
    squares += sum((torch.arange(20.0).double() * (i + 1)).square().sum() for i in range(replicas))
    squares += sum(3 * (2.0 * (i + 1)) ** 2 for i in range(replicas))
    wanted = (squares / replicas).sqrt()
    for name, x in X.items():
        clipped = shard(full[mine][name] / wanted.float(), layouts[name], mesh)
        assert_close(x.grad.to_local(), clipped.to_local(), NORM, what=name)
    return norm.item() / wanted.item(), after.item(), meter.total_bytes


@pytest.mark.parametrize("replicas", [1, 2])
def test_each_number_of_a_replica_counts_once(replicas):
    for ratio, after, sent in distributed.run(4 * replicas, pieces, replicas):
        assert_close(ratio, 1.0, NORM)
        assert_close(after, 1.0, NORM)
        assert sent == 8
