"""Logs of runs, and what ``python -m curvadion.watch`` shows and draws of them."""

from __future__ import annotations

import json
import math
import sys

import pytest

from curvadion import StepReport, Summary, watch
from curvadion.metering.json_lines import append_line
from curvadion.metering.report import write_json_line
from curvadion.metering.run_logs import Run, read_run
from curvadion.metering.writers import JsonLinesWriter

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
        common = {"waited_seconds": 0.5, "opening_seconds": 0.25, "share": 0.02, "threshold": 0.3}
        told = report(step, step in (1, 4, 8), **common)
        if step == 1:
            told = report(step, True, rmmc=math.inf, **common)
        write_json_line(path, told, loss=10.0 - step, **more)
    return path


@pytest.fixture
def totals(tmp_path):
    """What watch() writes after two times five steps, of which one is skipped."""
    path = tmp_path / "totals.jsonl"
    writer = JsonLinesWriter(path)
    for last in (5, 10):
        summary = Summary()
        for step in range(last - 4, last + 1):
            told = report(step, step % 5 < 2, rmmc=None, share=0.001 * step, waited_seconds=0.5)
            summary.add(told)
        writer.write(last, summary.scalars(told), [])
    return path


def test_reads_reports(log):
    run = read_run(log)
    assert (run.name, run.steps, run.threshold) == ("paper", 10, 0.3)
    assert run.loss == [(step, 10.0 - step) for step in range(1, 11)]
    assert run.over_bytes(run.loss, 20)[-1] == (pytest.approx(0.01), 0.0)
    assert run.opened == [1, 4, 8] and run.openings == 3
    assert run.signals[0] == (2, 0.2, False) and len(run.signals) == 9
    assert run.drift == [(5, 0.05), (10, 0.1)] and run.held_out == [(5, 9.0), (10, 9.0)]
    assert run.waited[-1] == (10, 7.5)


def test_a_log_may_begin_in_mid_run(tmp_path):
    """Of a run that was resumed: it counts from its first line on."""
    path = tmp_path / "resumed.jsonl"
    for step in range(61, 81):
        write_json_line(path, report(step, step % 5 == 0, share=0.02), loss=1.0)
    run = read_run(path)
    assert (run.start, run.length, run.openings) == (60, 20, 4)
    assert run.over_bytes(run.loss, 20)[-1] == (pytest.approx(0.02), 1.0)
    assert watch._frequencies([step - 60 for step in run.opened], 20) == [
        (i, float(i % 5 == 4)) for i in range(20)
    ]


def test_a_log_of_every_few_steps_begins_before_its_first_line(tmp_path):
    path = tmp_path / "every_20.jsonl"
    for step in range(20, 101, 20):
        write_json_line(path, report(step, True, share=0.02), loss=1.0)
    assert (read_run(path).start, read_run(path).length) == (0, 100)


def test_an_evaluation_before_the_first_step_does_not_hide_that_a_log_begins_in_mid_run(tmp_path):
    path = tmp_path / "evaluated.jsonl"
    append_line(path, {"step": 60, "val_loss": 2.0, "kind": "validation"})
    for step in range(61, 81):
        write_json_line(path, report(step, step % 5 == 0), loss=1.0)
    run = read_run(path)
    assert (run.start, run.length, run.held_out) == (60, 20, [(60, 2.0)])


def test_totals_may_begin_in_mid_run(tmp_path):
    """The steps of a line are its own, also where an evaluation comes between."""
    path = tmp_path / "totals.jsonl"
    writer = JsonLinesWriter(path)
    for last in (1100, 1200):
        append_line(path, {"step": last, "val_loss": 2.0, "kind": "validation"})
        summary = Summary()
        for step in range(last - 99, last + 1):
            told = report(step, step % 10 == 0)
            summary.add(told)
        writer.write(last, summary.scalars(told), [])
    run = read_run(path)
    assert (run.start, run.length, run.openings) == (1000, 200, 20)


def test_of_steps_that_a_resumed_run_repeats_the_last_lines_count(log):
    """It was saved after step 8, and opens at step 9 where the first run did not."""
    for step in (9, 10, 11):
        write_json_line(log, report(step, step == 9), loss=20.0 - step)
    with pytest.warns(UserWarning, match="2 earlier lines of repeated steps are left out"):
        run = read_run(log)
    assert run.loss == [*((s, 10.0 - s) for s in range(1, 9)), (9, 11.0), (10, 10.0), (11, 9.0)]
    assert run.opened == [1, 4, 8, 9] and run.openings == 4
    assert (run.start, run.steps) == (0, 11)


