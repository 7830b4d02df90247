"""Pictures of held-out loss over bytes sent: of the convergence benchmark, and of the claim."""

import sys
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple, TypeAlias

import matplotlib.pyplot as plt
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, NullFormatter

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))

from picture import STYLE, write

Points: TypeAlias = Sequence[tuple[float, float]]

# Okabe and Ito's palette, which stays distinct for colour-blind readers, with a marker each.
LOOKS = {
    "adamw": ("AdamW, DDP", "#666666", "s"),
    "powersgd": ("AdamW, PowerSGD", "#CC79A7", "P"),
    "diloco_adamw": ("DiLoCo, AdamW inside", "#56B4E9", "v"),
    "diloco_dion": ("DiLoCo, Dion inside", "#009E73", "^"),
    "dion": ("Dion, every step", "#0072B2", "o"),
    "dion_nesterov": ("the same, looking ahead", "#0072B2", "p"),
    "averaged_weights": ("averaged weights, Dion", "#E69F00", "d"),
    "averaging": ("the same, of a quarter of the rank", "#E69F00", "D"),
    "published": ("CurvaDion as published", "#000000", "X"),
    "authors": ("CurvaDion, authors' code", "#888888", "X"),
    "ours": ("CurvaDion under a budget", "#D55E00", "*"),
    "ours_rmmc": ("the same, by RMMC", "#882255", "*"),
    "coded_gradients": ("gradients in codes", "#F0C020", "P"),
}
COLUMNS = 2  # of panels
# Colour and marker; position of the name: index of a point, offset in points, alignment.
CLAIMED = {
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


class Point(NamedTuple):
    """A method at one setting: share of AdamW-DDP's bytes, loss, deviation over seeds."""

    task: str
    method: str
    share: float
    loss: float
    deviation: float


def draw(points: Sequence[Point], path: Path) -> None:
    """Write the picture, one panel for each task."""
    tasks = list(dict.fromkeys(point.task for point in points)) or [""]
    columns = min(COLUMNS, len(tasks))
    rows = -(-len(tasks) // columns)
    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(
            rows,
            columns,
            figsize=(5.5 * columns + 2.5, 4.8 * rows),
            layout="constrained",
            squeeze=False,
        )
        legend: dict[str, Artist] = {}
        for axes, task in zip_longest(panels.flat, tasks):
            if task is None:
                axes.set_visible(False)
                continue
            draw_panel(axes, [point for point in points if point.task == task])
            axes.set(title=task, xlabel="bytes sent, as a share of AdamW with DDP")
            axes.set_ylabel("held-out loss, nats per token")
            legend |= {str(shown.get_label()): shown for shown in axes.containers}
        figure.legend(legend.values(), legend.keys(), loc="outside right center", frameon=False)
        figure.savefig(path, dpi=120)
        plt.close(figure)


def draw_panel(axes: Axes, points: Sequence[Point]) -> None:
    """Draw one line per method through its settings, with error bars over seeds."""
    for method, (label, colour, marker) in LOOKS.items():
        own = sorted((p for p in points if p.method == method), key=lambda point: point.share)
        if own:
            axes.errorbar(
                [point.share for point in own],
                [point.loss for point in own],
                yerr=[point.deviation for point in own],
                color=colour,
                marker=marker,
                label=label,
                ms=10 if marker == "*" else 6,
                lw=1.5,
                capsize=3,
            )
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g} %"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(color="#eeeeee")
    axes.set_axisbelow(True)


def draw_claim(panels: Mapping[str, Mapping[str, Points]], path: Path) -> None:
    """Write losses over bytes by size and method: (share, loss), means over seeds."""
    around = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(1, 2, figsize=(9.6, 4.4), layout=around)
        for axes, (title, methods) in zip(grid, panels.items(), strict=True):
            axes.set_xscale("log")
            axes.set_ylim(*SHOWN[title])
            for method, points in methods.items():
                _claimed(axes, method, sorted(points))
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


def _claimed(axes: Axes, method: str, points: Points) -> None:
    """Draw a method's line, with its name beside one of its points."""
    colour, marker, at, offset, side = CLAIMED[method]
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
