"""Compiles csrc/cuda for GPUs that need not be here."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from curvadion.ops import native

TARGETS = (80, 90, 100)
KERNELS = ("momentum", "local_step")
THREADS = 256  # of a block, as csrc/cuda/batch.cuh says


def compiled(folder: Path) -> list[dict[str, object]]:
    """What ptxas says of each kernel; ``cubin`` is its machine code, a file in the folder."""
    records = []
    for kernel in KERNELS:
        (source,) = [path for path in native.sources("cuda") if path.stem == kernel]
        for target in TARGETS:
            cubin = folder / f"{kernel}.{target}.cubin"
            flags = [*native.CUDA_FLAGS, "-std=c++20", f"-arch=sm_{target}", "-Xptxas=-v"]
            command = ["nvcc", *flags, "-cubin", str(source), "-o", str(cubin)]
            result = subprocess.run(
                command, capture_output=True, text=True, check=True, timeout=100
            )
            said = result.stderr
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
