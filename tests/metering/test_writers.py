"""What is watched reaches Prometheus, TensorBoard, Weights & Biases and files, by their libraries.

wandb is not among the dependencies of the tests: its test is skipped where it is missing.
"""

import json
import re
import urllib.request

import pytest
import torch
from torch import nn

from curvadion import FixedPeriod, Replicated, Summary
from curvadion.comm.replicas import FixedMembers
from curvadion.metering.events import Event
from curvadion.metering.prometheus import MEANINGS, PrometheusWriter
from curvadion.metering.report import TOTALS
from curvadion.metering.watch import watch
from curvadion.metering.writers import JsonLinesWriter, TensorBoardWriter, WandbWriter
from support.documents.doc_blocks import ROOT

CAME = Event("joined", "b has come", member="b", replica="a", step=2, opening=1)
FAILED = Event("failed", "no answer", member="a", replica="a", step=5, opening=1)
SCALARS = {name: 0.5 for name in MEANINGS if name != "step"}


class Memory:
    def __init__(self):
        self.told = []

    def write(self, step, scalars, events):
        self.told.append((step, scalars, events))


def optimizer_of():
    x = nn.Parameter(torch.zeros(3))
    x.grad = torch.ones(3)
    inner = torch.optim.SGD([x], lr=0.1)
    return Replicated(inner, replicas="single", gate=FixedPeriod(1))


# ---------------------------------------------------------------- watching


def test_a_writer_gets_numbers_and_events_every_few_steps(monkeypatch):
    told = [CAME]
    monkeypatch.setattr(FixedMembers, "events", told)
    optimizer, memory = optimizer_of(), Memory()
    stop = watch(optimizer, memory, every=4)
    wanted = Summary()
    for step in range(10):
        optimizer.step()
        if step < 4:
            wanted.add(optimizer.report)
        if step == 3:
            last = optimizer.report
        if step == 5:
            told.append(FAILED)
    stop()
    stop()
    optimizer.step()
    assert [(step, events) for step, _, events in memory.told] == [
        (4, [CAME]),
        (8, [FAILED]),
        (10, []),
    ]
    assert memory.told[0][1] == wanted.scalars(last)


def test_a_full_disk_ends_no_training(caplog):
    class Full:
        def write(self, *_):
            raise OSError("no space left")

    optimizer = optimizer_of()
    watch(optimizer, Full(), every=1)
    optimizer.step()
    assert "Step 1 could not be written: no space left" in caplog.text
    with pytest.raises(ValueError, match="every=0"):
        watch(optimizer, Full(), every=0)


# ---------------------------------------------------------------- writers


def test_json_lines(tmp_path):
    writer = JsonLinesWriter(tmp_path / "run.jsonl")
    writer.write(10, SCALARS, [CAME])
    writer.write(20, SCALARS, [])
    first, second = map(json.loads, (tmp_path / "run.jsonl").read_text("utf-8").splitlines())
    assert first == {"step": 10, **SCALARS, "events": [CAME.as_dict()]}
    assert second == {"step": 20, **SCALARS, "events": []}


def page_of(exporter):
    """The numbers that Prometheus would read, by metric and labels."""
    with urllib.request.urlopen(f"http://localhost:{exporter.port}/metrics") as answer:
        page = answer.read().decode()
    lines = [line for line in page.splitlines() if not line.startswith("#")]
    pairs = [line.rsplit(" ", 1) for line in lines if "_created" not in line]
    return {name: float(value) for name, value in pairs}


@pytest.fixture
def exporter():
    pytest.importorskip("prometheus_client")
    exporter = PrometheusWriter(port=0, address="127.0.0.1")
    yield exporter
    exporter.close()


def test_prometheus_reads_a_page(exporter):
    exporter.write(10, SCALARS, [CAME, FAILED, FAILED])
    exporter.write(20, SCALARS, [FAILED])
    wanted = {"curvadion_step": 20.0}
    for name in SCALARS:
        if name in TOTALS:
            wanted[f"curvadion_{name}_total"] = 1.0
        else:
            wanted[f"curvadion_{name}"] = 0.5
    wanted['curvadion_events_total{kind="joined"}'] = 1.0
    wanted['curvadion_events_total{kind="failed"}'] = 3.0
    assert page_of(exporter) == wanted


def test_all_numbers_have_a_meaning_and_are_on_the_page():
    optimizer = optimizer_of()
    optimizer.step()
    known = Summary().scalars(optimizer.report).keys()
    assert known <= MEANINGS.keys()
    page = (ROOT / "docs" / "monitoring.md").read_text("utf-8")
    listed = page.split("| metric")[1].split("\n\n")[0]
    named = {name.removesuffix("_total") for name in re.findall(r"`(\w+)(?:\{[^}]*\})?`", listed)}
    assert named >= MEANINGS.keys() | {"events"}


def test_the_dashboard_shows_what_is_exported(exporter):
    exporter.write(10, SCALARS, [CAME])
    exported = {name.partition("{")[0] for name in page_of(exporter)}
    dashboard = json.loads((ROOT / "docs" / "grafana.json").read_text("utf-8"))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [item["query"]["query"] for item in dashboard["templating"]["list"][1:]]
    shown = {name for query in queries for name in re.findall(r"curvadion_\w+", query)}
    assert shown == exported
    alerts = (ROOT / "docs" / "monitoring.md").read_text("utf-8").split("Worth an alert")[1]
    assert set(re.findall(r"curvadion_\w+", alerts)) <= exported


def test_tensorboard_shows_numbers_and_events(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as board:
        writer = TensorBoardWriter(board)
        writer.write(10, SCALARS, [CAME])
        writer.write(20, SCALARS, [])
    held = EventAccumulator(str(tmp_path))
    held.Reload()
    assert set(held.Tags()["scalars"]) == {f"curvadion/{name}" for name in SCALARS}
    steps = [(each.step, each.value) for each in held.Scalars("curvadion/members")]
    assert steps == [(10, 0.5), (20, 0.5)]
    [tag] = held.Tags()["tensors"]
    [text] = held.Tensors(tag)
    assert text.step == CAME.step
    assert str(CAME).encode() in text.tensor_proto.string_val[0]


def test_wandb_gets_numbers_and_events(tmp_path):
    wandb = pytest.importorskip("wandb")
    with wandb.init(mode="offline", dir=tmp_path, project="curvadion") as run:
        writer = WandbWriter(run)
        writer.write(10, SCALARS, [CAME])
        writer.write(20, SCALARS, [])
        summary = dict(run.summary)
        assert run.step == 20
    assert summary["curvadion/members"] == 0.5
    assert summary["curvadion/events"] == str(CAME)
