"""Measures what part of its tolerance each numeric test uses, over kernels, threads and seeds.

    python tests/headroom.py                  # run i takes setting i and seed i
    python tests/headroom.py --every          # every setting with every seed, which takes hours
    python tests/headroom.py tests/update     # these tests only

A bound is met with headroom if no error exceeds a tenth of it. The exit status is 1 if one does, or
if a test fails.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SETTINGS: tuple[dict[str, str], ...] = (  # the kernels that one machine can be made to take
    {},
    {"CURVADION_TEST_THREADS": "2"},
    {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},  # of Intel's processors only
    {"MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    {"MKL_ENABLE_INSTRUCTIONS": "AVX512"},
    {"MKL_CBWR": "COMPATIBLE"},
    {"ATEN_CPU_CAPABILITY": "default"},
    {"ATEN_CPU_CAPABILITY": "avx2"},
    {"ATEN_CPU_CAPABILITY": "avx512"},
    {"ONEDNN_MAX_CPU_ISA": "AVX2"},
)
# What ATen needs for a capability, without asking the machine.
NEEDED = {"avx2": {"avx2", "fma"}, "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq"}}
SEEDS = 10
STRIDE = 1_000_003  # between the offsets of seeds: farther than the seeds of one test are apart
LIMIT = 0.1  # of its bound, what an error may be
ROWS = 40  # of the table, the least
NO_TESTS = 5  # pytest's exit status where none was selected
ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tests", nargs="*", default=["tests"], help="what pytest is given")
    parser.add_argument("--every", action="store_true", help="every setting with every seed")
    given = parser.parse_args()
    settings = [setting for setting in SETTINGS if can_force(setting)]
    runs = list(itertools.product(settings, range(SEEDS)))
    if not given.every:
        runs = list(zip(itertools.cycle(settings), range(SEEDS)))
    worst: dict[tuple[str, str], tuple[float, str]] = {}
    failures: list[str] = []
    for number, (setting, seed) in enumerate(runs):
        kernels = " ".join(f"{key}={value}" for key, value in setting.items())
        name = f"{kernels or 'as it is'}, seed {seed}"
        notes, failed = measure(setting, seed, given.tests)
        failures += [f"{test}  ({name})" for test in failed]
        for note in notes:
            share = math.inf if math.isnan(note["share"]) else note["share"]
            key = note["test"], note["where"]
            worst[key] = max(worst.get(key, (-1.0, "")), (share, name))
        print(
            f"{number + 1}/{len(runs)} {name}: {len(notes)} comparisons, {len(failed)} failures",
            flush=True,
        )
    return report(worst, failures)


def can_force(setting: dict[str, str]) -> bool:
    """Whether this machine has the instructions."""
    needed = NEEDED.get(setting.get("ATEN_CPU_CAPABILITY", ""), set())
    processor = Path("/proc/cpuinfo")
    return not needed or (processor.exists() and needed <= set(processor.read_text().split()))


def measure(setting: dict[str, str], seed: int, tests: list[str]) -> tuple[list, list[str]]:
    """What the comparisons of a run noted, as tolerance.py writes it, and the tests that failed."""
    with tempfile.TemporaryDirectory(prefix="curvadion-headroom-") as folder:
        path = Path(folder, "notes")
        environment = {
            **os.environ,
            **setting,
            "CURVADION_HEADROOM": str(path),
            "CURVADION_SEED_OFFSET": str(seed * STRIDE),
        }
        chosen = "numeric and not chosen_inputs" if seed else "numeric"
        options = "-q -rfE --tb=short --durations=0 --durations-min=60 -n 2 --dist loadfile"
        command = [sys.executable, "-m", "pytest", "-m", chosen, *options.split(), *tests]
        said = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False
        )
        lines = path.read_text("utf-8").splitlines() if path.exists() else []
    failed = [
        line.split(" ", 1)[1].split(" - ", 1)[0]
        for line in said.stdout.splitlines()
        if line.startswith(("FAILED ", "ERROR "))
    ]
    if said.returncode not in (0, NO_TESTS):
        print(said.stdout)
        failed = failed or [f"pytest ended with {said.returncode}"]
    return [json.loads(line) for line in lines], failed


def report(worst: dict[tuple[str, str], tuple[float, str]], failures: list[str]) -> int:
    """Print the largest shares and what went wrong; the exit status."""
    rows = sorted(((share, *key, run) for key, (share, run) in worst.items()), key=lambda r: -r[0])
    above = [row for row in rows if row[0] > LIMIT]
    print("\nlargest error over its tolerance, by test and comparison")
    for share, test, where, run in rows[: max(ROWS, len(above))]:
        print(f"{share:9.4f}  {test}  ({where}; {run})")
    for failure in failures:
        print(f"   FAILED  {failure}")
    print(f"\n{len(above)} comparisons used more than {LIMIT} of a tolerance")
    return int(bool(above or failures or not rows))


if __name__ == "__main__":
    sys.exit(main())
