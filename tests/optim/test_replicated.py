"""Replicas around optimizers of torch."""

import copy
import math
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from curvadion import (
    RMMC,
    AlwaysOpen,
    CodedGradients,
    CurvaDion,
    Dion,
    FixedPeriod,
    LowRank,
    QuantizedAverage,
    Replicated,
    WireMeter,
    clip_grad_norm_,
    param_groups,
)
from curvadion.comm.members import Members
from curvadion.integrations import fsdp
from curvadion.optim import replica_optimizer
from curvadion.optim.factory import updates
from support.runs import distributed, toy
from support.runs.drifts import drift


def muon_beside_adamw(model):
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.003)]


class Momentum(torch.optim.Optimizer):
    """A third party's, which makes its state at the first step and keeps a list in it."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(velocity=torch.zeros_like(p), seen=[])
                state["velocity"].mul_(0.9).add_(p.grad)
                state["seen"].append(group["lr"])
                p.sub_(state["velocity"], alpha=group["lr"])


INNER = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    "SGD": lambda model: torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9),
    "Muon beside AdamW": muon_beside_adamw,
    "a third party's": lambda model: Momentum(model.parameters(), lr=0.05),
}
HOW = {
    "AdamW": {"gate": FixedPeriod(3)},
    "AdamW, delay": {"gate": FixedPeriod(3), "sync": QuantizedAverage(delay=2, fragments=2)},
    "AdamW, codes": {"sync": CodedGradients(bits=2)},
    "SGD": {"gate": FixedPeriod(2), "sync": QuantizedAverage(bits=1)},
    "Muon beside AdamW": {"gate": FixedPeriod(3)},
    "a third party's": {"gate": AlwaysOpen(), "sync": QuantizedAverage()},
}


def build(how, replicas="single", **more):
    model = toy.model()
    given = copy.deepcopy(HOW[how])
    optimizer = Replicated(INNER[how.split(", ")[0]](model), replicas=replicas, **given, **more)
    return model, optimizer, LambdaLR(optimizer, lambda step: 1 / (1 + step))


# -------------------------------------------------------------------- trajectories


@pytest.mark.parametrize("how", [how for how in HOW if "codes" not in how])
def test_one_replica_takes_the_steps_of_the_optimizer_inside(how):
    model, optimizer, scheduler = build(how)
    toy.train(model, optimizer, range(7), after_step=scheduler.step)
    alone = toy.model()
    inner = INNER[how.split(", ")[0]](alone)
    inner = inner if isinstance(inner, list) else [inner]
    schedulers = [LambdaLR(each, lambda step: 1 / (1 + step)) for each in inner]
    for step in range(7):
        alone.zero_grad()
        toy.loss(alone, step).backward()
        for each in (*inner, *schedulers):
            each.step()
    assert all(map(torch.equal, model.parameters(), alone.parameters()))


@pytest.mark.parametrize("how", HOW)
@distributed.on_ranks(2)
def test_replicas_go_on_bitwise_and_agree(rank, how):
    """A run that was saved after 4 of 9 steps."""
    model, optimizer, scheduler = build(how, dist.group.WORLD)
    reports = toy.train(model, optimizer, range(4), rank, scheduler.step)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # replicas differ, and each loads what it has saved
        saved = copy.deepcopy([x.state_dict() for x in (model, optimizer, scheduler)])
    reports += toy.train(model, optimizer, range(4, 9), rank, scheduler.step)
    others = build(how, dist.group.WORLD)
    for other, state in zip(others, saved, strict=True):
        other.load_state_dict(state)
    toy.train(others[0], others[1], range(4, 9), rank, others[2].step)
    assert all(map(torch.equal, model.parameters(), others[0].parameters()))
    one, two = ({k: s for k, s in o.state_dict()["state"].items()} for o in (optimizer, others[1]))
    assert str(one) == str(two)
    optimizer.synchronize()
    opened = [report.gate_open for report in reports]
    told, told_there = distributed.gathered((opened, toy.weights(model)))
    assert told[0] == told_there[0] and any(opened)
    toy.assert_bitwise_equal(told[1], told_there[1])
    optimizer.synchronize(exact=True)
    assert drift(optimizer) == 0.0


@distributed.on_ranks(2)
def test_a_run_keeps_to_its_budget(rank):
    """Of two ranks each sends 4 bytes an element in an all-reduce of dense gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 64))
    inner = torch.optim.AdamW(model.parameters(), lr=0.003)
    optimizer = Replicated(inner, replicas=dist.group.WORLD, wire_budget=0.01)
    generator = torch.Generator().manual_seed(rank)
    with WireMeter() as meter:
        for _ in range(60):
            optimizer.zero_grad()
            model(torch.randn(4, 256, generator=generator)).square().mean().backward()
            optimizer.step()
        optimizer.synchronize()
    elements = sum(p.numel() for p in model.parameters())
    assert 0.005 < meter.total.sent / (4 * elements * 60) <= 0.01


