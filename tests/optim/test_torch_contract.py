"""What users and frameworks expect of any torch optimizer."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import pickle
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

import distributed
import toy
from curvadion import (
    RMMC,
    AlwaysOpen,
    CodedGradients,
    CurvaDion,
    Dion,
    FixedPeriod,
    Gate,
    QuantizedAverage,
    param_groups,
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


def train_to_the_end(optimizer, model, steps=range(4)):
    toy.train(model, optimizer, steps)
    return toy.weights(model)


# ---------------------------------------------------------------- construction


def test_params_in_any_form(make):
    expected = run(make(matrices()), 3)
    assert_same(run(make(p for p in matrices()), 3), expected)
    assert_same(run(make([*zip("ab", matrices(), strict=True)]), 3), expected)
    assert_same(run(make(zip("ab", matrices(), strict=True)), 3), expected)
    assert_same(run(make([{"params": matrices()}]), 3), expected)
    assert_same(run(make({"params": [p]} for p in matrices()), 3), expected)


def test_single_parameter_in_a_group():
    (x,) = matrices(1)
    assert CurvaDion([{"params": x}]).param_groups[0]["params"] == [x]


def test_names_are_kept():
    X = matrices()
    optimizer = CurvaDion([("a.weight", X[0]), ("b.weight", X[1])])
    assert optimizer.param_groups[0]["param_names"] == ["a.weight", "b.weight"]
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["a.weight", "b.weight"]


def test_unnamed_and_named_groups_may_not_be_mixed():
    X = matrices()
    with pytest.raises(ValueError, match="names"):
        CurvaDion([{"params": [("a", X[0])]}, {"params": [X[1]]}])


def test_group_keys_override_defaults():
    X = matrices(3)
    optimizer = CurvaDion(
        [
            {"params": X[:1], "lr": 0.5, "mu": 0.8},
            {"params": X[1:2], "algorithm": "adamw", "betas": (0.8, 0.99)},
            {"params": X[2:]},
        ],
        lr=0.1,
        rank_fraction=0.5,
    )
    first, second, third = optimizer.param_groups
    assert (first["lr"], first["mu"], first["rank_fraction"]) == (0.5, 0.8, 0.5)
    assert (second["algorithm"], second["betas"], second["lr"]) == ("adamw", (0.8, 0.99), 0.1)
    assert (third["algorithm"], third["lr"], third["betas"]) == ("dion", 0.1, (0.9, 0.95))


@pytest.mark.parametrize("key", ["fused", "foreach", "capturable", "differentiable", "maximize"])
def test_keys_that_frameworks_write_are_accepted(make, key):
    expected = run(make(matrices()), 3)
    assert_same(run(make([{"params": matrices(), key: False}]), 3), expected)


def test_repr_shows_groups_and_values():
    text = repr(CurvaDion(toy.groups(toy.model()), lr=0.125))
    assert text.startswith("CurvaDion (")
    assert "lr: 0.125" in text
    assert "Parameter Group 2" in text


def test_is_an_optimizer(make):
    assert isinstance(make(matrices()), torch.optim.Optimizer)


# ---------------------------------------------------------------- global settings of torch


SWITCHED = {
    "low rank": {"threshold": 0.3},
    "gradient": {"threshold": 0.3, "local_step": "gradient"},
    "quantized": {"gate": FixedPeriod(2), "sync": QuantizedAverage(spectrum_decay=0.8)},
    "polar": {"direction": "polar", "sync": CodedGradients()},
}


def life(options, setting, rank=0, replicas=None):
    """Weights and states after steps, a synchronisation and a reload, with a setting of torch."""
    model = toy.model()
    parameters = list(model.parameters())
    gradients = []
    for step in range(4):
        give_gradients(parameters, step + 10 * rank)
        gradients.append([p.grad for p in parameters])
    with setting:
        optimizer = CurvaDion(toy.groups(model), replicas=replicas, **copy.deepcopy(options))
        for step, given in enumerate(gradients):
            if step == 3:
                optimizer.synchronize()
                optimizer.load_state_dict(optimizer.state_dict())
            for p, gradient in zip(parameters, given, strict=True):
                p.grad = gradient.clone()
            optimizer.step()
    states = [v for state in optimizer.state.values() for v in state.values()]
    return parameters, [v for v in states if isinstance(v, torch.Tensor)]


@pytest.mark.parametrize("options", SWITCHED.values(), ids=SWITCHED)
@pytest.mark.parametrize("switch", SWITCHES)
def test_global_switches_of_torch_change_no_bit(options, switch):
    with_switch, plain = life(options, switched(switch)), life(options, contextlib.nullcontext())
    for found, expected in zip(with_switch, plain, strict=True):
        if switch in ROUNDING:  # which rounds products, where the CPU can
            for a, b in zip(found, expected, strict=True):
                assert_close(a, b, Rounding(torch.float16, terms=8, condition=10, steps=5))
        else:
            assert [t.dtype for t in found] == [t.dtype for t in expected]
            assert_same(found, expected)


def lives_of_a_replica(rank, options):
    """The weights of a replica in the end: without a switch, and with each of them."""
    settings = [contextlib.nullcontext(), *map(switched, SWITCHES)]
    lives = [life(options, setting, rank, dist.group.WORLD) for setting in settings]
    return [[p.detach() for p in parameters] for parameters, _ in lives]


@pytest.mark.parametrize("options", SWITCHED.values(), ids=SWITCHED)
def test_global_switches_of_torch_change_no_bit_of_two_replicas(options):
    for plain, *lives in distributed.run(2, lives_of_a_replica, options):
        for switch, found in zip(SWITCHES, lives, strict=True):
            if switch not in ROUNDING:
                assert_same(found, plain)


def test_data_set_to_another_size_after_the_gradient_is_an_error():
    (X,) = matrices(1)
    optimizer = Dion([X])
    give_gradients([X])
    X.data = torch.ones(64, 64)
    with pytest.raises((ValueError, RuntimeError), match="64"):
        optimizer.step()


def test_a_layout_that_changes_before_the_first_step_is_an_error_that_names_it():
    convolution = nn.Conv2d(4, 4, 3, bias=False)
    optimizer = Dion([("kernel", convolution.weight)])
    convolution.to(memory_format=torch.channels_last)
    convolution.weight.grad = torch.ones_like(convolution.weight)
    with pytest.raises(ValueError, match="kernel.*not contiguous"):
        optimizer.step()


# ---------------------------------------------------------------- learning rates


@pytest.mark.numeric
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_tensor_lr_gives_the_trajectory_of_a_number(make, shape, dtype):
    expected_model, model = toy.model(), toy.model()
    lr = 0.03125  # exact in any dtype
    toy.train(expected_model, make(toy.groups(expected_model), lr=lr), range(6))
    toy.train(model, make(toy.groups(model), lr=torch.full(shape, lr, dtype=dtype)), range(6))
    for name, p in expected_model.named_parameters():
        rounding = Rounding(torch.float32, condition=CONDITION, steps=6)
        assert_close(model.get_parameter(name), p, rounding, what=name)


def test_tensor_lr_may_change_in_place():
    lr = torch.tensor(0.5)
    optimizer = Dion(matrices(), lr=lr, weight_decay=0.0)
    before = run(optimizer, 1)
    lr.zero_()
    assert_same(run(optimizer, 1), before)


SCHEDULERS = {
    "lambda": lambda o: LambdaLR(o, lambda step: 1 / (1 + step)),
    "cosine": lambda o: CosineAnnealingLR(o, 10),
    "one cycle": lambda o: OneCycleLR(o, max_lr=0.1, total_steps=10),
    "sequential": lambda o: SequentialLR(
        o, [LinearLR(o, 0.1, total_iters=3), CosineAnnealingLR(o, 7)], milestones=[3]
    ),
    "constant": lambda o: ConstantLR(o, 0.5, total_iters=3),
}


@pytest.mark.numeric
@pytest.mark.parametrize("schedule", SCHEDULERS.values(), ids=SCHEDULERS)
@pytest.mark.parametrize("lr", [0.02, torch.tensor(0.02)], ids=["number", "tensor"])
def test_schedulers_drive_the_learning_rate(schedule, lr):
    """The trajectory is that of the scheduled rates set by hand."""
    scheduled, by_hand = toy.model(), toy.model()
    optimizer = CurvaDion(toy.groups(scheduled), lr=copy.deepcopy(lr))
    scheduler = schedule(optimizer)
    rates = []

    def remember_and_go_on():
        rates.append([(float(g["lr"]), g["betas"]) for g in optimizer.param_groups])
        scheduler.step()

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        rates.append([(float(g["lr"]), g["betas"]) for g in optimizer.param_groups])
        for step in range(6):
            toy.train(scheduled, optimizer, [step], after_step=remember_and_go_on)
            rates[-1] = [(float(g["lr"]), g["betas"]) for g in optimizer.param_groups]
    assert len({rate for (rate, _), *_ in rates}) > 1

    reference = CurvaDion(toy.groups(by_hand), lr=0.02)
    for step in range(6):
        for group, (rate, betas) in zip(reference.param_groups, rates[step], strict=True):
            group["lr"], group["betas"] = rate, betas
        toy.train(by_hand, reference, [step])
    for name, p in by_hand.named_parameters():
        rounding = Rounding(torch.float32, terms=16, condition=CONDITION, steps=6)
        assert_close(scheduled.get_parameter(name), p, rounding, what=name)


def test_plateau_scheduler():
    optimizer = CurvaDion(matrices(), lr=0.1)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    for _ in range(3):
        run(optimizer, 1)
        scheduler.step(1.0)
    assert optimizer.param_groups[0]["lr"] == 0.025


def test_learning_rate_set_in_a_group_takes_effect_at_the_next_step(make):
    optimizer = make(matrices(), weight_decay=0.0)
    before = run(optimizer, 2)
    optimizer.param_groups[0]["lr"] = 0.0
    assert_same(run(optimizer, 1), before)


def test_group_dictionaries_may_be_replaced():
    optimizer = CurvaDion(matrices(), weight_decay=0.0)
    before = run(optimizer, 2)
    optimizer.param_groups[:] = [{**group, "lr": 0.0} for group in optimizer.param_groups]
    assert_same(run(optimizer, 1), before)


def test_warm_up_from_zero_gathers_momentum(make):
    """lr 0 with real gradients is a step like any other."""
    optimizer = make(matrices(), lr=0.0)
    assert_same(run(optimizer, 1), [p.detach() for p in matrices()])
    assert optimizer.progress.steps == 1
    assert optimizer.report.step == 1
    for state in optimizer.state.values():
        assert state["momentum"].norm() > 0


# ---------------------------------------------------------------- closures


def test_closure_runs_with_gradients_and_its_loss_is_returned(make):
    model, twin = toy.model(), toy.model()
    optimizer, plain = make(toy.groups(model)), make(toy.groups(twin))
    for step in range(3):

        def closure(step=step):
            assert torch.is_grad_enabled()
            optimizer.zero_grad()
            value = toy.loss(model, step)
            value.backward()
            return value

        expected = toy.loss(twin, step)
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


def test_step_under_no_grad_still_gives_the_closure_gradients():
    model = toy.model()
    optimizer = CurvaDion(toy.groups(model))
    before = toy.weights(model)

    def closure():
        optimizer.zero_grad()
        value = toy.loss(model, 0)
        value.backward()
        return value

    with torch.no_grad():
        optimizer.step(closure)
    assert not torch.equal(model.linear.weight, before["linear.weight"])


def test_step_leaves_grad_mode_and_gradients_alone(make):
    model = toy.model()
    optimizer = make(toy.groups(model))
    toy.loss(model, 0).backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    assert torch.is_grad_enabled()
    assert_same([p.grad for p in model.parameters()], gradients)
    assert all(p.requires_grad and p.is_leaf for p in model.parameters())


def test_zero_grad():
    X = matrices()
    optimizer = CurvaDion(X)
    give_gradients(X)
    optimizer.zero_grad(set_to_none=False)
    assert all(not p.grad.any() for p in X)
    optimizer.zero_grad()
    assert all(p.grad is None for p in X)


def test_step_hooks_fire(make):
    optimizer = make(matrices())
    seen = []
    before = optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda o, *_: seen.append(o.report.step))
    run(optimizer, 2)
    before.remove()
    run(optimizer, 1)
    assert seen == ["before", 1, "before", 2, 3]


def test_state_dict_hooks_fire():
    optimizer = CurvaDion(matrices())
    seen = []
    optimizer.register_state_dict_post_hook(lambda o, s: seen.append("saved"))
    optimizer.register_load_state_dict_pre_hook(lambda o, s: seen.append("loading"))
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append("loaded"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["saved", "loading", "loaded"]


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
    assert optimizer.param_groups[-1]["mu"] == 0.95
    toy.assert_bitwise_equal(others, {n: toy.states(optimizer)[n] for n in others})
    toy.train(model, optimizer, range(3, 5))
    assert not torch.equal(late, before["lm_head.weight"])
    assert set(optimizer.state[late]) == {"momentum", "Q", "momentum_norm", "R_scale"}
    assert optimizer.progress.steps == 5


@pytest.mark.parametrize("gate", [AlwaysOpen(), RMMC(0.3), FixedPeriod(3)], ids=repr)
def test_parameters_swapped_for_new_ones_before_training(gate):
    """Accelerate does this when it shards a model."""
    expected_model, model = toy.model(), toy.model()
    toy.train(expected_model, CurvaDion(toy.groups(expected_model), gate=gate), range(5))
    optimizer = CurvaDion(toy.groups(toy.model()), gate=copy.deepcopy(gate))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    named = dict(model.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [named[name] for name in group["param_names"]]
    toy.train(model, optimizer, range(5))
    toy.assert_bitwise_equal(toy.weights(model), toy.weights(expected_model))


def test_parameters_swapped_in_mid_training_with_their_state():
    model, twin = toy.model(), toy.model()
    optimizer, undisturbed = CurvaDion(toy.groups(model)), CurvaDion(toy.groups(twin))
    toy.train(model, optimizer, range(3))
    toy.train(twin, undisturbed, range(6))
    for name, old in list(model.named_parameters()):
        new = nn.Parameter(old.detach().clone())
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, new)
        optimizer.state[new] = optimizer.state.pop(old)
        for group in optimizer.param_groups:
            group["params"] = [new if p is old else p for p in group["params"]]
    toy.train(model, optimizer, range(3, 6))
    toy.assert_bitwise_equal(toy.weights(model), toy.weights(twin))


def test_a_state_that_is_replaced_counts_at_the_next_step():
    X = matrices()
    optimizer, undisturbed = (
        CurvaDion(X),
        CurvaDion(twins := [nn.Parameter(p.detach().clone()) for p in X]),
    )
    for _ in range(3):
        for x, twin in zip(X, twins, strict=True):
            x.grad = torch.ones_like(x)
            twin.grad = torch.ones_like(twin)
            optimizer.state[x] = dict(optimizer.state[x])
        optimizer.step()
        undisturbed.step()
        optimizer.state[X[0]] = {k: v.clone() for k, v in optimizer.state[X[0]].items()}
    assert all(map(torch.equal, X, twins))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_no_gradient_outlives_zero_grad(kind):
    """A cycle of references would keep all of them until Python looks for such."""
    X = matrices()
    optimizer = OPTIMIZERS[kind](X)
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


def test_replaced_states_are_let_go():
    """With two directions the step goes through the matrices in two parts, each with its states."""
    X = matrices(3)
    groups = [{"params": X[:2]}, {"params": X[2:], "direction": "polar"}]
    optimizer = Dion(groups)
    give_gradients(X)
    optimizer.step()
    before = [weakref.ref(t) for state in optimizer.state.values() for t in state.values()]
    for x in X:
        optimizer.state[x] = {k: v.clone() for k, v in optimizer.state[x].items()}
    optimizer.step()
    gc.collect()
    assert not any(tensor() is not None for tensor in before)


def test_cleared_state_starts_afresh():
    X = matrices()
    optimizer = CurvaDion(X)
    run(optimizer, 3)
    optimizer.state.clear()
    give_gradients(X)
    optimizer.step()
    fresh = CurvaDion([nn.Parameter(p.detach()) for p in X])
    run(fresh, 1)
    assert optimizer.state_dict()["state"].keys() == fresh.state_dict()["state"].keys()
    for held, expected in zip(optimizer.state.values(), fresh.state.values(), strict=True):
        assert torch.equal(held["momentum"], expected["momentum"])


# ---------------------------------------------------------------- parameters without gradients


@pytest.mark.parametrize("reset", [True, False], ids=["never had one", "had one before"])
def test_parameters_without_gradient_stay_untouched(make, reset):
    model = toy.model()
    optimizer = make(toy.groups(model))
    if not reset:
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


def test_state_keys_are_the_same_without_a_gradient(make):
    model, twin = toy.model(), toy.model()
    optimizer, partly = make(toy.groups(model)), make(toy.groups(twin))
    toy.train(model, optimizer, [0])
    toy.loss(twin, 0).backward()
    twin.linear.weight.grad = None
    twin.norm.weight.grad = None
    partly.step()
    assert toy.states(optimizer).keys() == toy.states(partly).keys()


def test_step_without_any_gradient(make):
    model = toy.model()
    optimizer = make(toy.groups(model))
    before = toy.weights(model)
    optimizer.step()
    toy.assert_bitwise_equal(toy.weights(model), before)


def test_matrix_without_gradient_does_not_move_the_gate():
    """The plain rule decays a momentum when it is used, and this one is not."""
    optimizer = CurvaDion(matrices(), momentum_rule="plain", mu=0.5)
    run(optimizer, 2)
    optimizer.zero_grad()
    optimizer.step()
    assert optimizer.report.rmmc == 0.0


def test_frozen_parameters_are_skipped(make):
    model = toy.model()
    model.linear.weight.requires_grad_(False)
    model.norm.bias.requires_grad_(False)
    before = toy.weights(model)
    optimizer = make(
        [
            {"params": [model.linear.weight, model.lm_head.weight]},
            {
                "params": [model.embedding.weight, *model.norm.parameters(), model.linear.bias],
                "algorithm": "adamw",
            },
        ]
    )
    toy.train(model, optimizer, range(3))
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) == (not p.requires_grad), name
        assert (p in optimizer.state) == p.requires_grad, name
    model.linear.weight.grad = torch.ones_like(model.linear.weight)
    optimizer.step()
    assert torch.equal(model.linear.weight, before["linear.weight"])
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def test_frozen_parameters_may_thaw(make):
    model = toy.model()
    optimizer = make(toy.groups(model))
    model.linear.weight.requires_grad_(False)
    toy.train(model, optimizer, range(2))
    before = model.linear.weight.detach().clone()
    model.linear.weight.requires_grad_(True)
    toy.train(model, optimizer, range(2, 4))
    assert not torch.equal(model.linear.weight, before)


@pytest.mark.parametrize("frozen", ["all", "matrices"])
def test_everything_may_be_frozen_for_a_while(make, frozen):
    model = toy.model()
    optimizer = make(toy.groups(model))
    for group in optimizer.param_groups:
        if frozen == "all" or group["algorithm"] == "dion":
            for p in group["params"]:
                p.requires_grad_(False)
    before = toy.weights(model)
    if frozen == "matrices":
        toy.loss(model, 0).backward()
    optimizer.step()
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) == (not p.requires_grad), name


# ---------------------------------------------------------------- copies


def copy_pickled(model, optimizer):
    return pickle.loads(pickle.dumps((model, optimizer)))


def copy_deep(model, optimizer):
    return copy.deepcopy((model, optimizer))


@pytest.mark.parametrize("duplicate", [copy_deep, copy_pickled])
@pytest.mark.parametrize("after", [0, 4])
def test_copy_continues_the_trajectory(make, duplicate, after):
    model = toy.model()
    optimizer = make(toy.groups(model))
    toy.train(model, optimizer, range(after))
    twin, its_optimizer = duplicate(model, optimizer)
    assert its_optimizer.progress == optimizer.progress
    assert its_optimizer.report == optimizer.report
    reports = toy.train(model, optimizer, range(after, after + 4))
    assert toy.train(twin, its_optimizer, range(after, after + 4)) == reports
    toy.assert_bitwise_equal(toy.weights(twin), toy.weights(model))
    toy.assert_bitwise_equal(toy.states(its_optimizer), toy.states(optimizer))


@pytest.mark.parametrize("duplicate", [copy_deep, copy_pickled])
def test_copy_shares_nothing_but_the_process_group(duplicate):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = toy.model()
        optimizer = CurvaDion(toy.groups(model), replicas=dist.group.WORLD)
        toy.train(model, optimizer, range(2))
        before, states = toy.weights(model), toy.states(optimizer)
        twin, its_optimizer = duplicate(model, optimizer)
        toy.train(twin, its_optimizer, range(2, 4))
        toy.assert_bitwise_equal(toy.weights(model), before)
        toy.assert_bitwise_equal(toy.states(optimizer), states)
        assert optimizer.progress.steps == 2
        assert its_optimizer.gate is not optimizer.gate
    finally:
        dist.destroy_process_group()


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
COPIES = {"itself": lambda *both: both, "deep copy": copy_deep, "pickled": copy_pickled}


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("after", [0, 3])
def test_a_state_loads_twice(make, duplicate, load, after):
    model, twin = toy.model(), toy.model()
    optimizer, undisturbed = make(toy.groups(model)), make(toy.groups(twin))
    toy.train(model, optimizer, range(after))
    model, optimizer = duplicate(model, optimizer)
    load(model, optimizer)
    load(model, optimizer)
    toy.train(twin, undisturbed, range(after + 3))
    toy.train(model, optimizer, range(after, after + 2))
    load(model, optimizer)
    toy.train(model, optimizer, [after + 2])
    toy.assert_bitwise_equal(toy.weights(model), toy.weights(twin))


def test_a_run_that_was_prepared_by_a_framework_resumes():
    """Accelerate loads an optimizer's own state when it prepares it, and the saved one then."""
    model = toy.model()
    optimizer = CurvaDion(toy.groups(model))
    optimizer.load_state_dict(optimizer.state_dict())
    toy.train(model, optimizer, range(3))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    toy.train(model, optimizer, range(3, 6))
    resumed = toy.model()
    its_optimizer = CurvaDion(toy.groups(resumed))
    its_optimizer.load_state_dict(its_optimizer.state_dict())
    resumed.load_state_dict(saved[0])
    its_optimizer.load_state_dict(saved[1])
    toy.train(resumed, its_optimizer, range(3, 6))
    toy.assert_bitwise_equal(toy.weights(resumed), toy.weights(model))


