"""Python programs in processes of their own, into which torch is imported already.

    said = fresh.python("-c", "import curvadion; print(curvadion.__version__)")
    assert said.returncode == 0, said.stderr

For programs that must not find this library, or what it integrates with, among the modules.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

import distributed


def python(*arguments, environment=None, cwd=None, timeout=110):
    """What ``python *arguments`` does, as a subprocess.CompletedProcess; a script or ``-c``."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "stdout"), Path(folder, "stderr")
        how = [*map(str, arguments)], dict(environment or os.environ), str(cwd or Path.cwd())
        process = distributed.of_forkserver(_live, (*how, str(out), str(err)))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(arguments, timeout, out.read_text(), err.read_text())
        return subprocess.CompletedProcess(
            arguments, process.exitcode, out.read_text("utf-8"), err.read_text("utf-8")
        )


def _live(arguments, environment, cwd, out, err):
    for number, file in ((1, out), (2, err)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    first, *rest = arguments
    # As python finds modules: beside the script, and where its environment says.
    known = environment.get("PYTHONPATH", "").split(os.pathsep)
    here = "" if first == "-c" else str(Path(first).resolve().parent)
    sys.path[:] = [here, *filter(None, known), *_usual]
    if first == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = arguments
        runpy.run_path(first, run_name="__main__")


_usual = [path for path in sys.path if path.startswith(sys.base_prefix) or "site-packages" in path]