# -------------------------------------------------------------------- shards and checkpoints


def placed(layout, how):
    """The model, its optimizer, and which batches this rank reads."""
    model, replicas, part = toy.model(), "single", 0
    if layout == "hsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        if how == "AdamW":
            fsdp.keep_gradients_local(fully_shard(model, mesh=mesh))
        else:
            fully_shard(model, mesh=mesh["shard"])
        replicas, part = mesh["replicate"], dist.get_rank()
    return model, Replicated(INNER[how](model), replicas=replicas, **copy.deepcopy(HOW[how])), part


@distributed.on_ranks(4)
def test_an_optimizer_of_matrices_needs_a_mesh_of_its_replica(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fsdp.keep_gradients_local(fully_shard(toy.model(), mesh=mesh))
    inner, gate = muon_beside_adamw(model), FixedPeriod(3)
    optimizer = Replicated(inner, replicas=mesh["replicate"], gate=gate)
    with pytest.raises(ValueError, match=r"optimizer=Muon would mix .* mesh=mesh\['shard'\]"):
        toy.train(model, optimizer, [0], rank)


def whole(model, optimizer):
    """Weights and inner states, as whole tensors."""
    held = {}
    for name, p in model.named_parameters():
        for key, value in {"": p.detach(), **optimizer.state[p]}.items():
            if isinstance(value, torch.Tensor) and key not in ("anchor", "residual"):
                value = value.full_tensor() if isinstance(value, DTensor) else value
                held[f"{name}.{key}"] = value.clone()
    return held


def distributed_checkpoint(rank, layout, how, path, saves):
    model, optimizer, part = placed(layout, how)
    if saves:
        toy.train(model, optimizer, range(5), part)
        optimizer.synchronize(exact=True)
        optimizer.zero_grad()
    weights, state = get_state_dict(model, optimizer)
    if saves:
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)
    else:
        held = {"model": weights, "optimizer": state}
        dcp.load(held, checkpoint_id=path)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=held["model"],
            optim_state_dict=held["optimizer"],
        )
    assert optimizer.progress.steps == 5
    found = whole(model, optimizer)
    toy.train(model, optimizer, range(5, 8), part)
    return found, optimizer.report.step


@pytest.mark.parametrize("how", ["AdamW", "Muon beside AdamW"])
def test_distributed_checkpoints_of_sharded_replicas_load_in_one_process(how, tmp_path):
    saved = distributed.run(4, distributed_checkpoint, "hsdp", how, str(tmp_path), True)
    (loaded,) = distributed.run(1, distributed_checkpoint, "one process", how, str(tmp_path), False)
    for held, step in (*saved, loaded):
        assert step == 8 and held.keys() == loaded[0].keys()
        for name, tensor in held.items():
            assert tensor.equal(loaded[0][name]), (name, tensor, loaded[0][name])


# -------------------------------------------------------------------- torch's contract


@distributed.on_ranks(2)
def test_a_scaler_unscales_and_all_replicas_skip_together(rank):
    """One gradient is infinite on one replica."""
    model, optimizer, _ = build("AdamW, codes", dist.group.WORLD)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(toy.loss(model, step, rank)).backward()
        if step == 2 and rank == 1:
            model.linear.weight.grad[0, 0] = math.inf
        before = toy.weights(model)
        scaler.step(optimizer)
        scaler.update()
        same = all(before[name].equal(w) for name, w in toy.weights(model).items())
        assert same == optimizer.report.skipped == (step == 2)
    assert rank == 0 or scaler.get_scale() == 2.0**9
    toy.assert_bitwise_equal(*distributed.gathered(toy.weights(model)))


