"""Python programs in processes of their own, which find the package in this checkout.

said = fresh.python("-c", "import curvadion; print(curvadion.__version__)")
assert said.returncode == 0, said.stderr
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from support.runs import distributed

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


def forked(code, **environment):
    """What code writes in a process that has imported torch already, and imports curvadion anew."""
    with tempfile.NamedTemporaryFile() as written:
        process = distributed.of_forkserver(_execute, (code, environment, written.name))
        process.start()
        process.join(100)
        process.kill()
        said = Path(written.name).read_text("utf-8")
    assert process.exitcode == 0, said
    return said


def _execute(code, environment, path):
    os.environ.update(environment)
    with open(path, "w") as written:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(written.fileno(), stream.fileno())
    for name in [name for name in sys.modules if name.startswith("curvadion")]:
        del sys.modules[name]
    exec(code, {"__name__": "__main__"})
