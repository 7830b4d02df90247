"""Builds and loads the compiled operations in csrc/: plain C libraries, called through ctypes.

``python setup.py build_ext`` puts them beside this file. Where that has not been done, the first
use builds them into a cache, which takes seconds. They link neither torch nor Python: one library
serves every version of both. This module imports neither, so that setup.py can run it.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
SOURCES, HEADERS = (".cpp", ".cu"), (".h", ".cuh")
CXX_FLAGS = ["-O3", "-std=c++17", "-fPIC", "-fopenmp", "-Wall", "-Wextra"]
CUDA_TARGETS = ["80", "90", "100"]  # A100, H100 and B200
NVCC_FLAGS = ["-O3", "-std=c++17", "-Xcompiler=-fPIC", "-cudart=static", "--threads=4"]

logger = logging.getLogger("curvadion")


class Unavailable(RuntimeError):
    """A library is not there and cannot be built; the text says what is missing."""


class Step(NamedTuple):
    """One command of a build, and the files it reads and writes."""

    output: Path
    inputs: list[Path]
    command: list[str]


@lru_cache
def library(name: str) -> ctypes.CDLL:
    """The library "cpu" or "cuda", built if need be.

    Raises:
        Unavailable: if it is neither installed nor can be built.
    """
    installed = HERE / file_name(name)
    if installed.exists():
        if source_folder(name) is None:
            return _load(installed)
        with suppress(Unavailable):
            loaded = _load(installed)
            if _digest_in(loaded) == source_digest(name):
                return loaded
    cached = cache_folder() / source_digest(name) / file_name(name)
    if not cached.exists():
        with _lock(cached.parent):
            if not cached.exists():
                logger.info("building %s, once", cached)
                build(name, cached)
    return _load(cached)


def file_name(name: str) -> str:
    """What the library is called on disk."""
    return f"libcurvadion_{name}.so"


def build(name: str, target: Path) -> None:
    """Compile the library into the file ``target``, with ninja if there is one.

    Raises:
        Unavailable: without sources or a compiler, or with the compiler's first complaint.
    """
    if source_folder(name) is None:
        raise Unavailable(f"the sources csrc/{name} are not installed")
    target = target.absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        steps = build_steps(name, Path(folder))
        ninja = _ninja()
        if ninja is not None:
            _write_ninja_file(steps, Path(folder))
            _run([ninja, "-C", folder])
        else:
            for step in steps:
                _run(step.command)
        # Readers in other processes see the whole file or none.
        os.replace(steps[-1].output, target)


def build_steps(name: str, folder: Path) -> list[Step]:
    """The commands that build the library in ``folder``; the last one writes the library."""
    if name == "cuda":
        compiler, link = _nvcc(), ["-cudart=static"]
        flags = [*NVCC_FLAGS, *_machine_code(compiler)]
    else:
        compiler, flags, link = _cxx(), CXX_FLAGS, ["-fopenmp"]
    sources = [path for path in source_files(name) if path.suffix in SOURCES]
    headers = [path for path in source_files(name) if path.suffix in HEADERS]
    digest = f'-DCURVADION_SOURCES="{source_digest(name)}"'
    steps = []
    for source in sources:
        output = folder / f"{source.stem}.o"
        command = [compiler, *flags, digest, "-c", str(source), "-o", str(output)]
        steps.append(Step(output, [source, *headers], command))
    objects = [step.output for step in steps]
    library_path = folder / file_name(name)
    command = [compiler, "-shared", *link, *map(str, objects), "-o", str(library_path)]
    return [*steps, Step(library_path, objects, command)]


def source_folder(name: str) -> Path | None:
    """csrc/<name>: inside the installed package, or beside it in a checkout."""
    for folder in (HERE / "csrc" / name, HERE.parent / "csrc" / name):
        if folder.is_dir():
            return folder
    return None


def source_files(name: str) -> list[Path]:
    """Sources and headers of a library, in a fixed order; none without a source folder."""
    folder = source_folder(name)
    files = [] if folder is None else folder.iterdir()
    return sorted(f for f in files if f.suffix in SOURCES + HEADERS)


@lru_cache
def source_digest(name: str) -> str:
    """Names a library's version: 16 hexadecimal digits of its sources, flags and machine."""
    digest = hashlib.sha256(
        repr((platform.machine(), CXX_FLAGS, NVCC_FLAGS, CUDA_TARGETS)).encode()
    )
    for path in source_files(name):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def cache_folder() -> Path:
    """Where first-use builds go: CURVADION_CACHE, or curvadion in the user's cache folder."""
    chosen = os.environ.get("CURVADION_CACHE")
    if chosen:
        return Path(chosen)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "curvadion"
    try:
        return Path.home() / ".cache" / "curvadion"
    except RuntimeError as error:  # a user without an entry and HOME, as in some containers
        raise Unavailable(f"no cache folder ({error}): set CURVADION_CACHE") from error


