"""Compiles every Triton kernel for GPUs that need not be here; prints one JSON record a variant.

    PYTHONPATH=tests:kernels python -m support.devices.triton_ahead_of_time

It needs a process of its own: TRITON_INTERPRET must not be set.
"""

import json
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

import torch
import triton
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from curvadion_kernels import (
    adamw,
    ahead,
    cholesky_qr,
    codes,
    columns,
    launch,
    local_step,
    low_rank,
    momentum,
    newton_schulz,
    rows,
    state_codes,
    symmetric,
)

F32, BF16 = triton.language.float32, triton.language.bfloat16
F16, I8 = triton.language.float16, triton.language.int8
# Reads from what ptxas has made how many registers a kernel takes.
CUOBJDUMP = f"{nvidia.__path__[0]}/bin/cuobjdump"


# ---------------------------------------------------------------- constants of kernels


def elementwise(**more):
    return {"CHUNK": launch.CHUNK, "BLOCK": launch.BLOCK, "GUARDED": True, **more}


def of_states(M):
    """Of kernels that take tensors and codes."""
    return {"CODED": M == I8}


def momentum_of(M, G, has_g, write):
    given = {"M_DTYPE": M, "G_DTYPE": G, "HAS_G": has_g, "WRITE": write}
    return momentum.momentum_kernel, elementwise(**given, SUMS=1024)


def lengths_of(M, G):
    given = {"M_DTYPE": M, "G_DTYPE": G, "SUMS": ahead.SUMS, **of_states(M)}
    return ahead.lengths_kernel, {"CHUNK": launch.CHUNK, "BLOCK": launch.BLOCK, **given}


def ahead_of(M, G, out, scaled=True, steps=True):
    given = {"M_DTYPE": M, "G_DTYPE": G, "OUT_DTYPE": out, "SCALED": scaled, "STEPS": steps}
    return ahead.ahead_kernel, elementwise(**given, **of_states(M), SEEDED=M == I8)


def local_step_of(dtype, **more):
    given = {f"{tensor}_DTYPE": dtype for tensor in "XGM"}
    return local_step.local_step_kernel, elementwise(**given, **more)


def adamw_of(X, G, M):
    given = {"X_DTYPE": X, "G_DTYPE": G, "M_DTYPE": M, "V_DTYPE": M}
    return adamw.adamw_kernel, elementwise(**given, **of_states(M), SEEDED=M == I8)


def low_rank_of(X, M, seeded, swapped, aligned=True):
    given = {"X_DTYPE": X, "M_DTYPE": M, "SEEDED": seeded, "SWAPPED": swapped, "ALIGNED": aligned}
    given |= {"HAS_M": True, "PRECISION": "tf32x3", "GUARDED": True}
    tiles = {"TILE_M": low_rank.TILE_M[aligned], "TILE_N": low_rank.TILE_N}
    return low_rank.low_rank_kernel, {**given, **tiles, "TILE_K": low_rank.TILE_K}


def coded(bits, **more):
    return {"BITS": bits, "CHUNK": launch.CHUNK, "ROWS": codes.ROWS, **more}


def symmetric_constants(tile_k, precision="tf32", *, gram=False, whole=False):
    """Of products of row-major matrices, or of B^T B, whose left factor is a transposed view."""
    ones = ["a_row" if gram else "a_column", "b_column", "out_column"]
    given = {"PRECISION": precision, "TILE": symmetric.TILE, "TILE_K": tile_k, "WHOLE": whole}
    return {**given, "GROUP": symmetric.GROUP, **dict.fromkeys(ones, 1)}


TILES_OF_HALVES = {
    "TILE": symmetric.TILE, "TILE_K": symmetric.TILE_K[2], "GROUP": symmetric.GROUP
}  # fmt: skip


def grams_of(dtype, *, whole=False):
    given = {"DTYPE": dtype, "STACKS": newton_schulz.STACKS, "WHOLE": whole}
    return newton_schulz.grams_kernel, {**given, **TILES_OF_HALVES}


def product_of(power=0, sums=None, *, polynomial=False, whole=False):
    given = {"POWER": power, "SUMS": sums, "HAS_C": polynomial, "WHOLE": whole}
    return newton_schulz.product_kernel, {**given, **TILES_OF_HALVES}


def dropped(**more):
    given = {"STATE_DTYPE": F32, "GUARDED": True, "PARTS": 32, "BLOCK": newton_schulz.CLEARED}
    return newton_schulz.drop_kernel, {**given, **more}


