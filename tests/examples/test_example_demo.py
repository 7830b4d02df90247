"""The demos from their command lines to their pictures, at sizes that take seconds."""

import json

import pytest

import demo
import demo_layouts
from support.documents.example_runs import LOSSES, follow_in_workers
from support.references.tolerance import assert_within

TINY = (
    "--validate-every 2 --dim 16 --heads 2 --layers 1 --context 16 --data-bytes 50000 "
    "--validation-tokens 64"
).split()


def test_demo_compares_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo, "follow", follow_in_workers)
    more = ["--steps", "4", "--batch-size", "2", "--warmup-steps", "1"]
    summaries = demo.main(["--out", str(tmp_path), *TINY, *more])
    assert json.loads((tmp_path / "summary.json").read_text("utf-8")) == summaries
    names = [summary["name"] for summary in summaries]
    assert names == ["AdamW-DDP", "Muon", "CurvaDion", "CurvaDion-1%"]
    sent = [summary["sent_bytes"] for summary in summaries]
    for summary in summaries[:3]:  # of two ranks an all-reduce sends its payload
        assert summary["sent_bytes"] == pytest.approx(summary["wire_bytes"], rel=1e-3)
    for summary in summaries:
        assert (summary["steps"], summary["tokens"]) == (4, 4 * 2 * 2 * 16)
        assert 4 < summary["val_loss"] < 7
    assert sent[1] == pytest.approx(sent[0], rel=0.02)
    assert sent[1] > sent[2] > sent[3] > 0
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert "100.00%" in capsys.readouterr().out


@pytest.mark.numeric
def test_demo_of_layouts_compares_them_with_one_process(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo, "follow", follow_in_workers)
    more = ["--steps", "2", "--processes", "2"]
    summaries = demo_layouts.main(["--out", str(tmp_path), *TINY, *more])
    assert json.loads((tmp_path / "summary.json").read_text("utf-8")) == summaries
    names = [summary["name"] for summary in summaries]
    assert names == ["one process", "DDP 2", "FSDP 2", "TP 2"]
    assert {summary["tokens_per_step"] for summary in summaries} == {8 * 16}
    for summary in summaries:
        assert_within(summary["largest_difference"], LOSSES, what=summary["name"])
    for summary in summaries[1:]:
        assert 0 < summary["optimizer_bytes_per_step"] <= summary["wire_bytes_per_step"]
    assert (tmp_path / "demo_layouts.png").read_bytes().startswith(b"\x89PNG")
    assert "TP 2" in capsys.readouterr().out
