"""The picture of the claim: gaps with standard errors, and shakespeare_char over the steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.layout_engine import ConstrainedLayoutEngine

from benchmarks.losses.characters import REPORTED
from benchmarks.losses.claim import BASELINE, Row
from curvadion.metering.picture import STYLE

COLOURS = {"10 %": "#E69F00", "1 %": "#D55E00"}
CURVES = {
    "adamw": ("AdamW, every step", "#333333", "-"),
    "muon": ("Muon, every step", "#0072B2", "-"),
    "1 %": ("CurvaDion, 1 % of the bytes", "#D55E00", "-"),
    "10 %": ("CurvaDion, 10 %", "#E69F00", "-"),
    "adamw at 1 %": ("AdamW in Replicated, 1 %", "#333333", "--"),
}
BARS = 2  # standard errors on each side


def draw(
    tables: Mapping[str, Mapping[str, Row]],
    curves: Mapping[str, Sequence[Sequence[float]]],
    path: Path,
) -> None:
    """Write the picture.

    Args:
        tables: the claim's rows by cell, by the name of the text.
        curves: (step, validation loss) of shakespeare_char by method.
        path: of the picture.
    """
    around = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 4.2), layout=around)
        _gaps(left, tables)
        _curves(right, curves)
        figure.savefig(path, dpi=170)
        plt.close(figure)


def _gaps(axes: Axes, tables: Mapping[str, Mapping[str, Row]]) -> None:
    """Draw each text's gaps; a bar spans two standard errors on each side."""
    cells = [cell for cell in next(iter(tables.values())) if cell != BASELINE]
    for number, cell in enumerate(cells):
        for place, rows in enumerate(tables.values()):
            row = rows[cell]
            assert row.gap is not None
            assert row.gap_error is not None
            at = place + 0.16 * (number - (len(cells) - 1) / 2)
            label = f"{cell.removesuffix(' %')} % of the bytes" if place == 0 else None
            axes.errorbar(
                at, row.gap, BARS * row.gap_error, fmt="o", color=COLOURS[cell], capsize=4,
                label=label,
            )  # fmt: skip
    axes.axhline(0, color="#0072B2", lw=1.5)
    axes.set_xticks(range(len(tables)), list(tables))
    axes.set_xlim(-0.5, len(tables) - 0.5)
    axes.set_ylabel("loss above Muon at every step, %")
    axes.set_title("131 thousand parameters")
    axes.grid(axis="y", color="#eeeeee")
    axes.set_axisbelow(True)
    axes.legend(frameon=False)


def _curves(axes: Axes, curves: Mapping[str, Sequence[Sequence[float]]]) -> None:
    for method, (name, colour, style) in CURVES.items():
        if method in curves:
            steps, losses = zip(*curves[method], strict=True)
            axes.plot(steps, losses, style, color=colour, label=name)
    axes.axhline(REPORTED["gpu"], color="#999999", lw=1, ls=":", label="nanoGPT's AdamW, best")
    axes.set_ylim(1.40, 1.62)
    axes.set(title="shakespeare_char, 10.7 million", xlabel="step", ylabel="validation loss")
    axes.grid(color="#eeeeee")
    axes.set_axisbelow(True)
    axes.legend(fontsize=8, framealpha=1.0, edgecolor="white")
