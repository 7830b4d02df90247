"""Everything that needs an NVIDIA GPU, in one call: the GPU tests and all benchmarks of kernels.

    python benchmarks/gpu_report.py --output benchmarks/results/gpu/report.json

Runs from a checkout with torch, Triton, numpy and nvcc; nothing is installed. Ends within
``--limit`` seconds, by default in less than nine minutes: what is left then is recorded as not run.
Without pytest the report says that the tests were not run, and goes on.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "benchmarks")]

from curvadion import ops
from measure import environment

TESTS = ROOT / "tests" / "ops" / "test_gpu.py"
# Tests run in as many processes: most of their time goes into compiling kernels on the host.
TEST_GROUPS = {
    "momentum": "test_norms or test_momentum",
    "local step": "test_local_step",
    "low rank": "test_low_rank_update",
    "symmetric products": "test_symmetric",
    "others": (
        "not (test_norms or test_momentum or test_local_step or test_low_rank_update or "
        "test_symmetric)"
    ),
}
SECONDS_FOR_TESTS = 270.0
# What matters most comes first: the limit may cut the list short.
BENCHMARKS = {
    "kernels, 1.3B, float32": "kernels.py --models llama-1.3b --seconds 4",
    "kernels, 1.3B, bfloat16": "kernels.py --models llama-1.3b --dtype bfloat16 --seconds 4",
    "step, 1.3B, bfloat16": (
        "optimizer_step.py --models llama-1.3b --dtype bfloat16 --seconds 20 --without-peers"
    ),
    "symmetric products, 8B, bfloat16": (
        "kernels.py --models llama-8b --blocks 4 --dtype bfloat16 --operations gram "
        "symmetric_product --seconds 3"
    ),
    "symmetric products, 1.3B, float16": (
        "kernels.py --models llama-1.3b --blocks 4 --dtype float16 --operations gram "
        "symmetric_product --seconds 3"
    ),
    "symmetric products, 1.3B, TensorFloat-32": (
        "kernels.py --models llama-1.3b --blocks 4 --precision high --operations gram "
        "symmetric_product --seconds 3"
    ),
    "kernels, lists": "kernels.py --models 500x2000 100x500000 --seconds 2",
    "low-rank update, 1.3B, TensorFloat-32": (
        "kernels.py --models llama-1.3b --operations low_rank_update_ --precision high --seconds 4"
    ),
    "low-rank update, 1.3B, TensorFloat-32, rank 1/16": (
        "kernels.py --models llama-1.3b --operations low_rank_update_ --precision high "
        "--rank-fraction 0.0625 --seconds 4"
    ),
    "step, 160M, float32": "optimizer_step.py --models gpt2-160m --seconds 10 --without-peers",
    "kernels, 8B in part, bfloat16": (
        "kernels.py --models llama-8b --blocks 8 --dtype bfloat16 --seconds 4"
    ),
    "step, 1.3B in part, float32": (
        "optimizer_step.py --models llama-1.3b --blocks 8 --seconds 15 --without-peers"
    ),
    "step, lists": "optimizer_step.py --models 5000x64 --seconds 5 --without-peers",
    "kernels, 160M, torch.compile": "kernels.py --models gpt2-160m --compile --seconds 3",
    # Other libraries come last: they may compile and tune for minutes.
    "step, 1.3B in part, beside other libraries": (
        "optimizer_step.py --models llama-1.3b --blocks 8 --matrices-only --seconds 10"
    ),
}


class Deadline:
    """Seconds left of a limit that began with this object."""

    def __init__(self, limit: float) -> None:
        self._begin, self._limit = time.monotonic(), limit

    @property
    def passed(self) -> float:
        return time.monotonic() - self._begin

    @property
    def left(self) -> float:
        return max(self._limit - self.passed, 0.0)


def start(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    """A process of this checkout, with its output in ``log``."""
    folders = [ROOT, ROOT / "kernels", ROOT / "tests" / "support"]
    path = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, *command], stdout=file, stderr=subprocess.STDOUT, cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path.rstrip(os.pathsep)},
        )  # fmt: skip


def finish(process: subprocess.Popen[bytes], seconds: float) -> str:
    """Wait that long at most; "ok", or how the process ended."""
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # pytest then still writes what it has found
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return "stopped: its time was up"
    return "ok" if code == 0 else f"exit code {code}"


def run_tests(folder: Path, deadline: Deadline) -> dict[str, Any]:
    """Counts and failures of tests/ops/test_gpu.py, by group."""
    if importlib.util.find_spec("pytest") is None:
        return {"status": "not run: pytest is not installed"}
    running = {}
    for i, (group, chosen) in enumerate(TEST_GROUPS.items()):
        xml, log = folder / f"tests{i}.xml", folder / f"tests{i}.log"
        # Plugins that the project's settings name need not be there.
        options = ["-q", "-c", os.devnull, f"--rootdir={ROOT}", "--noconftest", "--tb=short"]
        options += ["-p", "no:cacheprovider", f"--junitxml={xml}", "-k", chosen]
        running[group] = start(["-m", "pytest", *options, str(TESTS)], log), xml, log
    ends = Deadline(min(SECONDS_FOR_TESTS, deadline.left))
    found: dict[str, Any] = {}
    for group, (process, xml, log) in running.items():
        found[group] = {"status": finish(process, ends.left), "seconds": round(ends.passed, 1)}
        found[group] |= results_of(xml) if xml.exists() else {"output": tail(log, 6000)}
    return found


def results_of(xml: Path) -> dict[str, Any]:
    """Counts of a JUnit file, and its failures with the end of what they said."""
    suite = ElementTree.parse(xml).getroot().find("testsuite")
    assert suite is not None
    counts = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
    bad = {
        f"{case.get('name')}": (problem.text or "")[-1500:]
        for case in suite.iter("testcase")
        for problem in case
        if problem.tag in ("failure", "error")
    }
    reasons = {p.get("message") for case in suite.iter("testcase") for p in case.iter("skipped")}
    return {**counts, "failed": bad, "reasons_to_skip": sorted(map(str, reasons))}


def run_benchmark(arguments: str, folder: Path, deadline: Deadline) -> dict[str, Any]:
    """What one benchmark's JSON says, and how the benchmark ended."""
    if deadline.left < 10:
        return {"command": arguments, "status": "not run: the limit was reached"}
    output, log = folder / "records.json", folder / "benchmark.log"
    output.unlink(missing_ok=True)
    script, *options = arguments.split()
    command = [f"benchmarks/{script}", *options, "--device", "cuda", "--output", str(output)]
    begin = time.monotonic()
    status = finish(start(command, log), deadline.left)
    found = {"command": arguments, "status": status, "seconds": round(time.monotonic() - begin, 1)}
    if status != "ok":
        found["output"] = tail(log, 3000)
    if output.exists():
        found["records"] = json.loads(output.read_text("utf-8"))["records"]
    return found


