"""Reports on steps, and running totals over them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
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
            "warm-up", "longest local run", "closed", "non-finite gradient", or "no opening" if
            members that come and go could not synchronise, or have not come.
        rmmc: the gate's largest signal over all matrices and replicas. None if the gate reads
            no momentum, or if the step was skipped.
        rmmc_parameter: the name of the parameter with this signal.
        threshold: with which the gate compares the signal; None if it has none.
        local_steps: steps since replicas last synchronised, including this one.
        skipped: whether this replica skipped the step for a non-finite gradient: its own, or
            any replica's if replicas communicate before the step. With a delay the gate may be
            open at such a step, whose opening sends earlier movements. On a GPU it may be late
            by a step.
        wire_bytes: payload of this process's collectives since the last report. None without
            an active WireMeter.
        wire_bytes_by_ranks: the same by the ranks that shared them, as in
            {"0-7": 1024, "0, 8": 16}.
        share: what has been sent to other replicas since the run began, as a budget counts it:
            a share of an all-reduce of all gradients in float32 at every step, as DDP does it.
            It needs no WireMeter. None with one replica, and where the sync does not say what
            openings send, as LowRank: :meth:`curvadion.WireMeter.share` measures it. Steps of a
            run with such a sync, or with another optimizer (``load_torch_state``), do not count.
        waited_seconds: how long the step waited for a late exchange of a sync with a delay.
        opening_seconds: how long the host was held up by other replicas besides: until they had
            come to a meeting or an opening, and until codes had been exchanged. On a GPU it
            includes kernels of this rank for which the host waits there, and exchanges only as
            far as the host waits for them. Not counted are exchanges of LowRank, and those of
            ``synchronize()``, which is no step.
        step_seconds: from the end of the last step to the end of this one, with data, forward
            and backward; None at the first one.
        diagnostics: what ``optimizer.sync.diagnose()`` asks for, if means have arrived at this
            step: "disagreement", "residual", "progress" and "cosine".
        members: the names of those at the last opening, if they come and go; else None.
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
    # Times are no part of what a step did, so reports of equal steps are equal.
    opening_seconds: float = field(default=0.0, compare=False)
    step_seconds: float | None = field(default=None, compare=False)
    members: tuple[str, ...] | None = None
    diagnostics: dict[str, float] | None = None
    share: float | None = None
    threshold: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON values: an infinite RMMC becomes None."""
        return {key: strict(value) for key, value in asdict(self).items()}

    def scalars(self) -> dict[str, float]:
        """The finite numbers, for TensorBoard, Weights & Biases and other logs."""
        return _finite(
            gate_open=self.gate_open,
            rmmc=self.rmmc,
            local_steps=self.local_steps,
            skipped=self.skipped,
            wire_bytes=self.wire_bytes,
            share=self.share,
            threshold=self.threshold,
            waited_seconds=self.waited_seconds,
            opening_seconds=self.opening_seconds,
            step_seconds=self.step_seconds,
            members=None if self.members is None else len(self.members),
            **(self.diagnostics or {}),
        )


# Scalars of a Summary that are totals over its steps.
TOTALS = ("steps", "skipped_steps", "waited_seconds", "opening_seconds")


@dataclass
class Summary:
    """Running totals over reports.

    Attributes:
        steps: reports added; skipped steps count.
        open_steps: steps at which replicas synchronised.
        skipped_steps: steps skipped for a non-finite gradient.
        wire_bytes: payload, as far as a WireMeter was active.
        waited_seconds: for late exchanges; 0 without a delay.
        opening_seconds: that other replicas held up the host besides.
        step_seconds: of all steps but those whose report does not say.
        timed_steps: how many these are.
        diagnostics: the last ones.
    """

    steps: int = 0
    open_steps: int = 0
    skipped_steps: int = 0
    wire_bytes: int = 0
    waited_seconds: float = 0.0
    opening_seconds: float = 0.0
    step_seconds: float = 0.0
    timed_steps: int = 0
    diagnostics: dict[str, float] = field(default_factory=dict)

    def add(self, report: StepReport) -> None:
        self.steps += 1
        self.open_steps += report.gate_open
        self.skipped_steps += report.skipped
        self.wire_bytes += report.wire_bytes or 0
        self.waited_seconds += report.waited_seconds
        self.opening_seconds += report.opening_seconds
        self.step_seconds += report.step_seconds or 0.0
        self.timed_steps += report.step_seconds is not None
        self.diagnostics = report.diagnostics or self.diagnostics

    def scalars(self, last: StepReport) -> dict[str, float]:
        """Finite scalars for logs: means over the steps, totals, and those of the last report.

        Totals are those in ``TOTALS``; the others are means, or the last report's.
        """
        steps = max(1, self.steps)
        return _finite(
            steps=self.steps,
            wire_bytes=self.wire_bytes / steps,
            open_gate_share=self.open_steps / steps,
            skipped_steps=self.skipped_steps,
            waited_seconds=self.waited_seconds,
            opening_seconds=self.opening_seconds,
            step_seconds=self.step_seconds / self.timed_steps if self.timed_steps else None,
            members=None if last.members is None else len(last.members),
            rmmc=last.rmmc,
            threshold=last.threshold,
            share=last.share,
            local_steps=last.local_steps,
            **self.diagnostics,
        )


def write_json_line(path: str | Path, report: StepReport, **extra: Any) -> None:
    """Append a report as one line of JSON, with further values; NaN and infinity become null.

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
