"""What a step reports, and what becomes of it in logs."""

import dataclasses
import json
import math

import pytest
import torch.distributed as dist

from curvadion import CurvaDion, FixedPeriod, StepReport, Summary, WireMeter
from curvadion.metering.report import write_json_line
from support.runs import distributed, toy

CLOSED = StepReport(
    step=3,
    gate_open=False,
    reason="closed",
    rmmc=0.25,
    rmmc_parameter="linear.weight",
    local_steps=2,
    skipped=False,
    wire_bytes=24,
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


def test_directions_are_those_of_the_present_groups(tmp_path):
    model = toy.model()
    optimizer = CurvaDion(toy.groups(model), threshold=0.3, direction="polar")
    optimizer.param_groups[-1]["algorithm"] = "lion"
    lions = len(optimizer.param_groups[-1]["params"])
    [report] = toy.train(model, optimizer, range(1))
    assert report.directions == {"polar": 2, "adamw": 4 - lions, "lion": lions}
    assert "directions" not in report.scalars()
    write_json_line(tmp_path / "log.jsonl", report)
    assert (
        json.loads((tmp_path / "log.jsonl").read_text("utf-8"))["directions"] == report.directions
    )
    again = toy.train(model, optimizer, range(1, 3))
    assert all(later.directions is report.directions for later in again)
    model.linear.weight.requires_grad_(False)
    [frozen] = toy.train(model, optimizer, range(3, 4))
    assert frozen.directions == {**report.directions, "polar": 1}


@distributed.on_ranks(2)
def test_bytes_are_reported_while_a_meter_counts(rank):
    model = toy.model()
    optimizer = CurvaDion(toy.groups(model), replicas=dist.group.WORLD, gate=FixedPeriod(2))
    (before,) = toy.train(model, optimizer, [0], rank)
    with WireMeter() as meter:
        during = toy.train(model, optimizer, range(1, 5), rank)
    (after,) = toy.train(model, optimizer, [5], rank)
    assert before.wire_bytes is after.wire_bytes is None
    sent = [report.wire_bytes for report in during]
    assert sum(sent) == meter.total.bytes
    assert sent[0] == sent[2] > 0 and sent[1] == sent[3] == 0
    assert during[2].wire_bytes_by_ranks == {"0, 1": sent[2]}


def test_summary_adds_up():
    summary = Summary()
    for report in (FIRST, CLOSED, LATE, SKIPPED):
        summary.add(report)
    assert dataclasses.asdict(summary) == {
        "steps": 4,
        "open_steps": 1,
        "skipped_steps": 1,
        "wire_bytes": 72,
        "waited_seconds": 0.5,
    }
    assert summary.scalars(CLOSED)["open_gate_share"] == 0.25


def test_json_lines(tmp_path):
    path = tmp_path / "log.jsonl"
    write_json_line(path, FIRST, loss=math.nan, lr=[0.02, 0.003])
    write_json_line(path, SKIPPED, run="ü")
    lines = path.read_text("utf-8").splitlines()
    # JSON as the standard has it knows no NaN and no Infinity.
    first, second = (json.loads(line, parse_constant=pytest.fail) for line in lines)
    assert first == {**FIRST.as_dict(), "rmmc": "inf", "loss": "nan", "lr": [0.02, 0.003]}
    assert second == {**SKIPPED.as_dict(), "run": "ü"}


def test_scalars_are_finite_numbers():
    common = {"gate_open": 0.0, "local_steps": 2.0, "waited_seconds": 0.0}
    numbers = {**common, "rmmc": 0.25, "skipped": 0.0, "wire_bytes": 24.0}
    assert CLOSED.scalars() == numbers
    assert FIRST.scalars().keys() == numbers.keys() - {"rmmc"}
    assert SKIPPED.scalars() == {**common, "skipped": 1.0}
