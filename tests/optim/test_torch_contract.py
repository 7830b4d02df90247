"""What users and frameworks expect of any torch optimizer."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import pickle
import warnings
import weakref
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

import distributed
import toy
from curvadion import (
    CodedGradients,
    CurvaDion,
    Dion,
    FixedPeriod,
    Gate,
    QuantizedAverage,
)
from switches import ROUNDING, SWITCHES, switched
from tolerance import Rounding, assert_close

OPTIMIZERS = {
    "dion": Dion,
    "rmmc": functools.partial(CurvaDion, threshold=0.3),
    "gradient": functools.partial(CurvaDion, threshold=0.3, local_step="gradient"),
    "period": functools.partial(CurvaDion, gate=FixedPeriod(3)),
    "plain": functools.partial(CurvaDion, momentum_rule="plain", right_factor="qr"),
}

CONDITION = 8  # how much the toy's steps amplify a rounding error


@pytest.fixture(params=OPTIMIZERS.values(), ids=OPTIMIZERS)
def make(request):
    return request.param


def matrices(count=2):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(6, 4, generator=generator)) for _ in range(count)]


def give_gradients(parameters, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def run(optimizer, steps):
    """Weights after steps on seeded gradients."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(steps):
        give_gradients(parameters, step)
        optimizer.step()
    return [p.detach().clone() for p in parameters]


def assert_same(these, those):
    assert len(these) == len(those)
    assert all(torch.equal(a, b) for a, b in zip(these, those, strict=True))


# ---------------------------------------------------------------- construction


@pytest.mark.parametrize(
    "form",
    [
        iter,
        lambda X: zip("ab", X, strict=True),
        lambda X: [{"params": X}],
        lambda X: ({"params": x} for x in X),
        lambda X: [{"params": X, "fused": False, "foreach": None, "maximize": False}],
    ],
    ids=["iterator", "named", "group", "groups", "keys that frameworks write"],
)
def test_params_in_any_form(form):
    assert_same(run(CurvaDion(form(matrices())), 3), run(CurvaDion(matrices()), 3))


# ---------------------------------------------------------------- global settings of torch


SWITCHED = {
    "low rank": {"threshold": 0.3},
    "gradient": {"threshold": 0.3, "local_step": "gradient"},
    "quantized": {"gate": FixedPeriod(2), "sync": QuantizedAverage(spectrum_decay=0.8)},
    "polar": {"direction": "polar", "sync": CodedGradients()},
}


@dataclass
class Life:
    """What a replica holds in the end, and how far its weights moved at the first step."""

    weights: list[torch.Tensor]
    states: list[torch.Tensor]
    first_moves: list[torch.Tensor]


def life(options, setting, rank):
    """Steps, a synchronisation and a reload of one of two replicas, with a setting of torch."""
    model = toy.model()
    parameters = list(model.parameters())
    gradients = []
    for step in range(4):
        give_gradients(parameters, step + 10 * rank)
        gradients.append([p.grad for p in parameters])
    before = [p.detach().clone() for p in parameters]
    with setting:
        optimizer = CurvaDion(
            toy.groups(model), replicas=dist.group.WORLD, **copy.deepcopy(options)
        )
        for step, given in enumerate(gradients):
            if step == 3:
                optimizer.synchronize(exact=True)
                optimizer.load_state_dict(optimizer.state_dict())
            for p, gradient in zip(parameters, given, strict=True):
                p.grad = gradient.clone()
            optimizer.step()
            if step == 0:
                moves = [p.detach() - x for p, x in zip(parameters, before, strict=True)]
    states = [v for state in optimizer.state.values() for v in state.values()]
    tensors = [v for v in states if isinstance(v, torch.Tensor)]
    return Life([p.detach() for p in parameters], tensors, moves)


def rounds_products(switch):
    """Whether this CPU's products of float32 have fewer bits under the switch."""
    A = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    plain = A @ A
    with switched(switch):
        return not torch.equal(A @ A, plain)


def lives(rank, options):
    """Without a switch and with each, and which of these round products."""
    settings = [contextlib.nullcontext(), *map(switched, SWITCHES)]
    return [life(options, setting, rank) for setting in settings], [
        switch for switch in ROUNDING if rounds_products(switch)
    ]


