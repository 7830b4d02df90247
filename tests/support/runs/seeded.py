"""Weights and gradients that their shapes, steps and replicas fix."""

from __future__ import annotations

import os
import zlib

import torch

OFFSET = "CURVADION_SEED_OFFSET"  # what `make headroom` adds to every seed, for other inputs


def seeded(*key):
    return torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))


def random(*key, shape):
    return torch.randn(shape, generator=seeded(*key))


def half_common(name, shape, step, replica):
    """A gradient of which one half is common to the replicas."""
    return random("all", name, step, shape=shape) + random("own", name, step, replica, shape=shape)


def weights(shape, seed=0):
    return torch.randn(shape, generator=seeded("X", shape, seed))


def gradient(shape, step, replica, seed=0):
    """Half of it common to the replicas and the steps."""
    base = torch.randn(shape, generator=seeded("base", shape, seed))
    return base + torch.randn(shape, generator=seeded("own", shape, step, replica, seed))


def shift_seeds():
    """Add the offset of the environment to the seeds of this process, the library's included."""
    if not (offset := int(os.environ.get(OFFSET, "0"))):
        return
    of_default, of_generator = torch.manual_seed, torch.Generator

    class Generator(of_generator):
        def manual_seed(self, seed):
            return super().manual_seed(seed + offset)

    torch.manual_seed = lambda seed: of_default(seed + offset)
    torch.Generator = Generator
