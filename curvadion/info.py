"""What is installed and whether it works: ``python -m curvadion.info``.

Prints versions and backends, encodes and decodes known numbers, and takes two steps with two
processes on this machine. The exit status is 0 if all of this works, else 1.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import curvadion
from curvadion import ops
from curvadion.ops import codes, native, reference_codes

SECONDS = 120.0  # for two processes that import torch and take two steps
GRACE = 2.0  # for the other process, once one has failed


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m curvadion.info", description=__doc__)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meet", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.meet is not None:
        print(json.dumps(_steps_of_rank(options.rank, options.meet)))
        return 0
    works = True
    for title, lines in (
        ("Versions", _versions),
        ("Backends of the fused operations", _backends),
        ("Codes of a few bits", _codes),
        ("Two processes on this machine (gloo)", _two_processes),
    ):
        print(title, flush=True)
        works &= _print(lines)
    print("Everything works." if works else "Something above does not work.")
    return 0 if works else 1


def _print(lines: Callable[[], Iterator[str]]) -> bool:
    """Print lines with an indent; False if one could not be made, whose error is printed."""
    try:
        for line in lines():
            print(f"  {line}", flush=True)
    except Exception as error:  # a report goes on after any
        print(f"  FAILED: {type(error).__name__}: {error}", flush=True)
        return False
    return True


# ---------------------------------------------------------------- what there is


def _versions() -> Iterator[str]:
    yield f"curvadion {curvadion.__version__} ({Path(curvadion.__file__).parent})"
    yield f"torch {torch.__version__}, {_version('triton')}, {_version('numpy')}"
    yield f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA in this build of torch"
    yield f"Python {platform.python_version()}, {platform.platform()}"


def _version(name: str) -> str:
    try:
        return f"{name} {importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        return f"no {name}"


def _backends() -> Iterator[str]:
    width = max(map(len, ops.BACKENDS))
    for name in ops.BACKENDS:
        lacks = ops.lacking(name)
        state = "available" if lacks is None else f"not available: {lacks}"
        yield f"{name:{width}}  {state}{_library(name) if lacks is None else ''}"
    for device in _devices():
        yield f"tensors on {device} take {ops.backend_for(device)!r}{_forced()}"
    if not torch.cuda.is_available():
        yield "there is no CUDA device"


def _library(name: str) -> str:
    """Where a compiled backend's library lies."""
    if name not in ("cpu", "cuda"):
        return ""
    installed = native.HERE / native.file_name(name)
    if installed.exists():
        return f" ({installed}, compiled when the package was built)"
    return f" (compiled at its first use, in {native.cache_folder()})"


def _forced() -> str:
    name = os.environ.get("CURVADION_BACKEND")
    return f" (CURVADION_BACKEND={name})" if name else ""


def _devices() -> list[torch.device]:
    names = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    return [torch.device(name) for name in names]


# ---------------------------------------------------------------- codes


def _codes() -> Iterator[str]:
    for device in _devices():
        known = torch.sin(torch.arange(1000, dtype=torch.float32)).to(device)
        for bits in codes.BITS:
            made, stands = _coded(ops, known, bits)
            expected, stands_for = _coded(reference_codes, known, bits)
            if not torch.equal(made, expected) or not torch.equal(stands, stands_for):
                raise RuntimeError(
                    f"codes of {bits} bits on {device} differ from those of plain PyTorch: force "
                    f"it with CURVADION_BACKEND=torch, and report this with the lines above"
                )
        name = ops.backend_for(device)
        yield (
            f"1000 numbers in {', '.join(map(str, codes.BITS))} bits on {device}: {name!r} makes "
            f"the same bytes and numbers as plain PyTorch"
        )


def _coded(by: Any, x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The codes of x, and what they stand for, by the operations of a module."""
    rows = torch.zeros(
        (codes.blocks_of(x.numel()), codes.block_bytes(bits)), dtype=torch.uint8, device=x.device
    )
    none = torch.empty((0, codes.BLOCK), device=x.device)
    by.encode_difference_(rows, [x], [], [], bits=bits, owned=none, first=0)
    stands_for = torch.empty_like(x)
    by.decode_([stands_for], rows, bits)
    return rows, stands_for


# ---------------------------------------------------------------- two processes


def _two_processes() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="curvadion-info-") as folder:
        first, second = (json.loads(text) for text in _run_ranks(Path(folder)))
    for name, told in first.items():
        if told["weights"] != second[name]["weights"]:
            raise RuntimeError(f"after a step of {name} the two processes hold different weights")
        yield (
            f"{name}: a step of {told['numbers']} numbers sent {told['sent']:.0f} bytes a process "
            f"({told['sent'] / told['dense']:.1%} of an all-reduce of its gradients); both hold "
            f"the same weights"
        )


def _run_ranks(folder: Path) -> list[str]:
    """What two processes of this module print, by rank.

    Raises:
        RuntimeError: if one fails or takes too long; the message has the end of what it said.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    if sys.platform == "linux":  # the host's own name may lead nowhere
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    outputs = [folder / f"rank{rank}" for rank in range(2)]
    processes = []
    try:
        for rank, output in enumerate(outputs):
            command = [sys.executable, "-m", "curvadion.info", "--rank", str(rank)]
            command += ["--meet", str(folder / "store")]
            with output.open("w") as out, output.with_suffix(".err").open("w") as err:
                processes.append(subprocess.Popen(command, stdout=out, stderr=err, env=environment))
        _wait(processes)
        for rank, (process, output) in enumerate(zip(processes, outputs, strict=True)):
            if process.returncode != 0:
                said = output.with_suffix(".err").read_text("utf-8", "replace").strip()
                how = "took too long" if process.returncode is None else "failed"
                raise RuntimeError(f"process {rank} {how}: {said[-2000:] or 'it said nothing'}")
        return [output.read_text("utf-8") for output in outputs]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Until all have ended, the time is over, or one has failed and the others had time to end."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        codes_now = [process.poll() for process in processes]
        if None not in codes_now:
            return
        if any(codes_now):
            end = min(end, time.monotonic() + GRACE)
        time.sleep(0.05)


def _steps_of_rank(rank: int, store: Path) -> dict[str, dict[str, Any]]:
    """One step of each optimizer in a group of two: its bytes, and its weights at the end."""
    dist.init_process_group(
        "gloo",
        init_method=store.absolute().as_uri(),
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=SECONDS / 2),
    )
    told = {
        "Dion": _step(rank, curvadion.Dion),
        "CurvaDion, a budget of 10 %": _step(
            rank, curvadion.CurvaDion, wire_budget=0.1, warmup_steps=1
        ),
    }
    dist.barrier()
    dist.destroy_process_group()
    return told


def _step(rank: int, kind: Callable[..., curvadion.Dion], **arguments: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))
    groups = curvadion.param_groups(model)
    optimizer = kind(groups, replicas=dist.group.WORLD, **arguments)
    inputs = torch.randn(16, 64, generator=torch.Generator().manual_seed(rank))
    with curvadion.WireMeter() as meter:
        model(inputs).square().mean().backward()
        optimizer.step()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {
        "numbers": weights.numel(),
        "dense": 4 * weights.numel(),
        "sent": meter.total_sent,
        "weights": weights.tolist(),
    }


if __name__ == "__main__":
    sys.exit(main())
