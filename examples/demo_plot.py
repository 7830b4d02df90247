"""The demo's picture: loss over tokens, loss over bytes, and when the gate opened."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, MaxNLocator

sys.path.append(str(Path(__file__).resolve().parents[1]))

from curvadion.metering.picture import STYLE, label_ends, mark_threshold, scatter_signals, write

COLOURS = {
    "AdamW-DDP": "#666666",
    "Muon": "#0072B2",
    "CurvaDion": "#D55E00",
    "CurvaDion-1%": "#009E73",
}


def draw(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Write the picture of runs, each with its summary, config, train and validation records."""
    with plt.rc_context(STYLE):
        figure, (by_tokens, by_bytes, gate) = plt.subplots(
            1, 3, figsize=(15, 4.6), layout="constrained", width_ratios=(1, 1, 1.2)
        )
        held_out_loss(by_tokens, runs, "tokens")
        by_tokens.margins(x=0.02)
        summaries = ((run["summary"], colour(run)) for run in runs)
        label_ends(
            by_tokens,
            [(f"{s['name']}  {s['val_loss']:.3f}", s["val_loss"], mine) for s, mine in summaries],
        )
        by_tokens.set(title="Held-out loss by tokens", xlabel="training tokens")
        by_tokens.set_ylabel("nats per token")
        held_out_loss(by_bytes, runs, "sent_bytes")
        label_bytes(by_bytes, runs)
        by_bytes.set(title="Held-out loss by bytes", xlabel="bytes sent per replica", xscale="log")
        momentum_change(gate, max(runs, key=lambda run: len(measured(run))))
        by_tokens.xaxis.set_major_locator(MaxNLocator(5, steps=(1, 2, 5, 10)))
        by_tokens.xaxis.set_major_formatter(EngFormatter())
        by_bytes.xaxis.set_major_formatter(EngFormatter("B"))
        figure.savefig(path, dpi=160)
        plt.close(figure)


def held_out_loss(axes: Axes, runs: Sequence[dict[str, Any]], abscissa: str) -> None:
    """Draw each run's held-out loss over a column of its records."""
    for run in runs:
        x = [record[abscissa] for record in run["validation"]]
        y = [record["val_loss"] for record in run["validation"]]
        axes.plot(x, y, color=colour(run), lw=2, marker="o", ms=3.5)
    axes.grid(axis="y", color="#eeeeee")
    axes.set_axisbelow(True)


def label_bytes(axes: Axes, runs: Sequence[dict[str, Any]]) -> None:
    """Write names above the curves' starts, and the share of bytes below their ends."""
    axes.margins(x=0.15, y=0.14)
    reference = runs[0]["summary"]["sent_bytes"]
    ordered = sorted(runs, key=lambda run: run["summary"]["sent_bytes"])
    # Avoid neighbours: the outermost have room on their right, those between on their left.
    sides = ["left", *["right"] * (len(runs) - 3), "center", "left"][-len(runs) :]
    for run, side in zip(ordered, sides, strict=True):
        start, summary = run["validation"][0], run["summary"]
        beginning = (start["sent_bytes"], start["val_loss"])
        end = (summary["sent_bytes"], summary["val_loss"])
        share = f"{end[0] / reference:.0%}"
        write(axes, summary["name"], beginning, (0, 10), colour(run), ha=side, weight="bold")
        write(axes, share, end, (0, -12), colour(run), ha=side, weight="bold")


def measured(run: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the records of a run that have an RMMC."""
    return [r for r in run["train"] if isinstance(r["rmmc"], (int, float))]


def momentum_change(axes: Axes, run: dict[str, Any]) -> None:
    """Draw a run's RMMC by step, the threshold, and the steps at which its gate was open."""
    name, records, known = run["summary"]["name"], run["train"], measured(run)
    scatter_signals(axes, [(r["step"], r["rmmc"], r["gate_open"]) for r in known], colour(run))
    opened = [r["step"] for r in records if r["gate_open"]]
    across = axes.get_xaxis_transform()
    axes.vlines(opened, 0, 0.04, transform=across, color=colour(run), lw=1, alpha=0.8)
    axes.set(
        title=f"{name}: gate open at {run['summary']['open_gate_share']:.0%} of steps",
        xlabel="step (marks: gate open)",
        ylabel="relative momentum change (RMMC)",
    )
    if known and run["config"]["period"] is None:
        mark_threshold(axes, run["config"]["threshold"])


def colour(run: dict[str, Any]) -> str:
    """Return the colour of a run."""
    return COLOURS.get(run["summary"]["name"], "#009E73")
