"""Pictures of runs; needs matplotlib (the extra ``train``)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter

from run_logs import Points, Run

# Okabe and Ito's palette, which stays distinct for colour-blind readers.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#666666")
FAINT, INK = "#9a9a9a", "#333333"
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "lines.solid_capstyle": "round",
}
SMOOTHED_TO = 25  # a noisy curve is drawn as about this many independent means


def draw(runs: Sequence[Run], path: str | Path) -> None:
    """Write a picture: losses over bytes and steps, drift, momentum change, openings, waiting.

    Args:
        runs: at most 7, the number of colours.
        path: file to write; its suffix chooses the format (.png, .svg, .pdf).

    Raises:
        ValueError: if there are too many runs, or none.
    """
    if not 1 <= len(runs) <= len(PALETTE):
        raise ValueError(f"{len(runs)} runs: draw 1 to {len(PALETTE)} in one picture.")
    coloured = list(zip(runs, PALETTE, strict=False))
    with plt.rc_context(STYLE):
        around = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)
        figure, axes = plt.subplots(2, 3, figsize=(16, 8.4), layout=around)
        panels: Sequence[Callable[[Axes, Sequence[tuple[Run, str]]], None]] = (
            _loss_by_bytes, _loss_by_steps, _drift, _momentum_change, _openings, _waiting,
        )  # fmt: skip
        for panel, where in zip(panels, axes.flat, strict=True):
            panel(where, coloured)
        handles = [Line2D([], [], color=colour, lw=3, label=run.name) for run, colour in coloured]
        figure.legend(
            handles=handles, loc="outside upper left", ncols=min(len(runs), 4), frameon=False
        )
        figure.savefig(path, dpi=140)
        plt.close(figure)


# ---------------------------------------------------------------- parts, also for other pictures


def write(
    axes: Axes,
    text: str,
    where: tuple[float, float],
    offset: tuple[float, float],
    colour: str,
    **options: Any,
) -> None:
    """Write text in a colour, ``offset`` points from a position."""
    axes.annotate(
        text,
        where,
        xytext=offset,
        textcoords="offset points",
        va="center",
        color=colour,
        annotation_clip=False,
        **options,
    )


def label_ends(axes: Axes, ends: Iterable[tuple[str, float, str]]) -> None:
    """Write (text, height, colour) beside curves' ends, spread so that they do not overlap."""
    low, high = axes.get_ylim()
    line, placed = 0.06 * (high - low), -math.inf
    for text, height, colour in sorted(ends, key=lambda end: end[1]):
        placed = max(height, placed + line)
        where = (1, placed)
        write(axes, text, where, (4, 0), colour, weight="bold", xycoords=axes.get_yaxis_transform())


def scatter_signals(
    axes: Axes, signals: Iterable[tuple[float, float, bool]], colour: str, closed: str = FAINT
) -> None:
    """Draw (step, RMMC, whether the gate was open); open steps are large, in ``colour``."""
    signals = list(signals)
    for is_open, size in ((False, 7), (True, 16)):
        shown = [(step, value) for step, value, opened in signals if opened == is_open]
        x, y = zip(*shown, strict=True) if shown else ((), ())
        face = colour if is_open else closed
        axes.scatter(x, y, s=size, color=face, lw=0, zorder=2 + is_open)
    if any(value > 0 for _, value, _ in signals):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())


def mark_threshold(axes: Axes, threshold: float, colour: str = INK) -> None:
    """Draw a gate's threshold across, with its value on the right."""
    axes.axhline(threshold, color=colour, lw=1, ls=(0, (4, 3)))
    where = (1.0, threshold)
    across = axes.get_yaxis_transform()
    write(axes, f"threshold\n{threshold:g}", where, (4, 0), colour, xycoords=across)


# ---------------------------------------------------------------- panels

Coloured = Sequence[tuple[Run, str]]


def _loss_by_bytes(axes: Axes, runs: Coloured) -> None:
    axes.set(title="Loss by bytes", xlabel="payload of this rank's collectives, bytes")
    curves = [(run.over_bytes(run.loss), run.over_bytes(run.held_out), c) for run, c in runs]
    _losses(axes, curves, "no bytes in the log:\nkeep a curvadion.WireMeter active")
    ends = [points[-1][0] for *both, _ in curves for points in both if points]
    if ends and min(ends) > 0 and max(ends) > 10 * min(ends):
        axes.set_xscale("log")
    else:
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=(1, 2, 5, 10)))
    axes.xaxis.set_major_formatter(EngFormatter("B"))


