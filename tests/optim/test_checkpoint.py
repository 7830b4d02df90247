"""Save at step k, resume: the trajectory goes on as if nothing had happened."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import distributed
import toy
from curvadion import (
    AlwaysOpen,
    CurvaDion,
    Dion,
    FixedPeriod,
    Gate,
    LowRank,
    QuantizedAverage,
    WireMeter,
)
from tolerance import Rounding, assert_close


class Patient(Gate):
    """Opens when the signals since the last opening add up to ``enough``."""

    reason = "patience"
    reads_momentum = True

    def __init__(self, enough):
        self.enough, self.held, self.openings = enough, 0.0, 0

    def signal(self, before, after):
        return (after - before).abs()

    def opens(self, signal, local_steps):
        self.held += signal
        if self.held <= self.enough:
            return False
        self.held = 0.0
        self.openings += 1
        return True

    def state_dict(self):
        return {"held": self.held, "openings": self.openings}

    def load_state_dict(self, state):
        self.held, self.openings = state["held"], state["openings"]


SETTINGS = {
    "rmmc": {"threshold": 0.3},
    "gradient": {"threshold": 0.25, "local_step": "gradient", "local_lr": 0.01},
    "period": {"gate": FixedPeriod(4)},
    "patient": {"gate": Patient(1.0)},
    "plain": {"threshold": 0.2, "momentum_rule": "plain", "right_factor": "qr"},
    "no averaging": {"threshold": 0.3, "sync": LowRank(average_weights=False)},
    "longest run": {"threshold": 100.0, "max_local_steps": 4},
    "warm-up": {"threshold": 100.0, "warmup_steps": 4},
}


@pytest.fixture(params=SETTINGS.values(), ids=SETTINGS)
def settings(request):
    return copy.deepcopy(request.param)


def build(settings, dtype=torch.float32):
    model = toy.model(dtype)
    replicas = dist.group.WORLD if dist.is_initialized() else None
    return model, CurvaDion(toy.groups(model), replicas=replicas, **copy.deepcopy(settings))


def save(path, model, optimizer):
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)


def load(path, model, optimizer):
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])


def outcome(model, optimizer, reports):
    """All that a continued run must reproduce."""
    return toy.weights(model), toy.states(optimizer), reports, optimizer.state_dict()


def assert_same_outcome(these, those):
    toy.assert_bitwise_equal(these[0], those[0])
    toy.assert_bitwise_equal(these[1], those[1])
    assert these[2] == those[2]
    assert these[3]["param_groups"] == those[3]["param_groups"]


# ---------------------------------------------------------------- one process


@pytest.mark.parametrize("saved_after", [0, 1, 5])
def test_resumed_run_goes_on_bitwise(settings, saved_after, tmp_path):
    model, optimizer = build(settings)
    first = toy.train(model, optimizer, range(saved_after))
    save(tmp_path / "saved.pt", model, optimizer)
    reports = toy.train(model, optimizer, range(saved_after, 10))
    assert {report.gate_open for report in first + reports} == {True, False}

    resumed, its_optimizer = build(settings)
    load(tmp_path / "saved.pt", resumed, its_optimizer)
    its_reports = toy.train(resumed, its_optimizer, range(saved_after, 10))
    assert_same_outcome(
        outcome(resumed, its_optimizer, its_reports), outcome(model, optimizer, reports)
    )


def test_load_into_an_optimizer_that_has_already_trained(tmp_path):
    model, optimizer = build(SETTINGS["rmmc"])
    toy.train(model, optimizer, range(4))
    save(tmp_path / "saved.pt", model, optimizer)
    before = toy.weights(model), toy.states(optimizer), copy.deepcopy(optimizer.progress)
    toy.train(model, optimizer, range(4, 9))
    load(tmp_path / "saved.pt", model, optimizer)
    toy.assert_bitwise_equal(toy.weights(model), before[0])
    toy.assert_bitwise_equal(toy.states(optimizer), before[1])
    assert optimizer.progress == before[2]


class Historian(Gate):
    """Remembers every signal in a list that it hands out as it is."""

    def __init__(self):
        self.history = []

    def opens(self, signal, local_steps):
        self.history.append(local_steps)
        return local_steps >= 2

    def state_dict(self):
        return {"history": self.history}


def test_saved_counters_do_not_change_with_later_steps():
    model, optimizer = build({"gate": Historian()})
    toy.train(model, optimizer, range(3))
    saved = optimizer.state_dict()["param_groups"]
    kept = copy.deepcopy(saved)
    toy.train(model, optimizer, range(3, 6))
    assert saved == kept


def test_counters_and_gate_are_in_the_checkpoint(tmp_path):
    model, optimizer = build({"gate": Patient(1.0)})
    toy.train(model, optimizer, range(5))
    assert optimizer.gate.openings > 0
    assert optimizer.progress.local_steps > 0
    save(tmp_path / "saved.pt", model, optimizer)
    resumed, its_optimizer = build({"gate": Patient(1.0)})
    load(tmp_path / "saved.pt", resumed, its_optimizer)
    assert its_optimizer.progress == optimizer.progress
    assert its_optimizer.progress.steps == 5
    assert vars(its_optimizer.gate) == vars(optimizer.gate)


def test_skipped_steps_are_counted_across_a_checkpoint(tmp_path):
    model, optimizer = build(SETTINGS["rmmc"])
    toy.train(model, optimizer, range(2))
    for p in model.parameters():
        p.grad = torch.full_like(p, torch.nan)
    for _ in range(9):
        optimizer.step()
    save(tmp_path / "saved.pt", model, optimizer)
    resumed, its_optimizer = build(SETTINGS["rmmc"])
    load(tmp_path / "saved.pt", resumed, its_optimizer)
    for p in resumed.parameters():
        p.grad = torch.full_like(p, torch.nan)
    with pytest.raises(RuntimeError, match="10 steps in a row"):
        its_optimizer.step()


DTYPES = {
    "all narrow": ({}, torch.bfloat16, torch.bfloat16),
    "wide momentum": ({"momentum_dtype": "float32"}, torch.float32, torch.bfloat16),
    "wide Q": ({"q_dtype": torch.float32}, torch.bfloat16, torch.float32),
    "wide": ({"momentum_dtype": torch.float32, "q_dtype": "float32"}, *[torch.float32] * 2),
}


@pytest.mark.parametrize(("arguments", "momentum", "q"), DTYPES.values(), ids=DTYPES)
def test_dtypes_of_bfloat16_models_survive(arguments, momentum, q, tmp_path):
    model, optimizer = build(arguments, torch.bfloat16)
    toy.train(model, optimizer, range(4))
    save(tmp_path / "saved.pt", model, optimizer)
    reports = toy.train(model, optimizer, range(4, 8))
    resumed, its_optimizer = build(arguments, torch.bfloat16)
    load(tmp_path / "saved.pt", resumed, its_optimizer)
    state = its_optimizer.state[resumed.linear.weight]
    assert state["momentum"].dtype == momentum
    assert state["Q"].dtype == q
    assert state["momentum_norm"].dtype == torch.float32
    its_reports = toy.train(resumed, its_optimizer, range(4, 8))
    assert_same_outcome(
        outcome(resumed, its_optimizer, its_reports), outcome(model, optimizer, reports)
    )


def test_narrow_state_of_a_float32_model_survives(tmp_path):
    narrow = {"momentum_dtype": "bfloat16", "q_dtype": "float16"}
    model, optimizer = build(narrow)
    toy.train(model, optimizer, range(4))
    save(tmp_path / "saved.pt", model, optimizer)
    resumed, its_optimizer = build(narrow)
    load(tmp_path / "saved.pt", resumed, its_optimizer)
    assert its_optimizer.state[resumed.linear.weight]["momentum"].dtype == torch.bfloat16
    assert its_optimizer.state[resumed.linear.weight]["Q"].dtype == torch.float16
    toy.assert_bitwise_equal(toy.states(its_optimizer), toy.states(optimizer))


def test_state_keys_do_not_depend_on_which_gradients_came(tmp_path):
    model, optimizer = build(SETTINGS["rmmc"])
    toy.loss(model, 0).backward()
    for name in ("linear.weight", "norm.weight", "embedding.weight"):
        model.get_parameter(name).grad = None
    optimizer.step()
    whole, its_optimizer = build(SETTINGS["rmmc"])
    toy.train(whole, its_optimizer, [0])
    saved, expected = optimizer.state_dict()["state"], its_optimizer.state_dict()["state"]
    assert {i: [*s] for i, s in saved.items()} == {i: [*s] for i, s in expected.items()}
    assert {i: {k: (v.shape, v.dtype) for k, v in s.items()} for i, s in saved.items()} == {
        i: {k: (v.shape, v.dtype) for k, v in s.items()} for i, s in expected.items()
    }
    save(tmp_path / "saved.pt", model, optimizer)
    load(tmp_path / "saved.pt", whole, its_optimizer)
    toy.assert_bitwise_equal(toy.states(its_optimizer), toy.states(optimizer))


def test_hyperparameters_come_from_the_checkpoint_as_in_torch(tmp_path):
    model, optimizer = build({"lr": 0.1, "mu": 0.8})
    toy.train(model, optimizer, [0])
    save(tmp_path / "saved.pt", model, optimizer)
    resumed, its_optimizer = build({"lr": 0.5, "mu": 0.9})
    load(tmp_path / "saved.pt", resumed, its_optimizer)
    assert {(g["lr"], g["mu"]) for g in its_optimizer.param_groups} == {(0.1, 0.8)}


def test_state_dict_by_keyword_and_without_changing_it():
    model, optimizer = build(SETTINGS["period"])
    toy.train(model, optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    kept = copy.deepcopy(saved)
    other, its_optimizer = build(SETTINGS["period"])
    its_optimizer.load_state_dict(state_dict=saved)
    toy.train(other, its_optimizer, range(2, 4))
    assert saved["param_groups"] == kept["param_groups"]


def test_dion_checkpoint_into_curvadion(tmp_path):
    """A run may go on with a gate: the states are the same."""
    model = toy.model()
    optimizer = Dion(toy.groups(model))
    toy.train(model, optimizer, range(3))
    save(tmp_path / "saved.pt", model, optimizer)
    toy.train(model, optimizer, range(3, 6))
    resumed, its_optimizer = build({"gate": AlwaysOpen()})
    load(tmp_path / "saved.pt", resumed, its_optimizer)
    toy.train(resumed, its_optimizer, range(3, 6))
    toy.assert_bitwise_equal(toy.weights(resumed), toy.weights(model))


# ---------------------------------------------------------------- what does not fit


def two_groups(shape=(6, 4), algorithms=("dion", "adamw")):
    return [{"params": [nn.Parameter(torch.ones(shape))], "algorithm": name} for name in algorithms]


def trained(groups):
    optimizer = CurvaDion(groups, gate=AlwaysOpen())
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    optimizer.step()
    return optimizer


def test_other_number_of_groups():
    saved = trained(two_groups()).state_dict()
    told = r"different number of parameter groups: 2 instead of 1.*param_groups\(model\), or attach"
    with pytest.raises(ValueError, match=told):
        trained(two_groups()[:1]).load_state_dict(saved)


def test_other_number_of_parameters():
    saved = trained(two_groups()).state_dict()
    larger = two_groups()
    larger[1]["params"].append(nn.Parameter(torch.ones(3)))
    with pytest.raises(ValueError, match="size of optimizer's group"):
        CurvaDion(larger).load_state_dict(saved)


def test_reordered_groups_of_different_sizes():
    groups = two_groups(algorithms=("dion", "dion"))
    groups[0]["params"].append(nn.Parameter(torch.ones(4, 4)))
    saved = trained(groups).state_dict()
    with pytest.raises(ValueError, match="size of optimizer's group"):
        CurvaDion(groups[::-1]).load_state_dict(saved)


def test_reordered_groups_of_equal_sizes():
    """A matrix must not silently take the state and the algorithm of another parameter."""
    saved = trained(two_groups()).state_dict()
    other = CurvaDion(two_groups(algorithms=("adamw", "dion")), gate=AlwaysOpen())
    with pytest.raises(ValueError, match="algorithm"):
        other.load_state_dict(saved)


def test_groups_of_another_version():
    saved = trained(two_groups()).state_dict()
    del saved["param_groups"][1]["nesterov"]
    optimizer = CurvaDion(two_groups(), mu=0.5, nesterov=0.25)
    with pytest.warns(UserWarning, match=r"lacks keys.*\{1: \{'nesterov': 0\.25\}\}"):
        optimizer.load_state_dict(saved)
    assert [(g["mu"], g["nesterov"]) for g in optimizer.param_groups] == [(0.95, 0), (0.95, 0.25)]


def test_state_of_another_shape():
    saved = trained(two_groups()).state_dict()
    with pytest.raises(ValueError, match="shape"):
        CurvaDion(two_groups(shape=(8, 4))).load_state_dict(saved)


def test_failed_load_changes_nothing():
    saved = trained(two_groups()).state_dict()
    optimizer = trained(two_groups()[:1])
    optimizer.progress.steps = 5
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError):
        optimizer.load_state_dict(saved)
    assert optimizer.state_dict()["param_groups"] == before["param_groups"]
    assert optimizer.progress.steps == 5


# ---------------------------------------------------------------- replicas


def resume_each_rank(rank, settings, folder):
    """Every rank saves and loads its own state; returns the straight and the resumed outcome."""
    model, optimizer = build(settings)
    first = toy.train(model, optimizer, range(5), rank)
    save(f"{folder}/{rank}.pt", model, optimizer)
    straight = toy.train(model, optimizer, range(5, 9), rank)
    resumed, its_optimizer = build(settings)
    load(f"{folder}/{rank}.pt", resumed, its_optimizer)
    again = toy.train(resumed, its_optimizer, range(5, 9), rank)
    return (
        first,
        outcome(model, optimizer, straight),
        outcome(resumed, its_optimizer, again),
    )


def test_each_replica_resumes_its_own_state(settings, tmp_path):
    answers = distributed.run(2, resume_each_rank, settings, str(tmp_path))
    reports = [[*first, *straight[2]] for first, straight, _ in answers]
    assert reports[0] == reports[1]
    assert {report.gate_open for report in reports[0]} == {True, False}
    for _, straight, resumed in answers:
        assert_same_outcome(resumed, straight)


def resume_from_rank_0(rank, settings, folder):
    """All replicas load what rank 0 saved after synchronize()."""
    model, optimizer = build(settings)
    toy.train(model, optimizer, range(5), rank)
    apart = optimizer.drift()
    optimizer.synchronize()
    together = optimizer.drift()
    if rank == 0:
        save(f"{folder}/0.pt", model, optimizer)
    dist.barrier()
    straight = toy.train(model, optimizer, range(5, 9), rank)
    resumed, its_optimizer = build(settings)
    load(f"{folder}/0.pt", resumed, its_optimizer)
    again = toy.train(resumed, its_optimizer, range(5, 9), rank)
    return (
        (apart, together),
        outcome(model, optimizer, straight),
        outcome(resumed, its_optimizer, again),
    )


def test_all_replicas_resume_from_rank_0_after_synchronize(settings, tmp_path):
    answers = distributed.run(2, resume_from_rank_0, settings, str(tmp_path))
    for (apart, together), straight, resumed in answers:
        assert together == 0.0
        assert apart > 0.0
        assert_same_outcome(resumed, straight)


def synchronized_state(rank):
    model, optimizer = build({"threshold": 100.0})
    toy.train(model, optimizer, range(4), rank)
    momenta = [s["momentum"].clone() for s in optimizer.state.values() if "momentum" in s]
    optimizer.synchronize()
    return momenta, toy.weights(model), toy.states(optimizer), optimizer.progress


@pytest.mark.numeric
def test_synchronize_makes_weights_and_states_equal():
    answers = distributed.run(2, synchronized_state)
    (first, weights, states, progress), (second, its_weights, its_states, its_progress) = answers
    toy.assert_bitwise_equal(weights, its_weights)
    toy.assert_bitwise_equal(states, its_states)
    assert progress == its_progress
    assert progress.local_steps == 0
    after = [tensor for key, tensor in states.items() if key.endswith(".momentum")]
    norms = [tensor for key, tensor in states.items() if key.endswith(".momentum_norm")]
    wanted = torch.stack([M.norm() for M in after])
    assert_close(torch.stack(norms), wanted, Rounding(torch.float32, terms=64))
    assert any(not torch.equal(a, b) for a, b in zip(first, second, strict=True))
    for mean, a, b in zip(after, first, second, strict=True):
        assert_close(mean, (a + b) / 2, Rounding(torch.float32))


def continue_open(rank, synchronize):
    model, optimizer = build({"gate": AlwaysOpen()})
    toy.train(model, optimizer, range(3), rank)
    if synchronize:
        optimizer.synchronize()
    toy.train(model, optimizer, range(3, 6), rank)
    return toy.weights(model)


@pytest.mark.numeric
def test_synchronize_does_not_bend_a_synchronised_run():
    """Later open steps depend on the momenta's mean only."""
    with_it, without = (distributed.run(2, continue_open, flag)[0] for flag in (True, False))
    for name, tensor in without.items():
        assert_close(with_it[name], tensor, Rounding(torch.float32, terms=64, steps=6), what=name)


