"""What a step reports, and what becomes of it in logs."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from unittest import mock

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


# ---------------------------------------------------------------- wire bytes


def matrix_and_bias():
    return [
        {"params": [nn.Parameter(torch.ones(8, 4))], "rank_fraction": 0.5},
        {"params": [nn.Parameter(torch.ones(5))], "algorithm": "adamw"},
    ]


MEETING = 24
LOW_RANK = 4 * 2 * (8 + 4)  # P and R in float32, rank 2
DENSE = 4 * 5  # the bias's gradient
FIRST_CHECK = 48
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


@pytest.mark.parametrize(("gate", "closed"), [(FixedPeriod(2), 0), (Scheduled((2, 4, 6)), MEETING)])
def test_closed_steps_send_the_meeting_alone_or_nothing_under_a_schedule(gate, closed):
    for before, metered, total, after in distributed.run(2, bytes_of_steps, gate):
        assert before is after is None  # without a meter
        assert metered == [MEETING + LOW_RANK + DENSE + MEAN_OF_ALL, closed] * 2
        assert total == sum(metered)


def bytes_from_the_start(rank):
    with WireMeter() as meter:
        optimizer = Dion(matrix_and_bias(), replicas=dist.group.WORLD)
        sent = [step(optimizer, rank, 0), step(optimizer, rank, 1)]
        return sent, meter.total_bytes, optimizer.report.wire_bytes_by_ranks


def test_first_step_includes_the_check_of_the_replicas():
    for metered, total, by_ranks in distributed.run(2, bytes_from_the_start):
        assert metered == [MEETING + LOW_RANK + DENSE + FIRST_CHECK, MEETING + LOW_RANK + DENSE]
        assert total == sum(metered)
        assert by_ranks == {"0, 1": metered[-1]}


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
        "wire_bytes": 72,
        "longest_local_run": 2,
        "waited_seconds": 0.5,
        "open_gate_share": 0.25,
    }
    assert strict_json(json.dumps(summary.as_dict())) == summary.as_dict()


# ---------------------------------------------------------------- JSON lines


def test_json_lines_to_an_open_file_or_a_path(tmp_path):
    file, path = io.StringIO(), tmp_path / "log.jsonl"
    for log in (file, path):
        write_json_line(log, FIRST, loss=math.nan, lr=[0.02, 0.003])
        write_json_line(log, SKIPPED, run="ü")
    assert path.read_text("utf-8") == file.getvalue() and file.getvalue().endswith("\n")
    first, second = (strict_json(line) for line in file.getvalue().splitlines())
    assert first == {**FIRST.as_dict(), "rmmc": "inf", "loss": "nan", "lr": [0.02, 0.003]}
    assert second == {**SKIPPED.as_dict(), "run": "ü"}


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
            write_scalars(writer, report, norm=math.inf)  # left out: not finite
    assert written(tmp_path) == {
        "curvadion/gate_open": [(1, 1.0), (3, 0.0), (4, 0.0)],
        "curvadion/rmmc": [(3, 0.25)],
        "curvadion/local_steps": [(1, 0.0), (3, 2.0), (4, 2.0)],
        "curvadion/skipped": [(1, 0.0), (3, 0.0), (4, 1.0)],
        "curvadion/wire_bytes": [(1, 24.0), (3, 24.0)],
        "curvadion/waited_seconds": [(1, 0.0), (3, 0.5), (4, 0.0)],
    }


# ---------------------------------------------------------------- Weights & Biases


def test_numbers_in_a_run_of_weights_and_biases():
    run = mock.Mock()
    write_wandb(run, LATE, loss=1.5, norm=math.nan)
    (numbers,), options = run.log.call_args
    assert options == {"step": LATE.step}
    assert numbers == {
        "curvadion/gate_open": 0.0,
        "curvadion/rmmc": 0.25,
        "curvadion/local_steps": 2.0,
        "curvadion/skipped": 0.0,
        "curvadion/wire_bytes": 24.0,
        "curvadion/waited_seconds": 0.5,
        "curvadion/loss": 1.5,
    }
