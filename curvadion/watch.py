"""Watches runs by their logs: ``python -m curvadion.watch run.jsonl --follow``.

Prints for each run what it has sent as a share of DDP's bytes, its loss, its openings and how long
it has waited. ``--follow`` does so again whenever a log has grown, until Ctrl-C. ``--out run.png``
also draws a picture, which needs matplotlib.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from curvadion.metering.run_logs import Points, Run, read_run

ENDINGS = (".png", ".svg", ".pdf")
WIDTH = 60  # characters of a curve
LEVELS = "▁▂▃▄▅▆▇█"
PLAIN_LEVELS = "_.-~=+*#"  # for terminals that have no such characters
CLEAR = "\033[H\033[J"


def main(arguments: Sequence[str] | None = None) -> int:
    """Show the runs; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m curvadion.watch", description=__doc__)
    parser.add_argument("logs", nargs="+", type=Path, help="JSON lines, one file per run")
    parser.add_argument("--follow", action="store_true", help="go on until Ctrl-C")
    parser.add_argument(
        "--every", type=float, default=2.0, help="seconds between looks at the logs (2)"
    )
    parser.add_argument("--out", type=Path, help=f"also draw a picture: {', '.join(ENDINGS)}")
    options = parser.parse_args(arguments)
    if options.out is not None and options.out.suffix.lower() not in ENDINGS:
        parser.error(f"--out {options.out} must end with one of {', '.join(ENDINGS)}")
    if options.every <= 0:
        parser.error(f"--every {options.every} must be above 0")
    if not options.follow:
        return show(options.logs, options.out)
    seen: list[int] | None = None
    try:
        while True:
            sizes = [path.stat().st_size if path.exists() else 0 for path in options.logs]
            if sizes != seen:
                seen = sizes
                if sys.stdout.isatty():
                    print(CLEAR, end="")
                show(options.logs, options.out)
            time.sleep(options.every)
    except KeyboardInterrupt:
        return 0


def show(logs: Sequence[Path], picture: Path | None) -> int:
    """Print the runs and draw their picture; return 1 if something is missing, else 0.

    Args:
        logs: of the runs.
        picture: file to write; None draws nothing.
    """
    runs = []
    status = 0
    for path in logs:
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                runs.append(read_run(path))
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            status = 1
            continue
        for warning in caught:
            print(f"note: {warning.message}", file=sys.stderr)
        print("\n".join(lines(runs[-1])), flush=True)
    if picture is None or not runs:
        return status
    try:
        # Imported here, so that runs are printed without matplotlib, too.
        from curvadion.metering.picture import draw

        picture.parent.mkdir(parents=True, exist_ok=True)
        draw(runs, picture)
    except ImportError as error:
        print(f"no picture ({error}): pip install matplotlib", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(picture)
    return status


def lines(run: Run) -> list[str]:
    """What the terminal shows of a run."""
    facts = [f"step {run.steps}"]
    losses = run.held_out or run.loss
    if losses:
        facts.append(f"loss {losses[-1][1]:.4g}")
    if run.shares:
        facts.append(f"{100 * run.shares[-1][1]:.3g} % of DDP's bytes")
    facts.append(f"{run.openings} openings")
    if run.skipped:
        facts.append(f"{run.skipped} skipped")
    if run.waited:
        facts.append(f"{run.waited[-1][1]:.3g} s waited")
    if run.step_seconds:
        facts.append(f"{run.step_seconds[-1][1]:.3g} s a step")
    shown = [f"{run.name}: {', '.join(facts)}"]
    if len(run.loss) > 1:
        shown.append(
            f"  loss      {curve(run.loss)}  {run.loss[0][1]:.4g} to {run.loss[-1][1]:.4g}"
        )
    if len(run.shares) > 1:
        highest = 100 * max(share for _, share in run.shares)
        shown.append(f"  sent      {curve(run.shares)}  at most {highest:.3g} %")
    if run.opened:
        opened = [step - run.start for step in run.opened]
        openings = curve(_frequencies(opened, run.length))
        shown.append(f"  openings  {openings}  the last at step {run.opened[-1]}")
    return shown


def _frequencies(opened: Sequence[int], steps: int) -> Points:
    """The shares of open steps in equal parts of a run, by the part's number.

    Args:
        opened: the steps at which the gate was open.
        steps: of the run, counted from 1.
    """
    parts = min(WIDTH, steps)
    counts = Counter((step - 1) * parts // steps for step in opened)
    # The first step of each part, counted from 0: rounded up.
    starts = [-(-b * steps // parts) for b in range(parts + 1)]
    return [(b, counts[b] / (starts[b + 1] - starts[b])) for b in range(parts)]


def curve(points: Points) -> str:
    """A line of characters that are the higher, the larger the mean of their points is.

    Args:
        points: (x, y) in order of x.
    """
    width = min(WIDTH, len(points))
    first, last = points[0][0], points[-1][0]
    bins: list[list[float]] = [[] for _ in range(width)]
    for x, y in points:
        place = (x - first) / (last - first) if last > first else 0.0
        bins[min(width - 1, int(place * width))].append(y)
    means = [sum(found) / len(found) for found in bins if found]
    low, high = min(means), max(means)
    levels = LEVELS if _has(LEVELS) else PLAIN_LEVELS
    scale = (len(levels) - 1) / (high - low) if high > low else 0.0
    return "".join(levels[round((mean - low) * scale)] for mean in means)


def _has(characters: str) -> bool:
    """Whether the terminal can show these characters."""
    try:
        characters.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
