"""Builds, loads and calls the compiled operations in csrc/: plain C libraries, through ctypes.

torch.utils.cpp_extension builds them into a cache at their first use, which takes seconds.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from curvadion.ops.tensors import DTYPE_CODES, Lists, Numbers

HERE = Path(__file__).resolve().parent.parent  # the package
# Backends must agree bitwise on codes; fused multiply-adds would round differently.
FLAGS = ["-O3", "-fopenmp", "-ffp-contract=off"]
CUDA_FLAGS = ["-O3"]
POINTER = ctypes.c_void_p
INT = ctypes.c_int64

logger = logging.getLogger("curvadion")


class Unavailable(RuntimeError):
    """A library does not exist and cannot be built; the message says what is missing."""


@lru_cache
def library(name: str) -> ctypes.CDLL:
    """The library "cpu" or "cuda", or Unavailable; built if necessary."""
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
    """The sources in csrc/<name>, in the installed package or beside it in a checkout."""
    for folder in (HERE / "csrc" / name, HERE.parent / "csrc" / name):
        if folder.is_dir():
            return sorted(path for path in folder.iterdir() if path.suffix in (".cpp", ".cu"))
    raise Unavailable(f"the sources csrc/{name} are not installed")


def digest(name: str) -> str:
    """A library's name in the cache: of its sources, headers, flags and torch's version."""
    found = hashlib.sha256(repr((FLAGS, CUDA_FLAGS, torch.__version__)).encode())
    for path in sorted(sources(name)[0].parent.iterdir()):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def _build(name: str, target: Path) -> None:
    from torch.utils import cpp_extension

    with tempfile.TemporaryDirectory(dir=target.parent) as folder, _path_with_ninja():
        try:
            built: str = cpp_extension.load(
                f"curvadion_{name}",
                [str(path) for path in sources(name)],
                extra_cflags=FLAGS,
                extra_cuda_cflags=CUDA_FLAGS,
                extra_ldflags=["-fopenmp"],
                build_directory=folder,
                with_cuda=name == "cuda",
                is_python_module=False,
            )
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            lines = [line for line in str(error).splitlines() if "error" in line.lower()]
            reason = lines[0].strip() if lines else error
            raise Unavailable(f"building it failed: {reason}") from error
        os.replace(built, target)


@contextmanager
def _path_with_ninja() -> Iterator[None]:
    """Add the ninja of a virtual environment that is not active to PATH."""
    before = os.environ.get("PATH", "")
    os.environ["PATH"] = os.pathsep.join([before, sysconfig.get_path("scripts")])
    try:
        yield
    finally:
        os.environ["PATH"] = before


def declare(library: ctypes.CDLL, signatures: Mapping[str, list[Any]], result: Any) -> ctypes.CDLL:
    """Declare the types of arguments and results of a library's functions."""
    for name, types in signatures.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, result
    return library


def counted(X: Lists) -> tuple[ctypes.Array[Any], ...]:
    """A list's sizes, addresses and dtype codes, as three arrays."""
    return (ctypes.c_int64 * len(X))(*(x.numel() for x in X)), *addressed(X)


def addressed(X: Lists) -> tuple[ctypes.Array[Any], ...]:
    """A list's addresses and dtype codes, as two arrays."""
    codes = (ctypes.c_uint8 * len(X))(*(DTYPE_CODES[x.dtype] for x in X))
    return addresses(X), codes


def addresses(X: Lists) -> ctypes.Array[Any]:
    """A list's addresses."""
    return (ctypes.c_uint64 * len(X))(*(x.data_ptr() for x in X))


def floats(values: Numbers) -> ctypes.Array[Any]:
    """Numbers as float32."""
    return (ctypes.c_float * len(values))(*values)
