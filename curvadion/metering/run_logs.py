"""Read the log of a run: of ``write_json_line``, of ``watch`` or of the training example."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Points = list[tuple[float, float]]
EVENT = {"kind", "replica", "member"}  # keys of an event's line
_HINT = (
    "curvadion.metering.report.write_json_line writes such logs, and so do watch() with a "
    "JsonLinesWriter and examples/gpt/train_gpt.py"
)


@dataclass
class Run:
    """The contents of a run's log; a list is empty if the log has no such values.

    Attributes:
        name: of the run.
        loss: (step, loss), of training.
        held_out: (step, loss), of held-out data.
        drift: (step, drift), relative to the norm of the mean weights.
        shares: (step, share): what has been sent so far, of what DDP would have sent so far.
        signals: (step, RMMC, whether the gate was open), where RMMC is finite.
        opened: the steps at which the gate was open, where the log has every step.
        openings: how many there were.
        skipped: how many steps were skipped.
        waited: (step, seconds), the total that steps have waited for other replicas.
        step_seconds: (step, seconds) of a step.
        threshold: of the RMMC gate.
        start: the steps before the first one of the log, as of a run that was resumed.
        steps: the last step.
    """

    name: str
    loss: Points = field(default_factory=list)
    held_out: Points = field(default_factory=list)
    drift: Points = field(default_factory=list)
    shares: Points = field(default_factory=list)
    signals: list[tuple[float, float, bool]] = field(default_factory=list)
    opened: list[int] = field(default_factory=list)
    openings: int = 0
    skipped: int = 0
    waited: Points = field(default_factory=list)
    step_seconds: Points = field(default_factory=list)
    threshold: float | None = None
    start: int = 0
    steps: int = 0

    @property
    def length(self) -> int:
        """How many steps the log has."""
        return self.steps - self.start

    def over_bytes(self, points: Points, steps: int) -> Points:
        """Turn (step, value) into (bytes sent, value), where it is known what was sent.

        Bytes count from the log's first step on, at the share of the run so far.

        Args:
            points: by step.
            steps: bytes are shares of what DDP sends in so many.
        """
        shares = dict(self.shares)
        known = [(step, y) for step, y in points if step in shares]
        return [(shares[step] * (step - self.start) / steps, y) for step, y in known]


def read_run(path: str | Path) -> Run:
    """Read a log of one JSON object per line.

    A line is a :class:`StepReport`, perhaps with further values (``loss``, ``val_loss``,
    ``drift``). Or it has the scalars of a :class:`Summary` over the steps since the last line. Or
    it has a ``kind``, "train" or "validation", as the examples write. If a resumed run repeats
    steps, the last line of a step counts, and a warning says so.

    Raises:
        ValueError: if the file is not such a log; names the file, the line and the problem.
    """
    path = Path(path)
    run = Run(_name(path))
    waited = 0.0
    records = _newest(path)
    run.start = _steps_before(records)
    for record in records:
        step = record["step"]
        run.steps = max(run.steps, step)
        for key, points in (
            ("val_loss", run.held_out),
            ("drift", run.drift),
            ("share", run.shares),
            ("step_seconds", run.step_seconds),
        ):
            if (value := _number(record, key)) is not None:
                points.append((step, value))
        run.threshold = _number(record, "threshold") or run.threshold
        if "gate_open" in record:
            _read_step(run, record)
        elif "open_gate_share" in record:
            steps = _number(record, "steps") or 0.0
            run.openings += round(steps * (_number(record, "open_gate_share") or 0.0))
            run.skipped += round(_number(record, "skipped_steps") or 0.0)
        else:
            continue
        # Late means, and openings.
        waited += _number(record, "waited_seconds") or 0.0
        waited += _number(record, "opening_seconds") or 0.0
        run.waited.append((step, waited))
    if run.threshold is None:
        run.threshold = _configured_threshold(path)
    return run


def _steps_before(records: Sequence[Mapping[str, Any]]) -> int:
    """The number of steps before those that the lines of a log are about."""
    reported = [r for r in records if "gate_open" in r or "open_gate_share" in r]
    if not reported:  # evaluations alone do not tell
        return 0
    first = reported[0]
    steps = _number(first, "steps")
    if steps is None:  # a line of one step; there may be one for every k-th step
        steps = reported[1]["step"] - first["step"] if len(reported) > 1 else 1
    return max(0, int(first["step"]) - round(steps))


def _read_step(run: Run, record: Mapping[str, Any]) -> None:
    """Add what a line says of one step; record: of that line."""
    step = record["step"]
    if (value := _number(record, "loss")) is not None:
        run.loss.append((step, value))
    if (value := _number(record, "rmmc")) is not None:
        run.signals.append((step, value, record["gate_open"]))
    if record["gate_open"]:
        run.opened.append(step)
        run.openings += 1
    run.skipped += bool(record.get("skipped"))


def _name(path: Path) -> str:
    """Return the file's name, or its folder's if the file has the name that all runs use."""
    return path.resolve().parent.name if path.stem == "log" else path.stem


def _newest(path: Path) -> list[dict[str, Any]]:
    """Return the records in order of steps, without those that a resumed run repeated."""
    kept: list[dict[str, Any]] = []
    repeated = 0
    for record in _records(path):
        while kept and kept[-1]["step"] > record["step"]:
            kept.pop()
            repeated += 1
        place = len(kept) - 1
        while place >= 0 and kept[place]["step"] == record["step"]:
            if kept[place].get("kind") == record.get("kind"):
                del kept[place]
                repeated += 1
            place -= 1
        kept.append(record)
    if repeated:
        warnings.warn(
            f"{path}: steps go back, as in a run that was resumed: {repeated} earlier lines of "
            f"repeated steps are left out, and so are their bytes.",
            stacklevel=3,
        )
    if not kept:
        raise ValueError(f"{path} holds no line yet: {_HINT}.")
    return kept


def _records(path: Path) -> Iterator[dict[str, Any]]:
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError as error:
        raise ValueError(f"{path}: there is no such file.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no text file that can be read ({error}): {_HINT}.") from error
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines) and number > 1 and not line.endswith("\n"):
                return  # cut short by a crash, or still being written
            raise ValueError(f"{path}, line {number}: no JSON ({error}): {_HINT}.") from error
        if isinstance(record, dict) and record.keys() >= EVENT:
            raise ValueError(
                f"{path} holds the events of members, not the steps of a run: {_HINT}."
            )
        if not isinstance(record, dict) or not _is_step(record):
            raise ValueError(
                f"{path}, line {number}: {line.strip()[:60]!r} has no number of a step as 'step', "
                f"so this is no log of a run: {_HINT}."
            )
        yield record


def _is_step(record: Mapping[str, Any]) -> bool:
    """Whether a line has a step; those of a gate begin with 1, those of an evaluation with 0."""
    step = record.get("step")
    if not isinstance(step, int) or isinstance(step, bool):
        return False
    return step >= (1 if "gate_open" in record else 0)


def _number(record: Mapping[str, Any], key: str) -> float | None:
    """Return a finite number of a record; None for anything else."""
    value = record.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:  # of a whole number
        return None
    return number if math.isfinite(number) else None


def _configured_threshold(path: Path) -> float | None:
    """Return the threshold in the config.json that the examples write beside a log."""
    try:
        config = json.loads(path.with_name("config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict) or config.get("optimizer") != "curvadion":
        return None
    if config.get("period") is not None or config.get("wire_budget") is not None:
        return None
    return _number(config, "threshold")
