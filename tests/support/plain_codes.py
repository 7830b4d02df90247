"""Codes of a few bits for a vector of whole blocks."""

from __future__ import annotations

import torch

from curvadion import ops
from curvadion.ops.codes import BLOCK, block_bytes


def encode(x, bits):
    """(k * BLOCK,) float32 -> (k, block_bytes(bits)) uint8."""
    codes = x.new_empty(len(x) // BLOCK, block_bytes(bits), dtype=torch.uint8)
    ops.encode_difference_(codes, [x], bits=bits)
    return codes


def decode(codes, bits):
    """(k, block_bytes(bits)) uint8 -> (k * BLOCK,) float32."""
    x = codes.new_empty(len(codes) * BLOCK, dtype=torch.float32)
    ops.decode_add_([x], (), codes, bits)
    return x
