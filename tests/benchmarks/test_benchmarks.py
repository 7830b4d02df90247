"""The benchmarks of kernels and steps run, and write what their documentation promises."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

import distributed
import fresh
from curvadion import ops

ROOT = Path(__file__).resolve().parents[2]


def run(script, *arguments):
    environment = {**os.environ, "CURVADION_BACKEND": ""}
    return fresh.python(ROOT / "benchmarks" / script, *arguments, environment=environment, cwd=ROOT)


def records(script, path, *arguments):
    result = run(script, *arguments, "--device", "cpu", "--rounds", "2", "--output", path)
    assert result.returncode == 0, result.stderr[-2000:]
    written = json.loads(path.read_text("utf-8"))
    assert written["command"].startswith("OMP_NUM_THREADS=") and written["environment"]["torch"]
    return written["records"]


def test_kernels(tmp_path):
    found = records("kernels.py", tmp_path / "a.json", "--models", "500x2000", "--blocks", "20")
    contenders = {(r["operation"], r["contender"]) for r in found}
    for operation in ("momentum_norms", "accumulate_", "local_step_"):
        wanted = {"copy", "foreach", "torch"} | ({"cpu"} if ops.lacking("cpu") is None else set())
        assert {c for o, c in contenders if o == operation} == wanted
    assert {c for o, c in contenders if o == "symmetric_product"} == {"copy", "bmm", "torch"}
    # As many matrices of 40 x 40 numbers as there are.
    assert {r["flops"] for r in found if r["operation"] == "gram"} == {20 * 2 * 40 * 40 * 50}
    for r in found:
        # The first reads M and G, the second writes M as well.
        if lists := {"momentum_norms": 2, "accumulate_": 3}.get(r["operation"]):
            moved = 1e9 * r["gigabytes_per_second"] * r["seconds"]
            assert moved == pytest.approx(lists * 4 * 20 * 2000)
    assert len((tmp_path / "a.csv").read_text("utf-8").splitlines()) == len(found) + 1


def test_optimizer_step(tmp_path):
    arguments = ["--models", "500x2000", "--blocks", "20"]
    found = records("optimizer_step.py", tmp_path / "a.json", *arguments)
    by_name = {r["contender"]: r for r in found}
    assert {"open gate", "closed gate, gradient step", "AdamW, fused"} <= set(by_name)
    closed = by_name["closed gate, gradient step"]
    # Compiled operations make nothing of a weight's size, plain PyTorch the sum and the copies that
    # it saturates, of one weight at a time.
    copies = 1 if ops.lacking("cpu") is None else 4
    assert closed["peak_bytes"] < copies * 2000 * 4
    assert by_name["open gate"]["peak_bytes"] > 2000 * 4
    assert closed["host_microseconds_a_tensor"] == pytest.approx(
        1e6 * (closed["seconds"] - by_name["fused operations alone"]["seconds"]) / 20
    )
    assert all((r["replicas"], r["shards"]) == (1, 1) for r in found)


PEER = """
import torch

class Muon(torch.optim.SGD):
    def __init__(self, groups, **options):
        super().__init__([group["params"] for group in groups][0], lr=0.1)

class Dion:
    def __init__(self, groups, **options):
        raise RuntimeError("needs what is not here")
