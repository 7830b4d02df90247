"""The picture of train_processes.py: held-out loss over bytes sent, by method."""

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter

from curvadion.metering.picture import STYLE

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
    others = dict.fromkeys(p.method for p in points if p.method not in LOOKS)
    looks = LOOKS | {method: (method, "#999999", ".") for method in others}
    for method, (label, colour, marker) in looks.items():
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