# ---------------------------------------------------------------- replicas that are apart


APART = {
    "rmmc": {"threshold": 100.0},
    "period": {"gate": FixedPeriod(3)},
    "quantized": {"gate": FixedPeriod(3), "sync": QuantizedAverage()},
    "fragments": {
        "gate": FixedPeriod(1),
        "sync": QuantizedAverage(fragments=3, spectrum_decay=0.5),
    },
    "no averaging": {"gate": FixedPeriod(2), "sync": LowRank(average_weights=False)},
}


def told_by(function, *args):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        function(*args)
    return [str(warning.message) for warning in told]


def save_apart(rank, settings, folder):
    """What is said when replicas save while they are apart and together, and when they load."""
    model, optimizer = build(settings)
    said = {"new": told_by(optimizer.state_dict)}
    said["prepared"] = told_by(lambda: optimizer.load_state_dict(optimizer.state_dict()))
    toy.train(model, optimizer, range(4), rank)
    said["apart"] = told_by(optimizer.state_dict)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(f"{folder}/{rank}.pt", model, optimizer)
    dist.barrier()
    for who in (0, 1):
        for _ in range(2):
            said[who] = told_by(load, f"{folder}/{who}.pt", *build(settings))
    drift = optimizer.drift()
    optimizer.eval()
    said["together"] = told_by(optimizer.state_dict)
    with WireMeter() as meter:
        optimizer.eval()
        optimizer.train()
    calls = meter.total_calls
    optimizer.synchronize(exact=True)
    said["exact"] = told_by(optimizer.state_dict)
    said["loaded"] = told_by(load_copy, optimizer)
    return said, drift, optimizer.drift(), toy.weights(model), calls


