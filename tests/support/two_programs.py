"""The same program as two processes, of which tests see how each ends."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import fresh

ROOT = Path(__file__).resolve().parents[2]


def two_programs(program, folder, **inserted):
    """Start ``program`` twice, with the rank and a file for the rendezvous as its arguments.

    inserted: replaces the names in braces.
    """
    text, paths = textwrap.dedent(program).format(**inserted), f"{ROOT}:{ROOT / 'kernels'}"
    environment = {**os.environ, "PYTHONPATH": paths}
    return [
        fresh.Program("-c", text, rank, folder / "store", environment=environment)
        for rank in range(2)
    ]