FOREIGN = {"lr_scale": 0.5, "rho": 0.05, "adaptive": True, "lr_mult": 2.0, "is_muon": False}


@pytest.mark.parametrize("key", FOREIGN)
def test_keys_of_other_tools_are_kept_without_effect(make, key):
    expected = run(make(matrices()), 3)
    with pytest.warns(UserWarning, match=rf"\['{key}'\].*without effect") as told:
        optimizer = make([{"params": [p], key: FOREIGN[key]} for p in matrices()])
    assert len(told) == 1
    assert_same(run(optimizer, 3), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_own(None, optimizer)
        load_own(None, optimizer)
        copy.deepcopy(optimizer).add_param_group({"params": matrices(1), key: 1.0})
    assert [group[key] for group in optimizer.param_groups] == [FOREIGN[key]] * 2


def test_states_with_more_or_fewer_keys_of_other_tools_load():
    with pytest.warns(UserWarning, match="rho"):
        more = CurvaDion([{"params": matrices(), "rho": 0.05, "initial_lr": 0.1}])
    fewer = CurvaDion(matrices())
    run(more, 2)
    run(fewer, 2)
    with_rho, without = copy.deepcopy(more.state_dict()), copy.deepcopy(fewer.state_dict())
    with_rho["param_groups"][0]["lr_scale"] = 1.0
    for _ in range(2):
        more.load_state_dict(without)
    assert more.param_groups[0]["rho"] == 0.05
    with pytest.warns(UserWarning, match=r"\['lr_scale', 'rho'\]") as told:
        for _ in range(2):
            fewer.load_state_dict(with_rho)
    assert len(told) == 1
    assert fewer.param_groups[0]["rho"] == 0.05
    fewer.load_state_dict(without)
    run(fewer, 2)


def test_eval_and_train_of_one_replica_do_nothing(make):
    model, twin = toy.model(), toy.model()
    optimizer, undisturbed = make(toy.groups(model)), make(toy.groups(twin))
    for step in range(4):
        optimizer.train()
        toy.train(model, optimizer, [step])
        optimizer.eval()
    toy.train(twin, undisturbed, range(4))
    toy.assert_bitwise_equal(toy.weights(model), toy.weights(twin))


# ---------------------------------------------------------------- distributed checkpoints


def test_zero_step_only_creates_state(make):
    """How torch.distributed.checkpoint makes an optimizer create its state."""
    model = toy.model()
    optimizer = make(toy.groups(model), lr=0.0)
    before = toy.weights(model)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step(closure=None)
    toy.assert_bitwise_equal(toy.weights(model), before)
    assert optimizer.report is None
    assert optimizer.progress.steps == optimizer.progress.local_steps == 0
    assert len(optimizer.state) == len(before)
    for state in optimizer.state.values():
        assert not state.get("step", torch.zeros(())).item()


def test_zero_step_asks_no_gate():
    class Counting(Gate):
        asked = 0

        def opens(self, signal, local_steps):
            self.asked += 1
            return True

    x, gate = matrices(1)[0], Counting()
    x.grad = torch.zeros_like(x)
    optimizer = CurvaDion([x], lr=0.0, gate=gate)
    optimizer.step()
    assert gate.asked == 0
    optimizer.param_groups[0]["lr"] = 0.1
    give_gradients([x])
    optimizer.step()
    assert gate.asked == optimizer.progress.steps == 1


OPTIONS = {
    "plain": StateDictOptions(),
    "flattened": StateDictOptions(flatten_optimizer_state_dict=True),
    "full": StateDictOptions(full_state_dict=True, cpu_offload=True),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_distributed_checkpoint_round_trip(make, options, tmp_path):
    model = toy.model()
    optimizer = make(toy.groups(model))
    toy.train(model, optimizer, range(4))
    saved = {
        "model": model.state_dict(),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }
    torch.distributed.checkpoint.save(saved, checkpoint_id=tmp_path, no_dist=True)
    reports = toy.train(model, optimizer, range(4, 8))

    resumed = toy.model()
    its_optimizer = make(toy.groups(resumed))
    loaded = {
        "model": resumed.state_dict(),
        "optimizer": get_optimizer_state_dict(resumed, its_optimizer, options=options),
    }
    assert its_optimizer.progress.steps == 0
    torch.distributed.checkpoint.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    resumed.load_state_dict(loaded["model"])
    set_optimizer_state_dict(resumed, its_optimizer, loaded["optimizer"], options=options)
    assert toy.train(resumed, its_optimizer, range(4, 8)) == reports
    toy.assert_bitwise_equal(toy.weights(resumed), toy.weights(model))
    toy.assert_bitwise_equal(toy.states(its_optimizer), toy.states(optimizer))


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_dtypes_train(make, dtype):
    model = toy.model(dtype)
    optimizer = make(toy.groups(model), lr=0.02)
    first = toy.loss(model, 0).item()
    toy.train(model, optimizer, [0] * 15)
    assert toy.loss(model, 0).item() < 0.9 * first
    assert all(p.dtype == dtype for p in model.parameters())


def test_state_dtypes_follow_the_parameter_unless_told():
    for wanted, expected in [(None, torch.bfloat16), ("float32", torch.float32)]:
        model = toy.model(torch.bfloat16)
        optimizer = CurvaDion(toy.groups(model), momentum_dtype=wanted, q_dtype=torch.float32)
        toy.train(model, optimizer, [0])
        state = optimizer.state[model.linear.weight]
        assert state["momentum"].dtype == expected
        assert state["Q"].dtype == torch.float32
        assert state["momentum_norm"].dtype == torch.float32


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
def test_float64_is_computed_in_float64():
    """At full rank P P^T M = M, up to rounding: the momentum becomes mu M."""
    (x,) = (p.detach().double().requires_grad_() for p in matrices(1))
    optimizer = Dion([x], rank_fraction=1.0, mu=0.5)
    give_gradients([x])
    optimizer.step()
    rounding = Rounding(torch.float64, terms=max(x.shape))
    assert_close(optimizer.state[x]["momentum"], 0.5 * x.grad, rounding)
    assert optimizer.state[x]["Q"].dtype == torch.float64


def test_parameters_of_several_dtypes():
    dtypes = (torch.float32, torch.bfloat16, torch.float64)
    X = [p.detach().to(d).requires_grad_() for p, d in zip(matrices(3), dtypes, strict=True)]
    optimizer = CurvaDion(X)
    before = [p.detach().clone() for p in X]
    after = run(optimizer, 3)
    assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))


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
def test_grad_scaler_changes_nothing(make, unscale):
    """A power of two as the scale loses no bit."""
    model, twin = toy.model(), toy.model()
    toy.train(twin, make(toy.groups(twin)), range(4))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaled_train(model, make(toy.groups(model)), scaler, range(4), unscale)
    toy.assert_bitwise_equal(toy.weights(model), toy.weights(twin))


@pytest.mark.parametrize("unscale", [False, True], ids=["scaled", "unscaled by the user"])
def test_grad_scaler_overflow_is_skipped_and_lowers_the_scale(make, unscale):
    model, twin = toy.model(), toy.model()
    optimizer, undisturbed = make(toy.groups(model)), make(toy.groups(twin))
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


def test_clipping_before_the_step():
    model = toy.model()
    optimizer = CurvaDion(toy.groups(model))
    toy.loss(model, 0).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()
    norms = [state["momentum_norm"].item() for state in optimizer.state.values() if "Q" in state]
    assert 0 < max(norms) <= 1e-3


def test_model_of_param_groups_trains(make):
    model = toy.model()
    optimizer = make(param_groups(model, elementwise="lion"), lr=0.01)
    first = toy.loss(model, 0).item()
    toy.train(model, optimizer, [0] * 20)
    assert toy.loss(model, 0).item() < 0.9 * first
