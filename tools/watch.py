"""Plot runs from their logs: ``python tools/watch.py run.jsonl --out run.png``.

It shows the loss over bytes and over steps, the drift of replicas, the momentum change with its
threshold, the steps at which the gate was open, and how long steps waited for late exchanges.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from run_logs import read_run

ENDINGS = (".png", ".svg", ".pdf")


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the picture; return the exit status."""
    parser = argparse.ArgumentParser(prog="python tools/watch.py", description=__doc__)
    parser.add_argument("logs", nargs="+", type=Path, help="JSON lines, one file per run")
    parser.add_argument(
        "--out", type=Path, default=Path("run.png"), help=f"the picture: {', '.join(ENDINGS)}"
    )
    options = parser.parse_args(arguments)
    if options.out.suffix.lower() not in ENDINGS:
        parser.error(f"--out {options.out} must end with one of {', '.join(ENDINGS)}")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            runs = [read_run(path) for path in options.logs]
        for warning in caught:
            print(f"note: {warning.message}", file=sys.stderr)
        # Imported here, so that a wrong file is reported even without matplotlib.
        import picture

        options.out.parent.mkdir(parents=True, exist_ok=True)
        picture.draw(runs, options.out)
    except ImportError as error:
        print(f"error: {error}: pip install matplotlib", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
