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

from demo import EXAMPLES, table, train

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
    runs = {}
    for number, (name, (program, own)) in enumerate(programs.items(), start=1):
        print(f"[{number}/{len(programs)}] {name}", flush=True)
        every = [*SHARED.split(), *own, *flags]
        runs[name] = train(name, options.out, options.processes, every, program)
    summaries = [run["summary"] for run in runs.values()]
    (options.out / "summary.json").write_text(json.dumps(summaries, indent=2) + "\n")
    apart = max(
        distance(runs[ddp]["validation"], runs[f"Dion, ZeRO {stage}"]["validation"])
        for stage in STAGES
    )
    print(f"\n{table(summaries)}")
    print(f"\nGate always open: held-out losses differ from DDP's by at most {apart:.1e}.")
    return summaries


def distance(one: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> float:
    """Return the largest difference of two runs' held-out losses."""
    pairs = zip(one, other, strict=True)
    return max(abs(float(a["val_loss"]) - float(b["val_loss"])) for a, b in pairs)


if __name__ == "__main__":
    main()
