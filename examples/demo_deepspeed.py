"""Compare DeepSpeed's ZeRO stages with plain DDP, and replicas under ZeRO with HSDP.

    python examples/demo_deepspeed.py

All runs have the same model, data, seed and tokens. With the gate always open, every stage follows
the loss curve of DDP with Dion. With replicas of two ranks (``replica_size``) and 1 % of the bytes
between them, stages 1 to 3 follow HSDP. Prints a table and writes ``summary.json`` below ``--out``.
Further flags are passed to all runs.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from demo import GPT, aligned, train

SHARED = (
    "--steps 200 --dim 128 --layers 4 --heads 4 --context 128 --validate-every 20 "
    "--validation-tokens 16384"
)
STAGES = range(4)
NODE = 2  # ranks of a node and of a replica


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Run all, print the table and the largest difference of the curves; return the summary."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/demo-deepspeed"))
    parser.add_argument("--processes", type=int, default=4, help="ranks; default: 4")
    options, flags = parser.parse_known_args(arguments)
    every_step, few_bytes = at_every_step(), at_one_percent()
    programs = every_step | few_bytes
    runs: dict[str, dict[str, Any]] = {}
    for number, (name, (program, own)) in enumerate(programs.items(), start=1):
        print(f"[{number}/{len(programs)}] {name}", flush=True)
        every = [*SHARED.split(), "--node-size", str(NODE), *own, *flags]
        run = train(name, options.out, options.processes, every, program)
        reference = next(iter(every_step if name in every_step else few_bytes))
        runs[name] = compare(run, runs.get(reference, run))
    summaries = [run["summary"] for run in runs.values()]
    (options.out / "summary.json").write_text(json.dumps(summaries, indent=2) + "\n")
    print(f"\n{table(summaries)}\n\n{options.out}/summary.json")
    for names, first in ((every_step, "DDP's"), (few_bytes, "HSDP's")):
        difference = max(runs[name]["summary"]["largest_difference"] for name in names)
        print(
            f"{len(names)} runs: no loss of any step is further from {first} than {difference:.1e}."
        )
    return summaries


def at_every_step() -> dict[str, tuple[str, list[str]]]:
    """Return programs and flags by run name: DDP and each stage, with Dion."""
    of_ddp = ["--optimizer", "dion", "--batch-size", "8"]
    runs = {"Dion, DDP": ("train_gpt.py", of_ddp)}
    return runs | {
        f"Dion, ZeRO {stage}": of_json(f"ds_config_zero{stage}.json", "always") for stage in STAGES
    }


def at_one_percent() -> dict[str, tuple[str, list[str]]]:
    """Return the same for replicas with a budget of 1 % of the bytes."""
    of_hsdp = "--optimizer curvadion --lr 0.03 --wire-budget 0.01 --parallel hsdp --batch-size 8"
    runs = {"1 %, HSDP": ("train_gpt.py", [*of_hsdp.split(), "--shards", str(NODE)])}
    return runs | {
        f"1 %, ZeRO {stage}": of_json(f"ds_config_zero{stage}_replicas.json", "json")
        for stage in STAGES
        if stage > 0
    }


def of_json(name: str, gate: str) -> tuple[str, list[str]]:
    """Return the program and flags of a run with one of the DeepSpeed configurations."""
    flags = ["--deepspeed-config", str(GPT / name), "--gate", gate]
    return "train_gpt_deepspeed.py", flags


def compare(run: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """Return a run with its largest relative loss difference from another run at any step."""
    curve, expected = ([record["loss"] for record in each["train"]] for each in (run, reference))
    difference = max(abs(a / b - 1) for a, b in zip(curve, expected, strict=True))
    return {**run, "summary": {**run["summary"], "largest_difference": difference}}


def table(summaries: Sequence[dict[str, Any]]) -> str:
    """Return the runs as text, one per line."""
    heads = ["run", "held out", "difference", "sent kB/step", "crossing", "gate open", "s"]
    rows = [
        [
            summary["name"],
            f"{summary['val_loss']:.4f}",
            f"{summary['largest_difference']:.1e}",
            f"{summary['sent_bytes_per_step'] / 1e3:.1f}",
            f"{summary['crossing_bytes_per_step'] / 1e3:.1f}",
            f"{summary['open_gate_share']:.1%}",
            f"{summary['seconds']:.0f}",
        ]
        for summary in summaries
    ]
    return aligned([heads, *rows])


if __name__ == "__main__":
    main()
