"""Timing for the benchmarks, and their description of the machine."""

from __future__ import annotations

import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

Contenders = dict[str, Callable[[], object]]


def interleaved(
    contenders: Contenders,
    device: torch.device,
    *,
    rounds: int,
    seconds: float,
    before: Callable[[], object] | None = None,
    anywhere: Callable[[bool], bool] = bool,
) -> dict[str, list[float]]:
    """Return the seconds of every call; contenders take turns, so that noise affects all of them.

    Stops after ``rounds`` rounds, or after the first round that ends later than ``seconds``;
    warm-up calls do not count. ``before`` is called before each call and not timed. ``anywhere``
    returns whether something is true on any rank, for ranks that must take the same number of
    rounds.
    """
    for call in contenders.values():
        if before is not None:
            before()
        call()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    begin = time.perf_counter()
    for _ in range(rounds):
        for name, call in contenders.items():
            if before is not None:
                before()
            times[name].append(_seconds(call, device))
        if anywhere(time.perf_counter() - begin > seconds):
            break
    return times


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    start.record()
    call()
    stop.record()
    torch.cuda.synchronize(device)
    return float(start.elapsed_time(stop)) / 1e3


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """Return the fastest and median seconds of some calls, and their number."""
    return {
        "seconds": min(seconds),
        "median_seconds": statistics.median(seconds),
        "calls": len(seconds),
    }


def copy_of(total_bytes: int, device: torch.device) -> Callable[[], object]:
    """Return a copy that reads and writes ``total_bytes`` in all, as a bound on memory speed."""
    source = torch.ones(max(total_bytes // 2, 1), dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return lambda: target.copy_(source)


def environment(device: torch.device) -> dict[str, Any]:
    """Return versions and hardware."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "cpu": _cpu_name(),
        "commit": _commit(),
    }
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
        found["cuda"] = torch.version.cuda
    return found


def write(path: Path, device: torch.device, records: Sequence[dict[str, Any]]) -> None:
    """Write the records as JSON, with the command that made them and the environment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    launcher = ["torchrun", "--nproc-per-node", ranks] if by_torchrun else ["python"]
    command = shlex.join([*launcher, *sys.argv])
    if os.environ.get("OMP_NUM_THREADS"):
        command = f"OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']} {command}"
    result = {"command": command, "environment": environment(device), "records": list(records)}
    path.write_text(json.dumps(result, indent=1) + "\n")


@contextmanager
def axes_to_save(path: Path, size: tuple[float, float]) -> Iterator[Any]:
    """Axes of a picture of ``size`` inches, written to ``path`` at the end; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=size)
    yield axes
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _version(module: str) -> str | None:
    try:
        return str(__import__(module).__version__)
    except ImportError:
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), "")


def _commit() -> str | None:
    here = Path(__file__).resolve().parent
    command = ["git", "-C", str(here), "rev-parse", "--short", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.strip()
