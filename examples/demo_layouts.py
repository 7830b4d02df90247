"""Train one GPT in every layout: same seed and samples per step, hence the same loss curve.

    python examples/demo_layouts.py

Each run trains with Dion on this machine, with one to four processes (``--processes 8`` adds one).
Prints a table and writes ``summary.json`` and ``demo_layouts.png`` below ``--out``. Further flags
are passed to gpt/train_gpt.py in every run:
``python examples/demo_layouts.py --steps 100 --seed 1``.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from demo import aligned, train
from demo_layouts_plot import draw

SHARED = (
    "--optimizer dion --steps 60 --dim 96 --layers 2 --heads 4 --context 64 --warmup-steps 10 "
    "--validate-every 0 --validation-tokens 4096 --data-bytes 2000000"
)
SEQUENCES = 8  # per step, over all processes
# Processes, layout, and how many of the processes read their own samples.
RUNS = {
    "one process": (1, "ddp", 1),
    "DDP 2": (2, "ddp", 2),
    "FSDP 2": (2, "fsdp", 2),
    "TP 2": (2, "tp", 1),
    "HSDP 2 x 2": (4, "hsdp", 4),
    "FSDP x TP 2 x 2": (4, "fsdp_tp", 2),
    "HSDP x TP 2 x 2 x 2": (8, "hsdp_tp", 4),
}


def compare(run: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """Return a run with its relative loss difference from another run at every step."""
    curve, expected = ([record["loss"] for record in each["train"]] for each in (run, reference))
    differences = [abs(a / b - 1) for a, b in zip(curve, expected, strict=True)]
    summary = {**run["summary"], "loss": curve[-1], "largest_difference": max(differences)}
    return {**run, "differences": differences, "summary": summary}


def table(summaries: Sequence[dict[str, Any]]) -> str:
    """Return the runs as text, one per line."""
    heads = ["layout", "loss", "held out", "difference", "optimizer kB/step", "all kB/step", "s"]
    return aligned(
        [
            heads,
            *(
                [
                    summary["name"],
                    f"{summary['loss']:.5f}",
                    f"{summary['val_loss']:.5f}",
                    f"{summary['largest_difference']:.1e}",
                    f"{summary['optimizer_bytes_per_step'] / 1e3:.1f}",
                    f"{summary['wire_bytes_per_step'] / 1e3:.1f}",
                    f"{summary['seconds']:.0f}",
                ]
                for summary in summaries
            ),
        ]
    )


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Train in each layout, print the table, write summary and picture; return the summary."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    out = Path("runs/demo-layouts")
    parser.add_argument("--out", type=Path, default=out, help=f"default: {out}")
    parser.add_argument(
        "--processes", type=int, default=4, help="largest number of a layout; default: 4"
    )
    options, flags = parser.parse_known_args(arguments)
    chosen = {name: run for name, run in RUNS.items() if run[0] <= options.processes}
    runs: list[dict[str, Any]] = []
    for number, (name, (processes, parallel, readers)) in enumerate(chosen.items(), start=1):
        print(f"[{number}/{len(chosen)}] {name}", flush=True)
        layout = ["--parallel", parallel, "--batch-size", str(SEQUENCES // readers)]
        run = train(name, options.out, processes, [*SHARED.split(), *layout, *flags])
        runs.append(compare(run, runs[0] if runs else run))
    summaries = [run["summary"] for run in runs]
    (options.out / "summary.json").write_text(json.dumps(summaries, indent=2) + "\n")
    draw(runs, options.out / "demo_layouts.png")
    print(f"\n{table(summaries)}\n\n{options.out}/summary.json, {options.out}/demo_layouts.png")
    return summaries


if __name__ == "__main__":
    main()
