"""A small storm: its replicas agree, and its record says what has befallen them."""

import json

import pytest

from support.runs import forked

pytest.importorskip("torchft")
pytest.importorskip("matplotlib")


def test_a_small_storm(tmp_path):
    """One of three replicas is killed, another is cut off for longer than the heartbeat timeout."""
    path = tmp_path / "storm.json"
    options = (
        "--replicas 3 --steps 40 --step-seconds 0.05 --period 8 --kills 1 --away 0.2 --freezes 0 "
        "--cuts 1 --cut-off 1 --waves 0 --heartbeat-timeout 0.5"
    )
    module = "benchmarks.elastic.storm"
    ran = forked.module(module, *options.split(), "--out", path)
    assert ran.returncode == 0, ran.stdout[-2000:]
    written = json.loads(path.read_text("utf-8"))
    assert f"-m {module} --replicas 3" in written["command"]
    undisturbed, storm = written["records"]
    assert storm["faults"] == {"kill": 1, "freeze": 0, "cut": 1, "part": 0}
    for run in (undisturbed, storm):
        assert run["crashes"] == []
        assert run["openings_with_different_anchors"] == 0
        assert run["second_runs"] == 0
        assert run["final_weights"] == 1
        assert run["steps_at_the_end"] == [40]
    assert undisturbed["replicas_that_ended"] == 3
    # All but the first one begin with a copy of its states.
    assert undisturbed["events_of_replicas"]["copied"] == 2
    assert storm["held_out_loss"] == pytest.approx(undisturbed["held_out_loss"], rel=0.1)
    # Both runs take seconds, beside other tests.
    assert 0 < storm["goodput"] < 2
    picture = tmp_path / "storm.png"
    drawn = forked.module("benchmarks.elastic.storm_picture", path, picture)
    assert drawn.returncode == 0, drawn.stdout[-2000:]
    assert picture.stat().st_size > 10_000
