"""Reports what is installed and whether it works: ``python -m curvadion.info``.

Compares the codes of each device with those of plain PyTorch. The exit status is 0 if all
works.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch
from torch import Tensor

import curvadion
from curvadion import ops
from curvadion.ops import code_format


def main() -> None:
    """Print the report; raise if something does not work."""
    print(f"curvadion {curvadion.__version__} ({Path(curvadion.__file__).parent})")
    print(f"torch {torch.__version__} (CUDA {torch.version.cuda})")
    print(f"Python {platform.python_version()}, {platform.platform()}")
    print(f"Backends of the fused operations, forced: {os.environ.get('CURVADION_BACKEND')}")
    for name in ops.BACKENDS:
        lacks = ops.lacking(name)
        status = "available" if lacks is None else f"not available: {lacks}"
        print(f"  {name:6}  {status}")
    kinds = ["cpu"]
    if torch.cuda.is_available():
        kinds.append("cuda")
    for kind in kinds:
        # Flushed, because a backend that crashes would take the line with it.
        print(f"  tensors on {kind} take {ops.backend_for(torch.device(kind))!r}", flush=True)
        for bits in code_format.BITS:
            with ops.use_backend("torch"):
                expected = _coded(kind, bits)
            if not all(map(torch.equal, _coded(kind, bits), expected)):
                raise RuntimeError(
                    f"{bits}-bit codes on {kind} differ from those of PyTorch: set "
                    f"CURVADION_BACKEND=torch, and report this with the lines above"
                )
    print("Everything works.")


def _coded(device: str, bits: int) -> tuple[Tensor, Tensor]:
    """Codes of known numbers, (4, block_bytes(bits)) uint8, and their values, (1000,) float32."""
    x = torch.sin(torch.arange(1000, dtype=torch.float32)).to(device)
    rows = x.new_empty(
        code_format.blocks_of(len(x)), code_format.block_bytes(bits), dtype=torch.uint8
    )
    ops.encode_difference_(rows, [x], bits=bits)
    decoded = torch.empty_like(x)
    ops.decode_add_([decoded], (), rows, bits)
    return rows, decoded


if __name__ == "__main__":
    main()
