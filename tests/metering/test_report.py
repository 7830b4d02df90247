"""What a step reports, and what becomes of it in logs."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

import distributed
import toy
from curvadion import CurvaDion, Dion, FixedPeriod, StepReport, Summary, WireMeter
from curvadion.metering.report import write_json_line, write_scalars, write_wandb
from scheduled import Scheduled

CLOSED = StepReport(
    step=3,
    gate_open=False,
    reason="closed",
    rmmc=0.25,
    rmmc_parameter="linear.weight",
    local_steps=2,
    skipped=False,
    wire_bytes=16,
)
FIRST = dataclasses.replace(
    CLOSED, step=1, gate_open=True, reason="threshold", rmmc=math.inf, local_steps=0
)
LATE = dataclasses.replace(CLOSED, waited_seconds=0.5)
SKIPPED = dataclasses.replace(
    CLOSED,
    step=4,
    reason="non-finite gradient",
    rmmc=None,
    rmmc_parameter=None,
    skipped=True,
    wire_bytes=None,
)


def strict_json(text):
    """JSON as the standard has it: no NaN, no Infinity."""

    def refuse(constant):
        raise ValueError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


# ---------------------------------------------------------------- reports of a run


def test_reports_of_a_run():
    model = toy.model()
    optimizer = CurvaDion(toy.groups(model), threshold=0.3)
    assert optimizer.report is None
    reports = toy.train(model, optimizer, range(12))
    matrices = optimizer.param_groups[0]["param_names"]
    assert [report.step for report in reports] == [*range(1, 13)]
    assert {report.gate_open for report in reports} == {True, False}
    local_steps = 0
    for report in reports:
        assert report.gate_open == (report.rmmc > 0.3)
        assert report.reason == ("threshold" if report.gate_open else "closed")
        assert report.rmmc_parameter in matrices
        local_steps = 0 if report.gate_open else local_steps + 1
        assert report.local_steps == local_steps
        assert not report.skipped
        assert report.wire_bytes is None


def test_names_the_matrix_that_changed_most():
    X = [(name, nn.Parameter(torch.eye(4))) for name in ("calm", "wild", "still")]
    optimizer = CurvaDion(X)
    for step in range(4):
        for name, x in X:
            x.grad = torch.eye(4) * (10.0**step if name == "wild" else 1.0)
        optimizer.step()
    assert optimizer.report.rmmc_parameter == "wild"


def test_unnamed_parameters_are_told_by_place():
    x = nn.Parameter(torch.eye(4))
    bias = nn.Parameter(torch.zeros(4))
    optimizer = CurvaDion([{"params": [bias], "algorithm": "adamw"}, {"params": [x]}])
    x.grad, bias.grad = torch.ones_like(x), torch.ones_like(bias)
    optimizer.step()
    assert optimizer.report.rmmc_parameter == "param_groups[1]['params'][0]"


@pytest.mark.parametrize(
    ("make", "reason"), [(Dion, "always"), (lambda p: CurvaDion(p, gate=FixedPeriod(1)), "period")]
)
def test_gates_that_read_no_momentum_report_none(make, reason):
    model = toy.model()
    for report in toy.train(model, make(toy.groups(model)), range(3)):
        assert (report.gate_open, report.reason) == (True, reason)
        assert report.rmmc is report.rmmc_parameter is None


def test_skipped_step():
    model = toy.model()
    optimizer = CurvaDion(toy.groups(model), threshold=0.3)
    toy.train(model, optimizer, range(5))
    local_steps = optimizer.report.local_steps
    model.norm.weight.grad.fill_(torch.nan)
    optimizer.step()
    report = optimizer.report
    assert (report.step, report.skipped, report.gate_open) == (6, True, False)
    assert report.reason == "non-finite gradient"
    assert report.rmmc is report.rmmc_parameter is None
    assert report.local_steps == local_steps
    (after,) = toy.train(model, optimizer, [6])
    assert (after.step, after.skipped) == (7, False)


def test_report_is_a_value():
    model = toy.model()
    optimizer = Dion(toy.groups(model))
    first, second = toy.train(model, optimizer, range(2))
    assert (first.step, second.step) == (1, 2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.step = 5


# ---------------------------------------------------------------- wire bytes


def matrix_and_bias():
    return [
        {"params": [nn.Parameter(torch.ones(8, 4))], "rank_fraction": 0.5},
        {"params": [nn.Parameter(torch.ones(5))], "algorithm": "adamw"},
    ]


GATE = 16
LOW_RANK = 4 * 2 * (8 + 4)  # P and R in float32, rank 2
DENSE = 4 * 5  # the bias's gradient
FIRST_CHECK = 88
MEAN_OF_ALL = 4 * (8 * 4 + 5 + 2 * 5) + 4  # weights, AdamW's moments, its counter


def step(optimizer, rank, seed):
    generator = torch.Generator().manual_seed(100 * rank + seed)
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.randn(p.shape, generator=generator)
    optimizer.step()
    return optimizer.report.wire_bytes


def bytes_of_steps(rank, gate):
    optimizer = CurvaDion(matrix_and_bias(), replicas=dist.group.WORLD, gate=gate)
    unmetered = step(optimizer, rank, 0)
    with WireMeter() as meter:
        metered = [step(optimizer, rank, seed) for seed in range(1, 5)]
        total = meter.total_bytes
    return unmetered, metered, total, step(optimizer, rank, 5)


def test_wire_bytes_are_exact_and_none_without_a_meter():
    for before, metered, total, after in distributed.run(2, bytes_of_steps, FixedPeriod(1)):
        assert before is None
        assert metered == [GATE + LOW_RANK + DENSE] * 4
        assert total == sum(metered)
        assert after is None


def ranks_of_bytes(rank):
    optimizer = Dion(matrix_and_bias(), replicas=dist.group.WORLD)
    with WireMeter():
        step(optimizer, rank, 0)
        step(optimizer, rank, 1)
        return optimizer.report


def test_reports_tell_which_ranks_shared_the_bytes():
    for report in distributed.run(2, ranks_of_bytes):
        assert report.wire_bytes_by_ranks == {"0, 1": report.wire_bytes}


@pytest.mark.parametrize(("gate", "closed"), [(FixedPeriod(2), 0), (Scheduled((2, 4, 6)), GATE)])
def test_closed_steps_send_the_gate_alone_or_nothing_under_a_schedule(gate, closed):
    for _, metered, total, _ in distributed.run(2, bytes_of_steps, gate):
        assert metered == [GATE + LOW_RANK + DENSE + MEAN_OF_ALL, closed] * 2
        assert total == sum(metered)


def bytes_from_the_start(rank):
    with WireMeter() as meter:
        optimizer = Dion(matrix_and_bias(), replicas=dist.group.WORLD)
        return [step(optimizer, rank, 0), step(optimizer, rank, 1)], meter.total_bytes


def test_first_step_includes_the_check_of_the_replicas():
    for metered, total in distributed.run(2, bytes_from_the_start):
        assert metered == [GATE + LOW_RANK + DENSE + FIRST_CHECK, GATE + LOW_RANK + DENSE]
        assert total == sum(metered)


def bytes_of_others(rank):
    optimizer = Dion(matrix_and_bias(), replicas=dist.group.WORLD)
    step(optimizer, rank, 0)
    with WireMeter():
        dist.all_reduce(torch.zeros(100))
        between = step(optimizer, rank, 1)
        optimizer.drift()
        optimizer.synchronize()
        return between, step(optimizer, rank, 2)


def test_wire_bytes_count_everything_since_the_last_report():
    for between, after in distributed.run(2, bytes_of_others):
        assert between == 400 + GATE + LOW_RANK + DENSE
        assert after > GATE + LOW_RANK + DENSE


def bytes_with_many_meters(rank):
    optimizer = Dion(matrix_and_bias(), replicas=dist.group.WORLD)
    step(optimizer, rank, 0)
    own = []
    for seed in range(1, 4):
        with WireMeter() as meter:
            own.append((step(optimizer, rank, seed), meter.total_bytes))
    nested = []
    with WireMeter():
        nested.append(step(optimizer, rank, 4))
        with WireMeter():
            nested.append(step(optimizer, rank, 5))
        nested.append(step(optimizer, rank, 6))
    return own, nested


def test_each_step_may_have_a_meter_of_its_own():
    expected = GATE + LOW_RANK + DENSE
    for own, nested in distributed.run(2, bytes_with_many_meters):
        assert own == [(expected, expected)] * 3
        assert nested == [expected] * 3


def bytes_while_paused(rank):
    optimizer = Dion(matrix_and_bias(), replicas=dist.group.WORLD)
    step(optimizer, rank, 0)
    with WireMeter() as meter:
        step(optimizer, rank, 1)
        with meter.paused():
            optimizer.drift()
        return step(optimizer, rank, 2)


def test_paused_bytes_are_left_out():
    assert distributed.run(2, bytes_while_paused) == [GATE + LOW_RANK + DENSE] * 2


# ---------------------------------------------------------------- totals


def test_summary_adds_up():
    summary = Summary()
    assert summary.open_gate_share == 0.0
    for report in (FIRST, dataclasses.replace(CLOSED, local_steps=1), LATE, SKIPPED):
        summary.add(report)
    assert summary.as_dict() == {
        "steps": 4,
        "open_steps": 1,
        "skipped_steps": 1,
        "wire_bytes": 48,
        "longest_local_run": 2,
        "waited_seconds": 0.5,
        "open_gate_share": 0.25,
    }
    assert strict_json(json.dumps(summary.as_dict())) == summary.as_dict()


def test_summary_of_a_run_is_that_of_its_reports():
    model = toy.model()
    optimizer = CurvaDion(toy.groups(model), threshold=0.3)
    summary = Summary()
    reports = toy.train(
        model, optimizer, range(12), after_step=lambda: summary.add(optimizer.report)
    )
    assert summary.steps == 12
    assert summary.open_steps == sum(report.gate_open for report in reports)
    assert summary.longest_local_run == max(report.local_steps for report in reports) > 1


def test_summary_holds_no_more_after_many_reports():
    def size(summary):
        return sum(sys.getsizeof(value) for value in vars(summary).values())

    few, many = Summary(), Summary()
    few.add(CLOSED)
    for _ in range(5000):
        many.add(CLOSED)
    assert vars(many).keys() == vars(few).keys()
    assert size(many) == size(few)


# ---------------------------------------------------------------- JSON lines


@pytest.mark.parametrize("report", [FIRST, CLOSED, SKIPPED], ids=["first", "closed", "skipped"])
def test_report_as_strict_json(report):
    line = strict_json(json.dumps(report.as_dict()))
    assert line.keys() == {field.name for field in dataclasses.fields(StepReport)}
    assert line["step"] == report.step
    assert line["gate_open"] is report.gate_open


def test_infinite_change_of_the_first_step_is_json():
    model = toy.model()
    optimizer = CurvaDion(toy.groups(model))
    (report,) = toy.train(model, optimizer, [0])
    assert report.rmmc == math.inf
    file = io.StringIO()
    write_json_line(file, report)
    assert strict_json(file.getvalue())["rmmc"] == "inf"


def test_json_lines_to_an_open_file():
    file = io.StringIO()
    write_json_line(file, CLOSED, loss=1.5, lr=[0.02, 0.003])
    write_json_line(file, SKIPPED)
    first, second = file.getvalue().splitlines()
    assert strict_json(first) == {**CLOSED.as_dict(), "loss": 1.5, "lr": [0.02, 0.003]}
    assert strict_json(second) == SKIPPED.as_dict()
    assert file.getvalue().endswith("\n")


@pytest.mark.parametrize("kind", [str, lambda path: path], ids=["str", "Path"])
def test_json_lines_append_to_a_path(kind, tmp_path):
    path = tmp_path / "log.jsonl"
    for report in (FIRST, CLOSED):
        write_json_line(kind(path), report, run="ü")
    lines = [strict_json(line) for line in path.read_text("utf-8").splitlines()]
    assert lines == [{**report.as_dict(), "run": "ü"} for report in (FIRST, CLOSED)]


def test_diverged_loss_is_still_json():
    file = io.StringIO()
    write_json_line(file, SKIPPED, loss=math.nan, norm=math.inf)
    line = strict_json(file.getvalue())
    assert (line["loss"], line["norm"]) == ("nan", "inf")


# ---------------------------------------------------------------- TensorBoard


def written(folder):
    tensorboard = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = tensorboard.EventAccumulator(str(folder))
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_scalars_in_tensorboard(tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    with tensorboard.SummaryWriter(tmp_path) as writer:
        for report in (FIRST, LATE, SKIPPED):
            write_scalars(writer, report)
    assert written(tmp_path) == {
        "curvadion/gate_open": [(1, 1.0), (3, 0.0), (4, 0.0)],
        "curvadion/rmmc": [(3, 0.25)],
        "curvadion/local_steps": [(1, 0.0), (3, 2.0), (4, 2.0)],
        "curvadion/skipped": [(1, 0.0), (3, 0.0), (4, 1.0)],
        "curvadion/wire_bytes": [(1, 16.0), (3, 16.0)],
        "curvadion/waited_seconds": [(1, 0.0), (3, 0.5), (4, 0.0)],
    }


def test_scalars_of_several_steps():
    summary = Summary()
    for report in (FIRST, LATE, SKIPPED):
        summary.add(report)
    assert summary.scalars(LATE) == {
        "wire_bytes": (FIRST.wire_bytes + LATE.wire_bytes) / 3,
        "open_gate_share": 1 / 3,
        "skipped_steps": 1,
        "waited_seconds": 0.5,
        "rmmc": 0.25,
        "local_steps": 2,
    }
    assert "rmmc" not in summary.scalars(FIRST)  # infinite


def test_further_scalars_that_are_finite(tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    with tensorboard.SummaryWriter(tmp_path) as writer:
        write_scalars(writer, CLOSED, loss=0.5, norm=math.inf)
    assert written(tmp_path)["curvadion/loss"] == [(3, 0.5)]
    assert "curvadion/norm" not in written(tmp_path)


def test_scalars_under_another_prefix(tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    with tensorboard.SummaryWriter(tmp_path) as writer:
        write_scalars(writer, CLOSED, prefix="run/optimizer")
    assert all(tag.startswith("run/optimizer/") for tag in written(tmp_path))


# ---------------------------------------------------------------- Weights & Biases


def test_numbers_in_a_run_of_weights_and_biases(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="needs wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(project="curvadion", mode="offline", dir=tmp_path)
    write_wandb(run, FIRST, loss=2.0)
    write_wandb(run, LATE, loss=1.5, norm=math.nan)
    write_wandb(run, SKIPPED)  # a step is complete when the next begins
    kept = dict(run.summary)
    run.finish()
    assert kept.pop("_step") == LATE.step
    assert {name: value for name, value in kept.items() if not name.startswith("_")} == {
        "curvadion/gate_open": 0.0,
        "curvadion/rmmc": 0.25,
        "curvadion/local_steps": 2.0,
        "curvadion/skipped": 0.0,
        "curvadion/wire_bytes": 16.0,
        "curvadion/waited_seconds": 0.5,
        "curvadion/loss": 1.5,
    }
    assert list(tmp_path.rglob("*.wandb"))