def _loss_by_steps(axes: Axes, runs: Coloured) -> None:
    axes.set(title="Loss by steps", xlabel="step")
    curves = [(run.loss, run.held_out, colour) for run, colour in runs]
    _losses(axes, curves, "no loss in the log:\nwrite it with loss=loss.item()")
    ends = []
    for loss, held_out, colour in curves:
        if points := held_out or _smoothed(loss):
            ends.append((f"{points[-1][1]:.3f}", points[-1][1], colour))
    label_ends(axes, ends)


def _losses(axes: Axes, curves: Sequence[tuple[Points, Points, str]], missing: str) -> None:
    """Draw training losses, raw (faint) and smoothed, and held-out losses with marks."""
    axes.set_ylabel("loss (faint: each step; marks: held out)")
    for loss, held_out, colour in curves:
        axes.plot(*_columns(loss), color=colour, lw=0.6, alpha=0.25)
        axes.plot(*_columns(_smoothed(loss)), color=colour, lw=1.2 if held_out else 2)
        axes.plot(*_columns(held_out), color=colour, lw=2, marker="o", ms=4)
    _say_if_empty(axes, any(loss or held_out for loss, held_out, _ in curves), missing)


def _drift(axes: Axes, runs: Coloured) -> None:
    axes.set(title="Drift of replicas", xlabel="step", ylabel="drift, of the weights' norm")
    for run, colour in runs:
        axes.plot(*_columns(run.drift), color=colour, lw=1.5, marker="o", ms=4)
    drifts = [value for run, _ in runs for _, value in run.drift]
    _say_if_empty(axes, bool(drifts), "no drift in the log:\nwrite it with drift=")
    if drifts and min(drifts) > 0 and max(drifts) > 10 * min(drifts):
        axes.set_yscale("log")
    elif drifts:
        axes.set_ylim(bottom=0)
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))


def _momentum_change(axes: Axes, runs: Coloured) -> None:
    axes.set(
        title="Momentum change", xlabel="step", ylabel="RMMC, relative (large marks: gate open)"
    )
    told = [(run, colour) for run, colour in runs if run.signals]
    for run, colour in told:
        scatter_signals(axes, run.signals, colour, FAINT if len(told) == 1 else f"{colour}55")
    thresholds = {run.threshold: colour for run, colour in told if run.threshold is not None}
    for threshold, colour in thresholds.items():
        mark_threshold(axes, threshold, INK if len(thresholds) == 1 else colour)
    _say_if_empty(axes, bool(told), "the gate reads no momenta")


def _openings(axes: Axes, runs: Coloured) -> None:
    axes.set(title="Openings", xlabel="step")
    for row, (run, colour) in enumerate(runs):
        axes.vlines(run.opened, row - 0.35, row + 0.1, color=colour, lw=1)
        share = len(run.opened) / run.steps if run.steps else 0.0
        text = f"{run.name}: {len(run.opened)} openings, {share:.1%} of steps"
        where = (0, row - 0.42)
        across = axes.get_yaxis_transform()
        write(axes, text, where, (2, 5), colour, xycoords=across)
    axes.set(ylim=(len(runs) - 0.6, -0.75), yticks=[])
    axes.set_xlim(0, max(1, *(run.steps for run, _ in runs)) * 1.02)
    axes.spines["left"].set_visible(False)


def _waiting(axes: Axes, runs: Coloured) -> None:
    axes.set(
        title="Waiting for late exchanges", xlabel="step", ylabel="seconds waited, in all so far"
    )
    for run, colour in runs:
        axes.plot(*_columns(run.waited), color=colour, lw=2)
    longest = max((run.waited[-1][1] for run, _ in runs if run.waited), default=None)
    _say_if_empty(axes, longest is not None, "no waited_seconds in the log")
    if longest is not None:
        axes.set_ylim(0, 1.08 * longest or 1)
    if longest == 0:
        _say(axes, "none: without a delay this is always 0,\nalthough replicas wait for each other")


def _smoothed(points: Points) -> Points:
    """Return running means over enough points that about SMOOTHED_TO are independent."""
    width = max(1, len(points) // SMOOTHED_TO)
    total, result = 0.0, []
    for i, (x, y) in enumerate(points):
        total += y - (points[i - width][1] if i >= width else 0.0)
        result.append((x, total / min(i + 1, width)))
    return result


def _columns(points: Points) -> tuple[Sequence[float], Sequence[float]]:
    x, y = zip(*points, strict=True) if points else ((), ())
    return x, y


def _say_if_empty(axes: Axes, has_data: bool, text: str) -> None:
    if not has_data:
        _say(axes, text)
        axes.set(xticks=[], yticks=[])
        return
    axes.grid(axis="y", color="#eeeeee")
    axes.set_axisbelow(True)


def _say(axes: Axes, text: str) -> None:
    axes.text(0.5, 0.5, text, ha="center", va="center", color=FAINT, transform=axes.transAxes)
