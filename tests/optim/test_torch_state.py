"""A run goes on from the state of another optimizer, and back in torch's."""

import copy
import re
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

import curvadion
from curvadion.layout.flat_shard import declare_flat_shard
from support.references.tolerance import Rounding, assert_close
from support.runs import distributed, toy
from support.runs.seeded import gradient, weights

MATRICES = {"a": (24, 16), "b": (16, 24), "c": (24, 16), "d": (7, 5)}
OTHERS = {"e": (11, 6), "f": (8,), "g": (8,)}
SHAPES = {**MATRICES, **OTHERS}
STEPS = 5
OF_ADAMW = {"lr": 0.003, "weight_decay": 0.01, "betas": (0.9, 0.999)}
FLOAT = Rounding(torch.float32, terms=STEPS)


def parameters():
    return {name: nn.Parameter(weights(shape)) for name, shape in SHAPES.items()}


def give_gradients(X, step):
    for name, x in X.items():
        x.grad = gradient((*x.shape,), step, 0, seed=ord(name))


def of_torch(X, named=True):
    """Torch's Muon for matrices, and AdamW for the rest."""
    parts = [[(n, X[n]) for n in names] for names in (MATRICES, OTHERS)]
    if not named:
        parts = [[x for _, x in part] for part in parts]
    return [torch.optim.Muon(parts[0], lr=0.02), torch.optim.AdamW(parts[1], **OF_ADAMW)]


def ours(X, named=True, kind=curvadion.Muon, elementwise="adamw", **options):
    """Groups in another order than torch's optimizers have: g before f."""
    order = ["f", "g", "e"] if not named else ["g", "e", "f"]
    groups = [
        {"params": [(n, X[n]) if named else X[n] for n in order], "algorithm": elementwise},
        {"params": [(n, X[n]) if named else X[n] for n in MATRICES]},
    ]
    groups[0] |= OF_ADAMW
    return kind(groups, lr=0.02, **options)


def trained(named=True, steps=STEPS):
    X = parameters()
    optimizers = of_torch(X, named)
    for step in range(steps):
        give_gradients(X, step)
        for optimizer in optimizers:
            optimizer.step()
    return X, optimizers


def dicts(optimizers):
    return [optimizer.state_dict() for optimizer in optimizers]


def values(states):
    return [value for state in states.values() for value in state.values()]


def sum_of_gradients(name, decay, steps=STEPS):
    """M = sum_k decay^k G_k in float64."""
    M = torch.zeros(SHAPES[name], dtype=torch.float64)
    for step in range(steps):
        M = decay * M + gradient(SHAPES[name], step, 0, seed=ord(name)).double()
    return M


@pytest.mark.numeric
@pytest.mark.parametrize("named", [True, False])
def test_a_run_of_torchs_muon_and_adamw_goes_on(named):
    X, optimizers = trained(named)
    again = {name: nn.Parameter(x.detach().clone()) for name, x in X.items()}
    optimizer = ours(again, named)
    saved = dicts(optimizers)
    loaded = curvadion.load_torch_state(optimizer, saved)
    assert optimizer.progress.steps == STEPS
    assert loaded.fresh == [] and loaded.dropped == {}
    assert len(loaded.kept) == len(SHAPES)
    for name, x in again.items():
        state, theirs = optimizer.state[x], [o for o in optimizers if X[name] in o.state]
        if name in MATRICES:
            assert_close(state["momentum"], sum_of_gradients(name, 0.95), FLOAT, what=name)
            continue
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(state[key], theirs[0].state[X[name]][key]), (name, key)
    # Steps here do not write into the state that was loaded.
    theirs = {value.data_ptr() for one in saved for value in values(one["state"])}
    assert theirs.isdisjoint(value.data_ptr() for value in values(optimizer.state))
    begun = {name: x.detach().clone() for name, x in X.items()}
    for step in range(STEPS, 2 * STEPS):
        give_gradients(X, step)
        give_gradients(again, step)
        optimizers[0].step()
        optimizers[1].step()
        optimizer.step()
    for name in SHAPES:
        moved = (X[name] - begun[name]).detach()
        found = (again[name] - begun[name]).detach()
        if name in MATRICES:
            # torch takes its products in bfloat16, 0.012 over ten seeds. From a momentum of zeros
            # it is 0.3 and more.
            assert (found - moved).norm() / moved.norm() < 0.12, name
        else:
            rounding = Rounding(torch.float32, condition=100, steps=STEPS)
            assert_close(found, moved, rounding, what=name)


