"""What the logs of track3.py say of several seeds, by Track 3's rule of significance.

The rule is that of modded-nanogpt's ``records/track_3_optimization/README.md``: the mean of n runs
that were not chosen by their losses is below the target with p < 0.001, if the standard deviation
of a run is 0.0013 and ``(target - mean) sqrt(n) >= 0.004``. Every run ends at the step that was set
before; the earliest evaluated step at which the mean of all runs passes is the result.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo import aligned
from run_log import read

LEAST_MARGIN = 0.004  # 3.09 standard deviations of 0.0013
# Options that do not change what is computed.
NOT_SETTINGS = ("out", "data", "resume", "summary", "checkpoint_every", "compile")


@dataclass(frozen=True)
class Log:
    """A finished run.

    Args:
        path: of its log.
        settings: options that runs to be averaged have in common, and the number of ranks.
        seed: of the run.
        losses: held-out loss by evaluated step.
        share: bytes sent, as a share of those of DDP.
        seconds: of training.
    """

    path: Path
    settings: dict[str, Any]
    seed: int
    losses: dict[int, float]
    share: float
    seconds: float


def margin(losses: Sequence[float], target: float) -> float:
    """Return (target - mean) sqrt(n) of the losses of n runs."""
    return (target - statistics.fmean(losses)) * math.sqrt(len(losses))


def first_significant(logs: Sequence[Log]) -> int | None:
    """Return the earliest step, evaluated by all runs, whose mean is significantly below."""
    target = logs[0].settings["target"]
    shared = set.intersection(*(set(log.losses) for log in logs))
    for step in sorted(shared):
        if margin([log.losses[step] for log in logs], target) >= LEAST_MARGIN:
            return step
    return None


def read_log(path: Path) -> Log:
    """Read a log.

    Raises:
        ValueError: if it is none of track3.py, or of a run that has not ended. To leave out such
            runs would choose among them.
    """
    runs = read(path, "run")
    evaluations = read(path, "evaluation")
    if not runs:
        raise ValueError(f"summary={str(path)!r} is no log of track3.py")
    options = runs[-1]["settings"]
    steps = options["steps"]
    reached = evaluations[-1]["step"] if evaluations else 0
    if reached < steps:
        raise ValueError(
            f"summary={str(path)!r} has come to step {reached} of {steps}: continue it with "
            f"--resume"
        )
    ignored = {"seed", *NOT_SETTINGS}
    settings = {name: value for name, value in options.items() if name not in ignored}
    return Log(
        path=path,
        settings={**settings, "ranks": runs[-1]["ranks"]},
        seed=options["seed"],
        losses={record["step"]: record["val_loss"] for record in evaluations},
        share=evaluations[-1]["share"],
        seconds=evaluations[-1]["seconds"],
    )


def summarised(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Return a row for each setting: its runs, their mean loss, and whether it is significant.

    Raises:
        ValueError: for a log that :func:`read_log` refuses, and for two logs of one seed.
    """
    by_settings: dict[str, dict[int, Log]] = {}
    for path in paths:
        log = read_log(path)
        of_settings = by_settings.setdefault(json.dumps(log.settings, sort_keys=True), {})
        if log.seed in of_settings:
            raise ValueError(f"summary={str(path)!r} is a second log of seed={log.seed}")
        of_settings[log.seed] = log
    rows = []
    for of_settings in by_settings.values():
        logs = list(of_settings.values())
        settings = logs[0].settings
        ends = [log.losses[settings["steps"]] for log in logs]
        row = {key: settings[key] for key in ("method", "budget", "lr", "ranks", "steps")}
        row["runs"] = len(logs)
        row["mean"] = statistics.fmean(ends)
        row["margin"] = margin(ends, settings["target"])
        row["first_significant_step"] = first_significant(logs)
        row["share"] = statistics.fmean(log.share for log in logs)
        row["first_log"] = str(logs[0].path)
        row["seconds"] = statistics.fmean(log.seconds for log in logs)
        rows.append(row)
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as text; the margin of a mean that is not significant has no step."""
    heads = "method", "rate", "ranks", "bytes", "steps", "runs", "loss", "margin", "reached at"
    lines = [[*heads, "first log"]]
    for row in rows:
        method = row["method"]
        if method == "curvadion":
            method += f" {row['budget']:.2%}"
        step = row["first_significant_step"]
        lines.append(
            [
                method,
                f"{row['lr']}",
                f"{row['ranks']}",
                f"{row['share']:.2%}",
                f"{row['steps']}",
                f"{row['runs']}",
                f"{row['mean']:.4f}",
                f"{row['margin']:.4f}",
                "not significant" if step is None else f"{step}",
                row["first_log"],
            ]
        )
    return aligned(lines)