def _load(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise Unavailable(f"{path} does not load: {error}") from error


def _digest_in(loaded: ctypes.CDLL) -> str | None:
    try:
        sources = loaded.curvadion_sources
    except AttributeError:
        return None
    sources.restype = ctypes.c_char_p
    digest: bytes = sources()
    return digest.decode()


def _cxx() -> str:
    for name in (os.environ.get("CXX"), "g++", "c++", "clang++"):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise Unavailable("no C++ compiler was found: install g++ or set CXX")


def _nvcc() -> str:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    found = shutil.which("nvcc") or shutil.which("nvcc", path=f"{home}/bin")
    if found is None:
        raise Unavailable("nvcc was not found: install the CUDA toolkit or set CUDA_HOME")
    return found


def _machine_code(nvcc: str) -> list[str]:
    """Flags for machine code of the targets that this nvcc knows, and PTX for what comes after."""
    listing = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=False)
    known = [t for t in CUDA_TARGETS if f"compute_{t}" in listing.stdout.split()]
    if not known:
        raise Unavailable(f"{nvcc} compiles for none of sm_{', sm_'.join(CUDA_TARGETS)}: update it")
    newest = f"compute_{known[-1]}"
    codes = [f"-gencode=arch=compute_{t},code=sm_{t}" for t in known]
    return [*codes, f"-gencode=arch={newest},code={newest}"]


def _ninja() -> str | None:
    # The ninja of a virtual environment is not on PATH unless that is activated.
    return shutil.which("ninja") or shutil.which("ninja", path=sysconfig.get_path("scripts"))


def _write_ninja_file(steps: list[Step], folder: Path) -> None:
    lines = ["rule run", "  command = $command", "  description = $out"]
    for step in steps:
        inputs = " ".join(_escape(str(path)) for path in step.inputs)
        lines.append(f"build {_escape(str(step.output))}: run {inputs}")
        lines.append("  command = " + " ".join(_quote(word) for word in step.command))
    (folder / "build.ninja").write_text("\n".join(lines) + "\n")


def _escape(path: str) -> str:
    return path.replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def _quote(word: str) -> str:
    quoted = "'" + word.replace("'", "'\\''") + "'"
    return quoted.replace("$", "$$")


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        said = (result.stdout + result.stderr).splitlines()
        complaints = [line for line in said if "error" in line.lower()] or said or ["no output"]
        raise Unavailable(f"{command[0]} failed: {complaints[0].strip()}")


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Keep the other processes of this machine from building the same library meanwhile."""
    if sys.platform == "win32":
        raise Unavailable("compiled operations are not built on Windows")
    import fcntl

    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / "lock", "w")  # noqa: SIM115
    except OSError as error:
        raise Unavailable(f"cannot write {folder} ({error}): set CURVADION_CACHE") from error
    with file:
        # Some network file systems know no locks: then all build, and the last one's file stays.
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