@pytest.mark.numeric
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
@pytest.mark.parametrize("direction", ["polar", "low_rank", "normuon"])
def test_adams_mean_is_the_momentum_of_its_own_decay(kind, direction):
    X = parameters()
    adam = kind(list(X.items()), **{**OF_ADAMW, "weight_decay": 0.0})  # Adam's is in its mean
    for step in range(STEPS):
        give_gradients(X, step)
        adam.step()
    optimizer = ours(X, kind=curvadion.Dion, direction=direction)
    loaded = curvadion.load_torch_state(optimizer, adam.state_dict())
    assert loaded.dropped["a"] == ["exp_avg_sq", "step"] and loaded.kept["a"] == ["exp_avg"]
    for name in MATRICES:
        M = optimizer.state[X[name]]["momentum"]
        assert_close(M, sum_of_gradients(name, 0.9), FLOAT, what=name)
    assert torch.equal(optimizer.state[X["f"]]["exp_avg_sq"], adam.state[X["f"]]["exp_avg_sq"])
    # What Adam does not know is as at a first step.
    give_gradients(X, STEPS)
    optimizer.step()
    assert optimizer.report.step == STEPS + 1 and not optimizer.report.skipped


def of_microsoft(algorithm="normuon", rank=4, named=True):
    """A state as microsoft/dion has it: momenta are sums, and the counter is the group's."""
    others = {"algorithm": "adamw", "beta1": 0.9, "beta2": 0.95, "step": 7, "params": [4, 5, 6]}
    matrices = {"algorithm": algorithm, "mu": 0.95, "step": 7, "params": [0, 1, 2, 3]}
    states = {}
    for i, (name, shape) in enumerate(SHAPES.items()):
        states[i] = {"momentum": weights(shape, seed=1)}
        if name in OTHERS:
            states[i] |= {"variance": weights(shape, seed=2).square()}
        elif algorithm == "normuon":
            states[i]["variance_neuron"] = weights((shape[0], 1), seed=2).square()
        elif algorithm == "dion":
            states[i]["Q"] = weights((min(shape), rank), seed=2)
    if named:
        matrices["param_names"], others["param_names"] = list(MATRICES), list(OTHERS)
    return {"state": states, "param_groups": [matrices, others]}


@pytest.mark.parametrize("direction", ["normuon", "low_rank", "polar"])
@pytest.mark.parametrize("algorithm", ["normuon", "dion"])
def test_microsofts_states_keep_what_has_the_same_form(algorithm, direction):
    X = parameters()
    optimizer = ours(X, kind=curvadion.Dion, direction=direction, rank_multiple_of=4)
    saved = of_microsoft(algorithm)
    loaded = curvadion.load_torch_state(optimizer, saved)
    assert optimizer.progress.steps == 7
    for i, name in enumerate(SHAPES):
        state, theirs = optimizer.state[X[name]], saved["state"][i]
        if name in OTHERS:
            assert state["step"] == 7 and state["step"].dtype == torch.float32
            assert torch.equal(state["exp_avg"], theirs["momentum"])
            assert torch.equal(state["exp_avg_sq"], theirs["variance"])
            continue
        assert torch.equal(state["momentum"], theirs["momentum"])
        keeps = {"normuon": "normuon", "dion": "low_rank"}[algorithm] == direction
        extra = "variance_neuron" if algorithm == "normuon" else "Q"
        assert loaded.kept[name] == sorted(["momentum", extra] if keeps else ["momentum"])
        assert loaded.dropped.get(name) == (None if keeps else [extra])
        if keeps and algorithm == "normuon":
            assert torch.equal(state["row_second_moment"], theirs[extra][:, 0])
        if keeps and algorithm == "dion":
            assert torch.equal(state["Q"], theirs[extra])
    give_gradients(X, 0)
    optimizer.step()
    assert all(x.isfinite().all() for x in X.values())


def test_a_group_of_deepspeeds_adam_counts_steps_in_one_parameter():
    """As FusedAdam leaves it; a count of 0 would undo no bias and move tenfold."""
    X, optimizers = trained()
    saved = dicts(optimizers)
    saved[1]["param_groups"][0]["bias_correction"] = True
    for i, step in enumerate((0, 0, STEPS)):
        saved[1]["state"][i]["step"] = step
    optimizer = ours(X)
    curvadion.load_torch_state(optimizer, saved)
    assert [float(optimizer.state[X[name]]["step"]) for name in OTHERS] == [STEPS] * 3


