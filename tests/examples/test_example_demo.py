"""The demos from their command lines to their pictures, at sizes that take seconds."""

import json

import pytest

import demo
import demo_layouts
from example_runs import LOSSES, follow_in_workers
from tolerance import assert_within

TINY = (
    "--steps 4 --validate-every 2 --dim 16 --heads 2 --layers 1 --context 16 --batch-size 2 "
    "--data-bytes 50000 --validation-tokens 64 --warmup-steps 1"
).split()


def test_demo_compares_runs(tmp_path, capsys, monkeypatch):
    real = demo.follow

    def follow(command, environment, output):
        """One run is torchrun's, which takes seconds to start."""
        how = real if output.parent.name == "CurvaDion" else follow_in_workers
        return how(command, environment, output)

    monkeypatch.setattr(demo, "follow", follow)
    summaries = demo.main(["--out", str(tmp_path), *TINY])
    assert json.loads((tmp_path / "summary.json").read_text("utf-8")) == summaries
    assert [summary["name"] for summary in summaries] == [
        "AdamW-DDP",
        "Muon",
        "CurvaDion",
        "CurvaDion-1%",
    ]
    for summary in summaries[:3]:  # of two ranks an all-reduce sends its payload
        assert summary["sent_bytes"] == pytest.approx(summary["wire_bytes"], rel=1e-3)
    for summary in summaries:
        assert summary["crossing_bytes_per_step"] == summary["sent_bytes_per_step"]
        assert summary["steps"] == 4
        assert summary["tokens"] == 4 * 2 * 2 * 16
        assert summary["wire_bytes_per_step"] == summary["wire_bytes"] / 4
        assert 4 < summary["val_loss"] < 7
    assert summaries[1]["wire_bytes"] == pytest.approx(summaries[0]["wire_bytes"], rel=0.02)
    assert summaries[1]["sent_bytes"] > summaries[2]["sent_bytes"] > summaries[3]["sent_bytes"] > 0
    assert summaries[0]["drift"] == summaries[1]["drift"] == 0
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "100.00%" in printed and "CurvaDion" in printed


def test_demo_of_layouts_compares_them_with_one_process(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo, "follow", follow_in_workers)
    flags = ["--heads", "2", "--layers", "1", "--dim", "16", "--context", "16", "--steps", "2"]
    flags += ["--data-bytes", "50000", "--validation-tokens", "64", "--processes", "2"]
    summaries = demo_layouts.main(["--out", str(tmp_path), *flags])
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
