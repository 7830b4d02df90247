"""Records: JSON files that hold numbers, the command that made them, and the machine."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]  # of the checkout
RESULTS = ROOT / "benchmarks" / "results"


def environment(device: torch.device) -> dict[str, Any]:
    """Return versions and hardware."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "cpu": name_of(torch.device("cpu")),
        "commit": _commit(),
    }
    if device.type == "cuda":
        found["gpu"] = name_of(device)
        found["cuda"] = torch.version.cuda
    return found


def write(path: Path, device: torch.device, records: Sequence[dict[str, Any]]) -> None:
    """Write the records as JSON, with the command that made them and the environment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    launcher = ["torchrun", "--nproc-per-node", ranks] if by_torchrun else ["python"]
    command = shlex.join([*launcher, *program()])
    if os.environ.get("OMP_NUM_THREADS"):
        command = f"OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']} {command}"
    result = {"command": command, "environment": environment(device), "records": list(records)}
    path.write_text(json.dumps(result, indent=1) + "\n")


def command_of(module: str, arguments: Sequence[str] | None) -> str:
    """Return the command that runs a module.

    arguments: of its main; None for those of Python.
    """
    given = sys.argv[1:] if arguments is None else arguments
    return shlex.join(["python", "-m", module, *given])


def program() -> list[str]:
    """Return how this program was started: ``-m`` with its module, and its arguments."""
    path = Path(sys.argv[0]).resolve()
    if not path.is_relative_to(ROOT / "benchmarks"):
        return sys.argv
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return ["-m", module, *sys.argv[1:]]


def between_markers(document: str, begin: str, end: str, table: str) -> str:
    """Return a document with a table in the place of what lies between two markers.

    Args:
        document: Markdown, which has each marker once.
        begin: the first marker, which stays, as does the second one.
        end: the second one.
        table: Markdown.
    """
    before, rest = document.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}\n\n{table}\n\n{end}{after}"


def _version(module: str) -> str | None:
    try:
        return str(__import__(module).__version__)
    except ImportError:
        return None


def name_of(device: torch.device) -> str:
    """Return the name of a processor; "" if the system does not tell it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), "")


def _commit() -> str | None:
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.strip()