def test_a_state_of_another_rank_or_orientation_is_dropped():
    X = parameters()
    for options, entry in (
        ({"direction": "low_rank", "rank_multiple_of": 5}, "Q"),
        ({"direction": "low_rank", "rank_multiple_of": 4, "input_first": True}, "Q"),
        ({"direction": "normuon", "input_first": True}, "variance_neuron"),
    ):
        algorithm = "dion" if entry == "Q" else "normuon"
        optimizer = ours(X, kind=curvadion.Dion, **options)
        loaded = curvadion.load_torch_state(optimizer, of_microsoft(algorithm))
        assert loaded.dropped["a"] == [entry], options


def test_lion_takes_a_mean_and_muon_says_nothing_to_adamw():
    X, optimizers = trained()
    optimizer = ours(X, elementwise="lion")
    curvadion.load_torch_state(optimizer, dicts(optimizers))
    means = optimizer.state[X["e"]]["exp_avg"], optimizers[1].state[X["e"]]["exp_avg"]
    assert torch.equal(*means)
    X, [muon, _] = trained()
    groups = [{"params": [(n, X[n]) for n in "ab"], "algorithm": "adamw"}]
    groups += [{"params": [(n, X[n]) for n in "cd"]}]
    optimizer = curvadion.Muon(groups)
    loaded = curvadion.load_torch_state(optimizer, muon.state_dict())
    assert loaded.fresh == ["a", "b"] and sorted(loaded.kept) == ["c", "d"]
    assert loaded.dropped["a"] == ["momentum_buffer"]
    assert X["a"] not in optimizer.state
    give_gradients(X, 0)
    optimizer.step()
    assert optimizer.state[X["a"]]["step"] == 1


@pytest.mark.numeric
def test_back_in_torch_and_here_again():
    X, optimizers = trained()
    optimizer = ours(X)
    curvadion.load_torch_state(optimizer, dicts(optimizers))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        states = curvadion.torch_state(optimizer)
    assert states[0]["param_groups"][0]["lr"] == 0.02
    # The groups' order is the optimizer's, here g before f.
    back = [
        torch.optim.Muon([X[n] for n in MATRICES]),
        torch.optim.AdamW([X[n] for n in ("g", "e", "f")]),
    ]
    for one, other, state in zip(back, optimizers, states, strict=True):
        one.load_state_dict(state)
        for key in ("lr", "weight_decay"):
            assert one.param_groups[0][key] == other.param_groups[0][key]
        for x, held in other.state.items():
            for key, value in held.items():
                if key == "momentum_buffer":
                    assert_close(one.state[x][key], value, Rounding(torch.float32))
                else:
                    assert torch.equal(one.state[x][key], value), key
    again = ours(X)
    curvadion.load_torch_state(again, states)
    for x, held in optimizer.state.items():
        for key, value in held.items():
            if key == "momentum":
                assert_close(again.state[x][key], value, Rounding(torch.float32))
            else:
                assert torch.equal(again.state[x][key], value), key


def test_settings_that_torch_lacks_are_named():
    X = parameters()
    optimizer = ours(X, kind=curvadion.Dion, elementwise="lion", direction="polar", look_ahead=2.0)
    give_gradients(X, 0)
    optimizer.step()
    with pytest.warns(UserWarning, match=r"no counterpart of (.*): its") as told:
        muon, adamw = curvadion.torch_state(optimizer)
    lacking = str(told[0].message)
    for setting in (
        "look_ahead=2.0",
        "update_scale='spectral'",
        "newton_schulz='polar_express'",
        "algorithm='lion' (left out)",
    ):
        assert setting in lacking
    assert adamw == {"state": {}, "param_groups": []} and len(muon["state"]) == len(MATRICES)
    curvadion.load_torch_state(ours(X), [muon, adamw])
    divided = curvadion.Muon([{"params": [X["a"]], "column_blocks": 2}])
    with pytest.warns(UserWarning, match="column_blocks=2: its"):
        curvadion.torch_state(divided)


def spoiled(change):
    saved = dicts(trained()[1])
    change(saved)
    return saved