@pytest.mark.parametrize("options", SWITCHED.values(), ids=SWITCHED)
def test_global_switches_of_torch_change_no_bit(options):
    """But for those that let products round to TensorFloat-32, where the CPU does so."""
    # Both have 10 bits of mantissa. A polar factor amplifies what is rounded; a step is 1.
    tf32 = Rounding(torch.float16, terms=8, condition=8)
    for (plain, *switched_lives), rounding in distributed.run(2, lives, options):
        for switch, found in zip(SWITCHES, switched_lives, strict=True):
            if switch in ROUNDING:
                for move, expected in zip(found.first_moves, plain.first_moves, strict=True):
                    assert_close(move, expected, tf32, what=switch)
            if switch not in rounding:
                assert [t.dtype for t in found.states] == [t.dtype for t in plain.states]
                assert_same(found.weights + found.states, plain.weights + plain.states)


# ---------------------------------------------------------------- learning rates


@pytest.mark.numeric
@pytest.mark.parametrize(
    "lr", [torch.tensor(0.03125), torch.tensor([0.03125], dtype=torch.float64)], ids=str
)
def test_tensor_lr_gives_the_trajectory_of_a_number(make, lr):
    expected_model, model = toy.model(), toy.model()
    toy.train(expected_model, make(toy.groups(expected_model), lr=0.03125), range(6))
    toy.train(model, make(toy.groups(model), lr=lr), range(6))
    for name, p in expected_model.named_parameters():
        rounding = Rounding(torch.float32, condition=CONDITION, steps=6)
        assert_close(model.get_parameter(name), p, rounding, what=name)


@pytest.mark.numeric
@pytest.mark.parametrize(
    ("schedule", "lr"),
    [
        (lambda o: OneCycleLR(o, max_lr=0.1, total_steps=10), 0.02),
        (lambda o: CosineAnnealingLR(o, 10), torch.tensor(0.02)),
    ],
    ids=["one cycle", "cosine"],
)
def test_schedulers_drive_the_learning_rate(schedule, lr):
    """The trajectory is that of the scheduled rates and betas set by hand."""
    scheduled, by_hand = toy.model(), toy.model()
    optimizer = CurvaDion(toy.groups(scheduled), lr=lr)
    scheduler = schedule(optimizer)
    reference = CurvaDion(toy.groups(by_hand), lr=0.02)
    for step in range(6):
        for group, driven in zip(reference.param_groups, optimizer.param_groups, strict=True):
            group["lr"], group["betas"] = float(driven["lr"]), driven["betas"]
        toy.train(by_hand, reference, [step])
        toy.train(scheduled, optimizer, [step], after_step=scheduler.step)
    assert reference.param_groups[0]["lr"] != 0.02
    for name, p in by_hand.named_parameters():
        rounding = Rounding(torch.float32, terms=16, condition=CONDITION, steps=6)
        assert_close(scheduled.get_parameter(name), p, rounding, what=name)


def test_warm_up_from_zero_gathers_momentum():
    """lr 0 with real gradients is a step like any other."""
    optimizer = CurvaDion(matrices(), lr=0.0)
    assert_same(run(optimizer, 1), [p.detach() for p in matrices()])
    assert optimizer.progress.steps == 1
    assert optimizer.report.step == 1
    for state in optimizer.state.values():
        assert state["momentum"].norm() > 0


# ---------------------------------------------------------------- closures


@pytest.mark.parametrize("outside", [True, False], ids=["grad mode", "no_grad"])
def test_closure_runs_with_gradients_and_its_loss_is_returned(outside):
    model, twin = toy.model(), toy.model()
    optimizer, plain = CurvaDion(toy.groups(model)), CurvaDion(toy.groups(twin))
    for step in range(3):

        def closure(step=step):
            assert torch.is_grad_enabled()
            optimizer.zero_grad()
            value = toy.loss(model, step)
            value.backward()
            return value

        expected = toy.loss(twin, step)
        with torch.set_grad_enabled(outside):
            assert optimizer.step(closure=closure).item() == expected.item()
        plain.zero_grad()
        expected.backward()
        assert plain.step() is None
    toy.assert_bitwise_equal(toy.weights(model), toy.weights(twin))


def test_a_compiled_step_is_the_plain_step():
    def traced(graph, inputs):
        raise AssertionError(f"dynamo traced the step: {graph.code}")

    states = []
    for wrap in (lambda step: step, functools.partial(torch.compile, backend=traced)):
        parameters = matrices()
        optimizer = Dion(parameters, lr=0.1)
        step = wrap(optimizer.step)
        for seed in range(2):
            give_gradients(parameters, seed)
            step()
        states.append([p.detach() for p in parameters])
    assert_same(*states)


