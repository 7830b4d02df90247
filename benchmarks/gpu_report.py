"""First checks on a GPU, in nine minutes: seven checks, each in its own process.

    python benchmarks/gpu_report.py --output benchmarks/results/gpu/report.json
    python benchmarks/gpu_report.py --device cpu --output report.json    # tests this script

Runs from a checkout with torch, numpy and Triton; nothing is installed. The report is written after
every check, so a crash loses nothing. The exit status is 1 if a check failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "benchmarks")]

from curvadion import ops
from measure import environment

# The most informative first, with a time limit in seconds for each: 520 in all.
POINTS = {
    "waits": ("reads and copies for which the host waits, in closed steps and openings", 60),
    "processes": ("processes that share the device, against a CPU's trajectory", 90),
    "background": ("an exchange beside the training, with NCCL and one rank", 40),
    "steps": ("a step's time on the host and on the device, and its launches", 130),
    "products": ("symmetric products beside torch.bmm", 60),
    "sanitizer": ("compute-sanitizer on every operation", 100),
    "graphs": ("two captured graphs, replayed in reverse, and both TF32 interfaces", 40),
}
SHOWN = 3000  # characters of a failed check's output


def run(point: str, device: str, folder: Path) -> dict[str, Any]:
    """Return a check's findings, or how it failed."""
    title, seconds = POINTS[point]
    output = folder / f"{point}.json"
    script = str(ROOT / "benchmarks" / "gpu_points.py")
    command = [sys.executable, script, point, "--device", device, "--output", str(output)]
    paths = [*map(str, (ROOT, ROOT / "kernels")), os.environ.get("PYTHONPATH", "")]
    begin = time.monotonic()
    found: dict[str, Any] = {"title": title}
    try:
        said = subprocess.run(
            command, cwd=ROOT, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=seconds, check=False,
        )  # fmt: skip
        text, status = said.stdout, "ok" if said.returncode == 0 else f"exit code {said.returncode}"
    except subprocess.TimeoutExpired as late:
        text, status = late.stdout or b"", f"timed out after {seconds} s"
    results = json.loads(output.read_text("utf-8")) if output.exists() else {}
    if reason := results.pop("skipped", None):
        status = f"skipped: {reason}"
    found |= {"status": status, "seconds": round(time.monotonic() - begin, 1), "results": results}
    if not status.startswith(("ok", "skipped")):
        found["output"] = text.decode("utf-8", "replace")[-SHOWN:]
    return found


def main() -> int:
    """Run the checks, write the report after each, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", nargs="+", choices=[*POINTS], default=[*POINTS])
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device; --device cpu tries the report itself")
    report: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "environment": environment(torch.device(options.device)),
        "backends": {name: ops.lacking(name) or "available" for name in ops.BACKENDS},
        "points": {},
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for point in options.only:
            report["points"][point] = found = run(point, options.device, Path(folder))
            options.output.write_text(json.dumps(report, indent=1) + "\n")
            print(f"{found['seconds']:6.1f} s  {found['title']}: {found['status']}", flush=True)
    good = ("ok", "skipped")
    return int(any(not each["status"].startswith(good) for each in report["points"].values()))


if __name__ == "__main__":
    sys.exit(main())
