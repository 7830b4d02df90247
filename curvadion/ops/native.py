"""Builds and loads the compiled operations in csrc/: plain C libraries, called through ctypes.

``python setup.py build_ext --inplace`` builds them into the package. Otherwise their first use
builds them into a cache, which takes seconds. They do not link torch or Python, so one library
serves every version of both. This module does not import torch, so setup.py can run it.

Beside each library is a file with its SHA-256, which is checked before the library is loaded:
loading a truncated library would end the process. The cache holds code that will be run, so it is
used only if it belongs to this user and nobody else can write to it, nor to the files in it.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent.parent  # the package
CACHE_FORMAT = 2  # a checksum beside the library, in a folder of mode 700
SOURCES, HEADERS = (".cpp", ".cu"), (".h", ".cuh")
CXX_FLAGS = ["-O3", "-std=c++17", "-fPIC", "-fopenmp", "-Wall", "-Wextra"]
# Of single sources. Backends agree bit for bit on codes: fused multiply-adds would round otherwise.
SOURCE_FLAGS = {"codes.cpp": ["-ffp-contract=off"]}
CUDA_TARGETS = ["80", "90", "100"]  # A100, H100 and B200
NVCC_FLAGS = ["-O3", "-std=c++17", "-Xcompiler=-fPIC", "-cudart=static", "--threads=4"]

logger = logging.getLogger("curvadion")


class Unavailable(RuntimeError):
    """A library does not exist and cannot be built; the message says what is missing."""


class Step(NamedTuple):
    """One command of a build, and the files it reads and writes."""

    output: Path
    inputs: list[Path]
    command: list[str]


@lru_cache
def library(name: str) -> ctypes.CDLL:
    """The library "cpu" or "cuda"; built if necessary.

    Raises:
        Unavailable: if it is not installed and cannot be built.
    """
    installed = HERE / file_name(name)
    if installed.is_file():
        try:
            return _load(name, installed)
        except Unavailable:
            if source_folder(name) is None:
                raise
    return _load(name, _cached(name))


def _cached(name: str) -> Path:
    """The library's file in the cache; built if there is none or it is damaged."""
    if sys.platform == "win32":
        raise Unavailable("compiled operations are not built on Windows")
    folder = cache_folder() / source_digest(name)
    _make_private(folder)
    cached = folder / file_name(name)
    for file in (cached, checksum_file(cached)):
        _check_own(file)
    if not is_whole(cached):
        with _lock(folder):
            if not is_whole(cached):
                logger.info("building %s, once", cached)
                build(name, cached)
    return cached


def file_name(name: str) -> str:
    """The library's file name."""
    return f"libcurvadion_{name}.so"


def checksum_file(library_path: Path) -> Path:
    """The file that holds a library's SHA-256, in the format of ``sha256sum``."""
    return library_path.with_name(library_path.name + ".sha256")


def is_whole(library_path: Path) -> bool:
    """Whether the library exists and has the checksum that was written when it was built."""
    try:
        content = library_path.read_bytes()
        written = checksum_file(library_path).read_bytes()
    except OSError:
        return False
    return written == _checksum(library_path.name, content)


def build(name: str, target: Path) -> None:
    """Compile a library into the file ``target``, with its checksum beside it.

    Uses ninja if there is one.

    Raises:
        Unavailable: if there are no sources or no compiler, if the compiler fails (the message has
            its first error), or if the target's folder cannot be written.
    """
    if source_folder(name) is None:
        raise Unavailable(f"the sources csrc/{name} are not installed")
    target = target.absolute()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _build(name, target)
    except OSError as error:
        raise Unavailable(f"cannot build {target} ({error})") from error


