r"""Time whole optimizer steps, gate open and closed, beside AdamW and other Muons and Dions.

    OMP_NUM_THREADS=1 python -m benchmarks.seconds.optimizer_step --models gpt2-160m
    python -m benchmarks.seconds.optimizer_step --device cuda
    torchrun --nproc-per-node 2 -m benchmarks.seconds.optimizer_step \
        --contenders opening "Muon and AdamW"
    torchrun --nproc-per-node 2 -m benchmarks.seconds.optimizer_step --shards

The processes of torchrun are replicas: each holds all parameters and has its own gradients. The
third command also measures an opening: a local step, codes, and everything replicas do around them.
With --shards the processes hold one replica together, and every parameter is sharded by rows, as
FSDP2 does. Ranks run each contender at the same time, and the times are the first rank's.

Besides seconds, a record counts a step's launches and reads, and its peak memory above what is held
between steps. On a GPU, launches are kernels and reads are copies to the host. On a CPU, launches
are PyTorch operators (without compiled operations, one call each) and reads are operators that
return a number to Python; functions under torch.compile are counted uncompiled. FLOPs are torch's
count of matrix products on the first rank: it counts a DTensor's products in full, and misses
Triton kernels of other libraries.

"fused operations alone" calls the operations of a closed step with the gradient local step, on
lists prepared beforehand. The difference to that step, in one process, is the host's time: a record
of tiny tensors gives it in microseconds per tensor.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.common.model_shapes import MODELS
from benchmarks.common.records import write
from benchmarks.common.step_contenders import ALONE, NAMES, OPENING, Model, Weights, contenders
from benchmarks.common.timing import interleaved, summary
from curvadion import WireMeter, ops
from curvadion.layout.dtensor import local

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CLOSED = "closed gate, gradient step"
TINY = 4096  # elements; with larger tensors the noise exceeds the host's time


class _Counter(TorchDispatchMode):
    """Counts dispatched operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.calls += 1
        return function(*args, **(kwargs or {}))


def counts(
    call: Callable[[], object], device: torch.device, before: Callable[[], object]
) -> dict[str, int]:
    """Return one call's launches and reads, and its peak memory above that before the call.

    ``before`` is called before each call and not counted.
    """
    # Torch counts all products only in plain, uncompiled PyTorch.
    uncompiled = torch.compiler.set_stance("force_eager")
    before()
    with uncompiled, FlopCounterMode(display=False) as flops, ops.use_backend("torch"):
        call()
    before()
    if device.type != "cuda":
        with torch.compiler.set_stance("force_eager"), _Counter() as counter:
            call()
        before()
        peak = _peak_on_the_cpu(call)
        return {
            "flops": flops.get_total_flops(),
            "launches": counter.calls,
            "peak_bytes": peak,
        }
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - held
    before()
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        call()
        torch.cuda.synchronize()
    events = [e for e in record.events() if e.device_type.name == "CUDA"]
    names = [e.name for e in events if not e.is_user_annotation]
    return {
        "flops": flops.get_total_flops(),
        "launches": sum(not name.startswith(("Memcpy", "Memset")) for name in names),
        "host_reads": sum(name.startswith("Memcpy DtoH") for name in names),
        "peak_bytes": peak,
    }


def _peak_on_the_cpu(call: Callable[[], object]) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        call()
    assert record.profiler is not None
    events = record.profiler.kineto_results.events()
    changes = [e for e in events if e.name() == "[memory]"]
    changes.sort(key=lambda e: e.start_ns())
    peak: int = max(accumulate((e.nbytes() for e in changes), initial=0))
    return peak


def counts_of_ranks(call: Callable[[], object], peak: int) -> dict[str, list[float]]:
    """Return, by rank, the bytes that one call sends and the peak memory."""
    with WireMeter() as meter:
        call()
    mine = {"bytes_sent_by_rank": meter.total.sent, "peak_bytes_by_rank": peak}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return {key: [each[key] for each in everyone] for key in mine}


def _weights(
    shapes: Sequence[tuple[int, ...]], options: argparse.Namespace, mesh: DeviceMesh | None
) -> Weights:
    """Return parameters with gradients; in shards, all ranks hold pieces of the same tensors."""
    made = []
    for shape in shapes:
        x, gradient = (torch.randn(shape, device=options.device) * n for n in (0.02, 0.01))
        x, gradient = x.to(DTYPES[options.dtype]), gradient.to(DTYPES[options.dtype])
        if mesh is not None:
            x, gradient = (distribute_tensor(each, mesh, [Shard(0)]) for each in (x, gradient))
        made.append(torch.nn.Parameter(x))
        made[-1].grad = gradient
    return made


def _model(name: str, options: argparse.Namespace) -> Model:
    model = MODELS[name]
    mesh = init_device_mesh(options.device, (dist.get_world_size(),)) if options.shards else None
    torch.manual_seed(0)  # replicas begin identical
    matrices = _weights(model.matrices(options.blocks), options, mesh)
    shapes = [] if options.matrices_only else model.others(options.blocks)
    made = Model(matrices, _weights(shapes, options, mesh), mesh)
    if made.replicas is not None:
        torch.manual_seed(dist.get_rank())  # but have their own gradients
        for x in made.both:
            x.grad = torch.randn_like(x).mul_(0.01)
    return made


