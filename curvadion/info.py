"""Reports what is installed and whether it works: ``python -m curvadion.info``.

Prints versions and backends, and tests the codes. The exit status is 0 if all works, else 1.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

import curvadion
from curvadion import ops
from curvadion.ops import codes


def main() -> int:
    """Print the report; return the exit status."""
    works = True
    for part in (_versions, _backends, _codes):
        try:
            for line in part():
                print(line, flush=True)
        except Exception as error:  # the report continues after any error
            print(f"  FAILED: {type(error).__name__}: {error}", flush=True)
            works = False
    print("Everything works." if works else "Something above does not work.")
    return 0 if works else 1


def _versions() -> Iterator[str]:
    yield "Versions"
    yield f"  curvadion {curvadion.__version__} ({Path(curvadion.__file__).parent})"
    yield f"  torch {torch.__version__} (CUDA {torch.version.cuda})"
    for name in ("triton", "numpy"):
        try:
            yield f"  {name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            yield f"  no {name}"
    yield f"  Python {platform.python_version()}, {platform.platform()}"


def _backends() -> Iterator[str]:
    yield "Backends of the fused operations"
    for name in ops.BACKENDS:
        lacks = ops.lacking(name)
        yield f"  {name:6}  {'available' if lacks is None else f'not available: {lacks}'}"
    forced = os.environ.get("CURVADION_BACKEND")
    said = f" (CURVADION_BACKEND={forced})" if forced else ""
    for device in _devices():
        yield f"  tensors on {device} take {ops.backend_for(device)!r}{said}"


def _devices() -> list[torch.device]:
    names = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    return [torch.device(name) for name in names]


def _codes() -> Iterator[str]:
    yield "Codes of a few bits"
    for device in _devices():
        known = torch.sin(torch.arange(1000, dtype=torch.float32)).to(device)
        for bits in codes.BITS:
            found = _coded(known, bits)
            with ops.use_backend("torch"):
                expected = _coded(known, bits)
            if not all(map(torch.equal, found, expected)):
                raise RuntimeError(
                    f"codes of {bits} bits on {device} differ from those of plain PyTorch: set "
                    f"CURVADION_BACKEND=torch to use plain PyTorch, and report this with the lines "
                    f"above"
                )
        yield f"  {ops.backend_for(device)!r} on {device} makes those of plain PyTorch"


def _coded(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The codes of x, and their decoded values."""
    rows = x.new_empty(codes.blocks_of(len(x)), codes.block_bytes(bits), dtype=torch.uint8)
    ops.encode_difference_(rows, [x], bits=bits)
    stands_for = torch.empty_like(x)
    ops.decode_add_([stands_for], (), rows, bits)
    return rows, stands_for


if __name__ == "__main__":
    sys.exit(main())