def load_copy(optimizer):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


@pytest.mark.parametrize("settings", APART.values(), ids=APART)
def test_what_is_lost_is_said(settings, tmp_path):
    answers = distributed.run(2, save_apart, settings, str(tmp_path))
    for rank, (said, apart, drift, weights, calls) in enumerate(answers):
        assert said["new"] == said["prepared"] == said["exact"] == said["loaded"] == []
        # Weights agree, but what codes owe them is each replica's own.
        assert len(said["together"]) == isinstance(settings.get("sync"), QuantizedAverage)
        (at_saving,) = said["apart"]
        assert "optimizer.synchronize(exact=True)" in at_saving
        assert said[rank] == []
        (at_loading,) = said[1 - rank]
        assert f"saved by replica {1 - rank} of 2" in at_loading
        assert "lost" in at_loading
        assert apart > 0.0
        assert drift == 0.0
        assert calls == 0
        toy.assert_bitwise_equal(weights, answers[0][3])


def load_in_one_process(path):
    return told_by(load, path, *build({"threshold": 100.0}))


def test_one_process_that_loads_one_of_two_replicas(tmp_path):
    distributed.run(2, save_apart, APART["rmmc"], str(tmp_path))
    (told,) = load_in_one_process(tmp_path / "1.pt")
    assert "saved by replica 1 of 2" in told
    assert "3 local steps" in told or "4 local steps" in told


def test_one_process_is_never_apart(tmp_path):
    model, optimizer = build({"threshold": 100.0})
    toy.train(model, optimizer, range(4))
    assert optimizer.progress.local_steps
    assert told_by(load_copy, optimizer) == []
