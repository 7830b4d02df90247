"""The ladder's picture: the gap at 1 % of the bytes over length, batch and replicas."""

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
MARKERS = {"small": "o", "medium": "s", "large": "^", "largest": "D"}
SIZES = {"small": "0.13M", "medium": "0.5M", "large": "2M", "largest": "10M"}


def draw(gaps: Mapping[Place, Gap], path: Path) -> None:
    """Write the picture, one panel for each thing that grows."""
    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(1, 3, figsize=(12.5, 4.0), layout="constrained", sharey=True)
        usual = {p: g for p, g in gaps.items() if p.batch_size == 8 and p.replicas == 8}
        _panel(panels[0], usual, lambda p: p.tokens_per_parameter, "tokens a parameter")
        batches = {p: g for p, g in gaps.items() if p.replicas == 8 and p.steps == 300}
        _panel(panels[1], batches, lambda p: 64 * p.batch_size, "tokens a replica and a step")
        counts = {p: g for p, g in gaps.items() if p.batch_size == 8 and _at_twenty(p)}
        _panel(panels[2], counts, lambda p: p.replicas, "replicas")
        titles = ("Longer runs, larger models", "Larger batches, 300 steps", "More replicas")
        for axes, title in zip(panels, titles, strict=True):
            axes.set_title(title)
            axes.axhline(0, color="#9a9a9a", linewidth=1)
        panels[0].set_ylabel("loss above the best synchronous method")
        panels[0].yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:+.0f} %"))
        figure.savefig(path, dpi=130)
        plt.close(figure)


def _at_twenty(place: Place) -> bool:
    return 18 < place.tokens_per_parameter < 22


def _panel(axes: Axes, gaps: Mapping[Place, Gap], x: Callable[[Place], float], label: str) -> None:
    """One line for each model and text."""
    lines = dict.fromkeys((place.size, place.corpus) for place in gaps)
    for size, corpus in lines:
        chosen = [(x(p), g) for p, g in gaps.items() if (p.size, p.corpus) == (size, corpus)]
        chosen.sort(key=lambda point: point[0])
        axes.plot(
            [at for at, _ in chosen], [gap.percent for _, gap in chosen],
            color=COLOURS[corpus], marker=MARKERS[size], linewidth=1.5,
            linestyle="-" if size == "small" else "--", label=f"{SIZES[size]}, {NAMES[corpus]}",
        )  # fmt: skip
    ticks = sorted({x(place) for place in gaps})
    axes.set_xscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(ticks, [f"{tick:.0f}" for tick in ticks])
    axes.set_xlabel(label)
    if lines:
        axes.legend(frameon=False)
