r"""Train while replicas are killed, rejoin or are slow; record agreement, waiting and the loss.

    python -m benchmarks.elastic.kill_replicas --kills 50 \
        --out benchmarks/results/elastic/kills.json

Each replica is a process; at random moments SIGKILL ends one or two, and they restart a little
later. The run ends when all replicas together have taken --total steps, so losses are comparable at
equal tokens. At every opening each replica logs a digest of its anchors: all replicas that took
part must have the same one.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import curvadion
from benchmarks.common.records import command_of
from benchmarks.common.tasks import SIZES, data
from command_line import option, parse
from token_data import TrainingBatches

PRELOADED = ["numpy", "torch", "curvadion.integrations.torchft", "benchmarks.common.tasks"]


@dataclass(frozen=True)
class Options:
    """Train a small GPT on replicas that come and go."""

    replicas: int = option(4, "processes")
    kills: int = option(0, "how many replicas are killed, one or two at once")
    every: float = option(2.5, "seconds from one kill to the next, on average")
    away: float = option(2.0, "seconds until a killed replica restarts, on average")
    slow: float = option(1.0, "factor by which the last replica's steps take longer")
    slow_period: int = option(0, "steps of the last replica between openings; 0: as of the others")
    pause: float = option(0.0, "seconds that each replica sleeps in a step, to imitate compute")
    timeout: float = option(5.0, "seconds after which an exchange fails")
    patience: float = option(-1.0, "seconds that fast replicas wait at an opening; < 0: no limit")
    join_timeout: float = option(2.0, "seconds that an opening waits for members who are alive")
    total: int = option(4000, "steps of all replicas together")
    period: int = option(6, "steps from one opening to the next")
    delay: int = option(0, "steps until means arrive")
    optimizer: str = option("curvadion", "or adamw, inside Replicated")
    lr: float = option(0.04, "learning rate of matrices; AdamW takes a tenth")
    seed: int = option(0, "seed of weights, data and kills")
    out: str = option("runs/elastic.json", "the record")


def replica(
    slot: int,
    address: str,
    folder: str,
    steps: Any,
    joined: Any,
    options: Options,
    again: bool,
) -> None:
    """Run one replica until all together have taken enough steps.

    Args:
        slot: the replica's number, from 0.
        address: of the Lighthouse.
        folder: for logs and anchors.
        steps: taken by each replica; shared between the processes.
        joined: whether each replica has joined; shared likewise.
        options: of the program.
        again: whether the replica comes back, into a run that goes on.
    """
    import logging

    from curvadion.integrations.torchft import ElasticReplicas

    logging.disable(logging.WARNING)
    os.environ["TORCHFT_LIGHTHOUSE"] = address
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    task = SIZES["small"]
    training, _ = data(task)
    batches = TrainingBatches(training, task.context, task.batch_size, options.replicas, 1, 0)
    model = task.model()
    is_slow = options.slow > 1 and slot == options.replicas - 1
    waits = is_slow or options.patience < 0
    period = options.slow_period if is_slow and options.slow_period else options.period
    replicas = ElasticReplicas(
        begins=not again,
        timeout=options.timeout,
        quorum_timeout=60.0,
        patience=None if waits else options.patience,
        replica_id=f"replica_{slot}",
    )
    optimizer = build_optimizer(options, model, replicas, period)
    begun = time.time()
    replicas.start(optimizer)
    joined[slot] = 1
    log = open(f"{folder}/{slot}-{os.getpid()}.jsonl", "a", buffering=1)  # noqa: SIM115
    print(json.dumps({"started": time.time() - begun, "at": optimizer.progress.steps}), file=log)
    last = time.time()
    longest = 0.0
    noted = 0
    openings = replicas.openings
    closed_seconds = 0.0  # of the steps that wait for nobody
    closed_steps = 0
    while sum(steps) < options.total:
        since = time.time()
        [(inputs, targets)] = batches(steps[slot], slot)
        optimizer.zero_grad()
        model(inputs, targets).backward()
        optimizer.step()
        steps[slot] += 1
        time.sleep(options.pause)
        now = time.time()
        longest = max(longest, now - last)
        last = now
        if is_slow:
            time.sleep((options.slow - 1) * max(options.pause, 0.02))
            last = time.time()
        if not optimizer.report.gate_open:
            closed_seconds += time.time() - since
            closed_steps += 1
        if replicas.openings != openings:  # an opening was just applied
            openings = replicas.openings
            anchors = [optimizer.state[p]["anchor"] for p in model.parameters()]
            digest = hashlib.sha1(b"".join(a.numpy().tobytes() for a in anchors)).hexdigest()
            told = {"opening": openings, "digest": digest, "members": replicas.present}
            told["slot"] = slot
            if closed_steps:
                told["speed"] = closed_steps / closed_seconds
            print(json.dumps({**told, "longest": longest, "time": now}), file=log)
            torch.save([a.clone() for a in anchors], f"{folder}/anchors-{slot}.tmp")
            os.replace(f"{folder}/anchors-{slot}.tmp", f"{folder}/anchors-{slot}.pt")
        for event in replicas.events[noted:]:
            print(json.dumps({"event": event.as_dict()}), file=log)
        noted = len(replicas.events)
    os._exit(0)  # others may still wait for this replica: leave as after a kill


def build_optimizer(options: Options, model: torch.nn.Module, replicas: Any, period: int) -> Any:
    """The optimizer that the options name, for these replicas.

    Args:
        options: of the program.
        model: whose parameters it steps.
        replicas: an ElasticReplicas.
        period: steps between openings.
    """
    gate = curvadion.FixedPeriod(period)
    if options.optimizer == "adamw":
        inner = torch.optim.AdamW(model.parameters(), lr=options.lr / 10)
        sync = curvadion.QuantizedAverage(delay=options.delay)
        return curvadion.Replicated(inner, replicas=replicas, gate=gate, sync=sync)
    return curvadion.CurvaDion(
        curvadion.param_groups(model, elementwise_lr=options.lr / 2),
        lr=options.lr,
        replicas=replicas,
        gate=gate,
        sync=curvadion.QuantizedAverage(delay=options.delay),
    )


def run(options: Options) -> dict[str, Any]:
    """Return the record of a run."""
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind="[::]:0",
        min_replicas=1,
        join_timeout_ms=int(1000 * options.join_timeout),
        heartbeat_timeout_ms=1000,
        quorum_tick_ms=20,
    )
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    steps: Any = context.Array("q", options.replicas)
    joined: Any = context.Array("q", options.replicas)
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="elastic-") as folder:

        def start(slot: int, again: bool = False) -> Any:
            given = (slot, lighthouse.address(), folder, steps, joined, options, again)
            process = context.Process(target=replica, args=given, daemon=True)
            process.start()
            return process

        processes = [start(slot) for slot in range(options.replicas)]
        begun, kills = time.time(), 0
        together: tuple[float, int] | None = None  # when all had joined, and the steps until then
        due: dict[int, float] = {}
        next_kill = time.time() + 10
        while sum(steps) < options.total:
            time.sleep(0.02)
            if together is None and all(joined):
                together = time.time(), sum(steps)
            for slot in [s for s, when in due.items() if when < time.time()]:
                del due[slot]
                processes[slot] = start(slot, again=True)
            alive = [s for s in range(options.replicas) if s not in due]
            if kills < options.kills and time.time() > next_kill:
                for slot in victims_of(chance, alive, joined):
                    os.kill(processes[slot].pid, signal.SIGKILL)
                    processes[slot].join()
                    joined[slot] = 0
                    kills += 1
                    due[slot] = time.time() + chance.expovariate(1 / options.away)
                next_kill = time.time() + chance.expovariate(1 / options.every)
        ended = time.time()
        for process in processes:
            process.join(10)
            process.kill()
        logs = [log.read_text("utf-8") for log in Path(folder).glob("*.jsonl")]
        lines: list[dict[str, Any]] = [json.loads(x) for log in logs for x in log.splitlines()]
        loss = held_out(Path(folder))
    return {
        "options": asdict(options),
        "command": command_of("benchmarks.elastic.kill_replicas", None),
        "torch": torch.__version__,
        "kills": kills,
        "seconds": ended - begun,
        "steps": [int(count) for count in steps],
        "steps_a_second": (sum(steps) - together[1]) / (ended - together[0]) if together else None,
        **summarised(lines, ended),
        "val_loss": loss,
    }


def victims_of(chance: random.Random, alive: list[int], joined: Any) -> list[int]:
    """Choose one or two living replicas; none if no survivor would have joined the run."""
    victims = chance.sample(alive, min(chance.choice((1, 1, 2)), len(alive)))
    return victims if any(joined[s] for s in set(alive).difference(victims)) else []


def summarised(lines: list[dict[str, Any]], ended: float) -> dict[str, Any]:
    """Summarise what the replicas logged."""
    openings: dict[Any, set[str]] = {}
    for line in lines:
        # At the end a late replica finds no others, and opens alone.
        if "opening" in line and line["time"] < ended:
            openings.setdefault(line["opening"], set()).add(line["digest"])
    events = [line["event"] for line in lines if "event" in line]
    kinds = Counter(event["kind"] for event in events)
    started = [line["started"] for line in lines if line.get("at")]
    speeds = {x["slot"]: x["speed"] for x in lines if "speed" in x}
    return {
        "speeds_add_up_to": sum(speeds.values()),
        "openings": len(openings),
        "openings_with_several_digests": sum(len(found) > 1 for found in openings.values()),
        "failed_openings": kinds["failed"],
        "newcomers": len(started),
        "newcomer_seconds": [round(s, 3) for s in started],
        "newcomer_bytes": max((e["bytes"] for e in events if e["kind"] == "copied"), default=0),
        "strayed": kinds["strayed"],
        "took_over": kinds["copied"],
        "caught_up": kinds["caught up"],
        "longest_step_seconds": max((x["longest"] for x in lines if "longest" in x), default=None),
    }


@torch.no_grad()
def held_out(folder: Path) -> float:
    """The held-out loss of the anchors of the last opening."""
    task = SIZES["small"]
    torch.manual_seed(0)
    model = task.model()
    newest = max(folder.glob("anchors-*.pt"), key=lambda f: f.stat().st_mtime)
    for p, anchor in zip(model.parameters(), torch.load(newest), strict=True):
        p.copy_(anchor)
    _, batches = data(task)
    return sum(float(model(x, y)) for x, y in batches) / len(batches)


def main() -> None:
    """Run what the command line asks for."""
    options = parse(Options)
    record = run(options)
    out = Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps({k: v for k, v in record.items() if k != "options"}))


if __name__ == "__main__":
    main()