def damage(key, value):
    def change(saved):
        for one in saved:
            for state in one["state"].values():
                if key in state:
                    state[key] = value(state[key])

    return change


def put_into_groups(**keys):
    def change(saved):
        for one in saved:
            for group in one["param_groups"]:
                group.update(keys)

    return change


def rename(saved):
    saved[0]["param_groups"][0]["param_names"][0] = "module.a"


def twice(saved):
    saved[1]["param_groups"][0]["param_names"][0] = "a"


def of_sgd(saved):
    saved[0]["param_groups"][0].pop("ns_steps")


ERRORS = {
    "has a state of 'module.a'": rename,
    "has the parameter 'a' twice": twice,
    r"\['momentum_buffer'\] of a, in a group with the keys .* must be of torch.optim": of_sgd,
    "not finite": damage("momentum_buffer", lambda M: M.fill_(float("nan"))),
    "negative": damage("exp_avg_sq", lambda v: v - 1e3),
    r"of shape \(3,\)": damage("exp_avg_sq", lambda v: v.new_ones(3)),
    "of torch.complex64 for": damage("momentum_buffer", lambda M: M.to(torch.complex64)),
    "'exp_avg' of torch.int64": damage("exp_avg", lambda v: v.long()),
    "no tensor 'exp_avg'": damage("exp_avg", lambda v: None),
    "no 'step' of": damage("step", lambda v: None),
    r"step tensor\(\[1., 2.\]\): it must be one": damage("step", lambda v: torch.tensor([1.0, 2])),
    "step 'three': it must be one": damage("step", lambda v: "three"),
    "step=nan must be in": damage("step", lambda v: float("nan")),
    "newest gradient's share": put_into_groups(momentum=1.0),
    "a group with momentum=None instead of a number": put_into_groups(momentum=None),
    "call optimizer.load_state_dict": put_into_groups(progress="{}"),
}


@pytest.mark.parametrize("message", ERRORS)
def test_nothing_is_loaded_of_a_state_that_does_not_fit(message):
    X = parameters()
    optimizer = ours(X)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=message):
        curvadion.load_torch_state(optimizer, spoiled(ERRORS[message]))
    assert optimizer.state_dict() == before and not optimizer.state
    assert optimizer.progress.steps == 0


@pytest.mark.parametrize(
    ("shapes", "groups", "message"),
    [
        ([(8,), (8,), (4, 4)], [[(4, 4), (8,)]], r"2 parameters of shape \(8,\), this optimizer 1"),
        ([(8,), (6,), (8,)], [[(6,), (8,)], [(8,)]], r"shape \(8,\), which are in 1 .* in 2 of"),
        ([(8,)], [[(4,)]], r"1 parameters of shape \(8,\), this optimizer 0"),
        # One of them may have come first in the model, and last in groups by kind.
        ([(8,), (8,)], [[(8,)], [(8,)]], r"shape \(8,\), which are in 1 .* in 2 of"),
    ],
)
def test_unclear_matches_without_names_are_refused(shapes, groups, message):
    X = [nn.Parameter(weights(shape)) for shape in shapes]
    adamw = torch.optim.AdamW(X)
    for x in X:
        x.grad = torch.ones_like(x)
    adamw.step()
    optimizer = curvadion.Dion(
        [
            {"params": [nn.Parameter(weights(s)) for s in group], "algorithm": "adamw"}
            for group in groups
        ]
    )
    with pytest.raises(ValueError, match=message + r".*named_parameters\(\)"):
        curvadion.load_torch_state(optimizer, adamw.state_dict())


def test_wrong_optimizers_are_refused():
    X, optimizers = trained()
    saved = dicts(optimizers)
    optimizer = ours(X)
    give_gradients(X, 0)
    optimizer.step()
    with pytest.raises(ValueError, match="has taken 1 steps"):
        curvadion.load_torch_state(optimizer, saved)
    wrapped = curvadion.Replicated(optimizers, replicas="single", wire_budget=1.0)
    for wrong in (optimizers[0], wrapped):
        kind = type(wrong).__name__
        for call in (
            lambda w=wrong: curvadion.load_torch_state(w, saved),
            lambda w=wrong: curvadion.torch_state(w),
        ):
            with pytest.raises(TypeError, match=re.escape(f"optimizer={kind} must be")):
                call()
    flat = nn.Parameter(weights((12,)))
    declare_flat_shard(flat, (4, 3), 0, 12, None)
    with pytest.raises(ValueError, match="is a flat shard"):
        curvadion.load_torch_state(curvadion.Muon([("a", flat)]), saved)
    for nothing in ({"state": {}, "param_groups": [{"params": [0]}]}, [], [3]):
        with pytest.raises(ValueError, match=r"torch\.optim\.Muon"):
            curvadion.load_torch_state(ours(parameters(), named=False), nothing)


