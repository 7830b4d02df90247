"""The benchmarks of kernels and steps run, and write what their documentation promises."""

import importlib
import json
import re
import sys

import pytest

from benchmarks.seconds import fused_operations
from command_line import parse
from support.runs import distributed, forked


def records(module, path, *arguments):
    arguments = ("--device", "cpu", "--rounds", "2", "--output", path, *arguments)
    result = forked.module(module, *arguments, CURVADION_BACKEND="")
    assert result.returncode == 0, result.stdout[-2000:]
    written = json.loads(path.read_text("utf-8"))
    assert re.match(rf"OMP_NUM_THREADS=\d+ python -m {module} --device", written["command"])
    assert written["environment"]["torch"]
    return written["records"]


PROGRAMS = [
    *("characters", "claim", "ladder", "larger_models", "learning_rates", "offload"),
    *("pack_text", "process_report", "simulate", "state_dtypes", "track3", "train_processes"),
]


@pytest.mark.parametrize("name", PROGRAMS)
def test_help_is_printed(name, capsys):
    program = importlib.import_module(f"benchmarks.losses.{name}")
    with pytest.raises(SystemExit) as ended:
        parse(program.Options, ["--help"])
    assert ended.value.code == 0
    assert "%%" not in capsys.readouterr().out


def test_kernels(tmp_path):
    arguments = ["--models", "500x2000", "--blocks", "20"]
    found = records("benchmarks.seconds.fused_operations", tmp_path / "a.json", *arguments)
    contenders = {(r["operation"], r["contender"]) for r in found}
    for operation in ("momentum_norms", "accumulate_", "local_step_"):
        assert {c for o, c in contenders if o == operation} == {"copy", "foreach", "torch"}
    assert {c for o, c in contenders if o == "symmetric_product"} == {"copy", "bmm", "torch"}
    for r in found:
        # The first reads M and G, the second writes M as well.
        if lists := {"momentum_norms": 2, "accumulate_": 3}.get(r["operation"]):
            moved = 1e9 * r["gigabytes_per_second"] * r["seconds"]
            assert moved == pytest.approx(lists * 4 * 20 * 2000)


