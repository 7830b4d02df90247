"""The benchmarks of kernels and steps run, and write what their documentation promises."""

import json

import pytest

import distributed
import fresh


def records(script, path, *arguments):
    arguments = ("--device", "cpu", "--rounds", "2", "--output", path, *arguments)
    script = fresh.ROOT / "benchmarks" / script
    result = fresh.python(script, *arguments, CURVADION_BACKEND="")
    assert result.returncode == 0, result.stderr[-2000:]
    written = json.loads(path.read_text("utf-8"))
    assert written["command"].startswith("OMP_NUM_THREADS=") and written["environment"]["torch"]
    return written["records"]


def test_kernels(tmp_path):
    found = records("kernels.py", tmp_path / "a.json", "--models", "500x2000", "--blocks", "20")
    contenders = {(r["operation"], r["contender"]) for r in found}
    for operation in ("momentum_norms", "accumulate_", "local_step_"):
        assert {c for o, c in contenders if o == operation} == {"copy", "foreach", "torch"}
    assert {c for o, c in contenders if o == "symmetric_product"} == {"copy", "bmm", "torch"}
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
    assert closed["peak_bytes"] < 4 * 2000 * 4  # a sum and copies of one weight at a time
    assert by_name["open gate"]["peak_bytes"] > 2000 * 4
    assert closed["host_microseconds_a_tensor"] == pytest.approx(
        1e6 * (closed["seconds"] - by_name["fused operations alone"]["seconds"]) / 20
    )
    assert all((r["replicas"], r["shards"]) == (1, 1) for r in found)


def measure_ranks(rank, *arguments):
    import optimizer_step

    optimizer_step.main([*arguments, "--device", "cpu"])


def records_of_ranks(path, *arguments):
    """By contender, those of two ranks."""
    arguments = ("--output", str(path), "--models", "500x2000", *arguments)
    distributed.run(2, measure_ranks, *arguments)
    return {r["contender"]: r for r in json.loads(path.read_text("utf-8"))["records"]}


def test_a_step_of_shards(tmp_path):
    names = "Dion, polar", "AdamW, fused"
    few = ("--blocks", "3", "--rounds", "1", "--shards", "--contenders", *names)
    found = records_of_ranks(tmp_path / "a.json", *few)
    assert set(found) == {*names, "fused operations alone"}
    for r in found.values():
        assert (r["replicas"], r["shards"], r["tensors"]) == (1, 2, 3)
        assert r["elements"] == 3 * 2000 and r["weight_bytes"] == 3 * 2000 * 4 / 2
        assert len(r["peak_bytes_by_rank"]) == 2
    assert found["AdamW, fused"]["bytes_sent_by_rank"] == [0, 0]
    assert min(found["Dion, polar"]["bytes_sent_by_rank"]) > 0


def test_a_step_of_replicas(tmp_path):
    names = "opening", "local step, polar"
    few = ("--blocks", "1", "--rounds", "1000000", "--seconds", "0", "--contenders", *names)
    found = records_of_ranks(tmp_path / "a.json", *few)
    assert set(found) == {*names, "fused operations alone"}
    for r in found.values():
        assert (r["replicas"], r["shards"], r["calls"]) == (2, 1, 1)
        assert len(r["bytes_sent_by_rank"]) == 2


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
    said = fresh.python("-c", EVERY_POINT, tmp_path)
    assert said.returncode == 0, said.stdout[-2000:] + said.stderr[-2000:]
    points = dict(line.split() for line in said.stdout.splitlines())
    skipped = {point for point, was in points.items() if was == "True"}
    assert len(points) == 6 and skipped == {"waits", "sanitizer"}
