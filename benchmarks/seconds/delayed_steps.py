r"""Measure how much a delay hides: steps with and without a limited link, and a timeline.

    sudo PYTHONPATH=examples/gpt .venv/bin/python -m benchmarks.seconds.delayed_steps \
        --output benchmarks/results/scaling/delay.json --picture docs/delay.png

Every rank is a real process with gloo in its own network namespace (limited_network.py; needs
root). All ranks train a small GPT under a byte budget, alternating between no limits and the link.
A step's seconds are the mean over whole periods between openings, in the best of several rounds.
The picture shows what each rank does over the link: computing, coding, exchanging and waiting.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist

import curvadion
from benchmarks.common.limited_network import ask, network
from benchmarks.common.pictures import axes_to_save
from benchmarks.common.records import write
from benchmarks.seconds.cost_model import Link
from curvadion.comm.exchange_thread import Exchange
from curvadion.sync import coded_mean, in_flight, quantized_average
from gpt import GPT, GPTConfig
from train_gpt import leave_process_group

Record = dict[str, Any]
Span = tuple[str, float, float]

MODULE = "benchmarks.seconds.delayed_steps"
MEGABIT = 1e6
BUDGET = 0.01
CONFIG = GPTConfig(vocab_size=256, layers=2, heads=4, dim=128)
BATCH, TIME = 4, 64
KINDS = {"step": "lightgrey", "codes": "tab:orange", "exchange": "tab:blue", "waiting": "tab:red"}


# ---------------------------------------------------------------- a rank


class Recorder:
    """Records when some functions are called."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def wrap(self, owner: Any, name: str, kind: str) -> None:
        """Note the calls of a function, in whichever thread."""
        function: Callable[..., Any] = getattr(owner, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            begin = time.time()
            try:
                return function(*args, **kwargs)
            finally:
                self.spans.append((kind, begin, time.time()))

        setattr(owner, name, noted)


def worker(rank: int, ranks: int, delays: Sequence[int]) -> None:
    """Read a delay and a number of steps from each input line; answer with a line of JSON."""
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    recorder = Recorder()
    recorder.wrap(in_flight, "encode", "codes")
    recorder.wrap(in_flight, "decode_add_", "codes")
    recorder.wrap(quantized_average, "decode_add_", "codes")
    recorder.wrap(coded_mean, "encode", "codes")
    recorder.wrap(coded_mean.Message, "exchange_", "exchange")
    recorder.wrap(Exchange, "result", "waiting")
    steps = {delay: _training(delay) for delay in delays}
    torch.manual_seed(1 + rank)
    for step in steps.values():
        for _ in range(16):
            step()
    for line in sys.stdin:
        order = json.loads(line)
        step = steps[order["delay"]]
        recorder.spans.clear()
        waited = 0.0
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(order["steps"]):
            started = time.time()
            waited += step()
            recorder.spans.append(("step", started, time.time()))
        seconds = (time.perf_counter() - begin) / order["steps"]
        dist.barrier()
        answer = {"seconds": seconds, "waited": waited / order["steps"], "spans": recorder.spans}
        print(json.dumps(answer), flush=True)
    leave_process_group()


def _training(delay: int) -> Callable[[], float]:
    torch.manual_seed(0)
    model = GPT(CONFIG)
    optimizer = curvadion.CurvaDion(
        curvadion.param_groups(model),
        replicas=dist.group.WORLD,
        gate=curvadion.ByteBudget(BUDGET),
        sync=curvadion.QuantizedAverage(delay=delay),
    )

    def step() -> float:
        tokens = torch.randint(CONFIG.vocab_size, (2, BATCH, TIME))
        optimizer.zero_grad()
        model(tokens[0], tokens[1]).backward()
        optimizer.step()
        assert optimizer.report is not None
        return optimizer.report.waited_seconds

    return step


# ---------------------------------------------------------------- all of them


def measure(options: argparse.Namespace, link: Link) -> tuple[list[Record], list[list[Span]]]:
    """Seconds of a step by delay, with and without the link's limits; spans of the last delay."""
    found: dict[tuple[int, bool], list[Record]] = {}
    spans: list[list[Span]] = []
    with network(options.ranks, "reno") as net:
        arguments = ["--delays", *map(str, options.delays)]
        workers = [net.start(rank, MODULE, *arguments) for rank in range(options.ranks)]
        try:
            for _ in range(options.rounds):
                for limited in (False, True):
                    net.limit(*((link.bandwidth, link.latency) if limited else (None, 0.0)))
                    for delay in options.delays:
                        answers = ask(workers, json.dumps({"delay": delay, "steps": options.steps}))
                        found.setdefault((delay, limited), []).extend(_means(answers))
                        if limited:
                            spans = [answer["spans"] for answer in answers]
        finally:
            for process in workers:
                process.kill()
                process.wait()
    records = []
    for delay in options.delays:
        free, over = (
            min(found[delay, limited], key=lambda r: float(r["seconds"]))
            for limited in (False, True)
        )
        record = {
            "ranks": options.ranks,
            "bandwidth": link.bandwidth,
            "latency": link.latency,
            "wire_budget": BUDGET,
            "delay": delay,
            "unlimited_seconds": free["seconds"],
            "seconds": over["seconds"],
            "ratio": over["seconds"] / free["seconds"],
            "exposed_seconds": over["seconds"] - free["seconds"],
            "waited_seconds": over["waited"],
        }
        print(record, flush=True)
        records.append(record)
    return records, spans


def _means(answers: Sequence[Record]) -> list[Record]:
    return [{key: mean(answer[key] for answer in answers) for key in ("seconds", "waited")}]


def draw(spans: Sequence[Sequence[Span]], path: Path, title: str) -> None:
    """Draw each rank's timeline: training on the lower line, exchanges on the upper one."""
    start = min(begin for of_rank in spans for _, begin, _ in of_rank)
    with axes_to_save(path, (9, 0.8 + 0.9 * len(spans))) as axes:
        for rank, of_rank in enumerate(spans):
            for kind, begin, end in sorted(of_rank, key=lambda span: span[0] != "step"):
                line = rank + (0.35 if kind == "exchange" else 0.0)
                axes.broken_barh(
                    [(begin - start, max(end - begin, 1e-3))],
                    (line, 0.3),
                    facecolor=KINDS[kind],
                    edgecolor="white" if kind == "step" else KINDS[kind],
                )
        for kind, color in KINDS.items():
            axes.broken_barh([(0, 0)], (0, 0), color=color, label=kind)
        axes.set_yticks(
            [rank + 0.3 for rank in range(len(spans))], [f"rank {r}" for r in range(len(spans))]
        )
        axes.set_xlabel("seconds")
        axes.set_title(title, fontsize=9)
        axes.set_ylim(-0.2, len(spans) + 0.3)
        axes.legend(fontsize=7, ncols=len(KINDS), loc="upper right")


def command_line() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--delays", type=int, nargs="+", default=[0, 3])
    parser.add_argument(
        "--megabits", type=float, default=20.0, help="bandwidth of each rank's link, per second"
    )
    parser.add_argument("--milliseconds", type=float, default=10.0, help="latency each way")
    parser.add_argument(
        "--steps", type=int, default=40, help="steps of a round: many periods, or a multiple of one"
    )
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--output", type=Path, help="JSON file")
    parser.add_argument("--picture", type=Path, help="draw the last round with the last delay")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--worlds", type=int, nargs=1, help=argparse.SUPPRESS)
    return parser


def main() -> None:
    """Measure what the command line asks for."""
    options = command_line().parse_args()
    if options.worker is not None:
        worker(options.worker, options.worlds[0], options.delays)
        return
    link = Link(options.megabits * MEGABIT, 1e-3 * options.milliseconds)
    try:
        records, spans = measure(options, link)
    except PermissionError as error:
        raise SystemExit(f"delayed_steps: {error}") from None
    if options.output is not None:
        write(options.output, torch.device("cpu"), records)
    if options.picture is not None:
        title = (
            f"{options.ranks} ranks, {options.megabits:g} Mb/s, {options.milliseconds:g} ms each "
            f"way, wire_budget={BUDGET}, delay={options.delays[-1]}"
        )
        draw(spans, options.picture, title)


if __name__ == "__main__":
    main()
