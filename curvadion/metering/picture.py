"""Pictures of runs; needs matplotlib (the extra ``train``)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter

from curvadion.metering.run_logs import Points, Run

# Okabe and Ito's palette, which stays distinct for colour-blind readers.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#666666")
FAINT = "#9a9a9a"
INK = "#333333"
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
    """Write a picture with a panel for each thing that a log tells.

    They are losses over bytes and steps, what has been sent, drift, momentum change, openings and
    waiting.

    Args:
        runs: at most 7, the number of colours.
        path: file to write; its suffix chooses the format (.png, .svg, .pdf).

    Raises:
        ValueError: if there are too many runs, or none, or nothing to draw.
    """
    if not 1 <= len(runs) <= len(PALETTE):
        raise ValueError(f"{len(runs)} runs: draw 1 to {len(PALETTE)} in one picture.")
    coloured = list(zip(runs, PALETTE, strict=False))
    panels = [panel for panel, tells in PANELS if any(tells(run) for run in runs)]
    if not panels:
        raise ValueError("The logs tell of no step that was taken, so there is nothing to draw.")
    rows = 1 if len(panels) <= 3 else 2
    columns = math.ceil(len(panels) / rows)
    with matplotlib.rc_context(STYLE):
        around = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)
        figure = Figure(figsize=(4.7 * columns, 0.6 + 3.7 * rows), layout=around)
        grid = figure.add_gridspec(rows, columns)
        for place, panel in enumerate(panels):
            row, column = divmod(place, columns)
            # The last one takes what is left of its row.
            end = columns if panel is panels[-1] else column + 1
            panel(figure.add_subplot(grid[row, column:end]), coloured)
        handles = [Line2D([], [], color=colour, lw=3, label=run.name) for run, colour in coloured]
        figure.legend(
            handles=handles, loc="outside upper left", ncols=min(len(runs), 4), frameon=False
        )
        figure.savefig(path, dpi=140)


# ---------------------------------------------------------------- parts, also for other pictures


def write(
    axes: Axes,
    text: str,
    where: tuple[float, float],
    offset: tuple[float, float],
    colour: str,
    **options: Any,
) -> None:
    """Write text in a colour beside a position.

    Args:
        axes: to write into.
        text: to write.
        where: the position.
        offset: from it, in points.
        colour: of the text.
        options: others of ``annotate``, such as ``xycoords`` of the position.
    """
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
    line = 0.06 * (high - low)
    placed = -math.inf
    for text, height, colour in sorted(ends, key=lambda end: end[1]):
        placed = max(height, placed + line)
        where = (1, placed)
        write(axes, text, where, (4, 0), colour, weight="bold", xycoords=axes.get_yaxis_transform())


def scatter_signals(
    axes: Axes, signals: Iterable[tuple[float, float, bool]], colour: str, closed: str = FAINT
) -> None:
    """Draw the signals of a gate as points.

    Args:
        axes: to draw on.
        signals: (step, RMMC, whether the gate was open).
        colour: of open steps, whose points are larger.
        closed: the colour of closed steps.
    """
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
    steps = max(run.length for run, _ in runs)
    label = f"bytes sent, as a share of DDP's in {steps} steps"
    axes.set(title="Loss by bytes", xlabel=label)
    curves = []
    for run, colour in runs:
        loss, held_out = (run.over_bytes(points, steps) for points in (run.loss, run.held_out))
        curves.append((loss, held_out, colour))
    _losses(axes, curves)
    ends = [points[-1][0] for *both, _ in curves for points in both if points]
    if ends and min(ends) > 0 and max(ends) > 10 * min(ends):
        axes.set_xscale("log")
    axes.xaxis.set_major_formatter(_percent)


def _loss_by_steps(axes: Axes, runs: Coloured) -> None:
    axes.set(title="Loss by steps", xlabel="step")
    curves = [(run.loss, run.held_out, colour) for run, colour in runs]
    _losses(axes, curves)
    ends = []
    for loss, held_out, colour in curves:
        if points := held_out or _smoothed(loss):
            ends.append((f"{points[-1][1]:.3f}", points[-1][1], colour))
    label_ends(axes, ends)


def _losses(axes: Axes, curves: Sequence[tuple[Points, Points, str]]) -> None:
    """Draw training losses, raw (faint) and smoothed, and held-out losses with marks."""
    axes.set_ylabel("loss (faint: each step; marks: held out)")
    for loss, held_out, colour in curves:
        axes.plot(*_columns(loss), color=colour, lw=0.6, alpha=0.25)
        axes.plot(*_columns(_smoothed(loss)), color=colour, lw=1.2 if held_out else 2)
        axes.plot(*_columns(held_out), color=colour, lw=2, marker="o", ms=4)
    _lines_across(axes)


def _share(axes: Axes, runs: Coloured) -> None:
    axes.set(title="Bytes sent so far", xlabel="step", ylabel="share of DDP's bytes so far")
    drawn = [(run.shares, colour) for run, colour in runs if run.shares]
    for shares, colour in drawn:
        axes.plot(*_columns(shares), color=colour, lw=2)
    ends = [shares[-1] for shares, _ in drawn]
    last = [share for _, share in ends]
    if min(last) > 0 and max(last) > 10 * min(last):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(_percent)
    for (step, share), (_, colour) in zip(ends, drawn, strict=True):
        write(axes, f"{100 * share:.3g} %", (step, share), (4, 0), colour, weight="bold")
    _lines_across(axes)


def _drift(axes: Axes, runs: Coloured) -> None:
    axes.set(title="Drift of replicas", xlabel="step", ylabel="drift, of the weights' norm")
    for run, colour in runs:
        axes.plot(*_columns(run.drift), color=colour, lw=1.5, marker="o", ms=4)
    drifts = [value for run, _ in runs for _, value in run.drift]
    if min(drifts) > 0 and max(drifts) > 10 * min(drifts):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    _lines_across(axes)


def _momentum_change(axes: Axes, runs: Coloured) -> None:
    axes.set(
        title="Momentum change", xlabel="step", ylabel="RMMC, relative (large marks: gate open)"
    )
    drawn = [(run, colour) for run, colour in runs if run.signals]
    for run, colour in drawn:
        scatter_signals(axes, run.signals, colour, FAINT if len(drawn) == 1 else f"{colour}55")
    thresholds = {run.threshold: colour for run, colour in drawn if run.threshold is not None}
    for threshold, colour in thresholds.items():
        mark_threshold(axes, threshold, INK if len(thresholds) == 1 else colour)
    _lines_across(axes)


def _openings(axes: Axes, runs: Coloured) -> None:
    axes.set(title="Openings", xlabel="step")
    for row, (run, colour) in enumerate(runs):
        axes.vlines(run.opened, row - 0.35, row + 0.1, color=colour, lw=1)
        share = run.openings / run.length if run.length else 0.0
        text = f"{run.name}: {run.openings} openings, {share:.1%} of steps"
        where = (0, row - 0.42)
        across = axes.get_yaxis_transform()
        write(axes, text, where, (2, 5), colour, xycoords=across)
    axes.set(ylim=(len(runs) - 0.6, -0.75), yticks=[])
    axes.set_xlim(0, max(1, *(run.steps for run, _ in runs)) * 1.02)
    axes.spines["left"].set_visible(False)


def _waiting(axes: Axes, runs: Coloured) -> None:
    axes.set(title="Waiting for other replicas", xlabel="step", ylabel="seconds, in all so far")
    for run, colour in runs:
        axes.plot(*_columns(run.waited), color=colour, lw=2)
    axes.set_ylim(bottom=0)
    _lines_across(axes)


# Each with the question whether a run has something to show in it.
PANELS: tuple[tuple[Callable[[Axes, Coloured], None], Callable[[Run], object]], ...] = (
    (_loss_by_bytes, lambda run: run.shares and (run.loss or run.held_out)),
    (_loss_by_steps, lambda run: run.loss or run.held_out),
    (_share, lambda run: run.shares),
    (_drift, lambda run: run.drift),
    (_momentum_change, lambda run: run.signals),
    (_openings, lambda run: run.opened),
    (_waiting, lambda run: run.waited and run.waited[-1][1]),
)


def _smoothed(points: Points) -> Points:
    """Return running means over enough points that about SMOOTHED_TO are independent."""
    width = max(1, len(points) // SMOOTHED_TO)
    total = 0.0
    result = []
    for i, (x, y) in enumerate(points):
        total += y - (points[i - width][1] if i >= width else 0.0)
        result.append((x, total / min(i + 1, width)))
    return result


def _columns(points: Points) -> tuple[Sequence[float], Sequence[float]]:
    x, y = zip(*points, strict=True) if points else ((), ())
    return x, y


def _percent(share: float, _: float) -> str:
    """A tick's label."""
    return f"{100 * share:g} %"


def _lines_across(axes: Axes) -> None:
    axes.grid(axis="y", color="#eeeeee")
    axes.set_axisbelow(True)
