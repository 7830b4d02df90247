"""Does what a rank communicates in one order, as a device may that runs one collective at a time.

What hangs then depends on collectives that overlap.
"""

from __future__ import annotations

import random
import threading
import time
from contextlib import contextmanager

import torch
import torch.distributed as dist

from curvadion.metering import wire


@contextmanager
def one_at_a_time():
    """Do a rank's collectives one after the other, in the order in which its threads arrive."""
    wire.install_kernels()  # else later ones would take the place of these
    lock, jitter, main = threading.Lock(), random.Random(dist.get_rank()), threading.get_ident()
    below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
    library = torch.library.Library("c10d", "IMPL", "BackendSelect")

    def serial(overload):
        def kernel(keys, *args, **kwargs):
            if threading.get_ident() != main:
                time.sleep(0.005 * jitter.random())
            with lock:
                result = overload.redispatch(keys & below, *args, **kwargs)
                dist.Work.unbox(result[-1] if isinstance(result, tuple) else result).wait()
            return result

        return kernel

    for name in " ".join(wire._OPERATORS.values()).split():
        kernel = serial(getattr(torch.ops.c10d, name).default)
        library.impl(name, kernel, with_keyset=True, allow_override=True)
    try:
        yield
    finally:
        library._destroy()
