"""What a step did: a report per step, running totals, and writers for logs."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO


@dataclass(frozen=True)
class StepReport:
    """One optimizer step.

    Attributes:
        step: number of this step, from 1; a skipped one counts.
        gate_open: whether replicas synchronised.
        reason: why the gate opened ("threshold", "period", "always", "warm-up",
            "longest local run", or a gate's own), "closed", or "non-finite gradient".
        rmmc: the largest signal of the gate over matrices and replicas: for the RMMC gate the
            relative maximum momentum change. None if the gate reads no momentum or was skipped.
        rmmc_parameter: name of the parameter that had it.
        local_steps: local steps since the replicas last synchronised, this one included.
        skipped: whether a non-finite gradient on some replica made all of them skip this step.
        wire_bytes: payload bytes this process sent through any process group since the last
            report, whoever sent them; None if no WireMeter is active.
    """

    step: int
    gate_open: bool
    reason: str
    rmmc: float | None
    rmmc_parameter: str | None
    local_steps: int
    skipped: bool
    wire_bytes: int | None

    def as_dict(self) -> dict[str, Any]:
        """JSON-able: an infinite RMMC becomes the string "inf"."""
        record = asdict(self)
        return {key: _strict(value) for key, value in record.items()}


@dataclass
class Summary:
    """Running totals over reports; holds a few numbers however long the training runs."""

    steps: int = 0
    open_steps: int = 0
    skipped_steps: int = 0
    wire_bytes: int = 0
    longest_local_run: int = 0

    def add(self, report: StepReport) -> None:
        self.steps += 1
        self.open_steps += report.gate_open
        self.skipped_steps += report.skipped
        self.wire_bytes += report.wire_bytes or 0
        self.longest_local_run = max(self.longest_local_run, report.local_steps)

    @property
    def open_gate_share(self) -> float:
        """Share of the steps taken at which the gate was open; 0 before the first."""
        return self.open_steps / self.steps if self.steps else 0.0

    def as_dict(self) -> dict[str, float]:
        return {**asdict(self), "open_gate_share": self.open_gate_share}


def _strict(value: Any) -> Any:
    """JSON knows no infinity and no NaN: these become strings."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class ScalarWriter(Protocol):
    """The part of torch.utils.tensorboard.SummaryWriter that is used here."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None: ...


def write_json_line(file: TextIO | str | Path, report: StepReport, **extra: Any) -> None:
    """Append a report and any further JSON-able values as one line; NaN becomes "nan"."""
    values = {key: _strict(value) for key, value in extra.items()}
    line = json.dumps({**report.as_dict(), **values}, allow_nan=False) + "\n"
    if isinstance(file, (str, Path)):
        with open(file, "a", encoding="utf-8") as opened:
            opened.write(line)
    else:
        file.write(line)


def write_scalars(writer: ScalarWriter, report: StepReport, prefix: str = "curvadion") -> None:
    """Write a report's numbers to TensorBoard; an infinite RMMC is left out."""
    values: dict[str, float | None] = {
        "gate_open": report.gate_open,
        "rmmc": report.rmmc,
        "local_steps": report.local_steps,
        "skipped": report.skipped,
        "wire_bytes": report.wire_bytes,
    }
    for name, value in values.items():
        if value is not None and math.isfinite(value):
            writer.add_scalar(f"{prefix}/{name}", float(value), report.step)