def _build(name: str, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        steps = build_steps(name, Path(folder))
        ninja = _ninja()
        if ninja is not None:
            _write_ninja_file(steps, Path(folder))
            _run([ninja, "-C", folder])
        else:
            for step in steps:
                _run(step.command)
        built = steps[-1].output
        if not built.exists():
            raise Unavailable(f"{steps[-1].command[0]} reported success and wrote no library")
        checksum = checksum_file(built)
        checksum.write_bytes(_checksum(built.name, built.read_bytes()))
        _load(name, built)  # a test, before other processes find it
        # Each file replaces the old one at once. A process that reads in between the two sees a
        # wrong checksum.
        for made, mode in ((built, 0o755), (checksum, 0o644)):
            made.chmod(mode)
            os.replace(made, target.with_name(made.name))


def _checksum(file: str, content: bytes) -> bytes:
    return f"{hashlib.sha256(content).hexdigest()}  {file}\n".encode()


def build_steps(name: str, folder: Path) -> list[Step]:
    """The commands that build a library in ``folder``. The last one writes the library."""
    if name == "cuda":
        nvcc = _nvcc()
        compiler, link = [nvcc], ["-cudart=static"]
        flags = [*NVCC_FLAGS, *_machine_code(nvcc)]
    else:
        compiler, flags, link = _cxx(), CXX_FLAGS, ["-fopenmp"]
    sources = [path for path in source_files(name) if path.suffix in SOURCES]
    headers = [path for path in source_files(name) if path.suffix in HEADERS]
    digest = f'-DCURVADION_SOURCES="{source_digest(name)}"'
    steps = []
    for source in sources:
        output = folder / f"{source.stem}.o"
        own_flags = SOURCE_FLAGS.get(source.name, [])
        command = [*compiler, *flags, *own_flags, digest, "-c", str(source), "-o", str(output)]
        steps.append(Step(output, [source, *headers], command))
    objects = [step.output for step in steps]
    library_path = folder / file_name(name)
    command = [*compiler, "-shared", *link, *map(str, objects), "-o", str(library_path)]
    return [*steps, Step(library_path, objects, command)]


def source_folder(name: str) -> Path | None:
    """The folder csrc/<name>, in the installed package or beside it in a checkout; else None."""
    for folder in (HERE / "csrc" / name, HERE.parent / "csrc" / name):
        if folder.is_dir():
            return folder
    return None


def source_files(name: str) -> list[Path]:
    """A library's sources and headers, in a fixed order; [] if there is no source folder."""
    folder = source_folder(name)
    files = [] if folder is None else folder.iterdir()
    return sorted(f for f in files if f.suffix in SOURCES + HEADERS)


@lru_cache
def source_digest(name: str) -> str:
    """A version of a library: 16 hexadecimal digits from its sources, flags and machine."""
    flags = CXX_FLAGS, SOURCE_FLAGS, NVCC_FLAGS, CUDA_TARGETS
    facts = (CACHE_FORMAT, platform.machine(), *flags)
    digest = hashlib.sha256(repr(facts).encode())
    for path in source_files(name):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def cache_folder() -> Path:
    """The folder for libraries that are built at their first use.

    CURVADION_CACHE, or else ``curvadion`` in the user's cache folder.

    Raises:
        Unavailable: if the user has no home folder.
    """
    chosen = os.environ.get("CURVADION_CACHE")
    if chosen:
        return Path(chosen)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "curvadion"
    try:
        return Path.home() / ".cache" / "curvadion"
    except RuntimeError as error:  # a user without an entry and HOME, as in some containers
        raise Unavailable(f"no cache folder ({error}): set CURVADION_CACHE") from error


def _load(name: str, path: Path) -> ctypes.CDLL:
    """Load a library after checking its checksum and that it was built from the sources here."""
    if not is_whole(path):
        raise Unavailable(f"{path} does not match {checksum_file(path).name}: delete both")
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise Unavailable(f"{path} does not load: {error}") from error
    if source_folder(name) is not None and _digest_in(loaded) != source_digest(name):
        raise Unavailable(f"{path} was built from other sources: delete it")
    return loaded


def _digest_in(loaded: ctypes.CDLL) -> str | None:
    try:
        sources = loaded.curvadion_sources
    except AttributeError:
        return None
    sources.restype = ctypes.c_char_p
    digest: bytes = sources()
    return digest.decode()


def _cxx() -> list[str]:
    """The C++ compiler's command: CXX, which may have arguments, or the first usual name found."""
    if chosen := shlex.split(os.environ.get("CXX", "")):
        if shutil.which(chosen[0]) is None:
            raise Unavailable(f"CXX={chosen[0]!r} names no program: correct it or unset it")
        return chosen
    for name in ("g++", "c++", "clang++"):
        if found := shutil.which(name):
            return [found]
    raise Unavailable("no C++ compiler was found: install g++ or set CXX")


def _nvcc() -> str:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    found = shutil.which("nvcc") or shutil.which("nvcc", path=f"{home}/bin")
    if found is None:
        raise Unavailable("nvcc was not found: install the CUDA toolkit or set CUDA_HOME")
    return found


def _machine_code(nvcc: str) -> list[str]:
    """Flags for the targets that this nvcc knows: machine code, and PTX for later GPUs."""
    listing = _output([nvcc, "--list-gpu-arch"])
    known = [t for t in CUDA_TARGETS if f"compute_{t}" in listing.stdout.split()]
    if not known:
        raise Unavailable(f"{nvcc} compiles for none of sm_{', sm_'.join(CUDA_TARGETS)}: update it")
    newest = f"compute_{known[-1]}"
    codes = [f"-gencode=arch=compute_{t},code=sm_{t}" for t in known]
    return [*codes, f"-gencode=arch={newest},code={newest}"]


def _ninja() -> str | None:
    # A virtual environment's ninja is on PATH only while the environment is activated.
    return shutil.which("ninja") or shutil.which("ninja", path=sysconfig.get_path("scripts"))


def _write_ninja_file(steps: list[Step], folder: Path) -> None:
    lines = ["rule run", "  command = $command", "  description = $out"]
    for step in steps:
        inputs = " ".join(_escape(str(path)) for path in step.inputs)
        lines.append(f"build {_escape(str(step.output))}: run {inputs}")
        lines.append("  command = " + " ".join(_quote(word) for word in step.command))
    (folder / "build.ninja").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _escape(path: str) -> str:
    return path.replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def _quote(word: str) -> str:
    quoted = "'" + word.replace("'", "'\\''") + "'"
    return quoted.replace("$", "$$")


def _output(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command and read its output as UTF-8, whatever the locale."""
    try:
        return subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", check=False
        )
    except OSError as error:  # not executable, or for another machine
        raise Unavailable(f"{command[0]} does not run: {error}") from error


def _run(command: list[str]) -> None:
    result = _output(command)
    if result.returncode:
        lines = (result.stdout + result.stderr).splitlines()
        # A line with "error", else one with "failed", else the first.
        words = ("error", "failed", "")
        errors = [line for word in words for line in lines if word in line.lower()]
        raise Unavailable(f"{command[0]} failed: {(errors or ['no output'])[0].strip()}")


def _make_private(folder: Path) -> None:
    """Create a folder of the cache for this user alone; check one that exists.

    Raises:
        Unavailable: if the folder or its parent belongs to another user, if others can write to it,
            or if it cannot be created.
    """
    try:
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        for path in reversed(missing):
            path.mkdir(0o700, exist_ok=True)
        _check_private(folder.parent, stat.S_IWOTH)
        _check_private(folder, stat.S_IWOTH | stat.S_IWGRP)
    except OSError as error:
        raise Unavailable(f"cannot write {folder} ({error}): set CURVADION_CACHE") from error


def _check_private(path: Path, writable: int) -> None:
    found = path.stat()
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid != os.getuid():
        raise Unavailable(
            f"the cache {path} belongs to user {found.st_uid}, who could put any code there: set "
            f"CURVADION_CACHE to a folder of user {os.getuid()}"
        )
    if mode & writable:
        raise Unavailable(
            f"others can write to the cache {path} (mode {mode:o}) and could "
            f"put any code there: delete it, or set CURVADION_CACHE to a folder of mode 700"
        )


def _check_own(file: Path) -> None:
    """Raise Unavailable unless a file of the cache, if it exists, is one that only its user writes.

    It is not opened before: a pipe would never answer.
    """
    try:
        found = file.lstat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise Unavailable(f"cannot read {file} ({error}): set CURVADION_CACHE") from error
    if not stat.S_ISREG(found.st_mode):
        raise Unavailable(f"{file} is not a regular file: delete it")
    if found.st_uid not in (0, os.getuid()):
        raise Unavailable(
            f"{file} belongs to user {found.st_uid}, who could put any code there: delete it"
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise Unavailable(
            f"others can write to {file} (mode {stat.S_IMODE(found.st_mode):o}) and could put any "
            f"code there: delete it"
        )


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Keep other processes of this machine from building the same library at the same time."""
    import fcntl

    path = folder / "lock"
    try:
        # Do not follow a link: it could lead to any file.
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise Unavailable(f"{path} is a symbolic link: delete it") from error
        raise Unavailable(f"cannot write {folder} ({error}): set CURVADION_CACHE") from error
    try:
        # Some network file systems have no locks. Then all build, and the last file stays.
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)
