import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from curvadion import Dion
from curvadion.integrations.ddp import keep_gradients_local
from curvadion.metering.wire import WireMeter
from support.runs import distributed

F32 = 4


class Branches(nn.Module):
    """One matrix that every rank uses and one per rank."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(3, 3, bias=False)
        self.own = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(2))

    def forward(self, x, branches=(0, 1)):
        y = self.shared(x)
        return sum(self.own[branch](y) for branch in branches)


def weight(**options):
    """DDP around one weight whose gradient is the input."""
    return DistributedDataParallel(nn.Linear(1, 1, bias=False), **options)


def gradient(ddp):
    return next(ddp.parameters()).grad.item()


def value(rank):
    return torch.tensor([[2.0 * (rank + 1)]])


OPTIONS = {
    "plain": {},
    "bucket view, static graph": {"gradient_as_bucket_view": True, "static_graph": True},
    "small buckets": {"bucket_cap_mb": 1e-5},
}


@pytest.mark.parametrize("name", OPTIONS)
@distributed.on_ranks(2)
def test_gradient_is_this_replicas_own(rank, name):
    """Equal to those without DDP, over three steps."""
    ddp = keep_gradients_local(DistributedDataParallel(Branches(), **OPTIONS[name]))
    alone = Branches()
    alone.load_state_dict(ddp.module.state_dict())
    x = torch.randn(4, 3) * (rank + 1)
    with WireMeter() as meter:
        for _ in range(3):
            for model in (ddp, alone):
                model.zero_grad()
                model(x).square().sum().backward()
            for ours, expected in zip(ddp.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, expected.grad, rtol=0, atol=0)
    count = {how: n.bytes for how, n in meter.by_collective.items()}
    used_parameters = 3 * F32 if "static graph" in name else 0  # their map, in the first step
    assert count.pop("all_reduce", 0) == used_parameters
    assert count.pop("broadcast", 0) < 100  # the order of buckets, once
    assert not count


@pytest.mark.parametrize("in_no_sync", [False, True])
@distributed.on_ranks(2)
def test_gradients_accumulate(rank, in_no_sync):
    ddp = keep_gradients_local(weight(gradient_as_bucket_view=True))
    with WireMeter() as meter:
        for _ in range(2):
            ddp.zero_grad()
            with ddp.no_sync() if in_no_sync else nullcontext():
                ddp(value(rank)).sum().backward()
            ddp(10 * value(rank)).sum().backward()
    assert gradient(ddp) == 22.0 * (rank + 1)
    assert "all_reduce" not in meter.by_collective


@distributed.on_ranks(2)
def test_unused_parameters_cost_their_map_and_get_zeros(rank):
    ddp = DistributedDataParallel(Branches(), find_unused_parameters=True)
    keep_gradients_local(ddp)
    with WireMeter() as meter:
        ddp(torch.ones(1, 3), branches=(rank,)).sum().backward()
    used, unused = ddp.module.own[rank].weight.grad, ddp.module.own[1 - rank].weight.grad
    assert used.any() and unused.count_nonzero() == 0
    assert meter.by_collective.keys() == {"all_reduce"}
    assert meter.total.bytes == 4 * 3  # of three parameters


@pytest.mark.parametrize("replicas", [None, "group of one"])
@distributed.on_ranks(2)
def test_local_gradients_need_an_optimizer_that_averages_them(rank, replicas):
    """Otherwise every rank trains a model of its own, although it looks like one."""
    ddp = keep_gradients_local(DistributedDataParallel(nn.Linear(3, 3, bias=False)))
    if replicas is not None:
        replicas = [dist.new_group([0]), dist.new_group([1])][rank]
    said = r"replicas=.*nothing averages the gradient of .* over the ranks \[0, 1\].*'single'"
    for given, refusal in ((replicas, pytest.raises(ValueError, match=said)), ("single", None)):
        optimizer = Dion(ddp.parameters(), replicas=given)
        ddp(torch.randn(2, 3)).sum().backward()
        with refusal or nullcontext():
            optimizer.step()


@distributed.on_ranks(2)
def test_parameters_that_no_optimizer_averages_are_named(rank):
    """Not those of another optimizer of curvadion, and none that was frozen with a gradient."""
    ddp = keep_gradients_local(DistributedDataParallel(Branches()))
    shared, first, second = ddp.parameters()
    optimizer = Dion([shared], replicas=dist.group.WORLD)
    torch.optim.AdamW([first, second])
    ddp(torch.randn(4, 3) * (rank + 1)).sum().backward()
    with pytest.warns(UserWarning, match=r"in no CurvaDion.* 2 in all, such as 'own\.0\.weight'"):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        again = Dion([shared], replicas=dist.group.WORLD)
        other = Dion([first], replicas=dist.group.WORLD)
        second.requires_grad_(False)
        again.step()
        other.step()


@distributed.on_ranks(2)
def test_a_shared_parameter_is_named_once(rank):
    first, second, third = (nn.Linear(3, 3, bias=False) for _ in range(3))
    second.weight = first.weight
    ddp = keep_gradients_local(DistributedDataParallel(nn.Sequential(first, second, third)))
    ddp(torch.ones(1, 3)).sum().backward()
    with pytest.warns(UserWarning, match=" 1 in all, such as"):
        Dion([third.weight], replicas=dist.group.WORLD).step()


@distributed.on_ranks(2)
def test_local_gradients_after_a_step_need_one_as_well(rank):
    ddp = DistributedDataParallel(nn.Linear(3, 3, bias=False))
    optimizer = Dion(ddp.parameters())
    ddp(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    keep_gradients_local(ddp)
    ddp(torch.randn(2, 3)).sum().backward()
    with pytest.raises(ValueError, match="replicas=None.*nothing averages the gradient"):
        optimizer.step()


@distributed.on_ranks(2)
def test_another_hook_is_an_error_that_says_what_to_do(rank):
    ddp = weight()
    ddp.register_comm_hook(None, allreduce_hook)
    said = r"already has a communication hook.*build the DistributedDataParallel without it"
    with pytest.raises(RuntimeError, match=said):
        keep_gradients_local(ddp)


def test_anything_else_than_ddp_is_an_error():
    for model in (nn.Linear(1, 1), torch.compile(nn.Linear(1, 1), backend="eager")):
        with pytest.raises(TypeError, match="or torch.compile of one, got Linear"):
            keep_gradients_local(model)


@distributed.on_ranks(1)
def test_fsdp_models_have_a_function_of_their_own(rank):
    sharded = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (1,)))
    for model in (sharded, nn.Sequential(sharded)):
        with pytest.raises(TypeError, match=r"curvadion\.integrations\.fsdp\.keep_gradients_local"):
            keep_gradients_local(model)


COMPILED = {
    "DDP compiled": lambda: torch.compile(weight(), backend="eager"),
    "DDP of a compiled module": lambda: DistributedDataParallel(
        torch.compile(nn.Linear(1, 1, bias=False), backend="eager")
    ),
}


@pytest.mark.parametrize("name", COMPILED)
@distributed.on_ranks(2)
def test_compiled_modules_keep_their_gradients_and_stay_compiled(rank, name):
    model = COMPILED[name]()
    assert keep_gradients_local(keep_gradients_local(model)) is model
    with WireMeter() as meter:
        for _ in range(2):
            model.zero_grad()
            model(value(rank)).sum().backward()
    assert gradient(model) == 2.0 * (rank + 1)
    assert meter.total.bytes < 100  # the order of buckets


WIDTH = 512
TABLE = 8192  # bytes: 0.78 % of the gradient of a matrix of WIDTH x WIDTH


class Rotary(nn.Module):
    """A matrix and a table, in one of two parts that may differ between ranks."""

    def __init__(self, persistent, rank):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("table", torch.full((TABLE // F32,), rank + 1.0), persistent)

    def forward(self, x):
        return self.linear(x) * self.table[:WIDTH]


@pytest.mark.parametrize("persistent", [False, True])
@distributed.on_ranks(2)
def test_buffers_that_a_checkpoint_keeps_are_broadcast_and_others_are_not(rank, persistent):
    ddp = keep_gradients_local(DistributedDataParallel(Rotary(persistent, rank)))
    for _ in range(2):
        ddp(torch.ones(1, WIDTH)).sum().backward()  # the second one with the order of buckets
    ddp.module.table.fill_(rank + 1.0)
    with WireMeter() as meter:
        ddp(torch.ones(1, WIDTH)).sum().backward()
    assert meter.total.bytes == (TABLE if persistent else 0)
    assert ddp.module.table[0] == (1.0 if persistent else rank + 1.0)
