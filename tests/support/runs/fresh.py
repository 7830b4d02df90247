"""Python programs in processes of their own, which find the package in this checkout.

said = fresh.python("-c", "import curvadion; print(curvadion.__version__)")
assert said.returncode == 0, said.stderr
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def start(*arguments, **environment):
    """``python *arguments``, as a subprocess.Popen."""
    paths = f"{ROOT}:{ROOT / 'kernels'}"
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths, **environment},
    )


def finish(process, timeout=110):
    """What it has done, as a subprocess.CompletedProcess."""
    with process:
        try:
            said = process.communicate(timeout=timeout)
        finally:
            process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, *said)


def python(*arguments, **environment):
    """What ``python *arguments`` does: a script or ``-c``."""
    return finish(start(*arguments, **environment))
