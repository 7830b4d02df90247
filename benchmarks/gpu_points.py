"""The checks of gpu_report.py: functions that take the device and return their findings.

python benchmarks/gpu_points.py steps --device cuda --output found.json
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore, TCPStore
from torch.multiprocessing.spawn import spawn
from torch.profiler import ProfilerActivity, profile

from curvadion import CodedGradients, CurvaDion, Dion, FixedPeriod, QuantizedAverage, ops
from curvadion.comm.background import background_of
from models import MODELS

Found = dict[str, Any]
SMALL = [(96, 64), (64, 96), (128, 128)]


class Skipped(Exception):
    """This check cannot run here; the text says why."""


def parameters(
    matrices: list[tuple[int, int]], others: list[tuple[int, ...]], device: torch.device
) -> tuple[list[nn.Parameter], list[dict[str, Any]]]:
    """Return weights and their groups: matrices for Dion, all others for AdamW."""
    torch.manual_seed(0)
    X = [nn.Parameter(torch.randn(shape).to(device)) for shape in matrices]
    rest = [nn.Parameter(torch.randn(shape).to(device)) for shape in others]
    return [*X, *rest], [{"params": X}, {"params": rest, "algorithm": "adamw", "lr": 1e-3}]


def give_gradients(X: list[nn.Parameter], step: int, rank: int = 0) -> None:
    """Set gradients, the same on every device."""
    for i, x in enumerate(X):
        generator = torch.Generator().manual_seed(10_000 * step + 100 * rank + i)
        x.grad = torch.randn(x.shape, generator=generator).to(x.device)


@contextmanager
def one_rank(backend: str) -> Iterator[None]:
    """A default process group with this process only."""
    with tempfile.TemporaryDirectory() as folder:
        store = FileStore(f"{folder}/store", 1)
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


# -------------------------------------------------------------------- 1: waits


def waits(device: torch.device) -> Found:
    """Find where the host waits; fail if a closed step of a schedule waits more than once."""
    if device.type != "cuda":
        raise Skipped("no CUDA device")
    found: Found = {}
    with one_rank("gloo"):
        for name, options in {
            "schedule, polar": {"gate": FixedPeriod(3), "sync": QuantizedAverage(2)},
            "schedule, low rank": {"gate": FixedPeriod(3)},
            "RMMC": {"threshold": 0.3},
        }.items():
            X, groups = parameters(SMALL * 4, [(300,), (40, 30)], device)
            optimizer = CurvaDion(groups, replicas=dist.group.WORLD, **options)  # type: ignore[arg-type]
            for step in range(9):
                give_gradients(X, step)
                places = warned(optimizer)
                report = optimizer.report
                assert report is not None
                if step >= 6:
                    found[f"{name}, step {step}, {report.reason}"] = places
    closed = [sum(places.values()) for key, places in found.items() if key.endswith("closed")]
    if max(closed) > 1:
        raise AssertionError(f"closed steps wait {closed} times: {json.dumps(found)}")
    return found


def warned(optimizer: Dion) -> dict[str, int]:
    """Return the places of a step that torch's debug mode warns about, and how often."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    of_torch = [w for w in told if "synchronizing" in str(w.message)]
    return dict(Counter(f"{Path(w.filename).name}:{w.lineno}" for w in of_torch))


# -------------------------------------------------------------------- 2: processes


PROGRAMS: dict[str, Callable[[], dict[str, Any]]] = {
    "openings in codes": lambda: {"gate": FixedPeriod(3), "sync": QuantizedAverage(4)},
    "openings in codes, delay 2": lambda: {
        "gate": FixedPeriod(3), "sync": QuantizedAverage(4, delay=2)
    },
    "gradients in codes": lambda: {"sync": CodedGradients(4)},
    "low rank": lambda: {"gate": FixedPeriod(3)},
}  # fmt: skip


def processes(device: torch.device) -> Found:
    """Compare weights with a CPU's after eight steps: largest distance over distance moved."""
    found: Found = {}
    start = [x.detach().cpu() for x in parameters(SMALL, [(300,)], device)[0]]
    for ranks in (2, 4) if device.type == "cuda" else (2,):
        here = trained(ranks, device)
        there = here if device.type == "cpu" else trained(ranks, torch.device("cpu"))
        for name in PROGRAMS:
            moved = max(map(distance, here[name], start))
            found[f"{name}, {ranks} processes"] = (
                max(map(distance, here[name], there[name])) / moved
            )
    if max(found.values()) > 0.5:  # codes may round differently, but trajectories must stay close
        raise AssertionError(json.dumps(found))
    return found


def distance(one: Tensor, other: Tensor) -> float:
    """In the Frobenius norm."""
    return float((one - other).norm())