def of_toy(model):
    """Named optimizers of torch for the toy's matrices and the rest."""
    matrices, others = [], []
    for name, x in model.named_parameters():
        is_matrix = name in ("linear.weight", "lm_head.weight")
        (matrices if is_matrix else others).append((name, x))
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, **OF_ADAMW)]


@pytest.mark.numeric
@distributed.on_ranks(2)
def test_shards_and_replicas_go_on(rank):
    """FSDP2's DTensors, by numbers and by names; and replicas under a budget."""
    model = fully_shard(toy.model())
    optimizers = of_toy(model)
    toy.train(model, optimizers[0], range(1))
    optimizers[1].step()
    by_names = get_optimizer_state_dict(model, optimizers)
    found = []
    for saved in (dicts(optimizers), by_names):
        optimizer = curvadion.Muon(toy.groups(model))
        loaded = curvadion.load_torch_state(optimizer, saved)
        assert loaded.fresh == []
        found.append({k: v for k, v in toy.states(optimizer).items() if not k.endswith("Q")})
        weight = model.linear.weight
        M, buffer = optimizer.state[weight]["momentum"], optimizers[0].state[weight]
        assert M.placements == weight.placements
        assert_close(M.full_tensor() * 0.05, buffer["momentum_buffer"].full_tensor(), FLOAT)
        toy.train(model, optimizer, range(1, 3))
    assert found[0].keys() == found[1].keys()
    # Of a whole state each rank takes its shard.
    plain = toy.model()
    whole = of_toy(plain)
    toy.train(plain, whole[0], range(1))
    whole[1].step()
    optimizer = curvadion.Muon(toy.groups(model))
    assert curvadion.load_torch_state(optimizer, dicts(whole)).fresh == []
    for (name, x), p in zip(plain.named_parameters(), model.parameters(), strict=True):
        (entries,) = [one.state[x] for one in whole if x in one.state]
        for key, entry in entries.items():
            if key == "momentum_buffer":
                M = optimizer.state[p]["momentum"]
                assert M.placements == p.placements
                assert_close(M.full_tensor() * 0.05, entry, FLOAT)
            elif key != "step":
                assert torch.equal(optimizer.state[p][key].full_tensor(), entry), (name, key)
    toy.train(model, optimizer, range(1, 3))
    for direction, entry, key in (
        ("normuon", "variance_neuron", "row_second_moment"),
        ("low_rank", "Q", "Q"),
    ):
        layer = fully_shard(torch.nn.Linear(6, 8, bias=False))
        optimizer = curvadion.Dion(
            layer.named_parameters(), direction=direction, rank_fraction=0.5, rank_multiple_of=1
        )
        shape = (6, 3) if entry == "Q" else (8, 1)
        state = {"momentum": weights((8, 6)), entry: weights(shape).abs()}
        group = {"algorithm": "normuon", "mu": 0.95, "step": 3, "params": [0]}
        group |= {"param_names": ["weight"], "algorithm": "dion" if entry == "Q" else "normuon"}
        loaded = curvadion.load_torch_state(
            optimizer, {"state": {0: state}, "param_groups": [group]}
        )
        assert loaded.kept["weight"] == sorted(["momentum", entry])
        mine = optimizer.state[layer.weight][key].full_tensor()
        assert torch.equal(mine, state[entry].view(mine.shape)), direction
    budgeted = curvadion.CurvaDion(
        toy.groups(plain), replicas=dist.group.WORLD, wire_budget=0.5, lr=0.01
    )
    curvadion.load_torch_state(budgeted, dicts(whole))
    reports = toy.train(plain, budgeted, range(1, 12), rank)
    assert any(report.gate_open for report in reports)
    # Of the steps here alone, not of AdamW's.
    assert reports[-1].share == budgeted.progress.sent / 11
    budgeted.synchronize()
    toy.assert_bitwise_equal(*distributed.gathered(toy.weights(plain)))
