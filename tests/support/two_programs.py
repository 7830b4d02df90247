"""The same program as two processes, of which tests see how each ends."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def two_programs(program, folder, **inserted):
    """Start ``program`` twice, with the rank and a file for the rendezvous as its arguments.

    inserted: replaces the names in braces.
    """
    text, paths = textwrap.dedent(program).format(**inserted), f"{ROOT}:{ROOT / 'kernels'}"
    return [
        subprocess.Popen(
            [sys.executable, "-c", text, str(rank), str(folder / "store")],
            env={**os.environ, "PYTHONPATH": paths},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
