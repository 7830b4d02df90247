"""Show that DDP all-reduces unless the forward runs inside ``no_sync``; ``backward`` is not enough.

    python -m benchmarks.bytes.no_sync

Runs two processes; the gradient of the only weight is 2 on the first and 4 on the second.
"""

import argparse
import gc
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel


def gradient(rank: int, *, forward_inside: bool) -> float:
    """Return this rank's gradient after a backward inside ``no_sync``."""
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    x = torch.tensor([[2.0 * (rank + 1)]])
    if forward_inside:
        with model.no_sync():
            model(x).sum().backward()
    else:
        loss = model(x).sum()
        with model.no_sync():
            loss.backward()
    return float(next(model.parameters()).grad)  # type: ignore[arg-type]


def show(rank: int, store: str) -> None:
    """Print the gradients of both ranks, with the forward outside ``no_sync`` and inside."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for forward_inside in (False, True):
        seen = torch.zeros(2)
        seen[rank] = gradient(rank, forward_inside=forward_inside)
        dist.all_reduce(seen)
        if rank == 0:
            print(f"forward {'inside' if forward_inside else 'outside'} no_sync: {seen.tolist()}")
    dist.barrier()
    dist.destroy_process_group()
    # A gloo thread that frees a tensor while the interpreter exits aborts it: end the threads
    # first.
    gc.collect()


def main() -> None:
    """Run both processes."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spawn(show, args=(f"{folder}/store",), nprocs=2)


if __name__ == "__main__":
    main()