def floors_of(*, has_scale):
    given = {"ROUNDOFF": 2.0**-21, "LEAST": 2.0**-116, "HAS_SCALE": has_scale, "COLUMNS": 256}
    return cholesky_qr.floors_kernel, {**given, "HAS_ERROR": has_scale}


def unit_of(*, first):
    given = {"HAS_FLOOR": first, "ORDERED": not first, "ROWS": 8, "COLUMNS": 256}
    return cholesky_qr.unit_kernel, given


def factor_of(dtype, rows, *, first):
    given = {"DTYPE": dtype, "ROUNDOFF": 2.0**-21, "EPS": 2.0**-23, "FIRST": first}
    tiles = {"ROWS": rows, "WIDTH": cholesky_qr.WIDTH, "COLUMNS": 256}
    return cholesky_qr.factor_kernel, {**given, **tiles}


# ---------------------------------------------------------------- the variants

# Kernel and its constants.
VARIANTS = {
    "norms": momentum_of(F32, F32, False, False),
    "momentum_norms": momentum_of(BF16, BF16, True, False),
    "accumulate_": momentum_of(F32, BF16, True, True),
    "lengths": lengths_of(F32, F32),
    "lengths narrow": lengths_of(BF16, BF16),
    "ahead_": ahead_of(F32, F32, F16),
    "ahead_ narrow": ahead_of(BF16, BF16, F16),
    "ahead_ mixed": ahead_of(F32, BF16, BF16),
    "ahead_ unscaled": ahead_of(F32, F32, F32, scaled=False),
    "ahead_ that only scales": ahead_of(F32, F32, F16, steps=False),
    "lengths of codes": lengths_of(I8, F32),
    "ahead_ of codes": ahead_of(I8, F32, F16),
    "verdict": (
        ahead.verdict_kernel,
        {"HAS_SIGNAL": True, "HAS_OWNER": True, "FIRST": True, "SUMS": ahead.SUMS},
    ),
    "heeded": (ahead.heeded_kernel, {}),
    "local_step_": local_step_of(F32, HAS_M=True, SEEDED=False),
    "local_step_ seeded": local_step_of(BF16, HAS_M=False, SEEDED=True),
    "row_sums": (rows.row_sums_kernel, {"DTYPE": F32, "POWER": 1, **rows.TILES}),
    "row_sums narrow": (rows.row_sums_kernel, {"DTYPE": F16, "POWER": 2, **rows.TILES}),
    "second_moments_": (rows.second_moments_kernel, {"GUARDED": True, "BLOCK": rows.BLOCK}),
    "rescaled_rows": (
        rows.rescaled_rows_kernel,
        {"DTYPE": F32, "LARGEST": torch.finfo(torch.float32).max, **rows.TILES},
    ),
    "rescaled_rows narrow": (
        rows.rescaled_rows_kernel,
        {"DTYPE": F16, "LARGEST": torch.finfo(torch.float16).max, **rows.TILES},
    ),
    "scale_rows_": (rows.scale_rows_kernel, {"DTYPE": F32, "GUARDED": True, **rows.TILES}),
    "scale_rows_ narrow": (
        rows.scale_rows_kernel,
        {"DTYPE": BF16, "GUARDED": True, **rows.TILES},
    ),
    "adamw_": adamw_of(F32, F32, F32),
    "adamw_ narrow": adamw_of(BF16, F16, BF16),
    "adamw_ of codes": adamw_of(F32, F32, I8),
    "take_columns": (rows.take_rows_kernel, {"DTYPE": F32, **rows.TILES}),
    "put_columns": (
        rows.put_rows_kernel,
        {"DTYPE": F16, "AT_A_TIME": rows.AT_A_TIME, **rows.TILES},
    ),
    "column_sum_of_squares": (
        columns.column_sums_kernel,
        {"ROWS": columns.ROWS, "COLUMNS": columns.COLUMNS},
    ),
    "column_normalize_": (
        columns.normalize_kernel,
        {"ROWS": 64, "AT_ONCE": 8, "COLUMNS": 512},
    ),
    "column_floors": floors_of(has_scale=True),
    "column_floors of products": floors_of(has_scale=False),
    "factor of Cholesky QR: first unit": unit_of(first=True),
    "factor of Cholesky QR: second unit": unit_of(first=False),
    "factor of Cholesky QR: drop_columns": (
        cholesky_qr.drop_columns_kernel,
        {"ROWS": 8, "COLUMNS": 256},
    ),
    "factor of Cholesky QR: first": factor_of(F32, 64, first=True),
    "factor of Cholesky QR: second": factor_of(F32, 8, first=False),
    "factor of Cholesky QR: second, float64": factor_of(triton.language.float64, 8, first=False),
    "complete_": (
        cholesky_qr.complete_kernel,
        {"DTYPE": F32, "CHUNK": launch.CHUNK, "BLOCK": launch.BLOCK},
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
    "states encoded": (
        state_codes.encode_states_kernel,
        {"ROOTS": True, "SEEDED": True, "CHUNK": launch.CHUNK, "ROWS": state_codes.ROWS},
    ),
    "states decoded": (
        state_codes.decode_states_kernel,
        {"ROOTS": True, "CHUNK": launch.CHUNK, "ROWS": state_codes.ROWS},
    ),
    "average_codes_": (codes.average_codes_kernel, {"UP": 1, "DOWN": 2, "ROWS": codes.ROWS}),
}
VARIANTS |= {
    "first_factor of inverse_root": (
        newton_schulz.first_factor_kernel,
        {"PARTS": 32, "CHUNK": newton_schulz.CHUNK, "BLOCK": newton_schulz.BLOCK},
    ),
    "drop_unusable_": dropped(BOUNDED=True, REMEMBERS=True),
    "drop_unusable_ by check": dropped(BOUNDED=False, REMEMBERS=False),
}
# Of each kernel of products the variants that have most to do, in every precision.
CHOSEN_PRODUCTS = (
    "low_rank_update_ swapped",
    "grams float16",
    "inverse_root polynomial by traces",
    "inverse_root polynomial of bfloat16",
    "symmetric_product bfloat16",
    "symmetric_product float32",
    "symmetric_product float32 fast of B^T B",
)
for whole in (False, True):
    products = {
        "grams float16": grams_of(F16, whole=whole),
        "inverse_root square": product_of(2, "squares", whole=whole),
        "inverse_root polynomial": product_of(polynomial=True, whole=whole),
        "inverse_root polynomial by traces": product_of(2, polynomial=True, whole=whole),
        "inverse_root polynomial of bfloat16": product_of(2, polynomial=True, whole=whole),
        "inverse_root polynomial alone": product_of(0, "finite", polynomial=True, whole=whole),
        "inverse_root half": product_of(1, whole=whole),
        "inverse_root product": product_of(whole=whole),
        "inverse_root last": product_of(0.5, "finite", whole=whole),
    }
    for gram in (False, True):
        for dtype, *chosen in (
            ("bfloat16", symmetric.TILE_K[2]),
            ("float32", symmetric.TILE_K_PRECISE, "ieee"),
            ("float32 fast", symmetric.TILE_K[4]),
        ):
            products[f"symmetric_product {dtype}{' of B^T B' if gram else ''}"] = (
                symmetric.symmetric_kernel,
                symmetric_constants(*chosen, gram=gram, whole=whole),
            )
    if whole:  # the same products without masks, which take registers
        VARIANTS |= {f"{n} in whole tiles": products[n] for n in CHOSEN_PRODUCTS if n in products}
    else:
        VARIANTS |= products


# ---------------------------------------------------------------- arguments, options, targets

# Launch options of the kernels of a module.
OPTIONS = {
    module.__name__: module.OPTIONS for module in (adamw, codes, low_rank, state_codes, symmetric)
}
POINTERS = {
    "table": "*i64", "numel": "*i64", "of": "*i32", "chunk": "*i32", "first": "*i32",
    "slots": "*i32", "tickets": "*i32", "tiles": "*i32", "partial": "*fp64", "norms": "*fp32",
    "partial_gradients": "*fp64",
    "Q": "*fp32", "R": "*fp32", "sums": "*fp64", "floors": "*fp64", "codes": "*u8",
    "received": "*u8", "owned": "*fp32", "own": "*fp32", "signs": "*fp32", "midpoints": "*fp32",
    "levels": "*fp32", "up_levels": "*fp32", "down_levels": "*fp32",
    "moves": "*i1", "lengths": "*fp32", "exponents": "*fp32", "traces": "*fp32",
    "signal": "*fp32", "owner": "*i64", "word": "*i64", "words": "*i64", "largest_norm": "fp32",
    "sizes": "*i64", "matrix": "*i32", "energies": "*fp32",
}  # fmt: skip
# Those of the kernels of Newton-Schulz iterations, in which some names stand for others.
ITERATED = {
    **dict.fromkeys(("A", "B", "C", "G", "S", "Z", "out"), "*fp16"),
    **dict.fromkeys(("sums", "scales", "squares", "trace", "bound", "check"), "*fp32"),
    **dict.fromkeys(("alpha", "beta", "gamma", "root_n", "margin", "a", "b", "c"), "fp32"),
    **{"tiles": "i32", "table": "*i64", "exponents": "*fp32", "moves": "*i1"},
}
# Those of the kernels of Cholesky QR.
FACTORED = {
    **{
        name: "*fp64"
        for name in (
            "squares", "scale", "error", "lengths", "floors", "gram", "unit", "least", "lower",
            "identity", "inverse", "before", "longest",
        )
    },
    **dict.fromkeys(("dependent", "kept", "replaced"), "*i1"),
    **{"table": "*i64", "numel": "*i64", "of": "*i32", "chunk": "*i32", "W": "*fp32"},
}  # fmt: skip


PRODUCTS = [low_rank.low_rank_kernel, symmetric.symmetric_kernel]
PRODUCTS += [newton_schulz.product_kernel, newton_schulz.grams_kernel]


def targets(name: str) -> tuple[int, ...]:
    """Only products of matrices are other instructions on each architecture."""
    return (80, 90, 100) if name in CHOSEN_PRODUCTS else (90,)


def options(kernel, capability) -> dict[str, int]:
    if kernel in PRODUCTS and kernel.fn.__module__ == newton_schulz.__name__:
        return newton_schulz.options_of(capability)
    return OPTIONS.get(kernel.fn.__module__, {})


# ---------------------------------------------------------------- compiling


def resources(name: str, capability: int) -> dict[str, object]:
    kernel, constants = VARIANTS[name]
    pointers, signature, attributes = POINTERS, {}, {}
    symmetrical = kernel is symmetric.symmetric_kernel
    if symmetrical:
        dtype = "*fp32" if "float32" in name else "*bf16"
        pointers = {"A": dtype, "B": dtype, "out": dtype}
    iterated = kernel.fn.__module__ == newton_schulz.__name__
    if iterated:
        halves = "*bf16" if "bfloat16" in name else "*fp16"
        pointers = {key: halves if t == "*fp16" else t for key, t in ITERATED.items()}
    if kernel.fn.__module__ == cholesky_qr.__name__:
        pointers = {**FACTORED, "W": "*fp64"} if "float64" in name else FACTORED
    for i, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument] = "constexpr"
            continue
        signature[argument] = pointers.get(argument, "i32")
        # Sizes and strides of the symmetric products that the kernel takes are multiples of 16.
        sizes = (symmetrical and argument != "rows") or (iterated and argument in ("n", "elements"))
        if signature[argument].startswith("*") or sizes:
            attributes[(i,)] = [["tt.divisibility", 16]]
    values = {(kernel.arg_names.index(key),): value for key, value in constants.items()}
    compiled = triton.compile(
        ASTSource(kernel, signature, values, attributes),
        target=GPUTarget("cuda", capability, 32),
        options=options(kernel, capability),
    )
    ptx = compiled.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        said = subprocess.run(
            [CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return {
        "kernel": name,
        "target": f"sm_{capability}",
        "registers": int(re.search(r"\bREG:(\d+)", said)[1]),
        # Registers are spilled to the stack.
        "stack_bytes": int(re.search(r"\bSTACK:(\d+)", said)[1]),
        "wide_loads": len(re.findall(r"ld\.global[\w.:]*\.v4\.b32|cp\.async[\w.]* .*0x10,", ptx)),
        "stores": len(re.findall(r"\bst\.global", ptx)),
        "wide_stores": len(re.findall(r"st\.global[\w.:]*\.v4\.b32", ptx)),
        "fma": len(re.findall(r"\bfma\.rn", ptx)),
        "mma": len(re.findall(r"\b(mma\.sync|wgmma\.mma_async|tcgen05\.mma)", ptx)),
    }


def main() -> None:
    jobs = [(name, target) for name in VARIANTS for target in targets(name)]
    with ThreadPoolExecutor(2) as pool:
        for record in pool.map(lambda job: resources(*job), jobs):
            print(json.dumps(record), flush=True)


if __name__ == "__main__":
    sys.exit(main())
