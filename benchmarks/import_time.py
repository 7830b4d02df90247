"""What ``import curvadion`` takes beside ``import torch``, in new processes.

Byte code is written into a folder of its own before anything is timed, as an installation does.
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

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import torch

from measure import write

TIMED = """
import json, time
begin = time.perf_counter()
import torch
middle = time.perf_counter()
import curvadion
print(json.dumps([middle - begin, time.perf_counter() - middle]))
"""


def measured(code: str, *options: str, cache: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new process."""
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": cache, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    command = [sys.executable, *options, "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment)


def slowest(text: str, count: int) -> list[dict[str, object]]:
    """The modules with the largest own times in the output of ``-X importtime`` after a mark."""
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
    default = ROOT / "benchmarks/results/packaging/import.json"
    parser.add_argument("--output", type=Path, default=default)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        measured(TIMED, cache=cache)
        pairs = [json.loads(measured(TIMED, cache=cache).stdout) for _ in range(options.processes)]
        code = "import sys, torch; print('=====', file=sys.stderr); import curvadion"
        said = measured(code, "-X", "importtime", cache=cache).stderr
    torch_seconds, own_seconds = zip(*pairs, strict=True)
    record = {
        "processes": options.processes,
        "torch_seconds": statistics.median(torch_seconds),
        "curvadion_seconds_beyond_torch": statistics.median(own_seconds),
        "fastest": min(own_seconds),
        "slowest": max(own_seconds),
        "slowest_modules": slowest(said, 8),
    }
    write(options.output, torch.device("cpu"), [record])
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
