"""Python programs in processes of their own, into which torch is imported already.

    said = fresh.python("-c", "import curvadion; print(curvadion.__version__)")
    assert said.returncode == 0, said.stderr

For programs that must not find this library, or what it integrates with, among the modules.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from pathlib import Path

import distributed


def python(*arguments, environment=None, cwd=None, timeout=110):
    """What ``python *arguments`` does, as a subprocess.CompletedProcess; a script or ``-c``."""
    program = Program(*arguments, environment=environment, cwd=cwd, to_the_end=False)
    return program.finish(timeout)


class Program:
    """``python *arguments``, which runs until it ends or is not waited for any longer.

    to_the_end: whether it takes down threads, modules and C++'s statics, which takes a while.
    """

    def __init__(self, *arguments, environment=None, cwd=None, to_the_end=True):
        self.arguments = arguments
        self._folder = tempfile.TemporaryDirectory()
        self._said = [Path(self._folder.name, name) for name in ("stdout", "stderr")]
        how = [*map(str, arguments)], dict(environment or os.environ), str(cwd or Path.cwd())
        self._process = distributed.of_forkserver(_live, (*how, *map(str, self._said), to_the_end))
        self._process.start()

    def finish(self, timeout=110):
        """Wait for the end: a subprocess.CompletedProcess, or subprocess.TimeoutExpired."""
        with self._folder:
            self._process.join(timeout)
            if self._process.exitcode is None:
                self._process.kill()
                self._process.join()
                raise subprocess.TimeoutExpired(self.arguments, timeout, *self._texts())
            return subprocess.CompletedProcess(
                self.arguments, self._process.exitcode, *self._texts()
            )

    def _texts(self):
        return [path.read_text("utf-8") if path.exists() else "" for path in self._said]


def _live(arguments, environment, cwd, out, err, to_the_end):
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
    if not to_the_end:
        _run(first, rest)
        return
    code = 0
    try:
        _run(first, rest)
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    # As Python itself ends, which a process of multiprocessing leaves out.
    threading._shutdown()
    ctypes.pythonapi.Py_Exit(code)


def _run(first, rest):
    if first == "-c":
        sys.argv = ["-c", *rest[1:]]
        # What the program has made lives until Python ends, as it would in its main module.
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = [first, *rest]
        runpy.run_path(first, run_name="__main__")


_usual = [path for path in sys.path if path.startswith(sys.base_prefix) or "site-packages" in path]
