r"""Train while replicas are killed, frozen and cut off; measure speed, agreement and the loss.

    python -m benchmarks.elastic.storm --out benchmarks/results/elastic/storm.json

Each replica is a process on loopback with the default settings of ElasticReplicas. One run is left
alone, another is disturbed: SIGKILL ends replicas, which restart a little later; SIGSTOP freezes
them for some seconds; and partitions cut them off from the Lighthouse, by a TCP proxy before it,
and from all other replicas. Several times a third of the replicas is killed at once, and a majority
cut off over an opening. With ``--parted``, two replicas cannot connect to each other for a while,
but reach the Lighthouse and all others. Between replicas only new connections fail, to each other
and to each other's store: those that exist go on, and so does copying of states. Both runs end
after the same number of steps of the run, ``optimizer.progress.steps``.

A step sleeps until ``--step-seconds`` have passed, as if a GPU were busy, so that replicas do not
wait for the few cores. All times are seconds since the run began.

- Goodput: steps of the run per second, from its first step to its last, relative to the run that is
  left alone. What killed replicas would have contributed is not in it; ``work`` is the number of
  steps that all replicas have taken, relative to all steps of a run without faults.
- A survivor's stall: the time between two of its steps. One that is frozen or cut off is no
  survivor until its first opening after that.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlparse

import torch

from benchmarks.common import records
from benchmarks.elastic.proxy import Proxies
from benchmarks.elastic.storm_replica import Run, Shared, held_out_loss, replica
from command_line import option, parse

# What a replica imports, so that it restarts in little time; optimizers import torch._dynamo.
PRELOADED = [
    "torch._dynamo",
    "curvadion.integrations.torchft",
    "benchmarks.elastic.storm_replica",
]
POLL = 0.02  # seconds
END = 60.0  # seconds until replicas that do not end are killed
WHILE = 2.0  # seconds; a shorter wait is not drawn
ARRIVED_EARLY = 2  # steps before an opening at which a majority is cut off
Kind = Literal["kill", "freeze", "cut", "part"]


@dataclass(frozen=True)
class Options:
    """Train a tiny GPT on replicas that are killed, frozen and cut off, and on others that are not.

    One that freezes or is cut off comes back by itself.
    """

    replicas: int = option(16, "processes")
    steps: int = option(2400, "steps of the run")
    step_seconds: float = option(0.5, "seconds that a step takes at least")
    period: int = option(50, "steps from one opening to the next")
    kills: int = option(100, "replicas that are killed, one or two at once")
    away: float = option(4.0, "seconds until a killed replica restarts, at most")
    freezes: int = option(20, "replicas that are frozen")
    frozen: float = option(4.0, "seconds that one is frozen, at most; at least a quarter of it")
    cuts: int = option(20, "times at which replicas are cut off from the Lighthouse and all others")
    cut_off: float = option(
        15.0, "seconds that one is cut off, or two are parted, at most; at least a quarter of it"
    )
    parted: int = option(0, "times at which two replicas cannot connect to each other")
    waves: int = option(2, "times that a third is killed at once, and that a majority is cut off")
    join_timeout: float = option(60.0, "of the Lighthouse, seconds")
    heartbeat_timeout: float = option(1.0, "of the Lighthouse, seconds")
    seed: int = option(0, "of weights, data and faults")
    undisturbed: str = option("", "a record with the run left alone; empty: it is measured first")
    logs: str = option("", "a folder for the logs of the storm; empty: they are not kept")
    out: str = option("runs/storm.json", "the record")


@dataclass
class Fault:
    """What befalls some replicas at once.

    Attributes:
        kind: what it is.
        at: seconds since the run began.
        count: number of replicas.
        seconds: how long it lasts; for a kill, until the replica restarts.
        over_opening: whether it waits until the next opening is near.
        replicas: whom it has befallen.
    """

    kind: Kind
    at: float
    count: int
    seconds: float
    over_opening: bool = False
    replicas: list[int] = field(default_factory=list)


def plan_of(options: Options) -> list[Fault]:
    """The faults of a storm, in order; none in the first opening's time and in the last two."""
    chance = random.Random(options.seed)
    opening_seconds = options.period * options.step_seconds
    end = options.steps * options.step_seconds - 3 * opening_seconds

    def moment() -> float:
        return chance.uniform(opening_seconds / 2, end)

    def up_to(most: float) -> float:
        return chance.uniform(most / 4, most)

    faults = []
    left = options.kills
    third = max(1, options.replicas // 3)
    for _ in range(options.waves):
        if left >= third:
            faults.append(Fault("kill", moment(), third, up_to(options.away)))
            left -= third
    while left:
        count = min(left, chance.choice((1, 1, 2)))
        faults.append(Fault("kill", moment(), count, up_to(options.away)))
        left -= count
    for _ in range(options.freezes):
        faults.append(Fault("freeze", moment(), 1, up_to(options.frozen)))
    for number in range(options.cuts):
        if number < options.waves:
            # Long enough for the Lighthouse to count them as dead.
            majority = options.replicas // 2 + 1
            faults.append(Fault("cut", moment(), majority, options.cut_off, over_opening=True))
        else:
            faults.append(Fault("cut", moment(), 1, up_to(options.cut_off)))
    for _ in range(options.parted):
        faults.append(Fault("part", moment(), 2, up_to(options.cut_off), over_opening=True))
    return sorted(faults, key=lambda fault: fault.at)


class Storm:
    """The processes of a run, and what befalls them.

    Args:
        options: of the program.
        faults: what is planned.
        folder: of logs and weights.
    """

    def __init__(self, options: Options, faults: Sequence[Fault], folder: Path) -> None:
        from torchft.coordination import LighthouseServer

        count = options.replicas
        self.options = options
        self.faults = list(faults)
        self.done: list[Fault] = []
        self._chance = random.Random(options.seed + 1)
        self._lighthouse = LighthouseServer(
            bind="[::]:0",
            min_replicas=1,
            join_timeout_ms=int(1000 * options.join_timeout),
            heartbeat_timeout_ms=int(1000 * options.heartbeat_timeout),
        )
        address = urlparse(self._lighthouse.address())
        self._proxies = Proxies("localhost", address.port or 0, count)
        self._run = Run(
            str(folder), count, options.steps, options.period, options.step_seconds, options.seed
        )
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        self._shared = Shared(
            ready=self._context.RawArray("q", count),
            joined=self._context.RawArray("q", count),
            steps=self._context.RawArray("q", count),
            openings=self._context.RawArray("q", count),
            ports=self._context.RawArray("q", count),
            cut_off=[self._context.RawArray("b", count) for _ in range(count)],
            begin=self._context.RawArray("q", 1),
        )
        self._processes = [self._started(slot) for slot in range(count)]
        self._restarts: dict[int, float] = {}  # when killed replicas restart
        self._recoveries: dict[int, tuple[float, Fault]] = {}  # when, and from what
        self.begun = 0.0
        self.crashes: list[str] = []  # the last lines of each

    def weather(self) -> None:
        """Let the faults befall replicas until all have ended."""
        while not all(self._shared.ready):
            time.sleep(POLL)
            for slot in self._crashed():
                raise RuntimeError(f"replica {slot} has failed:\n{self._output_of(slot)}")
        time.sleep(1.0)  # until the Lighthouse knows all
        self.begun = time.time()
        self._shared.begin[0] = 1
        end = float("inf")
        while time.time() < end and any(p is None or p.is_alive() for p in self._processes):
            time.sleep(POLL)
            now = time.time() - self.begun
            for slot in self._crashed():
                self.crashes.append(self._output_of(slot))
                self._restarts[slot] = now
                self._processes[slot] = None
            self._restart(now)
            self._recover(now)
            for fault in [fault for fault in self.faults if fault.at < now]:
                if self._befall(fault, now):
                    self.faults.remove(fault)
                    self.done.append(fault)
            if end == float("inf") and max(self._shared.steps) >= self.options.steps:
                end = time.time() + END

    def close(self) -> None:
        """End everything that runs."""
        for process in self._processes:
            if process is not None:
                process.kill()
        self._proxies.close()
        self._lighthouse.shutdown()

    def _started(self, slot: int) -> Any:
        lighthouse = f"http://127.0.0.1:{self._proxies.ports[slot]}"
        process = self._context.Process(
            target=replica, args=(slot, lighthouse, self._run, self._shared), daemon=True
        )
        process.start()
        return process

    def _crashed(self) -> list[int]:
        """Replicas that have ended by themselves with an error."""
        processes = enumerate(self._processes)
        return [slot for slot, p in processes if p is not None and p.exitcode not in (None, 0)]

    def _output_of(self, slot: int) -> str:
        """The last lines that a process of a replica has written."""
        path = Path(self._run.folder, f"{slot}-{self._processes[slot].pid}.txt")
        return "\n".join(path.read_text("utf-8", "replace").splitlines()[-5:])

    def _restart(self, now: float) -> None:
        for slot in [slot for slot, when in self._restarts.items() if when < now]:
            del self._restarts[slot]
            self._processes[slot] = self._started(slot)

    def _recover(self, now: float) -> None:
        for slot, (when, fault) in list(self._recoveries.items()):
            if when < now:
                del self._recoveries[slot]
                if fault.kind == "freeze":
                    os.kill(self._processes[slot].pid, signal.SIGCONT)
                elif fault.kind == "cut":
                    self._proxies.join(slot)
                self._set_links()

    def _befall(self, fault: Fault, now: float) -> bool:
        """Let a fault befall replicas, if enough others stay; return whether it has."""
        shared = self._shared
        slots = range(self.options.replicas)
        if fault.over_opening and not self._opening_is_near():
            return False
        running = [s for s in slots if s not in self._restarts and s not in self._recoveries]
        # If all who took part in the last opening died, it would be lost.
        last = max(shared.openings)
        healthy = [s for s in running if shared.joined[s] and shared.openings[s] == last]
        eligible = running if fault.kind == "kill" else healthy
        if len(eligible) < fault.count:
            return False
        victims = self._chance.sample(eligible, fault.count)
        if len(set(healthy).difference(victims)) < max(1, self.options.replicas // 8):
            return False
        fault.at = now
        fault.replicas = sorted(victims)
        for slot in victims:
            process = self._processes[slot]
            if fault.kind == "kill":
                process.kill()
                process.join()
                shared.joined[slot] = 0
                self._processes[slot] = None
                self._restarts[slot] = now + fault.seconds
                continue
            if fault.kind == "freeze":
                os.kill(process.pid, signal.SIGSTOP)
            elif fault.kind == "cut":
                self._proxies.cut(slot)
            self._recoveries[slot] = (now + fault.seconds, fault)
        self._set_links()
        return True

    def _set_links(self) -> None:
        """Let each replica reach those that no present fault keeps it from."""
        slots = range(self.options.replicas)
        for one in slots:
            for other in slots:
                self._shared.cut_off[one][other] = one != other and self._are_apart(one, other)

    def _are_apart(self, one: int, other: int) -> bool:
        """Whether one of the two is cut off from all, or they are cut off from each other."""
        faults = [self._recoveries[slot][1] for slot in (one, other) if slot in self._recoveries]
        return any(
            fault.kind == "cut" or (fault.kind == "part" and {one, other} <= set(fault.replicas))
            for fault in faults
        )

    def _opening_is_near(self) -> bool:
        steps = int(max(self._shared.steps))
        return 0 < -steps % self.options.period <= ARRIVED_EARLY


def run(options: Options, faults: Sequence[Fault]) -> dict[str, Any]:
    """The record of a run with these faults."""
    with tempfile.TemporaryDirectory(prefix="storm-") as name:
        folder = Path(name)
        with closing(Storm(options, faults, folder)) as storm:
            storm.weather()
        logs = {path.stem: lines_of(path, storm.begun) for path in folder.glob("*.jsonl")}
        if options.logs and faults:
            shutil.copytree(folder, options.logs, dirs_exist_ok=True)
        weights = sorted(folder.glob("*.pt"))
        loss = held_out_loss(weights[0]) if weights else None
    return {
        "options": asdict(options),
        **summary_of(options, storm.done, logs),
        "crashes": storm.crashes,
        "held_out_loss": loss,
    }


@contextmanager
def closing(storm: Storm) -> Iterator[Storm]:
    """End the storm's processes, also after errors."""
    try:
        yield storm
    finally:
        storm.close()


def lines_of(path: Path, begun: float) -> list[dict[str, Any]]:
    """The lines of a log, with times since the run began; a kill may have cut off the last."""
    lines = []
    for text in path.read_text("utf-8").splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        line["time"] -= begun
        lines.append(line)
    return lines


def summary_of(
    options: Options, faults: Sequence[Fault], logs: dict[str, list[dict[str, Any]]]
) -> dict[str, Any]:
    """What the logs of all processes say.

    Args:
        options: of the program.
        faults: that have happened.
        logs: lines by "replica-process".
    """
    lines = [line for log in logs.values() for line in log]
    steps = [line for line in lines if "step" in line and "joined" not in line]
    ends = [line for line in lines if "ended" in line]
    first = min(line["time"] for line in steps)
    last = max(line["time"] for line in steps)
    openings = openings_of(logs)
    stalls = sorted(stalls_of(faults, logs), key=lambda stall: -stall["seconds"])
    events = Counter(line["kind"] for line in lines if "event" in line)
    beginnings = {line["time"] for line in lines if "new run" in line.get("warning", "")}
    began_together = [moment for moment in beginnings if moment < min(beginnings) + 1.0]
    return {
        "faults": {
            kind: sum(len(fault.replicas) for fault in faults if fault.kind == kind)
            for kind in ("kill", "freeze", "cut", "part")
        },
        "seconds": round(last - first, 2),
        "steps_a_second": round((options.steps - 1) / (last - first), 4),
        "work": round(len(steps) / (options.steps * options.replicas), 4),
        "longest_stall_of_a_survivor": stalls[0]["seconds"],
        "openings": len(openings),
        "openings_with_different_anchors": sum(opening["anchors"] > 1 for opening in openings),
        "second_runs": len(beginnings) - len(began_together),
        "replicas_that_ended": len(ends),
        "steps_at_the_end": sorted({line["ended"] for line in ends}),
        "final_weights": len({line["weights"] for line in ends}),
        "events_of_replicas": dict(events),
        "opening_events": openings,
        "fault_events": [told(fault) for fault in faults],
        "lives": lives_of(faults, logs),
        "waits": list(waits_of(logs)),
        "longest_stalls": stalls[:20],
    }


def openings_of(logs: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Each opening: when the first member had applied it, who took part, how many anchors."""
    by_number = defaultdict(list)
    for name, log in logs.items():
        for line in log:
            if "opening" in line:
                by_number[line["opening"]].append((slot_of(name), line))
    openings = []
    for number, parts in sorted(by_number.items()):
        lines = [line for _, line in parts]
        openings.append(
            {
                "number": number,
                "at": round(min(line["time"] for line in lines), 2),
                "step": max(line["step"] for line in lines),
                "members": max(line["members"] for line in lines),
                "told_by": sorted({slot for slot, _ in parts}),
                "anchors": len({line["anchors"] for line in lines}),
            }
        )
    return openings


def stalls_of(
    faults: Sequence[Fault], logs: dict[str, list[dict[str, Any]]]
) -> Iterator[dict[str, Any]]:
    """The times between two steps of each survivor.

    A replica is none from the time at which it is frozen or cut off to its first opening after.
    """
    for name, log in logs.items():
        slot = slot_of(name)
        openings = [line["time"] for line in log if "opening" in line]
        disturbed = []
        for fault in faults:
            if slot in fault.replicas and fault.kind in ("freeze", "cut"):
                over = fault.at + fault.seconds
                back = min((at for at in openings if at > over), default=float("inf"))
                disturbed.append((fault.at, back))
        times = [line["time"] for line in log if "step" in line]
        for before, after in pairwise(times):
            if not any(begin <= after and before <= back for begin, back in disturbed):
                yield {
                    "replica": slot,
                    "at": round(after, 2),
                    "seconds": round(after - before, 2),
                }


def lives_of(
    faults: Sequence[Fault], logs: dict[str, list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Of each process when it had joined the run, and when it was killed or ended."""
    lives = []
    for name, log in logs.items():
        slot = slot_of(name)
        joined = [line["time"] for line in log if "joined" in line]
        if joined:
            kills = [f.at for f in faults if f.kind == "kill" and slot in f.replicas]
            end = min((at for at in kills if at > joined[0]), default=log[-1]["time"])
            lives.append({"replica": slot, "from": round(joined[0], 2), "to": round(end, 2)})
    return sorted(lives, key=lambda life: (life["replica"], life["from"]))


def waits_of(logs: dict[str, list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """All times between two steps of a replica, survivor or not, that are longer than a while."""
    for name, log in logs.items():
        times = [line["time"] for line in log if "step" in line]
        for before, after in pairwise(times):
            if after - before > WHILE:
                begin, end = round(before, 2), round(after, 2)
                yield {"replica": slot_of(name), "from": begin, "to": end}


def slot_of(name: str) -> int:
    """The replica of a process, from the name of its log."""
    return int(name.partition("-")[0])


def told(fault: Fault) -> dict[str, Any]:
    """A fault that has happened, as the record has it."""
    return {
        "kind": fault.kind,
        "at": round(fault.at, 2),
        "seconds": round(fault.seconds, 2),
        "replicas": fault.replicas,
    }


def interrupt(*_: object) -> None:
    """End as Ctrl-C does, so that no replica stays."""
    raise KeyboardInterrupt


def main() -> None:
    """Run what the command line asks for."""
    signal.signal(signal.SIGTERM, interrupt)
    options = parse(Options)
    if options.undisturbed:
        undisturbed = json.loads(Path(options.undisturbed).read_text("utf-8"))["records"][0]
    else:
        undisturbed = {"run": "undisturbed", **run(options, [])}
    found = [undisturbed]
    if faults := plan_of(options):
        storm = {"run": "storm", **run(options, faults)}
        storm["goodput"] = round(storm["steps_a_second"] / undisturbed["steps_a_second"], 4)
        found.append(storm)
    records.write(Path(options.out), torch.device("cpu"), found)
    for record in found:
        short = {k: v for k, v in record.items() if k != "options" and not isinstance(v, list)}
        print(json.dumps(short))


if __name__ == "__main__":
    main()