def test_step_leaves_grad_mode_and_gradients_alone(make):
    model = toy.model()
    optimizer = make(toy.groups(model))
    toy.loss(model, 0).backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    assert torch.is_grad_enabled()
    assert_same([p.grad for p in model.parameters()], gradients)
    assert all(p.requires_grad and p.is_leaf for p in model.parameters())


def test_hooks_fire():
    optimizer = CurvaDion(matrices())
    seen = []
    before = optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda o, *_: seen.append(o.report.step))
    run(optimizer, 2)
    before.remove()
    run(optimizer, 1)
    assert seen == ["before", 1, "before", 2, 3]
    optimizer.register_state_dict_post_hook(lambda o, s: seen.append("saved"))
    optimizer.register_load_state_dict_pre_hook(lambda o, s: seen.append("loading"))
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append("loaded"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen[-3:] == ["saved", "loading", "loaded"]


# ---------------------------------------------------------------- groups that change


def test_group_added_in_mid_training():
    model = toy.model()
    late = model.lm_head.weight
    groups = toy.groups(model)
    first = [{**g, "params": [(n, p) for n, p in g["params"] if p is not late]} for g in groups]
    optimizer = CurvaDion(first, gate=FixedPeriod(2))
    before = toy.weights(model)
    toy.train(model, optimizer, range(3))
    assert torch.equal(late, before["lm_head.weight"])
    others = toy.states(optimizer)
    optimizer.add_param_group({"params": [("lm_head.weight", late)], "lr": 0.1})
    assert len(optimizer.param_groups) == len(first) + 1
    assert optimizer.param_groups[-1]["momentum"] == 0.95
    toy.assert_bitwise_equal(others, {n: toy.states(optimizer)[n] for n in others})
    toy.train(model, optimizer, range(3, 5))
    assert not torch.equal(late, before["lm_head.weight"])
    assert set(optimizer.state[late]) == {"momentum", "Q", "momentum_norm", "R_scale"}
    assert optimizer.progress.steps == 5


def test_parameters_swapped_for_new_ones_before_training():
    """Accelerate does this when it shards a model."""
    gate = FixedPeriod(3)
    expected_model, model = toy.model(), toy.model()
    toy.train(expected_model, CurvaDion(toy.groups(expected_model), gate=gate), range(5))
    optimizer = CurvaDion(toy.groups(toy.model()), gate=copy.deepcopy(gate))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    named = dict(model.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [named[name] for name in group["param_names"]]
    toy.train(model, optimizer, range(5))
    toy.assert_bitwise_equal(toy.weights(model), toy.weights(expected_model))


def test_no_gradient_outlives_zero_grad(make):
    """A cycle of references would keep all of them until Python looks for such."""
    X = matrices()
    optimizer = make(X)
    gc.disable()
    try:
        for _ in range(3):
            give_gradients(X)
            gradients = [weakref.ref(x.grad) for x in X]
            optimizer.step()
            optimizer.zero_grad()
            assert not any(gradient() for gradient in gradients)
    finally:
        gc.enable()


# ---------------------------------------------------------------- parameters without gradients


def test_parameters_without_gradient_stay_untouched(make):
    model = toy.model()
    optimizer = make(toy.groups(model))
    toy.train(model, optimizer, range(3))
    before, states = toy.weights(model), toy.states(optimizer)
    lacking = {"linear.weight", "norm.bias", "embedding.weight"}
    for step in range(2):
        optimizer.zero_grad()
        toy.loss(model, step).backward()
        for name in lacking:
            model.get_parameter(name).grad = None
        optimizer.step()
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) == (name in lacking), name
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    for key, tensor in states.items():
        if names[int(key.split(".")[0])] in lacking:
            assert torch.equal(tensor, toy.states(optimizer)[key]), key


def test_matrix_without_gradient_does_not_move_the_gate():
    """The plain rule decays a momentum when it is used, and this one is not."""
    optimizer = CurvaDion(matrices(), momentum_rule="plain", momentum=0.5)
    run(optimizer, 2)
    optimizer.zero_grad()
    optimizer.step()
    assert optimizer.report.rmmc == 0.0


def test_frozen_parameters_are_skipped_until_they_thaw():
    model = toy.model()
    optimizer = CurvaDion(toy.groups(model))
    frozen = {"linear.weight", "norm.bias"}
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    before = toy.weights(model)
    toy.train(model, optimizer, range(2))
    model.linear.weight.grad = torch.ones_like(model.linear.weight)
    optimizer.step()
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) == (name in frozen), name
        assert (p in optimizer.state) == (name not in frozen), name
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    model.linear.weight.requires_grad_(True)
    toy.train(model, optimizer, range(2, 4))
    assert not torch.equal(model.linear.weight, before["linear.weight"])


