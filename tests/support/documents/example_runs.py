"""Runs of examples/gpt/train_gpt.py, and the checkpoints that they leave."""

from __future__ import annotations

import importlib
from pathlib import Path

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import train_gpt
from support.references.tolerance import Rounding, assert_close
from support.runs import deepspeed_engines, distributed

LOSSES = Rounding(torch.float32, terms=16)  # of runs whose sums differ in their order


def train(rank, *arguments):
    return train_gpt.main(arguments)


def follow_in_workers(command, environment, output):
    """What demo.follow does, with processes that are there already in place of torchrun's."""
    *launcher, processes, program = command[: command.index("--out")]
    assert launcher[1:] == "-m torch.distributed.run --standalone --nproc-per-node".split()
    arguments = [*command[command.index("--out") :], "--no-progress"]
    port = distributed.free_port()
    distributed.run(int(processes), run_program, Path(program).stem, arguments, port)
    output.write_text("")
    return 0


def run_program(rank, name, arguments, port):
    program = importlib.import_module(name)
    if name == "train_gpt_deepspeed":
        deepspeed_engines.prepare()
        program.main(arguments)
        return
    with distributed.as_torchrun_starts(rank, port):
        program.main(arguments)


def assert_same_losses(actual, expected):
    assert_close(torch.tensor(actual), torch.tensor(expected), LOSSES)


def assert_same_checkpoint(one: Path, other: Path):
    ours, theirs = contents(one), contents(other)
    assert ours.keys() == theirs.keys()
    assert {key[0] for key in ours} == {"model", "optimizer"}
    for key, value in ours.items():
        assert value == theirs[key] if not torch.is_tensor(value) else value.equal(theirs[key]), key


def contents(folder: Path):
    """A checkpoint's values by their path, whatever the layout that wrote them."""
    file = folder.with_suffix(".pt")
    dcp_to_torch_save(folder, file)
    flat, nested = {}, [((), torch.load(file, weights_only=False))]
    while nested:
        path, value = nested.pop()
        if isinstance(value, (dict, list)):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            nested += [((*path, key), inner) for key, inner in items]
        else:
            flat[path] = value
    return flat