def test_only_a_last_line_may_be_cut_short(log):
    """By a crash, or because it is still being written."""
    whole = read_run(log)
    with log.open("a", encoding="utf-8") as lines:
        lines.write('{"step": 11, "gate_o')
    assert read_run(log) == whole
    with log.open("a", encoding="utf-8") as lines:
        lines.write("\n")
    with pytest.raises(ValueError, match="line 11: no JSON"):
        read_run(log)


def test_reads_what_watch_has_written(totals):
    run = read_run(totals)
    assert (run.steps, run.openings, run.opened) == (10, 4, [])
    assert run.shares == [(5, 0.005), (10, 0.01)]
    assert run.waited == [(5, 2.5), (10, 5.0)]
    assert watch.lines(run)[0] == "totals: step 10, 1 % of DDP's bytes, 4 openings, 5 s waited"


def test_a_terminal_shows_the_share_of_ddps_bytes(log, capsys):
    assert watch.main([str(log)]) == 0
    first, loss, sent, openings = capsys.readouterr().out.splitlines()
    assert first == "paper: step 10, loss 9, 2 % of DDP's bytes, 3 openings, 7.5 s waited"
    assert loss.split() == ["loss", "█▇▆▆▅▄▃▃▂▁", "9", "to", "0"]
    assert sent.endswith("at most 2 %")
    assert openings.split()[1] == "█▁▁█▁▁▁█▁▁"
    rising = watch.curve([(step, step) for step in range(1000)])
    assert len(rising) == watch.WIDTH and list(rising) == sorted(rising)
    assert set(rising) == set(watch.LEVELS)


def test_draws_what_logs_tell_and_no_empty_panel(log, totals, tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    picture = tmp_path / "new" / "run.svg"

    def drawn(*logs):
        with matplotlib.rc_context(TEXT):
            assert watch.main([*map(str, logs), "--out", str(picture)]) == 0
        return picture.read_text("utf-8")

    everything = (
        "Loss by bytes",
        "Loss by steps",
        "Bytes sent so far",
        "Drift of replicas",
        "Momentum change",
        "Openings",
        "Waiting for other replicas",
    )
    both = drawn(log, totals)
    for text in (
        *everything,
        *("threshold", "0.3", "paper: 3 openings, 30.0% of steps"),
        *("bytes sent, as a share of DDP's in 10 steps", "2 %"),
    ):
        assert f">{text}<" in both, text
    alone = drawn(totals)
    assert [text for text in everything if f">{text}<" in alone] == [everything[2], everything[6]]


def test_without_matplotlib_the_terminal_is_told(log, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "curvadion.metering.picture", None)
    assert watch.main([str(log), "--out", str(tmp_path / "run.png")]) == 1
    said = capsys.readouterr()
    assert said.out.startswith("paper: step 10")
    assert "no picture" in said.err and "pip install matplotlib" in said.err


def test_follows_a_log_that_grows(log, capsys, monkeypatch):
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        if len(waits) == 2:
            write_json_line(log, report(11), loss=0.5)
        if len(waits) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(watch.time, "sleep", sleep)
    missing = log.with_name("later.jsonl")
    assert watch.main([str(log), str(missing), "--follow", "--every", "0.5"]) == 0
    said = capsys.readouterr()
    shown = [line for line in said.out.splitlines() if line.startswith("paper")]
    assert [line.split(",")[0] for line in shown] == ["paper: step 10", "paper: step 11"]
    assert said.err.count("there is no such file") == 2
    assert waits == [0.5] * 4


def test_openings_of_a_long_run_are_shares_of_equal_parts():
    run = Run("long", steps=90_000_000, opened=[1, 2, 45_000_001, 90_000_000])
    assert watch.lines(run)[-1].split()[1] == "█" + "▁" * 29 + "▅" + "▁" * 28 + "▅"


@pytest.mark.parametrize(
    "line", ["{}", '{"step": true}', '{"step": -1}', '{"step": 0, "gate_open": true}']
)
def test_a_wrong_log_is_named_with_its_line(log, capsys, line):
    log.write_text(json.dumps({"step": 1, "gate_open": False}) + f"\n{line}\n", "utf-8")
    assert watch.main([str(log)]) == 1
    assert f"{log}, line 2" in capsys.readouterr().err


def test_a_log_of_events_is_no_log_of_steps(log, capsys):
    event = {"kind": "joined", "member": "b", "replica": "a", "step": 10}
    log.write_text(json.dumps(event) + "\n", "utf-8")
    assert watch.main([str(log)]) == 1
    assert "holds the events of members, not the steps of a run" in capsys.readouterr().err
