"""A GPU in fifteen minutes: measurements and checks, the most telling ones first.

    python -m benchmarks.gpu.report --output benchmarks/results/gpu/report.json --runs 2
    python -m benchmarks.gpu.report --device cpu --output report.json    # tries the report itself

Runs from the root of a checkout with torch, numpy and Triton. If Curvadion is not installed there,
set PYTHONPATH=kernels. Each part is a process of its own with a time limit, and the report is
written after every part, so a crash loses nothing. Of a part that fails or is stopped, the report
has what it had found until then. The exit status is 1 if a part failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.common.records import ROOT, environment, program
from curvadion import ops

Found = dict[str, Any]


class Part(NamedTuple):
    """A process of the report."""

    title: str
    seconds: int  # after which it is stopped
    repeated: bool = False  # whether --runs repeats it


# Two runs of the repeated parts and one of correctness take at most 880 seconds.
FIRST = {
    "ceilings": Part("what the device and the host can do at best", 20, repeated=True),
    "steps": Part("time, kernels and memory of whole steps", 150, repeated=True),
    "correctness": Part("captured steps beside eager ones, and numbers beside float64", 60),
    "kernels": Part("speed of operations, and which kernel is chosen", 60, repeated=True),
    "peers": Part("steps beside those of other libraries", 180, repeated=True),
}
THEN = {
    "states": Part("steps with states of 32, 16 and 8 bits", 90),
    "waits": Part("reads and copies for which the host waits, in closed steps and openings", 60),
    "processes": Part("processes that share the device, against a CPU's trajectory", 90),
    "background": Part("an exchange beside the training, with NCCL and one rank", 40),
    "sanitizer": Part("compute-sanitizer on every operation", 100),
    "graphs": Part("two captured graphs of operations, replayed in reverse", 40),
}
PARTS = {**FIRST, **THEN}
COMPARE = (
    "Compare wall, host and back-to-back times only within one process: they depend on the host, "
    "and on what else runs there. device_ms, kernels and copies do not depend on the host; compare "
    "them between records of one GPU."
)
SHOWN = 3000  # characters of a failed part's output


def order(chosen: Sequence[str], runs: int) -> Iterator[str]:
    """Yield the chosen parts in their order; repeated ones come once a run, before the checks."""
    for run in range(runs):
        for name, part in FIRST.items():
            if name in chosen and (part.repeated or run == 0):
                yield name
    yield from (name for name in THEN if name in chosen)


def run(name: str, device: str, folder: Path, peers: Path | None) -> Found:
    """Return a part's findings, or how it failed.

    Args:
        name: of the part.
        device: "cuda" or "cpu".
        folder: for files that nobody else needs.
        peers: where other libraries are, or None.
    """
    seconds = PARTS[name].seconds
    output = folder / f"{name}.json"
    output.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.gpu.parts", name, "--device", device]
    command += ["--output", str(output), "--seconds", str(seconds)]
    folders = [ROOT, ROOT / "kernels", *([] if peers is None else [peers.resolve()])]
    paths = [*map(str, folders), os.environ.get("PYTHONPATH", "")]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    begin = time.monotonic()
    said = folder / f"{name}.txt"
    # To a file: processes that outlive the part would keep a pipe open.
    with said.open("wb") as text:
        process = subprocess.Popen(
            command, cwd=ROOT, env=variables, stdout=text, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(timeout=seconds)
            status = "ok" if code == 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            status = f"timed out after {seconds} s"
        finally:
            stop(process)
    results = json.loads(output.read_text("utf-8")) if output.exists() else {}
    reason = results.pop("skipped", None)
    if reason is not None and status == "ok":
        status = f"skipped: {reason}"
    took = round(time.monotonic() - begin, 1)
    found: Found = {"status": status, "seconds": took, "results": results}
    if not good(found):
        found["output"] = said.read_bytes().decode("utf-8", "replace")[-SHOWN:]
    return found


def stop(process: subprocess.Popen[bytes]) -> None:
    """Stop a part and whatever it has started, such as compilers."""
    with suppress(ProcessLookupError):  # all of them have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def good(found: Found) -> bool:
    """Whether a part did not fail."""
    return bool(found["status"].startswith(("ok", "skipped")))


def spread(runs: Sequence[Found]) -> dict[str, float]:
    """Return (largest - smallest) / smallest of each positive number that all runs have."""
    each = [dict(numbers(found["results"])) for found in runs]
    spreads = {}
    for name in each[0]:
        values = [numbered.get(name, 0.0) for numbered in each]
        if min(values) > 0:
            spreads[name] = round((max(values) - min(values)) / min(values), 4)
    return spreads


def numbers(results: object, path: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers of nested findings with their paths, but not those of single kernels."""
    if isinstance(results, dict):
        for key, value in results.items():
            if key != "longest":
                yield from numbers(value, f"{path}: {key}" if path else key)
    elif isinstance(results, (int, float)) and not isinstance(results, bool):
        yield path, float(results)


def main() -> int:
    """Run the parts, write the report after each, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", nargs="+", choices=[*PARTS], default=[*PARTS])
    parser.add_argument("--runs", type=int, default=1, help="of the parts that measure time")
    parser.add_argument("--peers", type=Path, help="folder with Microsoft's package dion")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device; --device cpu tries the report itself")
    if options.peers is not None and not (options.peers / "dion").is_dir():
        parser.error(f"--peers {options.peers} holds no package dion")
    if options.runs < 1:
        parser.error("--runs must be at least 1")
    report: Found = {
        "command": " ".join(["python", *program()]),
        "environment": environment(torch.device(options.device)),
        "compare": COMPARE,
        "parts": {},
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in order(options.only, options.runs):
            if name in THEN and "backends" not in report:
                # This may compile C++, for which the measurements need not wait.
                report["backends"] = {b: ops.lacking(b) or "available" for b in ops.BACKENDS}
            entry = report["parts"].setdefault(name, {"title": PARTS[name].title, "runs": []})
            found = run(name, options.device, Path(folder), options.peers)
            entry["runs"].append(found)
            if len(entry["runs"]) > 1:
                entry["spread"] = spread(entry["runs"])
            options.output.write_text(json.dumps(report, indent=1) + "\n")
            print(f"{found['seconds']:6.1f} s  {entry['title']}: {found['status']}", flush=True)
    every = [found for entry in report["parts"].values() for found in entry["runs"]]
    return int(not all(map(good, every)))


if __name__ == "__main__":
    sys.exit(main())