# ---------------------------------------------------------------- copies


def copy_pickled(model, optimizer):
    return pickle.loads(pickle.dumps((model, optimizer)))


def copy_deep(model, optimizer):
    return copy.deepcopy((model, optimizer))


@pytest.mark.parametrize("duplicate", [copy_deep, copy_pickled])
def test_copy_continues_the_trajectory(make, duplicate):
    model = toy.model()
    optimizer = make(toy.groups(model))
    toy.train(model, optimizer, range(4))
    twin, its_optimizer = duplicate(model, optimizer)
    assert its_optimizer.progress == optimizer.progress
    assert its_optimizer.report == optimizer.report
    reports = toy.train(model, optimizer, range(4, 8))
    assert toy.train(twin, its_optimizer, range(4, 8)) == reports
    toy.assert_bitwise_equal(toy.weights(twin), toy.weights(model))
    toy.assert_bitwise_equal(toy.states(its_optimizer), toy.states(optimizer))


# ---------------------------------------------------------------- states, loaded again and again


def load_own(model, optimizer):
    optimizer.load_state_dict(optimizer.state_dict())


def load_through_torch(model, optimizer):
    state = get_optimizer_state_dict(model, optimizer)
    set_optimizer_state_dict(model, optimizer, state)


def load_flattened(model, optimizer):
    how = StateDictOptions(flatten_optimizer_state_dict=True)
    state = get_optimizer_state_dict(model, optimizer, options=how)
    set_optimizer_state_dict(model, optimizer, state, options=how)


LOADS = {"own": load_own, "torch": load_through_torch, "flattened": load_flattened}


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
@pytest.mark.parametrize("after", [0, 3])
def test_a_state_loads_twice(load, after):
    model, twin = toy.model(), toy.model()
    optimizer, undisturbed = CurvaDion(toy.groups(model)), CurvaDion(toy.groups(twin))
    toy.train(model, optimizer, range(after))
    model, optimizer = copy_pickled(model, optimizer)
    load(model, optimizer)
    load(model, optimizer)
    toy.train(twin, undisturbed, range(after + 3))
    toy.train(model, optimizer, range(after, after + 2))
    load(model, optimizer)
    toy.train(model, optimizer, [after + 2])
    toy.assert_bitwise_equal(toy.weights(model), toy.weights(twin))