def trained(ranks: int, device: torch.device) -> dict[str, list[Tensor]]:
    """Return rank 0's weights after eight steps of each program on one device."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        given = ranks, str(device), store.port, folder
        spawn(train_rank, given, nprocs=ranks)
        weights: dict[str, list[Tensor]] = torch.load(f"{folder}/weights.pt", weights_only=True)
    return weights


def train_rank(rank: int, ranks: int, device: str, port: int, folder: str) -> None:
    """Run one process of :func:`trained`."""
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False)
    seconds = timedelta(seconds=40)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=seconds)
    found = {}
    for name, options in PROGRAMS.items():
        X, groups = parameters(SMALL, [(300,)], torch.device(device))
        optimizer = CurvaDion(groups, replicas=dist.group.WORLD, **options())
        for step in range(8):
            give_gradients(X, step, rank)
            optimizer.step()
        optimizer.synchronize()
        found[name] = [x.detach().cpu() for x in X]
    if rank == 0:
        torch.save(found, f"{folder}/weights.pt")
    dist.destroy_process_group()


# -------------------------------------------------------------------- 3: background


def background(device: torch.device) -> Found:
    """Run fifty exchanges in their own thread and group while the device computes."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    with one_rank(backend):
        exchanges = background_of(dist.group.WORLD, device)  # type: ignore[arg-type]
        a = torch.randn(1024, 1024, device=device)
        begin = time.perf_counter()
        under_way = []
        for i in range(50):
            sent = torch.full((1 << 16,), float(i), device=device)

            def work(sent: Tensor = sent) -> Tensor:
                dist.all_reduce(sent, group=exchanges.group)
                return sent + 1

            under_way.append(exchanges.begin(f"exchange {i}", work))
            a = a @ a / a.norm()
        wrong = [i for i, e in enumerate(under_way) if not bool((e.result() == i + 1).all())]
        seconds = time.perf_counter() - begin
    if wrong:
        raise AssertionError(f"exchanges {wrong} gave other numbers")
    return {"backend": backend, "seconds": seconds}


# -------------------------------------------------------------------- 4: steps


STEPS: dict[str, Callable[[list[dict[str, Any]]], Dion]] = {
    "Dion, polar": lambda groups: Dion(groups, direction="polar", replicas="single"),
    "local step, polar": lambda groups: CurvaDion(
        groups, gate=FixedPeriod(2**30), max_local_steps=None, sync=QuantizedAverage(2)
    ),
    "Dion, low rank": lambda groups: Dion(groups, replicas="single"),
}


def steps(device: torch.device) -> Found:
    """Measure closed steps: host and device milliseconds, launches, peak memory."""
    large = device.type == "cuda"
    return {
        f"{name}, {kind}": timed(name, make, device)
        for name in (["gpt2-160m", "llama-1.3b"] if large else ["500x2000"])
        for kind, make in STEPS.items()
    }


def timed(model: str, make: Callable[[list[dict[str, Any]]], Dion], device: torch.device) -> Found:
    """Time a step of one process, and list its longest kernels."""
    shapes, large = MODELS[model], device.type == "cuda"
    blocks = None if large else 50
    X, groups = parameters(shapes.matrices(blocks), shapes.others(blocks), device)
    optimizer = make(groups)
    for x in X:
        x.grad = torch.randn_like(x)
    for _ in range(3):
        optimizer.step()
    wait(device)
    host, whole = [], []
    for _ in range(5):
        begin = time.perf_counter()
        optimizer.step()
        host.append(time.perf_counter() - begin)
        wait(device)
        whole.append(time.perf_counter() - begin)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if large else [])]
    held = torch.cuda.memory_allocated() if large else 0
    if large:
        torch.cuda.reset_peak_memory_stats()
    with profile(activities=activities) as record:
        optimizer.step()
        wait(device)
    # The device's timeline also holds spans of record_function.
    found = [e for e in record.events() if e.device_type.name == "CUDA"]
    kernels = [e for e in found if not e.is_user_annotation]
    by_name: Counter[str] = Counter()
    for e in kernels:
        by_name[e.name[:100]] += e.device_time / 1e3
    return {
        "host_ms": 1e3 * min(host),
        "whole_ms": 1e3 * min(whole),
        "device_ms": sum(by_name.values()),
        "launches": len(kernels),
        "copies": sum(e.name.startswith("Memcpy") for e in kernels),
        "peak_bytes": torch.cuda.max_memory_allocated() - held if large else None,
        "longest_ms": dict(by_name.most_common(5)),
    }


