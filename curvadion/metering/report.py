"""Reports on steps, and running totals over them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from curvadion.metering.json_lines import append_line, strict


@dataclass(frozen=True)
class StepReport:
    """What one optimizer step did.

    Attributes:
        step: counted from 1; skipped steps count.
        gate_open: whether replicas synchronised.
        reason: the gate's reason to open ("threshold", "period", "budget", "always"),
            "warm-up", "longest local run", "closed", or "non-finite gradient".
        rmmc: the gate's largest signal over all matrices and replicas. None if the gate reads
            no momentum, or if the step was skipped.
        rmmc_parameter: the name of the parameter with this signal.
        local_steps: steps since replicas last synchronised, including this one.
        skipped: whether this replica skipped the step for a non-finite gradient: its own, or
            any replica's if replicas communicate before the step. On a GPU it may be late by
            a step.
        wire_bytes: payload of this process's collectives since the last report. None without
            an active WireMeter.
        wire_bytes_by_ranks: the same by the ranks that shared them, as in
            {"0-7": 1024, "0, 8": 16}.
        waited_seconds: how long the step waited for a late exchange of a sync with a delay.
        captured: whether the step was the replay of a CUDA graph.
        directions: how many trained parameters take each update, by direction or elementwise
            algorithm: {"polar": 48, "adamw": 27}; with Replicated {"inner": 75}. With
            local_step="gradient" it describes the open steps. None if a framework skipped
            steps before the first one.
    """

    step: int
    gate_open: bool
    reason: str
    rmmc: float | None
    rmmc_parameter: str | None
    local_steps: int
    skipped: bool
    wire_bytes: int | None
    waited_seconds: float = 0.0
    wire_bytes_by_ranks: dict[str, int] | None = None
    captured: bool = False
    directions: dict[str, int] | None = None

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON values: an infinite RMMC becomes the string "inf"."""
        return {key: strict(value) for key, value in asdict(self).items()}

    def scalars(self) -> dict[str, float]:
        """The finite numbers, for TensorBoard, Weights & Biases and other logs."""
        return _finite(
            gate_open=self.gate_open,
            rmmc=self.rmmc,
            local_steps=self.local_steps,
            skipped=self.skipped,
            wire_bytes=self.wire_bytes,
            waited_seconds=self.waited_seconds,
        )


@dataclass
class Summary:
    """Running totals over reports.

    Attributes:
        steps: reports added; skipped steps count.
        open_steps: steps at which replicas synchronised.
        skipped_steps: steps skipped for a non-finite gradient.
        wire_bytes: payload, as far as a WireMeter was active.
        waited_seconds: for late exchanges; 0 without a delay.
    """

    steps: int = 0
    open_steps: int = 0
    skipped_steps: int = 0
    wire_bytes: int = 0
    waited_seconds: float = 0.0

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
    """Append a report as one line of JSON, with further values; NaN becomes "nan".

    Args:
        path: of the file, which need not exist.
        report: of a step.
        extra: further JSON values, by name.
    """
    append_line(path, {**report.as_dict(), **extra})


def _finite(**values: float | None) -> dict[str, float]:
    """The values that are known and finite."""
    known = {name: float(value) for name, value in values.items() if value is not None}
    return {name: value for name, value in known.items() if math.isfinite(value)}
