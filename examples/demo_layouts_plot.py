"""The picture of demo_layouts.py: overlaid loss curves, their differences, bytes sent."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter

sys.path.append(str(Path(__file__).resolve().parents[1]))

from curvadion.metering.picture import FAINT, STYLE

# Okabe and Ito's palette; the others are compared with the first run.
COLOURS = ("#bbbbbb", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def draw(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Write the picture of runs; the others are compared with the first."""
    with plt.rc_context(STYLE):
        figure, (curves, distances, sent) = plt.subplots(
            1, 3, figsize=(15, 4.6), layout="constrained", width_ratios=(1.1, 1, 0.9)
        )
        loss_curves(curves, runs)
        differences(distances, runs)
        bytes_sent(sent, runs)
        figure.savefig(path, dpi=120)
        plt.close(figure)


def loss_curves(axes: Axes, runs: Sequence[dict[str, Any]]) -> None:
    """Draw overlaid training losses, the first as a wide band below the others."""
    for number, run in enumerate(runs):
        steps = [record["step"] for record in run["train"]]
        losses = [record["loss"] for record in run["train"]]
        # Dashes with the same period and different phases keep every curve visible.
        phase = (number - 1) * 12 / max(1, len(runs) - 1)
        how = {"lw": 7} if number == 0 else {"lw": 2, "ls": (phase, (2, 4))}
        axes.plot(steps, losses, color=COLOURS[number], label=run["summary"]["name"], **how)
    axes.legend(frameon=False)
    axes.set(title="Training loss: one curve", xlabel="step", ylabel="nats per token")


def differences(axes: Axes, runs: Sequence[dict[str, Any]]) -> None:
    """Draw each run's loss difference from the first run, where it is not zero."""
    for number, run in enumerate(runs[1:], start=1):
        each = zip(run["train"], run["differences"], strict=True)
        found = [(record["step"], difference) for record, difference in each if difference]
        if found:
            axes.plot(*zip(*found, strict=True), color=COLOURS[number], lw=1.2, marker="o", ms=2.5)
    axes.set(
        title="Apart from one process by rounding",
        xlabel="step",
        ylabel="relative difference of the loss",
        yscale="log",
        ylim=(1e-8, 1e-3),
    )
    axes.axhline(2**-23, color=FAINT, lw=1, ls=(0, (4, 3)))
    axes.annotate(
        "float32's last bit",
        (0.9, 2**-23),
        xycoords=axes.get_yaxis_transform(),
        xytext=(-2, 40),
        textcoords="offset points",
        ha="right",
        color="#555555",
        arrowprops={"arrowstyle": "-", "color": FAINT, "lw": 1},
    )


def bytes_sent(axes: Axes, runs: Sequence[dict[str, Any]]) -> None:
    """Draw the bytes a rank sends per step: the optimizer's, and the layout's own."""
    shown = [run["summary"] for run in runs if run["summary"]["wire_bytes_per_step"]]
    names = [summary["name"] for summary in shown]
    ours = [summary["optimizer_bytes_per_step"] for summary in shown]
    theirs = [s["wire_bytes_per_step"] - mine for s, mine in zip(shown, ours, strict=True)]
    colours = [COLOURS[number] for number in range(len(runs) - len(shown), len(runs))]
    axes.barh(names, ours, color=colours)
    axes.barh(names, theirs, left=ours, color=FAINT, alpha=0.35)
    for place, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        axes.text(mine + other, place, f"  {mine / 1e3:.0f} kB", va="center")
    axes.invert_yaxis()
    axes.margins(x=0.16)
    axes.xaxis.set_major_formatter(EngFormatter("B"))
    axes.set(
        title="What a rank sends in a step",
        xlabel="coloured: optimizer, grey: all else",
    )
