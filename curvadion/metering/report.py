"""Reports on steps, and running totals over them."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class StepReport:
    """What one optimizer step did.

    Attributes:
        reason: the gate's reason to open ("threshold", "period", "budget", "always"),
            "warm-up", "longest local run", "closed", or "non-finite gradient".
        rmmc: the gate's largest signal over all matrices and replicas. None if the gate reads
            no momentum, or if the step was skipped.
        skipped: whether this replica skipped the step for a non-finite gradient: its own, or
            any replica's if replicas communicate before the step. On a GPU it may be late by
            a step.
        wire_bytes: payload of this process's collectives since the last report. None without
            an active WireMeter.
        wire_bytes_by_ranks: the same by the ranks that shared them, as in
            {"0-7": 1024, "0, 8": 16}.
        waited_seconds: how long the step waited for a late exchange of a sync with a delay.
        captured: whether the step was the replay of a CUDA graph.
    """

    step: int  # counted from 1; skipped steps count
    gate_open: bool  # whether replicas synchronised
    reason: str
    rmmc: float | None
    rmmc_parameter: str | None  # the name of the parameter with this signal
    local_steps: int  # since replicas last synchronised, including this one
    skipped: bool
    wire_bytes: int | None
    waited_seconds: float = 0.0
    wire_bytes_by_ranks: dict[str, int] | None = None
    captured: bool = False

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON values: an infinite RMMC becomes the string "inf"."""
        return {key: _strict(value) for key, value in asdict(self).items()}

    def scalars(self) -> dict[str, float]:
        """The finite numbers, for TensorBoard, Weights & Biases and other logs."""
        names = "gate_open rmmc local_steps skipped wire_bytes waited_seconds".split()
        return _finite(**{name: getattr(self, name) for name in names})


@dataclass
class Summary:
    """Running totals over reports."""

    steps: int = 0  # reports added; skipped steps count
    open_steps: int = 0  # at which replicas synchronised
    skipped_steps: int = 0  # for a non-finite gradient
    wire_bytes: int = 0  # payload, as far as a WireMeter was active
    waited_seconds: float = 0.0  # for late exchanges; 0 without a delay

    def add(self, report: StepReport) -> None:
        self.steps += 1
        self.open_steps += report.gate_open
        self.skipped_steps += report.skipped
        self.wire_bytes += report.wire_bytes or 0
        self.waited_seconds += report.waited_seconds

    def scalars(self, last: StepReport) -> dict[str, float]:
        """Finite scalars for logs: means over the steps, and those of the last report."""
        steps = max(1, self.steps)
        return _finite(
            wire_bytes=self.wire_bytes / steps,
            open_gate_share=self.open_steps / steps,
            skipped_steps=self.skipped_steps,
            waited_seconds=self.waited_seconds,
            rmmc=last.rmmc,
            local_steps=last.local_steps,
        )


def write_json_line(path: str | Path, report: StepReport, **extra: Any) -> None:
    """Append a report as one line of JSON, with further values; NaN becomes "nan"."""
    values = {key: _strict(value) for key, value in extra.items()}
    line = json.dumps({**report.as_dict(), **values}, allow_nan=False)
    with open(path, "a", encoding="utf-8") as file:
        file.write(line + "\n")


def _strict(value: Any) -> Any:
    """JSON has no infinite numbers and no NaN."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _finite(**values: float | None) -> dict[str, float]:
    known = {name: float(value) for name, value in values.items() if value is not None}
    return {name: value for name, value in known.items() if math.isfinite(value)}
