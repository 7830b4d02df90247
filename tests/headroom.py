"""Measures what part of its tolerance each numeric test uses, over kernels, threads and seeds.

    python tests/headroom.py                  # run i takes setting i and seed i
    python tests/headroom.py --every          # every setting with every seed, which takes hours
    python tests/headroom.py tests/update     # these tests only

A bound is met with headroom if no error exceeds a tenth of it. The exit status is 1 if one does, or
if a test fails.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
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
SEEDS = 10
STRIDE = 1_000_003  # between the offsets of seeds: farther than the seeds of one test are apart
LIMIT = 0.1  # of its bound, what an error may be
ROWS = 40  # of the table, the least
NO_TESTS = 5  # pytest's exit status where none was selected
ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Run:
    """The tests once, with one setting and one seed."""

    setting: dict[str, str]
    seed: int

    def __str__(self) -> str:
        kernels = " ".join(f"{key}={value}" for key, value in self.setting.items())
        return f"{kernels or 'as it is'}, seed {self.seed}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tests", nargs="*", default=["tests"], help="what pytest is given")
    parser.add_argument("--every", action="store_true", help="every setting with every seed")
    given = parser.parse_args()
    settings = [setting for setting in SETTINGS if can_force(setting)]
    seeds = range(SEEDS)
    if given.every:
        runs = [Run(setting, seed) for setting in settings for seed in seeds]
    else:
        count = max(len(settings), SEEDS)
        runs = [Run(settings[i % len(settings)], seeds[i % SEEDS]) for i in range(count)]
    worst: dict[tuple[str, str], tuple[float, Run]] = {}
    failed: dict[str, list[Run]] = {}
    compared: Counter[str] = Counter()
    for number, run in enumerate(runs):
        shares, failures = measure(run, given.tests)
        print(
            f"{number + 1}/{len(runs)} {run}: {len(shares)} comparisons, "
            f"{max((share for *_, share in shares), default=0.0):.3f} at most, "
            f"{len(failures)} failures",
            flush=True,
        )
        for test, where, share in shares:
            compared[test] += 1
            if share > worst.get((test, where), (-1.0, run))[0]:
                worst[test, where] = share, run
        for test in failures:
            failed.setdefault(test, []).append(run)
    return report(worst, failed, compared)


def can_force(setting: dict[str, str]) -> bool:
    """Whether this machine has the instructions, which ATen takes without asking."""
    name = setting.get("ATEN_CPU_CAPABILITY", "default")
    if name == "default":
        return True
    if platform.machine() not in ("x86_64", "AMD64") or not Path("/proc/cpuinfo").exists():
        return False
    needed = {"avx2": {"avx2", "fma"}, "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq"}}
    return needed[name] <= set(Path("/proc/cpuinfo").read_text().split())


def measure(run: Run, tests: list[str]) -> tuple[list[tuple[str, str, float]], list[str]]:
    """The shares that a run's comparisons used, (test, where, share), and the tests that failed."""
    with tempfile.TemporaryDirectory(prefix="curvadion-headroom-") as folder:
        notes = Path(folder, "notes")
        environment = {
            **os.environ,
            **run.setting,
            "CURVADION_HEADROOM": str(notes),
            "CURVADION_SEED_OFFSET": str(run.seed * STRIDE),
        }
        chosen = "numeric and not chosen_inputs" if run.seed else "numeric"
        options = "-q -rfE --tb=short --durations=0 --durations-min=60 -n 2 --dist loadfile"
        command = [sys.executable, "-m", "pytest", "-m", chosen, *options.split(), *tests]
        said = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False
        )
        lines = notes.read_text("utf-8").splitlines() if notes.exists() else []
    failures = [
        line.split(" ", 1)[1].split(" - ", 1)[0]
        for line in said.stdout.splitlines()
        if line.startswith(("FAILED ", "ERROR "))
    ]
    if said.returncode not in (0, NO_TESTS):
        print(said.stdout)
        failures = failures or [f"pytest ended with {said.returncode}"]
    return [used(json.loads(line)) for line in lines], failures


def used(note: dict[str, object]) -> tuple[str, str, float]:
    """One comparison, whose share is infinite where it is not a number."""
    share = float(str(note["share"]))
    return str(note["test"]), str(note["where"]), math.inf if math.isnan(share) else share


def report(
    worst: dict[tuple[str, str], tuple[float, Run]],
    failed: dict[str, list[Run]],
    compared: Counter[str],
) -> int:
    """Print the largest shares and what went wrong; the exit status."""
    if not compared and not failed:
        print("No test compared anything. Is one of these marked numeric?")
        return 1
    rows = sorted(((share, *key, run) for key, (share, run) in worst.items()), key=lambda r: -r[0])
    above = [row for row in rows if row[0] > LIMIT]
    print("\nlargest error over its tolerance, by test and comparison")
    for share, test, where, run in rows[: max(ROWS, len(above))]:
        print(f"{share:9.4f}  {test}  ({where}; {run})")
    for test, runs in sorted(failed.items()):
        print(f"   FAILED  {test}  ({'; '.join(map(str, runs))})")
    print(
        f"\n{sum(compared.values())} comparisons in {len(compared)} tests: "
        f"{len({test for _, test, _, _ in above})} tests used more than {LIMIT} of a tolerance, "
        f"{len(failed)} failed"
    )
    return int(bool(above or failed))


if __name__ == "__main__":
    sys.exit(main())
