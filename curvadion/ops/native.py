"""Builds, loads and calls the compiled operations in csrc/, by ctypes.

torch.utils.cpp_extension builds them into a cache at their first use, which takes seconds.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from curvadion.ops.tensors import DTYPE_CODES, Tensors

PACKAGE = Path(__file__).resolve().parent.parent
# Backends must agree bitwise on codes; fused multiply-adds would round differently. Roots that
# might set errno would not be computed as vectors.
FLAGS = ["-O3", "-fopenmp", "-ffp-contract=off", "-fno-math-errno"]
CUDA_FLAGS = ["-O3"]
LONGEST_BUILD = 3600  # seconds, after which a build has ended or was killed
POINTER = ctypes.c_void_p
INT = ctypes.c_int64
Array = ctypes.Array[Any] | None  # None is a null pointer

logger = logging.getLogger("curvadion")


class Unavailable(RuntimeError):
    """A library does not exist and cannot be built."""


@lru_cache
def library(name: str) -> ctypes.CDLL:
    """The library "cpu" or "cuda", built if necessary.

    Raises:
        Unavailable: it does not exist and cannot be built, or it cannot be loaded.
    """
    folder = os.environ.get("CURVADION_CACHE") or Path.home() / ".cache" / "curvadion"
    path = Path(folder) / f"libcurvadion_{name}_{digest(name)}.so"
    try:
        if not path.exists():
            logger.info("building %s, once", path)
            path.parent.mkdir(0o700, parents=True, exist_ok=True)
            _build(name, path)
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise Unavailable(f"{path}: {error}. Delete it, or set CURVADION_CACHE") from error


def sources(name: str) -> list[Path]:
    """The sources in csrc/<name>, of the installed package or of a checkout."""
    for place in (PACKAGE, PACKAGE.parent):
        folder = place / "csrc" / name
        if folder.is_dir():
            return sorted(path for path in folder.iterdir() if path.suffix in (".cpp", ".cu"))
    raise Unavailable(f"the sources csrc/{name} are not installed")


def digest(name: str) -> str:
    """A hash of a library's sources, headers, flags and torch's version."""
    settings = repr((FLAGS, CUDA_FLAGS, torch.__version__))
    content = hashlib.sha256(settings.encode())
    folder = sources(name)[0].parent
    for path in sorted(folder.iterdir()):
        content.update(path.read_bytes())
    return content.hexdigest()[:16]


def _build(name: str, target: Path) -> None:
    """Build a library beside its place, and move it there when it is complete.

    The processes of a machine take turns, and find what the first has built.
    """
    prefix = f"curvadion_{name}_build_"
    with ExitStack() as stack:
        if _locked(stack, target.parent / f"curvadion_{name}.lock"):
            if target.exists():
                return
            _sweep(target.parent.glob(f"{prefix}*"))
        folder = tempfile.TemporaryDirectory(prefix=prefix, dir=target.parent)
        _compile(name, target, stack.enter_context(folder))


def _sweep(folders: Iterable[Path]) -> None:
    """Delete what builds that were killed have left."""
    for folder in folders:
        # A file system may lock for one machine only, and another one may be building.
        if time.time() - folder.stat().st_mtime > LONGEST_BUILD:
            shutil.rmtree(folder, ignore_errors=True)


def _locked(stack: ExitStack, path: Path) -> bool:
    """Whether a file is now locked, until the stack ends; not on every file system."""
    try:
        import fcntl

        file = stack.enter_context(path.open("w"))
        fcntl.flock(file, fcntl.LOCK_EX)
    except (ImportError, OSError):
        return False
    return True


def _compile(name: str, target: Path, folder: str) -> None:
    """Compile a library in a folder, and move it to its place."""
    from torch.utils import cpp_extension  # importing it takes long

    with _path_with_ninja():
        try:
            built: str = cpp_extension.load(
                f"curvadion_{name}",
                list(map(str, sources(name))),
                extra_cflags=FLAGS,
                extra_cuda_cflags=CUDA_FLAGS,
                extra_ldflags=["-fopenmp"],
                build_directory=folder,
                with_cuda=name == "cuda",
                is_python_module=False,
            )
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            lines = str(error).splitlines()
            reason = next((line.strip() for line in lines if "error" in line.lower()), error)
            raise Unavailable(f"building it failed: {reason}") from error
        os.replace(built, target)


@contextmanager
def _path_with_ninja() -> Iterator[None]:
    """Add the ninja of a virtual environment that is not active to PATH."""
    path = os.environ.get("PATH", "")
    os.environ["PATH"] = os.pathsep.join([path, sysconfig.get_path("scripts")])
    try:
        yield
    finally:
        os.environ["PATH"] = path


def declare(library: ctypes.CDLL, signatures: Mapping[str, list[Any]], result: Any) -> ctypes.CDLL:
    """Declare the types of functions of a library, and return it.

    Args:
        library: the library.
        signatures: the types of the arguments, by the function's name.
        result: the type of the result of each function; None for void.
    """
    for name, types in signatures.items():
        function = getattr(library, name)
        function.argtypes = types
        function.restype = result
    return library


def counted(X: Tensors) -> tuple[Array, ...]:
    """A list's sizes in elements, its addresses, and its dtypes as in ``DTYPE_CODES``."""
    return array(INT, (x.numel() for x in X)), *addressed(X)


def addressed(X: Tensors) -> tuple[Array, ...]:
    """A list's addresses, and its dtypes as in ``DTYPE_CODES``."""
    return addresses(X), array(ctypes.c_uint8, (DTYPE_CODES[x.dtype] for x in X))


def addresses(X: Tensors) -> Array:
    """A list's addresses."""
    return array(ctypes.c_uint64, (x.data_ptr() for x in X))


def array(kind: Any, numbers: Iterable[float]) -> Array:
    """An array of numbers of a C type; a null pointer for none."""
    values = list(numbers)
    if not values:
        return None
    c_array: ctypes.Array[Any] = (kind * len(values))(*values)
    return c_array