def test_hooks_closures_copies_and_groups():
    model, optimizer, _ = build("AdamW")
    called = []
    optimizer.register_step_pre_hook(lambda *_: called.append("step"))
    optimizer.register_state_dict_post_hook(lambda *_: called.append("save"))
    optimizer.register_load_state_dict_pre_hook(lambda *_: called.append("load"))
    optimizer.register_load_state_dict_post_hook(lambda *_: called.append("loaded"))

    def closure():
        optimizer.zero_grad()
        loss = toy.loss(model, 0)
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == pytest.approx(toy.loss(toy.model(), 0).item())
    optimizer.load_state_dict(optimizer.state_dict())
    assert called == ["step", "save", "load", "loaded"]
    more = nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [more], "lr": 0.5})
    assert optimizer.inner.optimizers[0].param_groups[-1]["params"] == [more]
    assert optimizer.param_groups[-1]["lr"] == 0.5
    two, twin = copy.deepcopy((model, optimizer))
    for net, each in ((model, optimizer), (two, twin)):
        toy.train(net, each, [1])
        each.param_groups[-1]["params"][0].grad = torch.ones(3)
        each.step()
    assert all(map(torch.equal, model.parameters(), two.parameters()))
    assert twin.param_groups[-1]["params"][0].equal(more)
    assert "Replicated AdamW" in repr(optimizer)
    assert clip_grad_norm_(optimizer, math.inf) > 0


def test_a_load_that_fails_changes_nothing():
    model, optimizer, _ = build("AdamW")
    toy.train(model, optimizer, range(4))
    before, saved = str(optimizer.state_dict()), copy.deepcopy(optimizer.state_dict())
    saved["state"][2]["residual"] = torch.zeros(2)
    with pytest.raises(ValueError, match=r"'residual' of shape \(2,\)"):
        optimizer.load_state_dict(saved)
    assert str(optimizer.state_dict()) == before
    plain = torch.optim.AdamW(toy.model().parameters())
    with pytest.raises(ValueError, match="not saved by an optimizer of curvadion"):
        optimizer.load_state_dict(plain.state_dict())


def test_another_sync_keeps_the_inner_state():
    model, optimizer, _ = build("AdamW")
    toy.train(model, optimizer, range(3))
    _, other, _ = build("AdamW, codes")
    with pytest.warns(UserWarning, match="saved with another sync"):
        other.load_state_dict(optimizer.state_dict())
    moments = [o.state_dict()["state"][1]["exp_avg"] for o in (optimizer, other)]
    assert moments[0].equal(moments[1])


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"optimizer": "AdamW"}, TypeError, "optimizer=str must be a torch.optim.Optimizer"),
        ({"optimizer": []}, ValueError, "at least one optimizer"),
        ({"optimizer": CurvaDion}, TypeError, "CurvaDion synchronises replicas itself: use it"),
        ({"optimizer": torch.optim.AdamW}, TypeError, r"optimizer=the class AdamW must be a"),
        ({"sync": LowRank()}, ValueError, "averages Dion's low-rank factors"),
        ({"gate": RMMC(0.3)}, ValueError, "has a signal, of Dion's momenta"),
        ({"wire_budget": 1.5}, ValueError, "wire_budget=1.5"),
        ({"wire_budget": 0.1, "gate": AlwaysOpen()}, ValueError, "pass one of them"),
    ],
)
def test_errors_say_what_to_do(given, error, says):
    model = toy.model()
    optimizer = given.pop("optimizer", None)
    if optimizer is None:
        optimizer = INNER["AdamW"](model)
    elif optimizer is CurvaDion:
        optimizer = CurvaDion(toy.groups(model), replicas="single", threshold=0.3)
    with pytest.raises(error, match=says):
        Replicated(optimizer, replicas="single", **given)
    if not given:
        return
    with pytest.raises(ValueError, match="the same optimizer twice"):
        Replicated([optimizer, optimizer], replicas="single")
    norm = torch.optim.SGD(model.norm.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"\['AdamW', 'SGD'\] hold 2 parameters twice"):
        Replicated([INNER["AdamW"](model), norm], replicas="single")
    with pytest.raises(ValueError, match="LBFGS needs closure in each step"):
        Replicated(torch.optim.LBFGS(model.parameters()), replicas="single")


def test_nobody_else_steps_the_optimizer_inside():
    model, optimizer, _ = build("AdamW")
    toy.train(model, optimizer, range(2))
    before = toy.weights(model)
    (inner,) = optimizer.inner.optimizers
    twin = copy.deepcopy(optimizer)
    (copied,) = twin.inner.optimizers
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(toy.loss(model, 2)).backward()
    for step in (inner.step, copied.step, lambda: scaler.step(inner)):
        with pytest.raises(RuntimeError, match=r"AdamW\.step\(\) was called.*scaler\.step"):
            step()
    toy.assert_bitwise_equal(toy.weights(model), before)
    other = Replicated(inner, gate=FixedPeriod(3), replicas="single")
    toy.train(model, other, [2])
    with pytest.raises(RuntimeError, match="was called although"):
        optimizer.step()


