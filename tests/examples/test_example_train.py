"""examples/train_gpt.py on real process groups: schedules, what is sent, resuming."""

import json
import os
import shutil
import subprocess
import sys
import warnings
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import checkpoint
import distributed
import fresh
import train_gpt
from command_line import parse
from example_runs import assert_same_checkpoint, assert_same_losses, train
from gpt import GPT, GPTConfig
from optional import need
from run_log import RunLog, read
from tolerance import Rounding, assert_close

CPU = torch.device("cpu")
TINY = (
    "--no-progress --data-bytes 60000 --validation-tokens 256 --layers 1 --heads 2 --dim 16 "
    "--context 16 --batch-size 4 --steps 6 --warmup-steps 2"
).split()
OPTIMIZERS = {
    "adamw": ["--optimizer", "adamw"],
    "dion": ["--optimizer", "dion"],
    "curvadion": ["--optimizer", "curvadion", "--threshold", "0.5", "--max-local-steps", "2"],
}


def config(**values):
    return train_gpt.Config(**{"steps": 100, "warmup_steps": 10, **values})


def test_wsd_warms_up_stays_and_descends():
    scales = [train_gpt.lr_scale(step, config(warmdown_fraction=0.3)) for step in range(100)]
    assert scales[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert scales[10:71] == [1.0] * 61
    assert scales[70:] == pytest.approx([(30 - i) / 30 for i in range(30)])


def test_cosine_is_half_way_at_half_time_and_ends_near_its_floor():
    cosine = config(schedule="cosine", final_lr_fraction=0.1)
    assert train_gpt.lr_scale(10, cosine) == 1.0
    assert train_gpt.lr_scale(55, cosine) == pytest.approx(0.55)
    assert train_gpt.lr_scale(99, cosine) == pytest.approx(0.1, abs=1e-3)


def test_the_command_line_is_the_dataclass():
    assert parse(train_gpt.Config, []) == train_gpt.Config()
    given = "--data a b --tie --no-progress --period 5 --schedule cosine --lr 1e-3".split()
    assert parse(train_gpt.Config, given) == train_gpt.Config(
        data=("a", "b"), tie=True, progress=False, period=5, schedule="cosine", lr=1e-3
    )
    with pytest.raises(SystemExit):
        parse(train_gpt.Config, ["--optimizer", "sgd"])


AVERAGE = (
    "QuantizedAverage(bits={}, fragments={}, align_momentum={}, polar_correction={}, "
    "residual_dtype='bfloat16', delay=0, spectrum_decay=0.8)"
)
SYNCS = {
    "": "LowRank(average_weights=True)",
    "--period 3 --sync low_rank": "LowRank(average_weights=True)",
    "--sync low_rank_unaveraged": "LowRank(average_weights=False)",
    "--period 3 --sync quantized_average": AVERAGE.format(2, 1, True, True),
    "--wire-budget 0.1": AVERAGE.format(3, 1, True, True),
    "--wire-budget 0.1 --budget-by rmmc --bits 1 --fragments 2": AVERAGE.format(1, 2, True, True),
    "--period 3 --sync quantized_average --no-align-momentum --no-polar-correction": (
        AVERAGE.format(2, 1, False, False)
    ),
}


@pytest.mark.parametrize(("flags", "wanted"), SYNCS.items())
def test_flags_choose_how_replicas_come_together(flags, wanted):
    model = GPT(GPTConfig(vocab_size=256, layers=1, heads=2, dim=16, tie=False))
    optimizer = train_gpt.build_optimizer(parse(train_gpt.Config, flags.split()), model, None)
    assert repr(optimizer.sync) == wanted


def test_a_missing_extra_is_named_with_what_needs_it():
    with pytest.raises(ImportError, match=r"--flag needs not_there: .*curvadion\[train\]"):
        need("not_there.part", "--flag")


def test_the_model_is_causal_and_ties_its_head():
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=11, layers=2, heads=2, dim=8, tie=True))
    assert model.head.weight is model.embedding.weight
    logits = []
    model.head.register_forward_hook(lambda module, inputs, output: logits.append(output))
    tokens = torch.randint(11, (1, 6))
    changed = tokens.clone()
    changed[0, 4] = (tokens[0, 4] + 1) % 11
    for these in (tokens, changed):
        model(these, tokens)
    assert_close(logits[0][0, :4], logits[1][0, :4], Rounding(torch.float32, terms=11))
    assert (logits[0] - logits[1])[0, 4:].norm() > 0.01 * logits[0][0, 4:].norm()
    with pytest.raises(ValueError, match="dim=12"):
        GPTConfig(vocab_size=11, layers=1, heads=4, dim=12)


