"""benchmarks/no_sync.py prints what DDP does."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "no_sync.py"


def test_a_backward_alone_in_no_sync_is_still_reduced():
    printed = subprocess.run(
        [sys.executable, SCRIPT], check=True, stdout=subprocess.PIPE, text=True
    )
    assert printed.stdout.splitlines() == [
        "forward outside no_sync: [3.0, 3.0]",
        "forward inside no_sync: [2.0, 4.0]",
    ]
