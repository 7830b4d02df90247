"""Measure how long ``import curvadion`` takes after ``import torch``, in new processes.

Bytecode is compiled into a separate folder before the timing starts, as at installation.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.common.records import RESULTS, ROOT, write

TIMED = """
import gc, json, time
collecting = 0.0
def collect(phase, info):
    global collecting
    now = time.process_time()
    collecting += now if phase == "stop" else -now
def now():
    return [time.perf_counter(), time.process_time(), collecting]
gc.callbacks.append(collect)
begin = now()
import torch
middle = now()
import curvadion
end = now()
print(json.dumps([[b - a for a, b in zip(begin, middle)], [b - a for a, b in zip(middle, end)]]))
"""


def measured(code: str, *options: str, cache: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new process."""
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": cache, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    command = [sys.executable, *options, "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment)


def slowest(text: str, count: int) -> list[dict[str, object]]:
    """Return the modules with the largest own times, from ``-X importtime`` output after a mark."""
    rows = []
    for line in text.partition("=====")[2].splitlines():
        if line.startswith("import time:"):
            own, _, name = line.removeprefix("import time:").split("|")
            rows.append((int(own), name.strip()))
    return [{"module": name, "own_us": own} for own, name in sorted(rows, reverse=True)[:count]]


def main() -> None:
    """Measure and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=11, help="new processes to time")
    default = RESULTS / "packaging/import.json"
    parser.add_argument("--output", type=Path, default=default)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        measured(TIMED, cache=cache)
        pairs = [json.loads(measured(TIMED, cache=cache).stdout) for _ in range(options.processes)]
        code = "import sys, torch; print('=====', file=sys.stderr); import curvadion"
        said = measured(code, "-X", "importtime", cache=cache).stderr
    of_torch, own = (
        [statistics.median(row) for row in zip(*part, strict=True)]
        for part in zip(*pairs, strict=True)
    )
    record = {
        "processes": options.processes,
        "torch, seconds": of_torch[0],
        "torch, CPU seconds": of_torch[1],
        "curvadion beyond torch, seconds": own[0],
        "curvadion beyond torch, fastest": min(pair[1][0] for pair in pairs),
        "curvadion beyond torch, CPU seconds": own[1],
        "of these, one collection of garbage among torch's objects": own[2],
        "slowest modules": slowest(said, 8),
    }
    write(options.output, torch.device("cpu"), [record])
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
