"""Compare DeepSpeed's four ZeRO stages with plain DDP: same model, data, seed and tokens.

    python examples/demo_deepspeed.py

The gate is always open in one run of each stage, which then trains as DDP with Dion does, and
opens by the RMMC in another. The table goes to the screen, and ``summary.json`` below ``--out``.
Further flags go to all runs.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from demo import EXAMPLES, aligned, train

SHARED = (
    "--steps 200 --dim 128 --layers 4 --heads 4 --context 128 --validate-every 20 "
    "--validation-tokens 16384"
)
STAGES = range(4)


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Train all, print the table and how far the curves lie apart; return the summary."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/demo-deepspeed"))
    parser.add_argument("--processes", type=int, default=2, help="ranks; default: 2")
    options, flags = parser.parse_known_args(arguments)
    ddp = "Dion, DDP"
    programs = {ddp: ("train_gpt.py", ["--optimizer", "dion", "--batch-size", "8"])}
    for kind, gate in (("Dion", "always"), ("CurvaDion", "rmmc")):
        for stage in STAGES:
            json_file = str(EXAMPLES / f"ds_config_zero{stage}.json")
            own = ["--deepspeed-config", json_file, "--gate", gate]
            programs[f"{kind}, ZeRO {stage}"] = "train_gpt_deepspeed.py", own
    runs: list[dict[str, Any]] = []
    for number, (name, (program, own)) in enumerate(programs.items(), start=1):
        print(f"[{number}/{len(programs)}] {name}", flush=True)
        every = [*SHARED.split(), *own, *flags]
        run = train(name, options.out, options.processes, every, program)
        runs.append(compare(run, runs[0] if runs else run))
    summaries = [run["summary"] for run in runs]
    (options.out / "summary.json").write_text(json.dumps(summaries, indent=2) + "\n")
    apart = max(each["largest_difference"] for each in summaries if each["open_gate_share"] == 1)
    print(f"\n{table(summaries)}\n\n{options.out}/summary.json")
    print(f"Gate always open: no loss of any step is further from DDP's than {apart:.1e} of it.")
    return summaries


def compare(run: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """Return a run with the largest difference of a step's loss, relative to another run's."""
    curve, expected = ([record["loss"] for record in each["train"]] for each in (run, reference))
    apart = max(abs(a / b - 1) for a, b in zip(curve, expected, strict=True))
    return {**run, "summary": {**run["summary"], "largest_difference": apart}}


def table(summaries: Sequence[dict[str, Any]]) -> str:
    """Return the runs as text, one a line."""
    heads = ["run", "held out", "difference", "all kB/step", "optimizer kB/step", "gate open", "s"]
    rows = [
        [
            summary["name"],
            f"{summary['val_loss']:.4f}",
            f"{summary['largest_difference']:.1e}",
            f"{summary['wire_bytes_per_step'] / 1e3:.1f}",
            f"{summary['optimizer_bytes_per_step'] / 1e3:.1f}",
            f"{summary['open_gate_share']:.1%}",
            f"{summary['seconds']:.0f}",
        ]
        for summary in summaries
    ]
    return aligned([heads, *rows])


if __name__ == "__main__":
    main()