class Fixed(torch.optim.Optimizer):
    """A step of its own length; its groups have another meaning of a key of ours."""

    def __init__(self, params):
        super().__init__(params, {"algorithm": ("fixed",)})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for x in group["params"]:
                x.sub_(x.grad.sign(), alpha=0.01)


def test_the_list_of_updates_takes_groups_without_a_rate():
    optimizer = Replicated(Fixed([nn.Linear(4, 3).weight]), wire_budget=0.5, replicas="single")
    assert updates(optimizer).splitlines()[1] == "  Fixed: 1 tensor of 12 elements"


def test_the_list_of_updates_has_stars_only_for_several_names():
    model = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 3), nn.Linear(3, 4))
    optimizer = CurvaDion(param_groups(model), wire_budget=0.5, replicas="single")
    listed = [line.split(": ", 1)[1] for line in updates(optimizer).splitlines()[1:]]
    assert listed == [
        "1 tensor of 6 elements: 1.weight",
        "1 tensor of 8 elements: 0.weight",
        "1 tensor of 12 elements: 2.weight",
        "2 tensors of 7 elements: *.bias",
    ]


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free SGD (arXiv 2405.15682): steps move z, y is trained, x is evaluated."""

    def __init__(self, params, lr, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            for y in group["params"]:
                z = self.state[y].setdefault("z", y.detach().clone())
                share = 1 / group["k"]  # of z in x
                y.lerp_(z, share)
                y.add_(y.grad, alpha=group["lr"] * (group["beta"] * (1 - share) - 1))
                z.sub_(y.grad, alpha=group["lr"])

    @torch.no_grad()
    def move(self, weight):
        for group in self.param_groups:
            for y in group["params"]:
                y.lerp_(self.state[y]["z"], weight(group["beta"]))

    def eval(self):
        self.move(lambda beta: 1 - 1 / beta)

    def train(self):
        self.move(lambda beta: 1 - beta)


@distributed.on_ranks(2)
def test_replicas_evaluate_the_same_schedule_free_weights(rank):
    model = toy.model()
    inner = ScheduleFree(model.parameters(), lr=0.1)
    optimizer = Replicated(inner, replicas=dist.group.WORLD, gate=FixedPeriod(3))
    toy.train(model, optimizer, range(7), rank)
    optimizer.synchronize()  # of y alone
    optimizer.eval()
    assert drift(optimizer) == 0.0
    one, other = distributed.gathered(toy.weights(model))
    toy.assert_bitwise_equal(one, other)
    optimizer.train()
    toy.train(model, optimizer, range(7, 9), rank)


def test_members_that_come_and_go_refuse_schedule_free_optimizers():
    inner = ScheduleFree(toy.model().parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"'ScheduleFree'.*come and go.*not schedule-free"):
        Replicated(inner, replicas=ComingAndGoing(), gate=FixedPeriod(3))


class ComingAndGoing(Members):
    """Members whom nobody meets."""

    def meet(self, *, ahead=False): ...

    def gather(self, numbers): ...

    def during_training(self, device): ...

    def agree(self): ...

    def commit(self, *, error, record): ...


def test_an_inner_state_named_like_the_syncs_is_refused():
    model = toy.model()
    inner = INNER["AdamW"](model)
    optimizer = Replicated(inner, replicas="single")
    with pytest.raises(ValueError, match=r"AdamW has states \['residual'\]"):
        for step in range(2):
            toy.train(model, optimizer, [step])
            for state in inner.state.values():
                state["residual"] = torch.zeros(())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_scalars_of_states_keep_their_dtype(dtype):
    """torch casts NAdam's product of momenta, a float32 scalar, to the dtype of the weights."""
    x = nn.Parameter(torch.ones(4, dtype=dtype))
    optimizer = Replicated(torch.optim.NAdam([x]), gate=FixedPeriod(2), replicas="single")
    x.grad = torch.ones_like(x)
    optimizer.step()
    before = optimizer.state[x]["mu_product"].clone()
    optimizer.load_state_dict(optimizer.state_dict())
    after = optimizer.state[x]["mu_product"]
    assert after.dtype == torch.float32 and torch.equal(after, before)