def tail(log: Path, characters: int) -> str:
    """The end of a log."""
    return log.read_text("utf-8", errors="replace")[-characters:]


def nvcc_version() -> str | None:
    """The CUDA compiler's release, if there is one."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path=f"{home}/bin")
    if nvcc is None:
        return None
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
    release = re.search(r"release ([\d.]+)", said)
    return release[1] if release else None


def main() -> None:
    """Run everything, and write the report after every part of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    parser.add_argument("--limit", type=float, default=520, help="seconds for all of it")
    parser.add_argument("--only", nargs="+", default=[], help='"tests", or names of benchmarks')
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device")
    deadline = Deadline(options.limit)
    report: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "environment": {**environment(torch.device("cuda")), "nvcc": nvcc_version()},
        "backends": {name: ops.lacking(name) or "available" for name in ops.BACKENDS},
    }
    report["seconds"] = {"builds": round(deadline.passed, 1)}

    def keep(name: str, part: Any) -> None:
        report[name] = part
        report["seconds"][name] = round(deadline.passed, 1)
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(report, indent=1) + "\n")
        print(f"{deadline.passed:6.1f} s  {name}: {json.dumps(part)[:300]}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        if not options.only or "tests" in options.only:
            keep("tests", run_tests(Path(folder), deadline))
        for name, arguments in BENCHMARKS.items():
            if not options.only or name in options.only:
                keep(name, run_benchmark(arguments, Path(folder), deadline))


if __name__ == "__main__":
    main()