def test_ddp_over_two_processes_is_accumulation_in_one(tmp_path):
    flags = [*TINY, *OPTIMIZERS["adamw"], "--out"]
    distributed.run(2, train, *flags, str(tmp_path / "two"))
    distributed.run(1, train, *flags, str(tmp_path / "one"), "--accumulation", "2")
    two, one = (
        [record["loss"] for record in read(tmp_path / name / "log.jsonl", "train")]
        for name in ("two", "one")
    )
    assert len(two) == 6
    assert_same_losses(two, one)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_resuming_is_bitwise_continuation(tmp_path, optimizer):
    flags = [*TINY, *OPTIMIZERS[optimizer], "--checkpoint-every", "3", "--out"]
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    distributed.run(2, train, *flags, str(straight))
    shutil.copytree(straight, resumed)
    shutil.rmtree(resumed / "checkpoints" / "step-00000006")
    summaries = distributed.run(2, train, *flags, str(resumed), "--resume")

    assert json.loads((resumed / "summary.json").read_text("utf-8")) == summaries[0]
    ours, theirs = (read(run / "log.jsonl") for run in (straight, resumed))
    for one, other in zip(ours, theirs, strict=True):
        # A start has its own messages: DDP's bucket order, the optimizer's check of the replicas.
        for bytes_sent in ("wire_bytes", "sent_bytes", "optimizer_bytes"):
            extra = other.pop(bytes_sent, 0) - one.pop(bytes_sent, 0)
            assert 0 <= extra < 1000
        assert one == other
    assert_same_checkpoint(*(run / "checkpoints" / "step-00000006" for run in (straight, resumed)))
    gates = [record["gate_open"] for record in ours if record["kind"] == "train"]
    assert len(gates) == 6
    assert set(gates[3:]) == ({True, False} if optimizer == "curvadion" else {True})


def test_a_run_goes_on_under_another_gate_and_sync(tmp_path):
    flags = [*TINY, "--optimizer", "curvadion", "--checkpoint-every", "3", "--out", str(tmp_path)]
    choices = [
        ["--threshold", "0.5"],
        ["--wire-budget", "0.2", "--fragments", "2"],
        ["--period", "2", "--sync", "low_rank_unaveraged"],
    ]
    for steps, choice in zip((3, 6, 9), choices, strict=True):
        resumed = ["--resume"] if steps > 3 else []
        [summary, _] = distributed.run(2, train, *flags, *choice, *resumed, "--steps", str(steps))
        assert summary["steps"] == steps
    losses = [record["loss"] for record in read(tmp_path / "log.jsonl", "train")]
    assert len(losses) == 9 and losses[-1] < losses[0]


