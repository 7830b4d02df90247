"""Logs of runs, and the picture that tools/watch.py draws of them."""

from __future__ import annotations

import math

import pytest

import watch
from curvadion import StepReport
from curvadion.metering.report import write_json_line
from run_logs import read_run

matplotlib = pytest.importorskip("matplotlib")

TEXT = {"svg.fonttype": "none"}  # so that a picture holds its texts


def report(step, opened=False, **more):
    values = {"rmmc": 0.1 * step, "rmmc_parameter": "w", "wire_bytes": 100, **more}
    reason = "threshold" if opened else "closed"
    return StepReport(step, opened, reason, local_steps=0, skipped=False, **values)


@pytest.fixture
def log(tmp_path):
    """Ten steps: open at 1, where the momentum change is infinite, and at 4 and 8."""
    path = tmp_path / "paper.jsonl"
    for step in range(1, 11):
        more = {"drift": 0.01 * step, "val_loss": 9.0} if step % 5 == 0 else {}
        told = report(step, step in (1, 4, 8), waited_seconds=0.5)
        if step == 1:
            told = report(step, True, rmmc=math.inf, waited_seconds=0.5)
        write_json_line(path, told, loss=10.0 - step, threshold=0.3, **more)
    return path


def test_reads_reports(log):
    run = read_run(log)
    assert (run.name, run.steps, run.threshold) == ("paper", 10, 0.3)
    assert run.loss == [(step, 10.0 - step) for step in range(1, 11)]
    assert run.over_bytes(run.loss)[-1] == (1000, 0.0)
    assert run.opened == [1, 4, 8]
    assert run.signals[0] == (2, 0.2, False) and len(run.signals) == 9
    assert run.drift == [(5, 0.05), (10, 0.1)] and run.held_out == [(5, 9.0), (10, 9.0)]
    assert run.waited[-1] == (10, 5.0)


def test_draws_all_that_logs_tell(log, tmp_path):
    other = tmp_path / "budget.jsonl"
    for step in range(1, 21):
        write_json_line(other, report(step, step == 20, rmmc=None), loss=1.0)
    picture = tmp_path / "new" / "run.svg"
    with matplotlib.rc_context(TEXT):
        assert watch.main([str(log), str(other), "--out", str(picture)]) == 0
    drawn = picture.read_text("utf-8")
    for text in (
        *("Loss by bytes", "Loss by steps", "Drift of replicas", "Momentum change"),
        *("Openings", "Waiting for late exchanges", "threshold", "0.3"),
        *("paper: 3 openings, 30.0% of steps", "budget: 1 openings, 5.0% of steps"),
    ):
        assert f">{text}<" in drawn, text
    for absent in ("no drift in the log:", "no bytes in the log:", "the gate reads no momenta"):
        assert absent not in drawn
