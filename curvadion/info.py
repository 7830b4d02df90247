"""Reports what is installed and whether it works: ``python -m curvadion.info``.

Prints versions and backends, and compares the codes of each device with those of plain PyTorch.
The exit status is 0 if all works.
"""

from __future__ import annotations

import platform
from pathlib import Path

import torch
from torch import Tensor

import curvadion
from curvadion import ops
from curvadion.ops import codes


def main() -> None:
    """Print the report; raise if something does not work."""
    print(f"curvadion {curvadion.__version__} ({Path(curvadion.__file__).parent})")
    print(f"torch {torch.__version__} (CUDA {torch.version.cuda})")
    print(f"Python {platform.python_version()}, {platform.platform()}")
    print("Backends of the fused operations")
    for name in ops.BACKENDS:
        lacks = ops.lacking(name)
        print(f"  {name:6}  {'available' if lacks is None else f'not available: {lacks}'}")
    for kind in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        device = torch.device(kind)
        print(f"  tensors on {device} take {ops.backend_for(device)!r}", flush=True)
        _check_codes(device)
    print("Everything works.")


def _check_codes(device: torch.device) -> None:
    known = torch.sin(torch.arange(1000, dtype=torch.float32)).to(device)
    for bits in codes.BITS:
        with ops.use_backend("torch"):
            expected = _coded(known, bits)
        if not all(map(torch.equal, _coded(known, bits), expected)):
            raise RuntimeError(
                f"codes of {bits} bits on {device} differ from those of plain PyTorch: set "
                f"CURVADION_BACKEND=torch, and report this with the lines above"
            )


def _coded(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The codes of x, and their decoded values."""
    rows = x.new_empty(codes.blocks_of(len(x)), codes.block_bytes(bits), dtype=torch.uint8)
    ops.encode_difference_(rows, [x], bits=bits)
    stands_for = torch.empty_like(x)
    ops.decode_add_([stands_for], (), rows, bits)
    return rows, stands_for


if __name__ == "__main__":
    main()