def _about(name: str, model: Model, options: argparse.Namespace) -> dict[str, Any]:
    """Return the fields that all records of a model share."""
    processes = dist.get_world_size() if dist.is_initialized() else 1
    return {
        "model": name,
        "blocks": options.blocks or MODELS[name].blocks,
        "matrices_only": options.matrices_only,
        "device": options.device,
        "dtype": options.dtype,
        "backend": ops.backend_for(torch.device(options.device)),
        "tensors": len(model.both),
        "elements": sum(x.numel() for x in model.both),
        "replicas": processes if model.replicas is not None else 1,
        "shards": processes if options.shards else 1,
        "weight_bytes": sum(local(x.detach()).nbytes for x in model.both),
    }


def measured(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the records of one model."""
    device = torch.device(options.device)
    model = _model(name, options)
    together = dist.is_initialized()
    restore = _restoring(model)

    def before() -> None:
        restore()
        if together:
            dist.barrier()

    peers = not options.without_peers
    calls, states, absent = contenders(model, options.contenders, peers=peers, before=restore)
    for contender, reason in absent.items():
        _say(f"{name:14}{contender:27}left out: {reason}")
    # Ranks that step together must take the same number of rounds and begin at the same time.
    times = interleaved(
        calls,
        device,
        rounds=options.rounds,
        seconds=options.seconds,
        before=before,
        anywhere=_on_any_rank,
    )
    alone = min(times[ALONE])
    about, records = _about(name, model, options), []
    for contender, seconds in times.items():
        found = summary(seconds)
        counted: dict[str, Any] = dict(counts(calls[contender], device, before))
        if together:
            before()
            counted |= counts_of_ranks(calls[contender], counted["peak_bytes"])
        elif contender == CLOSED and about["elements"] <= TINY * about["tensors"]:
            host = (found["seconds"] - alone) / about["tensors"]
            counted["host_microseconds_a_tensor"] = 1e6 * host
        ratio = found["seconds"] / alone
        record = {**about, "contender": contender, "state_bytes": states.get(contender, 0)}
        records.append({**record, **found, "times_the_fused_operations_alone": ratio, **counted})
        _say(
            f"{name:14}{contender:27}{1e3 * found['seconds']:10.3f} ms"
            f"{ratio:8.2f} x the fused operations alone  {counted}"
        )
    return records


def _restoring(model: Model) -> Callable[[], None]:
    """Return a function that restores each replica's gradients after a step that averages them."""
    if model.replicas is None:
        return lambda: None
    own = [x.grad.clone() for x in model.both if x.grad is not None]

    def restore() -> None:
        for x, gradient in zip(model.both, own, strict=True):
            assert x.grad is not None
            x.grad.copy_(gradient)

    return restore


def _on_any_rank(true: bool) -> bool:
    """Return whether it is true on any rank; collective if there are several."""
    if not dist.is_initialized():
        return true
    anywhere = torch.tensor([int(true)])
    dist.all_reduce(anywhere, op=dist.ReduceOp.MAX)
    return bool(anywhere.item())


def _first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _say(line: str) -> None:
    if _first():
        print(line, flush=True)


def command_line() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="Under torchrun each process is a replica that holds all parameters, unless "
        "--shards is given.",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="+", default=["gpt2-160m"], choices=list(MODELS))
    parser.add_argument("--blocks", type=int, help="use only this many blocks of each model")
    parser.add_argument("--matrices-only", action="store_true", help="no embeddings, no norms")
    parser.add_argument(
        "--contenders",
        nargs="+",
        default=[],
        choices=NAMES,
        metavar="NAME",
        help="all if none is named: " + ", ".join(f'"{name}"' for name in NAMES),
    )
    parser.add_argument(
        "--without-peers", action="store_true", help="leave out other libraries, unless named"
    )
    parser.add_argument(
        "--shards",
        action="store_true",
        help="the processes of torchrun hold one replica together; by default each is a replica",
    )
    parser.add_argument("--dtype", default="float32", choices=list(DTYPES))
    parser.add_argument("--rounds", type=int, default=30, help="timed calls of each contender")
    parser.add_argument(
        "--seconds",
        type=float,
        default=60,
        help="start no round of a model later than this many seconds after its first one (which "
        "always runs); setup and counting take extra time",
    )
    parser.add_argument("--output", type=Path, help="JSON file")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what the command line asks for."""
    parser = command_line()
    options = parser.parse_args(arguments)
    launched = "LOCAL_RANK" in os.environ and not dist.is_initialized()
    if launched:
        dist.init_process_group("gloo")
    if options.shards and not dist.is_initialized():
        parser.error("--shards needs processes: run it with torchrun")
    if options.shards and options.device != "cpu":
        parser.error("--shards runs on the CPU: its ranks would share one GPU")
    if OPENING in options.contenders and (options.shards or not dist.is_initialized()):
        parser.error(f"--contenders {OPENING} needs replicas: run it with torchrun, not --shards")
    records = []
    for name in options.models:
        records += measured(name, options)
        if options.output is not None and _first():
            write(options.output, torch.device(options.device), records)
    if launched:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
