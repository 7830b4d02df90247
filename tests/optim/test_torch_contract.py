"""What users and frameworks expect of any torch optimizer."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import pickle
import typing
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
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

from curvadion import CurvaDion, Dion, FixedPeriod, QuantizedAverage, Replicated
from support.references.reference import DionReference
from support.references.tolerance import Rounding, assert_close
from support.runs import distributed, toy
from support.runs.seeded import gradient, weights
from support.runs.switches import ROUNDING, SWITCHES, switched

OPTIMIZERS = {
    "dion": Dion,
    "gradient": functools.partial(CurvaDion, threshold=0.3, local_step="gradient"),
    "plain": functools.partial(CurvaDion, threshold=0.3, momentum_rule="plain", right_factor="qr"),
}


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


# ---------------------------------------------------------------- parameters and switches


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
    assert_same(
        run(CurvaDion(form(matrices()), threshold=0.3), 3),
        run(CurvaDion(matrices(), threshold=0.3), 3),
    )


def life(options, setting, rank):
    """What one of two replicas holds after steps, a synchronisation and a reload."""
    model = toy.model()
    parameters = list(model.parameters())
    gradients = []
    for step in range(4):
        give_gradients(parameters, step + 10 * rank)
        gradients.append([p.grad for p in parameters])
    with setting:
        optimizer = CurvaDion(
            toy.groups(model), replicas=dist.group.WORLD, **copy.deepcopy(options)
        )
        for step, given in enumerate(gradients):
            if step == 3:
                optimizer.synchronize(exact=True)
                optimizer.load_state_dict(optimizer.state_dict())
            for p, one in zip(parameters, given, strict=True):
                p.grad = one.clone()
            optimizer.step()
    return toy.weights(model) | toy.states(optimizer)


def lives(rank, options):
    settings = [contextlib.nullcontext(), *(switched(s) for s in SWITCHES if s not in ROUNDING)]
    return [life(options, setting, rank) for setting in settings]


@pytest.mark.parametrize(
    "options",
    [
        {"gate": FixedPeriod(2), "sync": QuantizedAverage(spectrum_decay=0.8)},
        {"threshold": 0.3, "local_step": "gradient"},
    ],
    ids=["quantized", "low rank"],
)
def test_global_switches_of_torch_change_no_bit(options):
    for plain, *others in distributed.run(2, lives, options):
        for other in others:
            toy.assert_bitwise_equal(other, plain)


# ---------------------------------------------------------------- schedules, closures, hooks


@pytest.mark.numeric
@pytest.mark.parametrize(
    ("schedule", "lr"),
    [
        (lambda o: OneCycleLR(o, max_lr=[0.1, 0.04, 0.02], total_steps=10), 0.02),
        (lambda o: CosineAnnealingLR(o, 8), torch.tensor(0.02)),
        (lambda o: CosineAnnealingLR(o, 8), torch.tensor([0.02], dtype=torch.float64)),
    ],
    ids=["one cycle", "cosine", "cosine of a vector"],
)
def test_schedulers_drive_the_learning_rate(schedule, lr):
    """Rates and betas of each group, step by step, are those of torch's AdamW."""
    shapes = [(8, 6), (6, 9), (7,)]
    X = [nn.Parameter(weights(shape)) for shape in shapes]
    Y = [nn.Parameter(x.detach().clone()) for x in X]
    groups = [{"params": X[:1]}, {"params": X[1:2]}, {"params": X[2:], "algorithm": "adamw"}]
    optimizer = Dion(groups, lr=lr, rank_fraction=0.5)
    theirs = torch.optim.AdamW(
        [{"params": [y]} for y in Y], lr=0.02, betas=(0.9, 0.95), weight_decay=0.01
    )
    schedulers = schedule(optimizer), schedule(theirs)
    references = [DionReference(weights(shape), 1, 3) for shape in shapes[:2]]
    optimizer.param_groups[1]["right_factor"] = references[1].right_factor = "qr"
    for step in range(6):
        for x, y in zip(X, Y, strict=True):
            x.grad = gradient(x.shape, step, 0)
            y.grad = x.grad.clone()
        for reference, group, x in zip(references, theirs.param_groups, X, strict=False):
            reference.lr = group["lr"]
            reference.step([x.grad], True)
        for each in (optimizer, theirs, *schedulers):
            each.step()
    for x, wanted, shape in zip(X, [r.X[0] for r in references] + Y[2:], shapes, strict=True):
        moved = float((wanted.detach() - weights(shape)).norm())
        assert_close(x, wanted, Rounding(torch.float32, terms=9, condition=8, steps=6), scale=moved)


def test_closure_runs_with_gradients_and_its_loss_is_returned():
    model, twin = toy.model(), toy.model()
    optimizer, plain = (
        CurvaDion(toy.groups(model), threshold=0.3),
        CurvaDion(toy.groups(twin), threshold=0.3),
    )
    for step in range(3):

        def closure(step=step):
            assert torch.is_grad_enabled()
            optimizer.zero_grad()
            value = toy.loss(model, step)
            value.backward()
            return value

        expected = toy.loss(twin, step)
        with torch.no_grad():
            assert optimizer.step(closure=closure).item() == expected.item()
        plain.zero_grad()
        expected.backward()
        assert plain.step() is None
    toy.assert_bitwise_equal(toy.weights(model), toy.weights(twin))


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
    optimizer = CurvaDion(matrices(), threshold=0.3)
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


