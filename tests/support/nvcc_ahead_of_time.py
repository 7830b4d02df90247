"""Compiles csrc/cuda for GPUs that need not be here; prints one JSON record a kernel and target."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from curvadion.ops import native

KERNELS = ("momentum", "local_step")
THREADS = 256  # of a block, as csrc/cuda/batch.cuh says


def compiled(folder: Path) -> list[dict[str, object]]:
    """What ptxas says of each kernel; ``cubin`` is its machine code, a file in the folder."""
    records = []
    for kernel in KERNELS:
        source = native.source_folder("cuda") / f"{kernel}.cu"
        for target in native.CUDA_TARGETS:
            cubin = folder / f"{kernel}.{target}.cubin"
            said = subprocess.run(
                [native._nvcc(), *native.NVCC_FLAGS, f"-arch=sm_{target}", "-Xptxas=-v", "-cubin",
                 source, "-o", cubin],
                capture_output=True, text=True, check=True, timeout=100,
            ).stderr  # fmt: skip
            records.append(
                {
                    "kernel": kernel,
                    "target": f"sm_{target}",
                    "threads": THREADS,
                    "registers": int(re.search(r"Used (\d+) registers", said)[1]),
                    "spilled_bytes": sum(map(int, re.findall(r"(\d+) bytes spill", said))),
                    "stack_bytes": sum(map(int, re.findall(r"(\d+) bytes stack frame", said))),
                    "cubin": str(cubin),
                }
            )
    return records


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for record in compiled(Path(folder)):
            del record["cubin"]
            print(json.dumps(record))


if __name__ == "__main__":
    sys.exit(main())
