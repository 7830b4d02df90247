"""Run the commands of docs/getting-started.md in an empty folder and record how long they take.

    python -m benchmarks.seconds.getting_started

Needs a package index. The folder is a copy of the checkout without its virtual environment.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.common.records import RESULTS, ROOT, write

PAGE = ROOT / "docs" / "getting-started.md"
NOT_COPIED = shutil.ignore_patterns(".git", ".venv", "runs", "build", "dist", "*.egg-info", "site")
SECONDS = re.compile(r"(<!-- seconds -->).*?(<!-- end -->)", re.DOTALL)


def blocks(text: str, language: str) -> list[str]:
    """Return a page's code blocks in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def main() -> None:
    """Run the commands, write the record, and write the seconds into the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = RESULTS / "packaging/getting_started.json"
    parser.add_argument("--output", type=Path, default=default)
    options = parser.parse_args()
    text = PAGE.read_text("utf-8")
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    records = []
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder) / "checkout"
        shutil.copytree(ROOT, here, ignore=NOT_COPIED)
        environment["CURVADION_CACHE"] = str(Path(folder) / "cache")
        program = blocks(text, "python")[0]
        (here / "first.py").write_text(program, "utf-8")
        for command in "".join(blocks(text, "bash")).splitlines():
            begin = time.perf_counter()
            said = subprocess.run(
                command, shell=True, check=True, cwd=here, env=environment,
                stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            seconds = time.perf_counter() - begin
            last = (said.stdout.strip().splitlines() or [""])[-1]
            records.append({"command": command, "seconds": round(seconds, 1), "last line": last})
            print(records[-1])
    total = sum(float(str(record["seconds"])) for record in records)
    records.append({"command": "all of them", "seconds": round(total, 1), "last line": ""})
    write(options.output, torch.device("cpu"), records)
    PAGE.write_text(SECONDS.sub(rf"\g<1>{total:.0f} seconds\g<2>", text), "utf-8")


if __name__ == "__main__":
    main()