def test_a_line_compares_the_fastest_of_both_kinds(capsys, monkeypatch):
    milliseconds = {"copy": 0.5, "torch": 9.0, "foreach": 4.0, "cpu": 1.0}
    timed = [
        {
            "operation": "accumulate_",
            "contender": contender,
            "seconds": 1e-3 * duration,
            "share_of_copy": 0.5 / duration,
        }
        for contender, duration in milliseconds.items()
    ]
    expected = "accumulate_ 1.000 ms cpu 4.000 ms foreach 4.00x 50%"
    assert fused_operations._line(timed).split() == expected.split()
    expected = "accumulate_ none 4.000 ms foreach"
    assert fused_operations._line(timed[:-1]).split() == expected.split()
    for load, words in ((0.1, ""), (3.0, "warning: the load average is 3.0")):
        monkeypatch.setattr(fused_operations.os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        fused_operations._warn_if_busy()
        assert capsys.readouterr().err[: len(words) or None] == words


def test_optimizer_step(tmp_path):
    arguments = ["--models", "500x2000", "--blocks", "20"]
    found = records("benchmarks.seconds.optimizer_step", tmp_path / "a.json", *arguments)
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
    from benchmarks.seconds import optimizer_step

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


def every_part(out):
    from benchmarks.gpu import parts, report

    for part in report.PARTS.keys() - {"processes"}:
        sys.argv = ["parts.py", part, "--device", "cpu", "--output", str(out / part)]
        assert parts.main() == 0, part


NO_GPU = {"skipped": "no CUDA device"}


def test_every_part_of_the_report_of_a_gpu_runs_or_says_why_not(tmp_path):
    said = forked.Program(every_part, tmp_path).finish()
    assert said.returncode == 0, said.stdout[-2000:]
    parts = {path.name: json.loads(path.read_text("utf-8")) for path in tmp_path.iterdir()}
    skipped = {part for part, found in parts.items() if found == NO_GPU}
    assert len(parts) == 10 and skipped == {"kernels", "waits", "sanitizer", "graphs"}
    steps = parts["steps"]
    assert len(steps) == 6 and steps.pop("Dion, polar, captured, toy") == NO_GPU
    for found in steps.values():
        assert 0 < found["host_ms"] <= found["wall_ms"] <= found["wall_median_ms"]
        assert not found["refused"] and not found["captured"]
    good = [found["good"] for found in parts["correctness"].values() if "good" in found]
    assert len(good) > 10 and all(good)
    ratios = parts["peers"]["ours / theirs, toy"]
    assert all(ratio["wall_ms"] > 0 for ratio in ratios.values()) and ratios


@pytest.fixture
def in_place_of_parts(tmp_path, monkeypatch):
    """Lets the report of a GPU start a program of these lines, without torch."""
    from benchmarks.gpu import report

    def put(*lines):
        package = tmp_path / "benchmarks" / "gpu"
        package.mkdir(parents=True)
        for folder in (package.parent, package):
            (folder / "__init__.py").touch()
        imports = "import json, pathlib, sys, time"
        (package / "parts.py").write_text("\n".join([imports, *lines]))
        monkeypatch.setattr(report, "ROOT", tmp_path)

    return put


def test_the_report_of_a_gpu_repeats_what_measures_time(tmp_path, monkeypatch, in_place_of_parts):
    from benchmarks.gpu import report

    found = report.run("ceilings", "cpu", tmp_path, None)
    assert found["status"] == "ok" and found["results"]["copy_TB_s"] > 0
    in_place_of_parts(
        "runs = len([*pathlib.Path().glob('run*')])",
        "pathlib.Path(f'run{runs}').touch()",
        f"found = {NO_GPU} if sys.argv[1] == 'waits' else {{'copy_TB_s': 1.25**runs}}",
        "pathlib.Path(sys.argv[5]).write_text(json.dumps(found))",
    )
    path = tmp_path / "report.json"
    options = "--device cpu --runs 2 --only waits ceilings".split()
    monkeypatch.setattr(sys, "argv", [report.__file__, "--output", str(path), *options])
    assert report.main() == 0
    told = json.loads(path.read_text("utf-8"))
    assert told["command"].startswith("python -m benchmarks.gpu.report --output")
    assert told["environment"]["torch"] and told["backends"]["torch"] == "available"
    assert "only within one process" in told["compare"]
    parts = told["parts"]
    assert list(parts) == ["ceilings", "waits"]
    statuses = [[run["status"] for run in part["runs"]] for part in parts.values()]
    assert statuses == [["ok", "ok"], ["skipped: no CUDA device"]]
    assert [run["results"]["copy_TB_s"] for run in parts["ceilings"]["runs"]] == [1.0, 1.25]
    assert parts["ceilings"]["spread"] == {"copy_TB_s": 0.25}


def test_two_runs_of_the_measurements_of_a_gpu_take_fifteen_minutes():
    from benchmarks.gpu import report

    wanted = list(report.order([*report.PARTS], 2))
    timed = wanted[: -len(report.THEN)]
    assert timed[:3] == ["ceilings", "steps", "correctness"]
    assert sum(report.PARTS[part].seconds for part in timed) <= 15 * 60


def test_a_part_of_the_report_of_a_gpu_that_is_stopped_leaves_what_it_had_found(
    tmp_path, monkeypatch, in_place_of_parts
):
    from benchmarks.gpu import report

    late = report.PARTS["ceilings"]._replace(seconds=1)
    monkeypatch.setitem(report.PARTS, "ceilings", late)
    in_place_of_parts(
        "pathlib.Path(sys.argv[5]).write_text('{\"copy_TB_s\": 1.0}')",
        "print('a word')",
        "sys.stdout.flush()",
        "time.sleep(100)",
    )
    found = report.run("ceilings", "cpu", tmp_path, None)
    assert found["status"] == "timed out after 1 s" and found["results"] == {"copy_TB_s": 1.0}
    assert found["output"] == "a word\n" and not report.good(found)
