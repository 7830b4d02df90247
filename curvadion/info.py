"""What is installed and whether it works: ``python -m curvadion.info``.

Prints versions and backends, and encodes and decodes known numbers. The exit status is 0 if all of
this works, else 1.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

import curvadion
from curvadion import ops
from curvadion.ops import codes, native

CSRC = ("cpu", "cuda")  # backends that are compiled


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m curvadion.info", description=__doc__)
    parser.parse_args(arguments)
    works = True
    for title, lines in (
        ("Versions", _versions),
        ("Backends of the fused operations", _backends),
        ("Codes of a few bits", _codes),
    ):
        print(title, flush=True)
        works &= _print(lines)
    print("Everything works." if works else "Something above does not work.")
    return 0 if works else 1


def _print(lines: Callable[[], Iterator[str]]) -> bool:
    """Print lines with an indent; False if one could not be made, whose error is printed."""
    try:
        for line in lines():
            print(f"  {line}", flush=True)
    except Exception as error:  # a report goes on after any
        print(f"  FAILED: {type(error).__name__}: {error}", flush=True)
        return False
    return True


# ---------------------------------------------------------------- what there is


def _versions() -> Iterator[str]:
    yield f"curvadion {curvadion.__version__} ({Path(curvadion.__file__).parent})"
    yield f"torch {torch.__version__}, {_version('triton')}, {_version('numpy')}"
    yield f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA in this build of torch"
    yield f"Python {platform.python_version()}, {platform.platform()}"


def _version(name: str) -> str:
    try:
        return f"{name} {importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        return f"no {name}"


def _backends() -> Iterator[str]:
    width = max(map(len, ops.BACKENDS))
    for name in ops.BACKENDS:
        lacks = ops.lacking(name)
        state = "available" if lacks is None else f"not available: {lacks}"
        if lacks is None and name in CSRC:
            state += f" (compiled at its first use, in {native.cache_folder()})"
        yield f"{name:{width}}  {state}"
    forced = os.environ.get("CURVADION_BACKEND")
    for device in _devices():
        said = f" (CURVADION_BACKEND={forced})" if forced else ""
        yield f"tensors on {device} take {ops.backend_for(device)!r}{said}"
    if not torch.cuda.is_available():
        yield "there is no CUDA device"


def _devices() -> list[torch.device]:
    names = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    return [torch.device(name) for name in names]


# ---------------------------------------------------------------- codes


def _codes() -> Iterator[str]:
    for device in _devices():
        known = torch.sin(torch.arange(1000, dtype=torch.float32)).to(device)
        for bits in codes.BITS:
            made, stands = _coded(known, bits)
            with ops.use_backend("torch"):
                expected, stands_for = _coded(known, bits)
            if not torch.equal(made, expected) or not torch.equal(stands, stands_for):
                raise RuntimeError(
                    f"codes of {bits} bits on {device} differ from those of plain PyTorch: force "
                    f"it with CURVADION_BACKEND=torch, and report this with the lines above"
                )
        name = ops.backend_for(device)
        yield (
            f"1000 numbers in {', '.join(map(str, codes.BITS))} bits on {device}: {name!r} makes "
            f"the same bytes and numbers as plain PyTorch"
        )


def _coded(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The codes of x, and what they stand for."""
    rows = torch.zeros(
        (codes.blocks_of(x.numel()), codes.block_bytes(bits)), dtype=torch.uint8, device=x.device
    )
    ops.encode_difference_(rows, [x], bits=bits)
    stands_for = torch.empty_like(x)
    ops.decode_([stands_for], rows, bits)
    return rows, stands_for


if __name__ == "__main__":
    sys.exit(main())