"""


def test_other_libraries_take_part_where_they_can(tmp_path, monkeypatch):
    (tmp_path / "dion.py").write_text(PEER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    names = "Microsoft's Muon", "Microsoft's Dion", "AdamW, fused"
    few = ("--models", "500x2000", "--blocks", "2", "--rounds", "1", "--device", "cpu")
    for arguments, left_out in ((("--contenders", *names), 1), (("--without-peers",), 0)):
        output = tmp_path / "a.json"
        said = run("optimizer_step.py", *few, *arguments, "--output", output)
        assert said.returncode == 0, said.stderr[-2000:]
        assert said.stdout.count("left out: RuntimeError: needs what is not here") == left_out
        found = {r["contender"] for r in json.loads(output.read_text("utf-8"))["records"]}
        assert found & set(names) == set(names[::2] if left_out else names[2:])


def measure_shards(rank, *arguments):
    import optimizer_step

    optimizer_step.main([*arguments, "--device", "cpu"])


def test_a_step_of_shards(tmp_path):
    names = "Dion, low rank", "Dion, polar", "AdamW, fused"
    few = ("--models", "500x2000", "--blocks", "3", "--rounds", "1", "--shards", "--contenders")
    output = tmp_path / "a.json"
    distributed.run(2, measure_shards, "--output", str(output), *few, *names)
    found = {r["contender"]: r for r in json.loads(output.read_text("utf-8"))["records"]}
    assert set(found) == {*names, "fused operations alone"}
    for r in found.values():
        assert (r["replicas"], r["shards"], r["tensors"]) == (1, 2, 3)
        assert r["elements"] == 3 * 2000 and r["weight_bytes"] == 3 * 2000 * 4 / 2
        assert len(r["peak_bytes_by_rank"]) == 2
    assert found["AdamW, fused"]["bytes_sent_by_rank"] == [0, 0]
    assert all(min(found[name]["bytes_sent_by_rank"]) > 0 for name in names[:2])


def measure_replicas(rank, *arguments):
    import optimizer_step

    optimizer_step.main([*arguments, "--device", "cpu"])


def test_replicas_keep_gradients_of_their_own_and_stop_together(tmp_path):
    # A polar step averages gradients in place, and an optimizer refuses gradients that are alike.
    names = "opening", "Dion, polar", "local step, polar"
    few = ("--models", "500x2000", "--blocks", "1", "--contenders", *names)
    output = tmp_path / "a.json"
    rounds = ("--rounds", "1000000", "--seconds", "0")
    distributed.run(2, measure_replicas, "--output", str(output), *few, *rounds)
    found = {r["contender"]: r for r in json.loads(output.read_text("utf-8"))["records"]}
    assert set(found) == {*names, "fused operations alone"}
    for r in found.values():
        assert (r["replicas"], r["shards"], r["calls"]) == (2, 1, 1)
        assert len(r["bytes_sent_by_rank"]) == 2


def late_on(rank):
    import measure
    import optimizer_step

    assert optimizer_step._on_any_rank(rank == 1)
    assert not optimizer_step._on_any_rank(False)
    times = measure.interleaved(
        {"nothing": lambda: None},
        torch.device("cpu"),
        rounds=3,
        seconds=-1 if rank == 1 else 1e9,
        anywhere=optimizer_step._on_any_rank,
    )
    return len(times["nothing"])


def test_a_limit_that_one_rank_has_reached_ends_the_rounds_of_all():
    assert distributed.run(2, late_on) == [1, 1]


def test_unknown_contenders_are_named():
    said = run("optimizer_step.py", "--contenders", "foo", "--device", "cpu")
    assert said.returncode == 2
    assert "'foo'" in said.stderr and "local step, polar" in said.stderr
    said = run("optimizer_step.py", "--contenders", "opening", "--device", "cpu")
    assert said.returncode == 2 and "needs replicas" in said.stderr
    said = run("optimizer_step.py", "--help")
    text = " ".join(said.stdout.split())
    assert '"Muon and AdamW"' in text and "each process is a replica" in text


def test_shards_need_processes():
    said = run("optimizer_step.py", "--shards", "--device", "cpu")
    assert said.returncode == 2 and "run it with torchrun" in said.stderr


def test_routing_rates(tmp_path):
    out = tmp_path / "rates.json"
    few = ("--steps", "2", "--tasks", "narrow", "--elementwise", "lion", "--rates", "0.001")
    for kinds in (("all",), ("all", "head")):  # the second time one run is left
        result = run("routing_rates.py", "--out", out, *few, "--kinds", *kinds)
        assert result.returncode == 0, result.stderr[-2000:]
    written = json.loads(out.read_text())
    assert [r["rates"]["vector"] for r in written["records"]] == [0.001, 0.01]
    assert all(4 < r["loss"] < 6 for r in written["records"])
    assert len(written["commands"]) == 2


EVERY_POINT = """
import json, sys
from pathlib import Path
sys.path.insert(0, "benchmarks")
import gpu_points, gpu_report
out = Path(sys.argv[1])
for point in gpu_report.POINTS.keys() - {"processes"}:
    sys.argv = ["gpu_points.py", point, "--device", "cpu", "--output", str(out / point)]
    assert gpu_points.main() == 0, point
    print(point, "skipped" in json.loads((out / point).read_text()))
"""


def test_every_point_of_the_report_of_a_gpu_runs_or_says_why_not(tmp_path):
    said = fresh.python("-c", EVERY_POINT, tmp_path, cwd=ROOT)
    assert said.returncode == 0, said.stdout[-2000:] + said.stderr[-2000:]
    points = dict(line.split() for line in said.stdout.splitlines())
    skipped = {point for point, was in points.items() if was == "True"}
    assert len(points) == 6 and skipped == {"waits", "sanitizer"}


BROKEN = """
import sys
sys.path.insert(0, "benchmarks")
import gpu_report
gpu_report.POINTS |= {"none": ("a point that fails", 60), "late": ("one that hangs", 1)}
only = ["--only", "none", "late", "processes"]
sys.argv = ["gpu_report.py", "--device", "cpu", *only, "--output", sys.argv[1]]
sys.exit(gpu_report.main())
"""


def test_a_point_that_fails_or_hangs_does_not_end_the_others(tmp_path):
    said = fresh.python("-c", BROKEN, tmp_path / "report.json", cwd=ROOT)
    assert said.returncode == 1, said.stderr[-2000:]
    points = json.loads((tmp_path / "report.json").read_text())["points"]
    found = [each["status"] for each in points.values()]
    assert found == ["exit code 1", "timed out after 1 s", "ok"]
    assert "KeyError: 'none'" in points["none"]["output"]
    assert set(points["processes"]["results"].values()) == {0.0}  # a CPU beside itself


def test_the_report_of_a_gpu_needs_one(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("has a CUDA device")
    result = run("gpu_report.py", "--output", tmp_path / "a.json")
    assert result.returncode == 2 and "there is no CUDA device" in result.stderr
