"""Save at step k, resume: the trajectory goes on as if nothing had happened."""

import copy
import warnings
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from curvadion import AlwaysOpen, CurvaDion, FixedPeriod, LowRank, QuantizedAverage
from support.runs import distributed, toy
from support.runs.drifts import drift
from support.runs.scheduled import Patient

SETTINGS = {
    "rmmc": {"threshold": 0.3},
    "gradient": {"threshold": 0.25, "local_step": "gradient", "local_lr": 0.01},
    "patient": {"gate": Patient(1.0)},
    "plain": {"threshold": 0.2, "momentum_rule": "plain", "right_factor": "qr"},
    "no averaging": {"gate": FixedPeriod(4), "sync": LowRank(average_weights=False)},
    "quantized": {
        "gate": FixedPeriod(2),
        "sync": QuantizedAverage(bits=(3, 4), fragments=2, delay=1, spectrum_decay=0.5),
    },
    "residuals in 8 bits": {
        "gate": FixedPeriod(2),
        "sync": QuantizedAverage(fragments=2, delay=1, residual_dtype="int8"),
    },
    "budget": {"wire_budget": 0.5, "sync": QuantizedAverage(fragments=3)},
    "smaller budget": {"wire_budget": 0.4, "sync": QuantizedAverage(fragments=3)},
    "bounds": {"threshold": 100.0, "max_local_steps": 3, "warmup_steps": 3},
}


def build(settings, dtype=torch.float32):
    model = toy.model(dtype)
    replicas = dist.group.WORLD if dist.is_initialized() else None
    return model, CurvaDion(toy.groups(model), **{"replicas": replicas, **copy.deepcopy(settings)})


def save(path, model, optimizer):
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)


def load(path, model, optimizer):
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])


def facts(reports):
    """All of them but times."""
    return [replace(report, waited_seconds=0.0) for report in reports]


def outcome(model, optimizer, reports):
    """All that a continued run must reproduce."""
    return toy.weights(model), toy.states(optimizer), facts(reports), optimizer.state_dict()


def assert_same_outcome(these, those):
    toy.assert_bitwise_equal(these[0], those[0])
    toy.assert_bitwise_equal(these[1], those[1])
    assert these[2] == those[2]
    assert these[3]["param_groups"] == those[3]["param_groups"]


@pytest.mark.parametrize(
    ("name", "saved_after"), [("rmmc", 0), *((name, 5) for name in SETTINGS if name != "rmmc")]
)
def test_resumed_run_goes_on_bitwise(name, saved_after, tmp_path):
    settings = SETTINGS[name]
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


def two_groups(shape=(6, 4), algorithms=("dion", "adamw")):
    return [{"params": [nn.Parameter(torch.ones(shape))], "algorithm": name} for name in algorithms]


def trained(groups, steps=1):
    optimizer = CurvaDion(groups, gate=AlwaysOpen())
    for _ in range(steps):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.ones_like(p)
        optimizer.step()
    return optimizer


def other_number_of_groups(groups):
    del groups[1]


def other_order(groups):
    groups.reverse()


def other_shape(groups):
    groups[0]["params"] = [nn.Parameter(torch.ones(8, 4))]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (other_number_of_groups, r"number of parameter groups, 2 instead of 1"),
        (other_order, "algorithm"),
        (other_shape, "shape"),
    ],
)
def test_what_does_not_fit_is_said_and_changes_nothing(change, said):
    saved = trained(two_groups(), steps=2).state_dict()
    groups = two_groups()
    change(groups)
    optimizer = trained(groups)
    before, held = copy.deepcopy(optimizer.state_dict()), toy.states(optimizer)
    with pytest.raises(ValueError, match=said):
        optimizer.load_state_dict(saved)
    assert optimizer.state_dict()["param_groups"] == before["param_groups"]
    toy.assert_bitwise_equal(toy.states(optimizer), held)
    assert optimizer.progress.steps == 1


@pytest.mark.parametrize("name", ["rmmc", "patient", "quantized", "residuals in 8 bits", "budget"])
@distributed.on_ranks(2)
def test_each_replica_resumes_its_own_state(rank, name, tmp_path):
    model, optimizer = build(SETTINGS[name])
    first = toy.train(model, optimizer, range(5), rank)
    save(tmp_path / f"{rank}.pt", model, optimizer)
    reports = toy.train(model, optimizer, range(5, 9), rank)
    resumed, its_optimizer = build(SETTINGS[name])
    load(tmp_path / f"{rank}.pt", resumed, its_optimizer)
    its_reports = toy.train(resumed, its_optimizer, range(5, 9), rank)
    assert_same_outcome(
        outcome(resumed, its_optimizer, its_reports), outcome(model, optimizer, reports)
    )
    told = facts([*first, *reports])
    assert distributed.gathered(told) == [told] * 2
    assert {report.gate_open for report in told} == {True, False}


def told_by(function, *args):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        function(*args)
    return [str(warning.message) for warning in told]


@pytest.mark.parametrize("name", ["quantized", "no averaging"])
@distributed.on_ranks(2)
def test_what_is_lost_is_said(rank, name, tmp_path):
    settings = {**SETTINGS[name], "gate": FixedPeriod(3)}
    model, optimizer = build(settings)
    assert told_by(optimizer.state_dict) == []
    toy.train(model, optimizer, range(4), rank)
    (at_saving,) = told_by(save, tmp_path / f"{rank}.pt", model, optimizer)
    assert "synchronize(exact=True)" in at_saving
    dist.barrier()
    assert told_by(load, tmp_path / f"{rank}.pt", *build(settings)) == []
    (at_loading,) = told_by(load, tmp_path / f"{1 - rank}.pt", *build(settings))
    assert f"saved by replica {1 - rank} of 2" in at_loading
    assert drift(optimizer) > 0.0
    optimizer.eval()
    # Weights agree, but what codes owe them is each replica's own.
    assert len(told_by(optimizer.state_dict)) == (name == "quantized")
    optimizer.synchronize(exact=True)
    assert told_by(optimizer.state_dict) == [] and drift(optimizer) == 0.0


@distributed.on_ranks(2)
def test_replicas_that_have_drifted_may_load(rank, tmp_path):
    """They load a distributed checkpoint."""
    model, optimizer = build({"gate": FixedPeriod(3), "sync": QuantizedAverage(bits=8)})
    toy.train(model, optimizer, range(4), rank)
    optimizer.synchronize(exact=True)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path)
    saved = toy.weights(model)
    toy.train(model, optimizer, range(4, 8), rank)
    assert optimizer.drifted
    with pytest.warns(UserWarning, match=r"state_dict\(\) while the replicas' states differ"):
        weights, state = get_state_dict(model, optimizer)
    held = {"model": weights, "optimizer": copy.deepcopy(state)}
    dcp.load(held, checkpoint_id=tmp_path)
    set_state_dict(
        model, optimizer, model_state_dict=held["model"], optim_state_dict=held["optimizer"]
    )
    toy.assert_bitwise_equal(toy.weights(model), saved)
    assert (optimizer.drifted, optimizer.progress.steps) == (False, 4)
