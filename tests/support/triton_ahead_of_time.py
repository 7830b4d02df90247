"""Compiles every Triton kernel for GPUs that need not be here; prints one JSON record a variant.

Run as a script, in a process of its own: TRITON_INTERPRET must not be set.
"""

import json
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from curvadion_kernels import codes, columns, launch, local_step, low_rank, momentum, symmetric

F32, BF16 = triton.language.float32, triton.language.bfloat16


def elementwise(**more):
    return {"CHUNK": launch.CHUNK, "BLOCK": launch.BLOCK, "GUARDED": True, **more}


def momentum_of(M, G, has_g, write, has_out=False):
    given = {"M_DTYPE": M, "G_DTYPE": G, "OUT_DTYPE": M, "HAS_G": has_g, "WRITE": write}
    return momentum.momentum_kernel, elementwise(**given, HAS_OUT=has_out, SUMS=1024)


def local_step_of(dtype, **more):
    given = {f"{tensor}_DTYPE": dtype for tensor in "XGM"}
    return local_step.local_step_kernel, elementwise(**given, **more)


def low_rank_of(X, M, seeded, swapped, aligned=True):
    given = {"X_DTYPE": X, "M_DTYPE": M, "SEEDED": seeded, "SWAPPED": swapped, "ALIGNED": aligned}
    given |= {"HAS_M": True, "PRECISION": "tf32x3", "GUARDED": True}
    tiles = {"TILE_M": low_rank.TILE_M[aligned], "TILE_N": low_rank.TILE_N}
    return low_rank.low_rank_kernel, {**given, **tiles, "TILE_K": low_rank.TILE_K}


def coded(bits, **more):
    return {"BITS": bits, "CHUNK": launch.CHUNK, "ROWS": codes.ROWS, **more}


def symmetric_constants(tile_k, precision="tf32", *, gram=False):
    """Of products of row-major matrices, or of B^T B, whose left factor is a transposed view."""
    ones = ["a_row" if gram else "a_column", "b_column", "out_column"]
    given = {"PRECISION": precision, "TILE": symmetric.TILE, "TILE_K": tile_k}
    return {**given, "GROUP": symmetric.GROUP, **dict.fromkeys(ones, 1)}


# Kernel and its constants.
VARIANTS = {
    "norms": momentum_of(F32, F32, False, False),
    "momentum_norms": momentum_of(BF16, BF16, True, False),
    "accumulate_": momentum_of(F32, BF16, True, True),
    "look_ahead": momentum_of(F32, F32, True, True, True),
    "local_step_": local_step_of(F32, HAS_M=True, SEEDED=False),
    "local_step_ seeded": local_step_of(BF16, HAS_M=False, SEEDED=True),
    "column_sum_of_squares": (
        columns.column_sums_kernel,
        {"ROWS": columns.ROWS, "COLUMNS": columns.COLUMNS},
    ),
    "column_normalize_": (
        columns.normalize_kernel,
        {"ROWS": 64, "AT_ONCE": 8, "COLUMNS": 512},
    ),
    "low_rank_update_": low_rank_of(F32, F32, False, False),
    "low_rank_update_ swapped": low_rank_of(BF16, BF16, True, True),
    "low_rank_update_ unaligned": low_rank_of(BF16, F32, False, False, False),
    "encode_difference_": (
        codes.encode_difference_kernel,
        coded(2, X_DTYPE=F32, R_DTYPE=F32, HAS_A=True, HAS_R=True),
    ),
    "decode_": (codes.decode_kernel, coded(4, X_DTYPE=F32, HAS_A=False)),
    "decode_add_": (codes.decode_kernel, coded(2, X_DTYPE=BF16, HAS_A=True)),
    "average_codes_": (codes.average_codes_kernel, {"BITS": 3, "ROWS": codes.ROWS}),
}
for gram in (False, True):
    for dtype, *chosen in (
        ("bfloat16", symmetric.TILE_K[2]),
        ("float32", symmetric.TILE_K_PRECISE, "ieee"),
        ("float32 fast", symmetric.TILE_K[4]),
    ):
        VARIANTS[f"symmetric_product {dtype}{' of B^T B' if gram else ''}"] = (
            symmetric.symmetric_kernel,
            symmetric_constants(*chosen, gram=gram),
        )
# Launch options of the kernels of a module.
OPTIONS = {module.__name__: module.OPTIONS for module in (codes, low_rank, symmetric)}
POINTERS = {
    "table": "*i64", "numel": "*i64", "of": "*i32", "chunk": "*i32", "first": "*i32",
    "slots": "*i32", "tickets": "*i32", "tiles": "*i32", "partial": "*fp64", "norms": "*fp32",
    "Q": "*fp32", "R": "*fp32", "sums": "*fp64", "floors": "*fp64", "codes": "*u8",
    "received": "*u8", "owned": "*fp32", "own": "*fp32", "signs": "*fp32", "midpoints": "*fp32",
    "levels": "*fp32", "moves": "*i1",
}  # fmt: skip


def targets(kernel) -> tuple[int, ...]:
    """Only products of matrices are other instructions on each architecture."""
    products = kernel in (low_rank.low_rank_kernel, symmetric.symmetric_kernel)
    return (80, 90, 100) if products else (90,)


def resources(name: str, capability: int) -> dict[str, object]:
    kernel, constants = VARIANTS[name]
    pointers, signature, attributes = POINTERS, {}, {}
    symmetrical = kernel is symmetric.symmetric_kernel
    if symmetrical:
        dtype = "*fp32" if "float32" in name else "*bf16"
        pointers = {"A": dtype, "B": dtype, "out": dtype}
    for i, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument] = "constexpr"
            continue
        signature[argument] = pointers.get(argument, "i32")
        # Sizes and strides of the symmetric products that the kernel takes are multiples of 16.
        if signature[argument].startswith("*") or (symmetrical and argument != "rows"):
            attributes[(i,)] = [["tt.divisibility", 16]]
    values = {(kernel.arg_names.index(key),): value for key, value in constants.items()}
    compiled = triton.compile(
        ASTSource(kernel, signature, values, attributes),
        target=GPUTarget("cuda", capability, 32),
        options=OPTIONS.get(kernel.fn.__module__, {}),
    )
    ptx = compiled.asm["ptx"]
    target = re.search(r"\.target (\w+)", ptx)[1]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        said = subprocess.run(
            [get_ptxas(capability).path, "-v", f"--gpu-name={target}", source, "-o", "/dev/null"],
            capture_output=True,
            text=True,
            check=True,
        ).stderr
    return {
        "kernel": name,
        "target": f"sm_{capability}",
        "spilled_bytes": sum(int(n) for n in re.findall(r"(\d+) bytes spill", said)),
        "wide_loads": len(re.findall(r"ld\.global[\w.:]*\.v4\.b32|cp\.async[\w.]* .*0x10,", ptx)),
        "stores": len(re.findall(r"\bst\.global", ptx)),
        "wide_stores": len(re.findall(r"st\.global[\w.:]*\.v4\.b32", ptx)),
        "fma": len(re.findall(r"\bfma\.rn", ptx)),
        "mma": len(re.findall(r"\b(mma\.sync|wgmma\.mma_async|tcgen05\.mma)", ptx)),
    }


def main() -> None:
    jobs = [(name, target) for name, (kernel, _) in VARIANTS.items() for target in targets(kernel)]
    with ThreadPoolExecutor(2) as pool:
        for record in pool.map(lambda job: resources(*job), jobs):
            print(json.dumps(record), flush=True)


if __name__ == "__main__":
    sys.exit(main())
