"""Compare AdamW on plain DDP, Muon, and CurvaDion with a gate and with a byte budget.

    python examples/demo.py

All runs have the same model, data, seed and tokens. Each trains a small GPT on this machine with
two processes. Prints a table and writes ``summary.json`` and ``demo.png`` below ``--out``. Further
flags are passed to gpt/train_gpt.py in every run: ``python examples/demo.py --steps 100 --seed 1``.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent / "gpt"))

from demo_plot import draw
from run_log import read

EXAMPLES = Path(__file__).resolve().parent
GPT = EXAMPLES / "gpt"
SHARED = (
    "--steps 400 --dim 128 --layers 4 --heads 4 --context 128 --batch-size 8 "
    "--validate-every 50 --validation-tokens 16384"
)
BESIDE_MATRICES = "--embedding-lr 6e-3 --head-lr 6e-3 --vector-lr 6e-3"
RUNS = {
    "AdamW-DDP": "--optimizer adamw --lr 3e-3",
    # One of the best synchronous methods (docs/convergence.md): Muon's direction with a look-ahead
    # of 2.
    "Muon": "--optimizer dion --direction polar --rank-fraction 1 --look-ahead 2 --lr 0.02 "
    f"{BESIDE_MATRICES}",
    "CurvaDion": "--optimizer curvadion --lr 0.02 --threshold 0.3 --max-local-steps 10 "
    f"{BESIDE_MATRICES}",
    "CurvaDion-1%": f"--optimizer curvadion --lr 0.03 --wire-budget 0.01 {BESIDE_MATRICES}",
}


def train(
    name: str, out: Path, processes: int, flags: Sequence[str], program: str = "train_gpt.py"
) -> dict[str, Any]:
    """Run a program of GPT under torchrun and return its summary, config and log.

    Args:
        name: of the run.
        out: folder of all runs.
        processes: how many.
        flags: of the program.
        program: a file of examples/gpt.

    Raises:
        SystemExit: the program failed.
    """
    folder = out / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    script = [str(GPT / program), "--out", str(folder), *flags]
    search_path = [str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")]
    environment = {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, search_path)),
    }
    if follow(
        [sys.executable, *launcher, str(processes), *script], environment, folder / "output.txt"
    ):
        output = (folder / "output.txt").read_text("utf-8", errors="replace")
        raise SystemExit(f"{output}\nThe run {name} failed: see {folder / 'output.txt'}")
    return {
        "summary": {
            **json.loads((folder / "summary.json").read_text("utf-8")),
            "name": name,
        },
        "config": json.loads((folder / "config.json").read_text("utf-8")),
        "train": read(folder / "log.jsonl", "train"),
        "validation": read(folder / "log.jsonl", "validation"),
    }


def follow(command: Sequence[str], environment: dict[str, str], output: Path) -> int:
    """Run a command, save its output, also show it in a terminal; return its exit status."""
    terminal = sys.stderr.isatty()
    progress = "--progress" if terminal else "--no-progress"
    with (
        output.open("wb") as kept,
        subprocess.Popen(
            [*command, progress], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process,
    ):
        assert process.stdout is not None
        while piece := os.read(process.stdout.fileno(), 4096):
            kept.write(piece)
            if terminal:
                sys.stderr.buffer.write(piece)
                sys.stderr.flush()
    return process.returncode


def table(summaries: Sequence[dict[str, Any]]) -> str:
    """Return the comparison as text, one line per run; bytes also as a share of the first run's."""
    rows = [
        ["run", "val loss", "wire MB", "kB/step", "of DDP", "gate open", "drift", "seconds"],
        *(
            [
                summary["name"],
                f"{summary['val_loss']:.4f}",
                f"{summary['sent_bytes'] / 1e6:.2f}",
                f"{summary['sent_bytes_per_step'] / 1e3:.1f}",
                f"{summary['sent_bytes'] / summaries[0]['sent_bytes']:.2%}",
                f"{summary['open_gate_share']:.1%}",
                f"{summary['drift']:.1e}" if summary["drift"] else "0",
                f"{summary['seconds']:.0f}",
            ]
            for summary in summaries
        ),
    ]
    return aligned(rows)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of cells as lines: the first column left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        row[0].ljust(widths[0])
        + "".join(cell.rjust(width + 2) for cell, width in zip(row[1:], widths[1:], strict=True))
        for row in rows
    )


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Run all trainings, print the table, write summary.json and demo.png; return the summary."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="default: runs/demo")
    parser.add_argument("--processes", type=int, default=2, help="replicas; default: 2")
    options, flags = parser.parse_known_args(arguments)
    runs = []
    for number, (name, own) in enumerate(RUNS.items(), start=1):
        print(f"[{number}/{len(RUNS)}] {name}", flush=True)
        runs.append(
            train(name, options.out, options.processes, [*SHARED.split(), *own.split(), *flags])
        )
    summaries = [run["summary"] for run in runs]
    (options.out / "summary.json").write_text(json.dumps(summaries, indent=2) + "\n")
    draw(runs, options.out / "demo.png")
    print(f"\n{table(summaries)}\n\n{options.out}/summary.json, {options.out}/demo.png")
    return summaries


if __name__ == "__main__":
    main()