def wait(device: torch.device) -> None:
    """Wait until the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# -------------------------------------------------------------------- 5: products


def products(device: torch.device) -> Found:
    """Time B B^T of symmetric B in float16, in milliseconds, by backend and by torch.bmm."""
    large = device.type == "cuda"
    found: Found = {}
    for n in (768, 2048, 4096) if large else (64,):
        for k in (1, 7, 10) if large else (2,):
            A = torch.randn(k, n, n, device=device)
            A = (A + A.mT).to(torch.float16 if large else torch.float32)
            out = torch.empty_like(A)
            ways: dict[str, Callable[[], object]] = {"torch.bmm": partial(torch.bmm, A, A, out=out)}
            for backend in ("triton",) if large else ("torch",):
                ways[backend] = partial(product, backend, A, out)
            found[f"k={k}, n={n}"] = {name: milliseconds(way, device) for name, way in ways.items()}
    return found


def product(backend: str, A: Tensor, out: Tensor) -> None:
    """Compute A A with one backend."""
    with ops.use_backend(backend):
        ops.symmetric_product(A, A, out)


def milliseconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the fastest of ten calls."""
    call()
    times = []
    for _ in range(10):
        wait(device)
        begin = time.perf_counter()
        call()
        wait(device)
        times.append(1e3 * (time.perf_counter() - begin))
    return min(times)


# -------------------------------------------------------------------- 6: sanitizer


def sanitizer(device: torch.device) -> Found:
    """Run compute-sanitizer on a small step with each backend."""
    tool = shutil.which("compute-sanitizer")
    if device.type != "cuda":
        raise Skipped("no CUDA device")
    if tool is None:
        raise Skipped("compute-sanitizer is not on PATH")
    found: Found = {}
    for backend in ("triton", "cuda"):
        command = [tool, "--error-exitcode", "9", sys.executable, __file__, "operations"]
        said = subprocess.run(
            [*command, "--device", "cuda", "--output", os.devnull],
            env={**os.environ, "CURVADION_BACKEND": backend},
            capture_output=True, text=True, timeout=48, check=False,
        )  # fmt: skip
        if said.returncode:
            raise AssertionError(f"{backend}: {said.stdout[-1500:]}{said.stderr[-500:]}")
        found[backend] = said.stdout.splitlines()[-1]
    return found


def operations(device: torch.device) -> Found:
    """Call every operation once, through steps of both directions and codes; for the sanitizer."""
    with one_rank("gloo"):
        for options in PROGRAMS.values():
            X, groups = parameters(SMALL, [(300,)], device)
            optimizer = CurvaDion(groups, replicas=dist.group.WORLD, **options())
            for step in range(4):
                give_gradients(X, step)
                optimizer.step()
            del optimizer
    return {}


# -------------------------------------------------------------------- 7: graphs


def graphs(device: torch.device) -> Found:
    """Compare captured and eager operations; take low-rank steps under both TF32 interfaces."""
    found: Found = {}
    for interface in ("set_float32_matmul_precision", "fp32_precision"):
        if interface == "fp32_precision":
            torch.backends.cuda.matmul.fp32_precision = "tf32"
        else:
            torch.set_float32_matmul_precision("high")
        X, groups = parameters(SMALL, [(300,)], device)
        optimizer = Dion(groups, replicas="single")
        for step in range(2):
            give_gradients(X, step)
            optimizer.step()
        found[interface] = all(bool(torch.isfinite(x).all()) for x in X)
    if device.type == "cuda":
        for backend in ("triton", "cuda"):
            found[backend] = ops.lacking(backend) or captured(backend, device)
    if not all(found.values()):
        raise AssertionError(json.dumps(found))
    return found


def captured(backend: str, device: torch.device) -> bool:
    """Capture two graphs on the default capture stream and replay them in reverse."""
    lists = [[torch.randn(s, device=device) for s in SMALL] for _ in range(4)]
    G = [torch.randn(s, device=device) for s in SMALL]

    def work(M: list[Tensor], X: list[Tensor]) -> Tensor:
        norms = ops.momentum_norms(M, G, [0.9] * len(G))
        ops.local_step_(X, G, [0.1] * len(G), [0.99] * len(G), M, [0.9] * len(G))
        return norms

    with ops.use_backend(backend):
        work(*([t.clone() for t in each] for each in lists[:2]))
        expected = [[t.clone() for t in each] for each in lists]
        made = [torch.cuda.CUDAGraph() for _ in range(2)]
        norms = []
        for i, graph in enumerate(made):
            with torch.cuda.graph(graph):
                norms.append(work(*lists[2 * i : 2 * i + 2]))
        same = True
        for i in (1, 0, 1):
            made[i].replay()
            wanted = work(*expected[2 * i : 2 * i + 2])
            torch.cuda.synchronize()
            same &= torch.allclose(norms[i], wanted, rtol=1e-5)
    for each, wanted_each in zip(lists, expected, strict=True):
        for a, b in zip(each, wanted_each, strict=True):
            same &= torch.allclose(a, b, rtol=1e-5, atol=1e-6)
    return same


def main() -> int:
    """Run one check; write its findings, or why it was skipped."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("point")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    found: Found
    try:
        found = globals()[options.point](torch.device(options.device))
    except Skipped as reason:
        found = {"skipped": str(reason)}
    except Exception:
        traceback.print_exc()
        return 1
    options.output.write_text(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