def test_keys_of_other_tools_are_kept_without_effect():
    expected = run(CurvaDion(matrices()), 3)
    foreign = {"lr_scale": 0.5, "adaptive": True, "is_muon": False}
    with pytest.warns(UserWarning, match=r"'adaptive'.*without effect") as told:
        optimizer = CurvaDion([{"params": [p], **foreign} for p in matrices()])
    assert len(told) == 1
    assert_same(run(optimizer, 3), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_own(None, optimizer)
        copy.deepcopy(optimizer).add_param_group({"params": matrices(1), "is_muon": True})
    saved = optimizer.state_dict()
    plain = CurvaDion([{"params": [p]} for p in matrices()])
    with pytest.warns(UserWarning, match="'adaptive'") as told:
        for _ in range(2):
            plain.load_state_dict(saved)
    assert len(told) == 1
    for group in (*optimizer.param_groups, *plain.param_groups):
        assert {key: group[key] for key in foreign} == foreign


# ---------------------------------------------------------------- distributed checkpoints


class Counting(Gate):
    asked = 0

    def opens(self, signal, local_steps):
        self.asked += 1
        return True


def test_zero_step_only_creates_state():
    """How torch.distributed.checkpoint makes an optimizer create its state."""
    model = toy.model()
    optimizer = CurvaDion(toy.groups(model), lr=0.0, gate=Counting())
    before = toy.weights(model)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step(closure=None)
    toy.assert_bitwise_equal(toy.weights(model), before)
    assert optimizer.report is None
    assert optimizer.progress.steps == optimizer.progress.local_steps == optimizer.gate.asked == 0
    assert len(optimizer.state) == len(before)
    for state in optimizer.state.values():
        assert not state.get("step", torch.zeros(())).item()
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    toy.train(model, optimizer, [0])
    assert optimizer.gate.asked == optimizer.progress.steps == 1


@pytest.mark.parametrize("touch", ["drift", "synchronize"])
def test_distributed_checkpoint_after_a_look_at_the_replicas(touch):
    """Neither may leave half a state behind, which torch would take for a whole one."""
    model = toy.model()
    optimizer = CurvaDion(toy.groups(model))
    getattr(optimizer, touch)()
    state = get_optimizer_state_dict(model, optimizer)["state"]
    assert state.keys() == dict(model.named_parameters()).keys()
    assert all(state.values())


# ---------------------------------------------------------------- dtypes


@pytest.mark.parametrize(("wanted", "grown"), [("float32", 0.01), (None, 0.0)])
def test_wide_momentum_keeps_what_bfloat16_would_round_away(wanted, grown):
    """Gradients of 1/1000 of the momentum are below bfloat16's resolution."""
    x = nn.Parameter(torch.zeros(6, 4, dtype=torch.bfloat16))
    optimizer = CurvaDion([x], threshold=1e9, local_step="gradient", momentum_dtype=wanted)
    x.grad = torch.ones_like(x)
    optimizer.step()
    before = optimizer.state[x]["momentum"].double()
    for _ in range(10):
        x.grad = torch.full_like(x, 0.001)
        optimizer.step()
        assert not optimizer.report.gate_open
    growth = (optimizer.state[x]["momentum"].double() - before).mean().item()
    assert growth == pytest.approx(grown, rel=0.01)


def test_momentum_that_its_dtype_cannot_hold_saturates():
    """float16 ends at 65504: an infinite momentum would never go away again."""
    (x,) = matrices(1)
    optimizer = CurvaDion([x], momentum_dtype="float16")
    run(optimizer, 2)
    before = x.detach().clone()
    x.grad = torch.full_like(x, 1e5)
    optimizer.step()
    assert not optimizer.report.skipped
    assert torch.isfinite(optimizer.state[x]["momentum"]).all()
    (after,) = run(optimizer, 1)
    assert torch.isfinite(after).all() and not torch.equal(after, before)


@pytest.mark.numeric
def test_strided_parameters():
    """A transposed view as a parameter: same numbers, same trajectory."""
    (plain,) = matrices(1)
    strided = nn.Parameter(plain.detach().mT.contiguous().mT)
    assert not strided.is_contiguous()
    rounding = Rounding(torch.float32, terms=max(plain.shape), steps=4)
    (found,), (wanted,) = run(CurvaDion([strided]), 4), run(CurvaDion([plain]), 4)
    assert_close(found, wanted, rounding)


# ---------------------------------------------------------------- mixed precision


def scaled_train(model, optimizer, scaler, steps, unscale=False):
    for step in steps:
        optimizer.zero_grad()
        scaler.scale(toy.loss(model, step)).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("unscale", [False, True], ids=["scaled", "unscaled by the user"])
def test_grad_scaler_overflow_is_skipped_and_lowers_the_scale(unscale):
    """The rest of the run is as without a scaler: a power of two as the scale loses no bit."""
    model, twin = toy.model(), toy.model()
    optimizer, undisturbed = CurvaDion(toy.groups(model)), CurvaDion(toy.groups(twin))
    toy.train(twin, undisturbed, range(4))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaled_train(model, optimizer, scaler, range(2), unscale)
    before, states = toy.weights(model), toy.states(optimizer)

    optimizer.zero_grad()
    (scaler.scale(toy.loss(model, 2)) * 2.0**140).backward()
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert optimizer.report.skipped
    assert scaler.get_scale() == 2.0**9
    toy.assert_bitwise_equal(toy.weights(model), before)
    toy.assert_bitwise_equal(toy.states(optimizer), states)

    scaled_train(model, optimizer, scaler, range(2, 4), unscale)
    assert not optimizer.report.skipped
    toy.assert_bitwise_equal(toy.weights(model), toy.weights(twin))


def test_grad_scaler_may_overflow_many_times_in_a_row():
    """Its scale starts high and takes a while to come down: no reason to give up."""
    model = toy.model()
    optimizer = CurvaDion(toy.groups(model))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1000)
    for _ in range(15):
        optimizer.zero_grad()
        (scaler.scale(toy.loss(model, 0)) * 2.0**15).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() < 2.0**127
    assert optimizer.progress.steps == 15
