"""examples/train_gpt.py on real process groups: schedules, what is sent, resuming."""

import json
import shutil
import warnings
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import checkpoint
import distributed
import train_gpt
from command_line import parse
from example_runs import assert_same_checkpoint, train
from gpt import GPT, GPTConfig
from run_log import read

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
    "--sync low_rank_unaveraged": "LowRank(average_weights=False)",
    "--wire-budget 0.1 --budget-by rmmc --bits 1 --fragments 2": AVERAGE.format(1, 2, True, True),
    "--period 3 --sync quantized_average --no-align-momentum --no-polar-correction": (
        AVERAGE.format(2, 1, False, False)
    ),
}


@pytest.mark.parametrize(("flags", "wanted"), SYNCS.items())
def test_flags_choose_how_replicas_synchronise(flags, wanted):
    model = GPT(GPTConfig(vocab_size=256, layers=1, heads=2, dim=16, tie=False))
    optimizer = train_gpt.build_optimizer(parse(train_gpt.Config, flags.split()), model, None)
    assert repr(optimizer.sync) == wanted


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


def damages_and_resumptions(rank, flags, runs):
    """By run: what is wrong with its last checkpoint, the step resumed from, the warnings."""
    found = {}
    for run in runs:
        trainer = train_gpt.Trainer(parse(train_gpt.Config, [*flags, str(run)]), CPU)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            complaint = checkpoint.damage(run / "checkpoints" / "step-00000006")
            step = trainer.resume().step
        said = [str(each.message) for each in caught if each.filename == checkpoint.__file__]
        found[run.name] = (complaint, step, said)
    return found


def test_a_flipped_byte_is_noticed_and_the_checkpoint_before_is_resumed(tmp_path):
    flags = [*TINY, *OPTIMIZERS["dion"], "--checkpoint-every", "3", "--out"]
    whole = tmp_path / "whole"
    distributed.run(2, train, *flags, str(whole))
    newest = Path("checkpoints") / "step-00000006"
    damaged = [".metadata", "__1_0.distcp", "progress.json"]
    runs = {name: tmp_path / name for name in damaged}
    for name, run in runs.items():
        shutil.copytree(whole, run)
        content = bytearray((run / newest / name).read_bytes())
        content[len(content) // 2] ^= 1
        (run / newest / name).write_bytes(content)

    flags.insert(-1, "--resume")
    ranks = distributed.run(2, damages_and_resumptions, flags, [whole, *runs.values()])
    for found in ranks:
        assert found["whole"] == (None, 6, [])
        for name in damaged:
            assert found[name][:2] == (f"{name} not as sha256 has it", 3)
    for name in damaged:
        (said,) = ranks[0][name][2]
        assert f"{newest} is damaged ({name}" in said and "step-00000003, an earlier" in said
    distributed.run(2, train, *flags, str(runs["__1_0.distcp"]))
    assert_same_checkpoint(whole / newest, runs["__1_0.distcp"] / newest)


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
    # Of the meeting alone while it is closed: neither DDP, nor evaluation, nor telemetry.
    closed = [each for each, is_open in zip(sent["curvadion"], gates, strict=True) if not is_open]
    assert closed and set(closed) == {24}
