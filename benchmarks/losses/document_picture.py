"""The picture on the documents' first pages: held-out loss over bytes sent, ours and rivals."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import NullFormatter

from curvadion.metering.picture import STYLE, write

Points: TypeAlias = Sequence[tuple[float, float]]

# Colour and marker; position of the name: index of a point, offset in points, alignment.
LOOKS = {
    "best synchronous": ("#0072B2", "o", 0, (9, -14), "right"),
    "Muon": ("#0072B2", "o", 0, (9, 12), "right"),
    "AdamW": ("#333333", "s", 0, (9, 12), "right"),
    "PowerSGD": ("#CC79A7", "P", 1, (9, 4), "left"),
    "DiLoCo, 2-bit codes": ("#009E73", "v", 0, (10, 4), "left"),
    "mean weights in codes": ("#4A9CC9", "D", 1, (6, 9), "left"),
    "Curvadion, coded gradients": ("#D55E00", "P", 0, (9, -1), "left"),
    "Curvadion": ("#D55E00", "*", 2, (0, -15), "center"),
}
SHOWN = {"131 thousand parameters": (1.42, 1.85), "half a million parameters": (1.215, 1.275)}


def draw(panels: Mapping[str, Mapping[str, Points]], path: Path) -> None:
    """Write losses over bytes by size and method: (share, loss), means over seeds."""
    around = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(1, 2, figsize=(9.6, 4.4), layout=around)
        for axes, (title, methods) in zip(grid, panels.items(), strict=True):
            axes.set_xscale("log")
            axes.set_ylim(*SHOWN[title])
            for method, points in methods.items():
                _line(axes, method, sorted(points))
            ticks = {0.0025: "0.25 %", 0.01: "1 %", 0.03: "3 %", 0.1: "10 %", 1.0: "100 %"}
            axes.set_xticks(list(ticks), list(ticks.values()))
            axes.xaxis.set_minor_formatter(NullFormatter())
            axes.tick_params(axis="x", which="minor", length=0)
            axes.set(title=title, xlabel="bytes sent, of AdamW with DDP", xlim=(0.0019, 1.5))
            axes.grid(color="#eeeeee")
            axes.set_axisbelow(True)
        grid[0].set_ylabel("held-out loss")
        figure.savefig(path, dpi=170)
        plt.close(figure)


def _line(axes: Axes, method: str, points: Points) -> None:
    """Draw a method's line, with its name beside one of its points."""
    colour, marker, at, offset, side = LOOKS[method]
    ours = method.startswith("Curvadion")
    size = 13 if marker == "*" else 6
    axes.plot(
        *zip(*points, strict=True), color=colour, marker=marker, ms=size, lw=2.5 if ours else 1.5
    )
    weight = "bold" if ours else "normal"
    name = method.removeprefix("Curvadion, ").replace("coded ", "coded\n")
    write(axes, name, points[at], offset, colour, ha=side, weight=weight)
    for share, loss in points:
        if loss > axes.get_ylim()[1]:
            top = (share, axes.get_ylim()[1])
            write(axes, f"{100 * share:.0f} %: {loss:.2f}", top, (-2, -8), colour, ha="right")