def flip_a_byte(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def damages_and_resumptions(rank, flags, runs):
    """By run: what is wrong with its last checkpoint, the step resumed from, the warnings."""
    found = {}
    for run in runs:
        trainer = train_gpt.Trainer(parse(train_gpt.Config, [*flags, str(run)]), CPU)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            complaint = checkpoint.damage(run / "checkpoints" / "step-00000006")
            try:
                step = trainer.resume().step
            except RuntimeError as error:
                step = str(error)
        said = [str(each.message) for each in caught if each.filename == checkpoint.__file__]
        found[run.name] = (complaint, step, said)
    return found


def test_a_flipped_byte_is_noticed_and_the_checkpoint_before_is_resumed(tmp_path):
    flags = [*TINY, *OPTIMIZERS["dion"], "--checkpoint-every", "3", "--out"]
    whole = tmp_path / "whole"
    distributed.run(2, train, *flags, str(whole))
    newest = Path("checkpoints") / "step-00000006"
    files = sorted(file.name for file in (whole / newest).iterdir())
    assert files == [".metadata", "__0_0.distcp", "__1_0.distcp", "progress.json", "sha256"]
    others = ["without a file", "all damaged", "without digests"]
    runs = {name: tmp_path / name for name in [*files, *others]}
    for run in runs.values():
        shutil.copytree(whole, run)
    for name in files:
        flip_a_byte(runs[name] / newest / name)
    (runs["without a file"] / newest / "__1_0.distcp").unlink()
    for step in ("step-00000003", "step-00000006"):
        flip_a_byte(runs["all damaged"] / "checkpoints" / step / "__0_0.distcp")
    (runs["without digests"] / newest / "sha256").unlink()

    flags.insert(-1, "--resume")
    first, second = distributed.run(2, damages_and_resumptions, flags, [whole, *runs.values()])
    for name in files:
        damaged = {"sha256": ""}.get(name, name)  # a flipped name or digest is of another file
        for complaint, step, _ in (first[name], second[name]):
            assert damaged in complaint and complaint.endswith("not as sha256 has it")
            assert step == 3
        (said,) = first[name][2]
        assert f"resumes from {runs[name]}/checkpoints/step-00000003, an earlier" in said
        assert f"{newest} is damaged ({damaged}" in said
    for found in (first, second):
        assert found["whole"] == (None, 6, [])
        assert found["without a file"][:2] == ("__1_0.distcp not as sha256 has it", 3)
        assert found["all damaged"][1].startswith("no checkpoint is left to resume from: ")
        assert found["without digests"][:2] == (None, 6)
    assert "an earlier version saved it, and it is not verified" in first["without digests"][2][0]

    distributed.run(2, train, *flags, str(runs["__0_0.distcp"]))
    assert_same_checkpoint(whole / newest, runs["__0_0.distcp"] / newest)
    if tool := shutil.which("sha256sum"):
        command = [tool, "--quiet", "--check", "sha256"]
        subprocess.run(command, check=True, cwd=runs["__0_0.distcp"] / newest)


def test_the_log_tells_what_crosses_the_wire(tmp_path):
    sent = {}
    for name, flags in OPTIMIZERS.items():
        distributed.run(2, train, *TINY, *flags, "--out", str(tmp_path / name))
        log = read(tmp_path / name / "log.jsonl", "train")
        totals = [record["wire_bytes"] for record in log]
        sent[name] = [b - a for a, b in pairwise(totals)]
        gates = [record["gate_open"] for record in log][1:]
        summary = json.loads((tmp_path / name / "summary.json").read_text("utf-8"))
        assert summary["wire_bytes"] == totals[-1]
        assert summary["tokens"] == 6 * 2 * 4 * 16
    parameters = 2 * 256 * 16 + 3 * 16 + 4 * 16 * 16 + 2 * 16 * 64
    assert sent["adamw"][-1] == 4 * parameters
    assert all(each < 4 * parameters for each in sent["dion"])
    # Of the gate alone while it is closed: neither DDP, nor evaluation, nor telemetry.
    closed = [each for each, is_open in zip(sent["curvadion"], gates, strict=True) if not is_open]
    assert closed and set(closed) == {16}


def test_a_resumed_log_drops_what_came_after_its_checkpoint(tmp_path):
    for after_step, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        with RunLog(tmp_path, after_step=after_step, tensorboard=False, active=True) as log:
            for step in steps:
                log.write("train", step, run=after_step)
        with (tmp_path / "log.jsonl").open("a") as file:
            file.write('{"cut sho')
    runs = [(record["step"], record["run"]) for record in read(tmp_path / "log.jsonl")]
    assert runs == [(1, 0), (2, 0), (3, 2), (4, 2)]


def test_no_thread_of_the_process_group_outlives_the_training(tmp_path):
    script = f"""
import pathlib, train_gpt
train_gpt.main({[*TINY, "--steps", "2", "--out", str(tmp_path)]})
print([task.read_text("utf-8").strip() for task in pathlib.Path("/proc/self/task").glob("*/comm")])
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    said = fresh.python("-c", script, environment=environment)
    assert said.returncode == 0, said.stderr
    printed = said.stdout
    assert "'python" in printed
    assert "gloo" not in printed


def refused(rank, *flags):
    """What ends a training; no error leaves the worker, which would have it replaced."""
    with pytest.raises(ValueError, match="pass --resume to continue") as error:
        train(rank, *flags)
    return str(error.value)


def test_a_folder_with_checkpoints_is_not_overwritten(tmp_path):
    flags = [*TINY, "--checkpoint-every", "6", "--out", str(tmp_path)]
    distributed.run(1, train, *flags)
    assert "pass --resume to continue" in distributed.run(1, refused, *flags)[0]
    again = distributed.run(1, train, *flags, "--resume")
    assert again[0]["steps"] == 6
