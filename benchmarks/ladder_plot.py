"""The ladder's picture: the gap at 1 % of the bytes over size, length, batch and replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

from curvadion.metering.picture import STYLE

if TYPE_CHECKING:
    from ladder import Gap, Place

COLOURS = {"python": "#0072B2", "cpp": "#D55E00"}
NAMES = {"python": "Python", "cpp": "C++"}
PARAMETERS = {"small": 0.13, "medium": 0.5, "large": 2, "largest": 10}  # millions


def draw(gaps: Mapping[Place, Gap], path: Path) -> None:
    """Write the picture, one panel for each thing that grows."""
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(2, 2, figsize=(9.0, 7.0), layout="constrained", sharey=True)
        panels = grid.flatten()
        usual = {p: g for p, g in gaps.items() if p.batch_size == 8 and p.replicas == 8}
        sizes = {p: g for p, g in usual.items() if _at_twenty(p)}
        _panel(panels[0], sizes, lambda p: PARAMETERS[p.size], "millions of parameters")
        small = {p: g for p, g in gaps.items() if p.size == "small"}
        lengths = {p: g for p, g in small.items() if p in usual}
        _panel(panels[1], lengths, lambda p: p.tokens_per_parameter, "tokens a parameter")
        batches = {p: g for p, g in small.items() if p.replicas == 8 and p.steps == 300}
        _panel(panels[2], batches, lambda p: 64 * p.batch_size, "tokens a replica and a step")
        counts = {p: g for p, g in small.items() if p.batch_size == 8 and _at_twenty(p)}
        _panel(panels[3], counts, lambda p: p.replicas, "replicas")
        titles = ("Larger models", "Longer runs", "Larger batches, 300 steps", "More replicas")
        figure.suptitle("1 % of the bytes in three fragments")
        for axes, title in zip(panels, titles, strict=True):
            axes.set_title(title)
            axes.axhline(0, color="#9a9a9a", linewidth=1)
        for axes in grid[:, 0]:
            axes.set_ylabel("loss above the best synchronous method")
            axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:+.0f} %"))
        figure.savefig(path, dpi=130)
        plt.close(figure)


def _at_twenty(place: Place) -> bool:
    return 18 < place.tokens_per_parameter < 22


def _panel(axes: Axes, gaps: Mapping[Place, Gap], x: Callable[[Place], float], label: str) -> None:
    """One line for each text."""
    for corpus in dict.fromkeys(place.corpus for place in gaps):
        chosen = [(x(p), g.percent, g.seeds) for p, g in gaps.items() if p.corpus == corpus]
        chosen.sort()
        at, percent, seeds = zip(*chosen, strict=True)
        colour = COLOURS[corpus]
        axes.plot(at, percent, color=colour, linewidth=1.5, label=NAMES[corpus])
        faces = [colour if count > 1 else "white" for count in seeds]
        axes.scatter(at, percent, c=faces, edgecolors=colour, linewidths=1.5, zorder=3)
    ticks = sorted({x(place) for place in gaps})
    axes.set_xscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(ticks, [f"{tick:g}" if tick < 1 else f"{tick:.0f}" for tick in ticks])
    axes.set_xlabel(label)
    if gaps:
        axes.legend(frameon=False)
