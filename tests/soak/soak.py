"""Random trials of the optimizer on real process groups, beside a reference: ``make soak``.

    python tests/soak/soak.py --minutes 20 --seed 0     # trials 0, 1, 2, ... until the time is over
    python tests/soak/soak.py --trial 17                # one trial again, with all that it found

A trial draws a layout, odd shapes, a gate, a way to come together, and a script: gradients that
are missing or not finite, frozen parameters, other learning rates, ``synchronize()``. Its run is
compared, step by step, with float64 references (reference.py and quantized_reference.py in
tests/support). Then the script runs again with saves and loads, copies, or a rank that is killed,
and must end in the same bits. ``soak_trials.py`` draws trials, ``soak_ranks.py`` is what ranks do,
and ``soak_checks.py`` what must hold.
"""

from __future__ import annotations

import argparse
import collections
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "support"))

import distributed
import soak_checks
import soak_ranks
import soak_trials
from soak_trials import Trial

TIMEOUT = 90.0  # seconds for one run of a script


def run(trial: Trial) -> list[str]:
    """What was found wrong."""
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        try:
            straight = distributed.run(
                trial.world, soak_ranks.play, trial, "straight", folder, timeout=TIMEOUT
            )
        except distributed.RankFailure as failure:
            return [f"straight run: {failure}"]
        problems = soak_checks.check(trial, straight)
        try:
            again = disturbed(trial, folder)
        except distributed.RankFailure as failure:
            return [*problems, f"disturbed run: {failure}"]
        return [*problems, *soak_checks.same_end(trial, straight, again)]


def disturbed(trial: Trial, folder: str) -> list[soak_ranks.Record]:
    """The same script with saves and loads, or killed and taken up from its last checkpoint."""
    if trial.kill is None:
        return distributed.run(
            trial.world, soak_ranks.play, trial, "disturbed", folder, timeout=TIMEOUT
        )
    try:
        distributed.run(trial.world, soak_ranks.play, trial, "killed", folder, timeout=TIMEOUT)
    except distributed.RankFailure as failure:
        if "exit code -9" not in str(failure):
            raise
    else:
        raise distributed.RankFailure("A killed rank was not missed.")
    return distributed.run(trial.world, soak_ranks.play, trial, "resumed", folder, timeout=TIMEOUT)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=20.0, help="how long to go on (20)")
    parser.add_argument("--seed", type=int, default=0, help="of the first trial (0)")
    parser.add_argument("--trial", type=int, help="run this trial only, and say all about it")
    parser.add_argument("--only", default="", help="run trials whose description holds this text")
    arguments = parser.parse_args()
    if arguments.trial is not None:
        trial = soak_trials.draw(arguments.trial)
        print(trial.description(), flush=True)
        problems = run(trial)
        print("\n".join(problems) or "passed")
        return bool(problems)
    return soak(arguments.minutes, arguments.seed, arguments.only)


def soak(minutes: float, first: int, only: str) -> int:
    """Trials one after the other; prints each that fails, and a line every minute."""
    started = last = time.monotonic()
    passed, failed, seed = 0, {}, first
    drawn: collections.Counter[str] = collections.Counter()
    while time.monotonic() - started < 60 * minutes:
        trial = soak_trials.draw(seed)
        seed += 1
        if only not in trial.description():
            continue
        problems = run(trial)
        drawn.update(trial.kinds())
        if problems:
            failed[trial.seed] = problems[0]
            print(f"trial {trial.seed} FAILED: {trial.description()}")
            print("\n".join(f"    {_short(problem)}" for problem in problems[:3]), flush=True)
        else:
            passed += 1
        if time.monotonic() - last > 60:
            last = time.monotonic()
            print(
                f"{(last - started) / 60:.1f} min: {passed} passed, {len(failed)} failed",
                flush=True,
            )
    spent = (time.monotonic() - started) / 60
    print(f"{passed} of {passed + len(failed)} trials passed in {spent:.1f} minutes.")
    print("Drawn: " + ", ".join(f"{kind} {count}" for kind, count in sorted(drawn.items())))
    if failed:
        print(
            f"Failed: {sorted(failed)}. Run one again: "
            f"python tests/soak/soak.py --trial {min(failed)}"
        )
    return bool(failed)


def _short(problem: str) -> str:
    """A problem's first line, and the last of a traceback."""
    lines = problem.strip().splitlines()
    return lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"


if __name__ == "__main__":
    sys.exit(main())
