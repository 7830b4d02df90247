"""Timing of contenders that take turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

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

    Args:
        contenders: calls by name; each is called once before, which does not count.
        device: on which they work.
        rounds: at most.
        seconds: after which a round is the last one.
        before: called before each call, and not timed.
        anywhere: returns whether something is true on any rank, for ranks that must take the same
            number of rounds.
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
