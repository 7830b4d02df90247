"""Captured steps in Triton's interpreter, in a process of its own: see interpreted_captures.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 400  # at most, on busy cores


@pytest.mark.timeout(SECONDS)
def test_replayed_steps_have_the_bits_of_eager_ones():
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}",
        "TRITON_INTERPRET": "1",
        "CURVADION_BACKEND": "triton",
    }
    file = Path(__file__).with_name("interpreted_captures.py")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", str(file)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        timeout=SECONDS - 10,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert "9 passed" in result.stdout, result.stdout[-500:]
