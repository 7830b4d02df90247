"""The picture of larger_models.py: the gap over size, length, batch and replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

from benchmarks.losses.gaps import Gap, Place
from curvadion.metering.picture import STYLE

COLOURS = {"python": "#0072B2", "cpp": "#D55E00", "linux": "#009E73"}
NAMES = {"python": "Python", "cpp": "C++", "linux": "C (Linux)"}
PARAMETERS = {"small": 0.13, "medium": 0.5, "large": 2}  # millions


def draw(gaps: Mapping[Place, Gap], path: Path) -> None:
    """Write the picture, one panel for each of these variables."""
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(2, 2, figsize=(9.0, 7.0), layout="constrained", sharey=True)
        figure.suptitle(
            "1 % of the bytes in three fragments; full points: three seeds, others: one"
        )
        models, lengths, batches, counts = grid.flatten()
        usual = {p: g for p, g in gaps.items() if p.batch_size == 8 and p.replicas == 8}
        small = {p: g for p, g in gaps.items() if p.size == "small"}
        for tokens, style in ((20, "-"), (10, ":")):
            of_length = {p: g for p, g in usual.items() if _about(tokens, p)}
            told = f", {tokens} tokens a parameter"
            _lines(models, of_length, lambda p: PARAMETERS[p.size], told, style)
        _finish(models, "Larger models", "millions of parameters")
        _lines(lengths, {p: g for p, g in small.items() if p in usual}, _tokens)
        _finish(lengths, "Longer runs", "tokens a parameter")
        short = {p: g for p, g in small.items() if p.replicas == 8 and p.steps == 300}
        _lines(batches, short, lambda p: 64 * p.batch_size)
        _finish(batches, "Larger batches, 300 steps", "tokens a replica and a step")
        equal = {p: g for p, g in small.items() if p.batch_size == 8 and _about(20, p)}
        _lines(counts, equal, lambda p: p.replicas)
        _finish(counts, "More replicas, equal tokens", "replicas")
        for axes in grid[:, 0]:
            axes.set_ylabel("loss above the best synchronous method")
            axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:+.0f} %" if y else "0"))
        figure.savefig(path, dpi=130)
        plt.close(figure)


def _tokens(place: Place) -> float:
    return place.tokens_per_parameter


def _about(tokens: float, place: Place) -> bool:
    return 0.9 * tokens < _tokens(place) < 1.1 * tokens


def _lines(
    axes: Axes,
    gaps: Mapping[Place, Gap],
    x: Callable[[Place], float],
    told: str = "",
    style: str = "-",
) -> None:
    """Draw one line per text, labelled with its name and other settings.

    Args:
        axes: to draw into.
        gaps: by where they were measured.
        x: the position of a gap.
        told: added to a text's name.
        style: matplotlib's linestyle.
    """
    for corpus in dict.fromkeys(place.corpus for place in gaps):
        chosen = [(x(p), g.percent, g.seeds) for p, g in gaps.items() if p.corpus == corpus]
        at, percent, seeds = zip(*sorted(chosen), strict=True)
        colour, name = COLOURS[corpus], NAMES[corpus] + told
        axes.plot(at, percent, color=colour, linewidth=1.5, linestyle=style, label=name)
        faces = [colour if count > 1 else "white" for count in seeds]
        axes.scatter(at, percent, c=faces, edgecolors=colour, linewidths=1.5, zorder=3)


def _finish(axes: Axes, title: str, label: str) -> None:
    """Label the axis, with a tick at each value."""
    axes.set_title(title)
    axes.axhline(0, color="#9a9a9a", linewidth=1)
    ticks = sorted({x for line in axes.lines[:-1] for x in np.asarray(line.get_xdata()).tolist()})
    axes.set_xscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(ticks, [f"{tick:g}" if tick < 1 else f"{tick:.0f}" for tick in ticks])
    axes.set_xlabel(label)
    if ticks:
        axes.legend(frameon=False)
