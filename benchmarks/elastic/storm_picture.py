"""A picture or an animation of a storm from its record; needs matplotlib.

    python -m benchmarks.elastic.storm_picture benchmarks/results/elastic/storm.json storm.png
    python -m benchmarks.elastic.storm_picture benchmarks/results/elastic/storm.json docs/storm.gif

The animation uncovers the picture from left to right. Above: the steps that the run has counted,
beside those of the run that is left alone. Below: a row for each replica, with its kills, freezes,
cuts and waits of 2 s or more; a line is an opening.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.animation import FuncAnimation, PillowWriter
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from curvadion.metering.picture import FAINT, PALETTE, STYLE

BLUE, RED, _, PINK, ORANGE, LIGHT, _ = PALETTE
COLOURS = {"freeze": ORANGE, "cut": PINK, "part": PINK}
MINUTE = 60.0
FRAMES = 60
FRAMES_A_SECOND = 6


def draw(undisturbed: dict[str, Any], storm: dict[str, Any], path: Path) -> None:
    """Write the picture of both runs' records, or the animation if the path ends in .gif."""
    with plt.rc_context(STYLE):
        figure, (above, below) = plt.subplots(
            2, 1, figsize=(10, 6.4), sharex=True, height_ratios=(1, 2.4), layout="constrained"
        )
        _steps(above, undisturbed, storm)
        _replicas(below, storm)
        if path.suffix == ".gif":
            _uncover(figure, (above, below), storm, path)
        else:
            figure.savefig(path, dpi=110)
        plt.close(figure)


def _uncover(figure: Figure, panels: Sequence[Axes], storm: dict[str, Any], path: Path) -> None:
    """Write the picture as an animation: time passes, and what is to come is covered.

    Args:
        figure: the whole picture.
        panels: its axes, all over the same time.
        storm: the record.
        path: of the GIF.
    """
    end = max(life["to"] for life in storm["lives"]) / MINUTE
    covers = [axes.axvspan(0.0, 1.1 * end, color="white", zorder=5) for axes in panels]
    title = figure.suptitle(" ")

    def at(frame: int) -> list[Any]:
        minute = end * (frame + 1) / FRAMES
        for cover in covers:
            cover.set_x(minute)
        openings = [o for o in storm["opening_events"] if o["at"] / MINUTE <= minute]
        members = openings[-1]["members"] if openings else storm["options"]["replicas"]
        title.set_text(f"minute {minute:.1f}: {members} replicas at the last opening")
        return [*covers, title]

    frames = FuncAnimation(figure, at, frames=FRAMES, blit=False)
    frames.save(path, writer=PillowWriter(fps=FRAMES_A_SECOND), dpi=70)


def _steps(axes: Axes, undisturbed: dict[str, Any], storm: dict[str, Any]) -> None:
    for name, record, colour in (("left alone", undisturbed, FAINT), ("storm", storm, BLUE)):
        openings = record["opening_events"]
        times = [opening["at"] / MINUTE for opening in openings]
        axes.plot(times, [opening["step"] for opening in openings], color=colour, label=name)
    axes.set(ylabel="steps of the run")
    axes.legend(frameon=False)


def _replicas(axes: Axes, storm: dict[str, Any]) -> None:
    for life in storm["lives"]:
        _bar(axes, life["replica"], life["from"], life["to"], BLUE)
    for wait in storm["waits"]:
        _bar(axes, wait["replica"], wait["from"], wait["to"], LIGHT)
    for fault in storm["fault_events"]:
        for replica in fault["replicas"]:
            if fault["kind"] == "kill":
                axes.plot(fault["at"] / MINUTE, replica, "x", color=RED, markersize=5)
            else:
                over = fault["at"] + fault["seconds"]
                _bar(axes, replica, fault["at"], over, COLOURS[fault["kind"]])
    for opening in storm["opening_events"]:
        axes.axvline(opening["at"] / MINUTE, color=FAINT, linewidth=0.5, zorder=0)
    axes.set(xlabel="minutes", ylabel="replica")
    entries = [
        Patch(color=BLUE, label="trains"),
        Patch(color=LIGHT, label="waits"),
        Line2D([], [], color=RED, marker="x", linestyle="", label="killed"),
        Patch(color=ORANGE, label="frozen"),
        Patch(color=PINK, label="cut off"),
        Line2D([], [], color=FAINT, linewidth=0.5, label="opening"),
    ]
    axes.legend(handles=entries, ncols=6, loc="upper center", bbox_to_anchor=(0.5, 1.12),
                frameon=False)  # fmt: skip


def _bar(axes: Axes, replica: int, begin: float, end: float, colour: str) -> None:
    """Draw a bar from one time to another in a replica's line.

    Args:
        axes: over minutes.
        replica: its line.
        begin: in seconds.
        end: in seconds.
        colour: of the bar.
    """
    axes.barh(replica, (end - begin) / MINUTE, 0.7, begin / MINUTE, color=colour)


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the record and the file that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("record", type=Path, help="of storm.py")
    parser.add_argument("picture", type=Path, help="a file of matplotlib's formats, or a .gif")
    options = parser.parse_args(arguments)
    undisturbed, storm = json.loads(options.record.read_text("utf-8"))["records"]
    draw(undisturbed, storm, options.picture)


if __name__ == "__main__":
    main()