def test_inner_states_of_no_parameter_are_saved():
    model = toy.model()
    inner, again = INNER["AdamW"](model), INNER["AdamW"](model)
    inner.state["global"] = {"count": 3.0}
    Replicated(again, replicas="single").load_state_dict(
        Replicated(inner, replicas="single").state_dict()
    )
    assert again.state["global"] == {"count": 3.0}


def test_a_group_for_one_of_several_optimizers_needs_that_one():
    _, optimizer, _ = build("Muon beside AdamW")
    with pytest.raises(ValueError, match=r"optimizer.inner.optimizers\[i\].add_param_group"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


# -------------------------------------------------------------------- replicas that differ


class Adaptive(torch.optim.SGD):
    """Changes a key of its groups by what it sees, as Prodigy does."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            group["d"] = group.get("d", 1.0) + float(group["params"][0].abs().sum())


@pytest.mark.parametrize("how", ["lacking", "adaptive", "frozen"])
@distributed.on_ranks(2)
def test_replicas_may_differ_in_what_is_theirs(rank, how):
    """The first alone uses the embedding, or each adapts to what it sees."""
    model = toy.model()
    kind = Adaptive if how == "adaptive" else torch.optim.SGD
    inner = kind(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = Replicated(inner, replicas=dist.group.WORLD, gate=FixedPeriod(2))
    for step in range(5):
        optimizer.zero_grad()
        toy.loss(model, step, rank).backward()
        if how == "lacking" and rank:
            model.embedding.weight.grad = None
        if how == "frozen" and step == 3:
            optimizer.synchronize()
            model.embedding.weight.requires_grad_(False)  # and its gradient remains
            frozen = model.embedding.weight.detach().clone()
        optimizer.step()
    optimizer.synchronize()
    assert drift(optimizer) == 0.0
    if how == "frozen":
        assert model.embedding.weight.equal(frozen)
    if how == "lacking":
        with pytest.raises(RuntimeError, match="states of different parameters"):
            optimizer.synchronize(exact=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        toy.train(model, optimizer, range(5, 8), rank)  # compared anew


@distributed.on_ranks(2)
def test_a_gradient_that_is_not_finite_stops_the_optimizer_inside(rank):
    with mock.patch.object(replica_optimizer, "RUNS_AHEAD", ("cpu",)):  # as on a GPU
        model, optimizer, _ = build("AdamW", dist.group.WORLD)
        for step in range(4):
            optimizer.zero_grad()
            toy.loss(model, step, rank).backward()
            if step == 1 and rank:
                model.linear.weight.grad.fill_(math.nan)
            optimizer.step()
        assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("how", ["AdamW", "Muon beside AdamW"])
def test_states_and_groups_can_be_assigned(how):
    """As Accelerate's and DeepSpeed's wrappers do; what the sync keeps stays beside."""
    model, optimizer, _ = build(how)
    twin_model, twin, _ = build(how)
    for net, each in ((model, optimizer), (twin_model, twin)):
        toy.train(net, each, range(3))
    optimizer.state = optimizer.state
    optimizer.param_groups = optimizer.param_groups
    for inner in optimizer.inner.optimizers:
        assert not {"anchor", "residual"} & {key for s in inner.state.values() for key in s}
    for net, each in ((model, optimizer), (twin_model, twin)):
        toy.train(net, each, [3])
    toy.assert_bitwise_equal(toy.weights(model), toy.weights(twin_model))
    frozen = next(model.parameters())
    frozen.requires_grad_(False)
    frozen.grad = None
    toy.train(model, optimizer, [4])
    frozen.requires_grad_(True)
    with torch.no_grad():
        frozen += 100
    toy.train(model, optimizer, [5])
    # An old anchor would let the 100 be sent as movement.
    assert (optimizer.state[frozen]["anchor"] - frozen).abs().max() < 1


def test_a_budget_that_cannot_be_kept_is_an_error_at_construction():
    weights = [nn.Parameter(torch.ones(8, 8))]
    with pytest.raises(ValueError, match="max_local_steps=2 asks for more"):
        Replicated(torch.optim.SGD(weights), wire_budget=0.01, max_local_steps=2)


def test_our_inner_optimizer_cannot_be_wrapped():
    dion = Dion([nn.Parameter(torch.ones(8, 8))], replicas="single")
    with pytest.raises(TypeError, match="optimizer=DionInner synchronises replicas itself"):
        Replicated(dion.inner)