# ---------------------------------------------------------------- gradients that are missing


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


def test_frozen_parameters_are_skipped_until_they_thaw():
    model = toy.model()
    optimizer = CurvaDion(toy.groups(model), threshold=0.3)
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


# ---------------------------------------------------------------- copies and saved states


def pickled(both):
    return pickle.loads(pickle.dumps(both))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled])
def test_copy_continues_the_trajectory(duplicate):
    model = toy.model()
    optimizer = CurvaDion(toy.groups(model), threshold=0.3, local_step="gradient")
    toy.train(model, optimizer, range(4))
    twin, its_optimizer = duplicate((model, optimizer))
    assert its_optimizer.progress == optimizer.progress
    assert its_optimizer.report == optimizer.report
    reports = toy.train(model, optimizer, range(4, 8))
    assert toy.train(twin, its_optimizer, range(4, 8)) == reports
    toy.assert_bitwise_equal(toy.weights(twin), toy.weights(model))
    toy.assert_bitwise_equal(toy.states(its_optimizer), toy.states(optimizer))


def load_own(model, optimizer):
    optimizer.load_state_dict(optimizer.state_dict())


def load_flattened(model, optimizer):
    how = StateDictOptions(flatten_optimizer_state_dict=True)
    state = get_optimizer_state_dict(model, optimizer, options=how)
    set_optimizer_state_dict(model, optimizer, state, options=how)


@pytest.mark.parametrize(("load", "after"), [(load_own, 0), (load_flattened, 3)])
def test_a_state_loads_twice(load, after):
    model, twin = toy.model(), toy.model()
    optimizer, undisturbed = (
        CurvaDion(toy.groups(model), threshold=0.3),
        CurvaDion(toy.groups(twin), threshold=0.3),
    )
    toy.train(model, optimizer, range(after))
    model, optimizer = pickled((model, optimizer))
    load(model, optimizer)
    load(model, optimizer)
    toy.train(twin, undisturbed, range(after + 3))
    toy.train(model, optimizer, range(after, after + 2))
    load(model, optimizer)
    toy.train(model, optimizer, [after + 2])
    toy.assert_bitwise_equal(toy.weights(model), toy.weights(twin))


def test_keys_of_other_tools_are_kept_without_effect():
    expected = run(CurvaDion(matrices(), threshold=0.3), 3)
    foreign = {"lr_scale": 0.5, "adaptive": True, "is_muon": False}
    with pytest.warns(UserWarning, match=r"'adaptive'.*without effect") as told:
        optimizer = CurvaDion([{"params": [p], **foreign} for p in matrices()], threshold=0.3)
    assert len(told) == 2  # one a group; Python shows equal ones once
    assert_same(run(optimizer, 3), expected)
    saved = optimizer.state_dict()
    plain = CurvaDion([{"params": [p]} for p in matrices()], threshold=0.3)
    plain.load_state_dict(saved)
    for group in (*optimizer.param_groups, *plain.param_groups):
        assert {key: group[key] for key in foreign} == foreign


# ---------------------------------------------------------------- narrow dtypes and scalers


@pytest.mark.parametrize(("wanted", "grown"), [("float32", 0.01), (None, 0.0)])
def test_wide_momentum_keeps_what_bfloat16_would_round_away(wanted, grown):
    """Gradients of 1/1000 of the momentum are below bfloat16's resolution."""
    x = nn.Parameter(torch.zeros(6, 4, dtype=torch.bfloat16))
    optimizer = CurvaDion([x], threshold=1e9, local_step="gradient", state_dtype=wanted)
    x.grad = torch.ones_like(x)
    optimizer.step()
    before = optimizer.state[x]["momentum"].double()
    for _ in range(10):
        x.grad = torch.full_like(x, 0.001)
        optimizer.step()
        assert not optimizer.report.gate_open
    growth = (optimizer.state[x]["momentum"].double() - before).mean().item()
    assert growth == pytest.approx(grown, rel=0.01)


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
    optimizer, undisturbed = (
        CurvaDion(toy.groups(model), threshold=0.3),
        CurvaDion(toy.groups(twin), threshold=0.3),
    )
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


@pytest.mark.parametrize("kind", [Dion, CurvaDion, Replicated])
def test_a_subclass_may_override_add_param_group(kind):
    class Counting(kind):
        def add_param_group(self, param_group):
            super().add_param_group(param_group)
            self.counted = len(self.param_groups)

    weights = nn.Parameter(torch.ones(8, 8))
    inner = torch.optim.AdamW([weights]) if kind is Replicated else [weights]
    how = {} if kind is Dion else {"gate": FixedPeriod(2)}
    optimizer = Counting(inner, replicas="single", **how)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4, 4))]})
    assert optimizer.counted == 2
    optimizer.defaults = {**optimizer.defaults, "lr": 0.5}
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4, 4))]})
    assert optimizer.param_groups[-1]["lr"] == (0.001 if kind is Replicated else 0.5)


def test_the_paper_steps_along_gradients_and_hints_can_be_read():
    paper = CurvaDion.paper([nn.Parameter(torch.ones(8, 8))], replicas="single")
    assert paper.inner.local_step == "gradient"
    assert "options" in typing.get_type_hints(CurvaDion.__init__)
