"""What a step reports, and what becomes of it in logs."""

import dataclasses
import json
import math
import time

import pytest
import torch.distributed as dist

from curvadion import (
    CurvaDion,
    FixedPeriod,
    QuantizedAverage,
    StepReport,
    Summary,
    WireMeter,
)
from curvadion.metering.report import TOTALS, write_json_line
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
LATE = dataclasses.replace(
    CLOSED, waited_seconds=0.5, opening_seconds=0.75, step_seconds=3.0, members=("a", "b")
)
TIMED = dataclasses.replace(CLOSED, step_seconds=1.0, diagnostics={"cosine": 0.5})
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
        assert report.threshold == 0.3
        assert report.share is None  # of one replica
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


@distributed.on_ranks(2)
def test_a_report_tells_how_long_others_held_up_a_step(rank):
    """The second replica is slow in the steps before two of four openings."""
    model = toy.model()
    sync = QuantizedAverage()
    optimizer = CurvaDion(
        toy.groups(model), replicas=dist.group.WORLD, gate=FixedPeriod(2), sync=sync
    )
    reports = []
    for step in range(8):
        if rank == 1 and step in (2, 7):
            time.sleep(0.3)
        reports += toy.train(model, optimizer, [step], rank)
    held_up = [report.opening_seconds for report in reports]
    took = [report.step_seconds for report in reports]
    assert took[0] is None
    assert all(report.opening_seconds == 0.0 for report in reports[2::2])  # which are closed
    assert all(report.members is None for report in reports)
    if rank == 1:
        assert min(took[2], took[7]) > 0.3
    else:
        assert min(held_up[3], held_up[7]) > 0.1
        assert took[3] > held_up[3] and took[7] > held_up[7]
    first, second = distributed.gathered(held_up[3] + held_up[7])
    assert first > second


def test_summary_adds_up():
    summary = Summary()
    for report in (FIRST, TIMED, LATE, SKIPPED):
        summary.add(report)
    assert dataclasses.asdict(summary) == {
        "steps": 4,
        "open_steps": 1,
        "skipped_steps": 1,
        "wire_bytes": 72,
        "waited_seconds": 0.5,
        "opening_seconds": 0.75,
        "step_seconds": 4.0,
        "timed_steps": 2,
        "diagnostics": {"cosine": 0.5},
    }
    scalars = summary.scalars(LATE)
    assert scalars["open_gate_share"] == 0.25
    assert scalars["step_seconds"] == 2.0
    assert scalars["opening_seconds"] == 0.75
    assert scalars["members"] == 2.0
    assert scalars["cosine"] == TIMED.scalars()["cosine"] == 0.5
    assert scalars.keys() >= set(TOTALS)
    assert not {"step_seconds", "members"} & Summary().scalars(CLOSED).keys()


def test_json_lines(tmp_path):
    path = tmp_path / "log.jsonl"
    write_json_line(path, FIRST, loss=math.nan, lr=[0.02, math.inf])
    write_json_line(path, SKIPPED, run="ü")
    lines = path.read_text("utf-8").splitlines()
    # JSON as the standard has it knows no NaN and no Infinity.
    first, second = (json.loads(line, parse_constant=pytest.fail) for line in lines)
    assert first == {**FIRST.as_dict(), "rmmc": None, "loss": None, "lr": [0.02, None]}
    assert math.isinf(FIRST.rmmc)
    assert second == {**SKIPPED.as_dict(), "run": "ü"}


def test_scalars_are_finite_numbers():
    common = {"gate_open": 0.0, "local_steps": 2.0, "waited_seconds": 0.0, "opening_seconds": 0.0}
    numbers = {**common, "rmmc": 0.25, "skipped": 0.0, "wire_bytes": 24.0}
    assert CLOSED.scalars() == numbers
    assert FIRST.scalars().keys() == numbers.keys() - {"rmmc"}
    assert SKIPPED.scalars() == {**common, "skipped": 1.0}
    timed = {"waited_seconds": 0.5, "opening_seconds": 0.75, "step_seconds": 3.0, "members": 2.0}
    assert LATE.scalars() == {**numbers, **timed}
    counted = dataclasses.replace(CLOSED, share=0.01, threshold=0.3)
    assert counted.scalars() == {**numbers, "share": 0.01, "threshold": 0.3}
    assert Summary().scalars(counted).items() >= {"share": 0.01, "threshold": 0.3}.items()
