"""Train a GPT on four replicas, two of which are killed and rejoin, and again undisturbed.

    python examples/demo_elastic.py

Needs torchft (``pip install 'torchft>=0.2,<0.3'``). Prints a table and writes ``summary.json`` and
``demo_elastic.png`` below ``--out``. Further flags are passed to gpt/train_gpt.py.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

sys.path.append(str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parent / "gpt"))

from curvadion.metering.picture import FAINT, STYLE
from demo import aligned
from run_log import read

EXAMPLES = Path(__file__).resolve().parent
TRAIN = EXAMPLES / "gpt" / "train_gpt.py"
REPLICAS = 4
SHARED = (
    "--optimizer curvadion --lr 0.03 --period 6 --sync quantized_average --steps 240 --dim 96 "
    "--layers 2 --heads 4 --context 64 --batch-size 8 --warmup-steps 10 --validate-every 12 "
    "--validation-tokens 4096 --data-bytes 2000000 --no-progress"
)
# When a replica is killed and when it rejoins, as shares of the first one's steps; its number.
KILLED = ((0.3, 0.45, 2), (0.5, 0.7, 3))


def train(out: Path, flags: Sequence[str], killed: Sequence[tuple[float, float, int]]) -> Any:
    """Run the replicas; return the first one's records, and the kills and restarts of others."""
    from torchft.coordination import LighthouseServer

    shutil.rmtree(out, ignore_errors=True)
    lighthouse = LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=5000, heartbeat_timeout_ms=1000
    )
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    environment["PYTHONPATH"] = f"{EXAMPLES.parent}:{environment.get('PYTHONPATH', '')}"
    environment["TORCHFT_LIGHTHOUSE"] = lighthouse.address()

    def start(number: int, again: bool) -> subprocess.Popen[bytes]:
        folder = out / f"replica_{number}"
        folder.mkdir(parents=True, exist_ok=True)
        own = {"REPLICA_GROUP_ID": folder.name, "TORCHELASTIC_RESTART_COUNT": str(int(again))}
        command = [sys.executable, str(TRAIN), "--out", str(folder), *flags]
        with (folder / "output.txt").open("ab") as output:
            return subprocess.Popen(
                command, env=environment | own, stdout=output, stderr=subprocess.STDOUT
            )

    def step() -> int:
        records = read(out / "replica_0" / "log.jsonl", "train")
        return records[-1]["step"] if records else 0

    running = [start(number, again=False) for number in range(REPLICAS)]
    # As in train_gpt.py, the last --steps counts.
    last = max(i for i, flag in enumerate(flags) if flag == "--steps")
    steps = int(flags[last + 1])
    plan = [(share * steps, "killed", k) for share, _, k in killed]
    plan = sorted(plan + [(share * steps, "back", k) for _, share, k in killed])
    events = []
    while running[0].poll() is None:
        time.sleep(0.1)
        while plan and step() >= plan[0][0]:
            _, what, number = plan.pop(0)
            if what == "killed":
                running[number].send_signal(signal.SIGKILL)
                running[number].wait()
            else:
                running[number] = start(number, again=True)
            events.append((step(), f"replica {number} {what}"))
    for process in running[1:]:
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:  # it waits for replicas that are gone
            process.kill()
    if running[0].returncode:
        raise SystemExit(f"The first replica failed: see {out / 'replica_0' / 'output.txt'}")
    return read(out / "replica_0" / "log.jsonl", "validation"), events


def draw(runs: dict[str, Any], path: Path) -> None:
    """Write the picture: held-out losses, and when replicas left and rejoined."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(8, 4.6), layout="constrained")
        for name, (records, events) in runs.items():
            steps, losses = ([r[key] for r in records] for key in ("step", "val_loss"))
            axes.plot(steps, losses, label=name)
            for height, (step, what) in enumerate(events):
                axes.axvline(step, color=FAINT)
                top = 0.97 - 0.06 * height
                transform = axes.get_xaxis_transform()
                axes.text(step, top, f" {what}", va="top", transform=transform)
        axes.set(xlabel="steps of the first replica", ylabel="its held-out loss")
        axes.legend(loc="lower left")
        figure.savefig(path, dpi=120)
        plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run both trainings, print a table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=Path("runs/demo-elastic"))
    options, more = parser.parse_known_args(arguments)
    flags = [*SHARED.split(), "--elastic", str(REPLICAS), *more]
    runs = {
        "undisturbed": train(options.out / "undisturbed", flags, ()),
        "two killed": train(options.out / "two killed", flags, KILLED),
    }
    summary = {
        name: {"val_loss": records[-1]["val_loss"], "events": events}
        for name, (records, events) in runs.items()
    }
    rows = [[name, f"{s['val_loss']:.4f}", "; ".join(f"{what} at {at}" for at, what in s["events"])]
            for name, s in summary.items()]  # fmt: skip
    print(aligned([["run", "held out", "events, by steps of the first replica"], *rows]))
    (options.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    draw(runs, options.out / "demo_elastic.png")
    return summary


if __name__ == "__main__":
    main()
