"""examples/gpt/train_gpt.py on real process groups: schedules, what is sent, resuming."""

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch

import checkpoint
import train_gpt
from command_line import parse
from gpt import GPT, GPTConfig
from run_log import read
from support.documents.example_runs import assert_same_checkpoint, train
from support.runs import distributed

CPU = torch.device("cpu")
TINY = (
    "--no-progress --data-bytes 60000 --validation-tokens 256 --layers 1 --heads 2 --dim 16 "
    "--context 16 --batch-size 4 --steps 6 --warmup-steps 2"
).split()
CURVADION = ["--optimizer", "curvadion", "--threshold", "0.5", "--max-local-steps", "2"]


def config(**values):
    return train_gpt.Config(**{"steps": 100, "warmup_steps": 10, **values})


AVERAGE = (
    "QuantizedAverage(bits={}, fragments={}, align_momentum={}, polar_correction={}, "
    "residual_dtype='bfloat16', delay=0, spectrum_decay=0.8)"
)
SYNCS = {
    "--threshold 0.3": "LowRank(average_weights=True)",
    "--threshold 0.3 --sync low_rank_unaveraged": "LowRank(average_weights=False)",
    "--wire-budget 0.1 --bits 1 --fragments 2": AVERAGE.format(1, 2, True, True),
    "--period 3 --sync quantized_average --no-align-momentum --no-polar-correction": (
        AVERAGE.format(2, 1, False, False)
    ),
    "--sync coded_gradients --bits 1 2": ("CodedGradients(bits=(1, 2), residual_dtype='bfloat16')"),
}


@pytest.mark.parametrize(("flags", "wanted"), SYNCS.items())
def test_flags_choose_how_replicas_synchronise(flags, wanted):
    model = GPT(GPTConfig(vocab_size=256, layers=1, heads=2, dim=16, tie=False))
    optimizer = train_gpt.build_optimizer(parse(train_gpt.Config, flags.split()), model, None)
    assert repr(optimizer.sync) == wanted


def test_flags_must_say_when_replicas_synchronise():
    with pytest.raises(ValueError, match=r"pass --wire-budget 0\.01 \(recommended\)"):
        train_gpt.gate(config())
    with pytest.raises(ValueError, match=r"period=3 and threshold=0\.3: give one of them"):
        train_gpt.gate(config(period=3, threshold=0.3))
    assert train_gpt.gate(config(sync="coded_gradients")).always_open


def test_resuming_is_bitwise_continuation(tmp_path):
    flags = [*TINY, *CURVADION, "--checkpoint-every", "3", "--out"]
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
        for share_or_seconds in ("share", "opening_seconds", "step_seconds"):
            assert (share_or_seconds in one) == (share_or_seconds in other)
            one.pop(share_or_seconds, None)
            other.pop(share_or_seconds, None)
        assert one == other
    assert_same_checkpoint(*(run / "checkpoints" / "step-00000006" for run in (straight, resumed)))
    gates = [record["gate_open"] for record in ours if record["kind"] == "train"]
    assert len(gates) == 6
    assert set(gates[3:]) == {True, False}


def warnings_of_training(rank, *arguments):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train_gpt.main(arguments)
    return [str(each.message) for each in caught if each.filename == checkpoint.__file__]


def test_a_flipped_byte_is_noticed_and_the_checkpoint_before_is_resumed(tmp_path):
    flags = [*TINY, "--optimizer", "adamw", "--checkpoint-every", "3", "--out"]
    whole, damaged = tmp_path / "whole", tmp_path / "damaged"
    distributed.run(2, train, *flags, str(whole))
    shutil.copytree(whole, damaged)
    with pytest.raises(distributed.RankFailure, match=r"(?s)Missing key in checkpoint.*model"):
        distributed.run(2, train, *flags, str(whole), "--resume", "--layers", "2", "--steps", "7")
    newest = Path("checkpoints") / "step-00000006"
    file = damaged / newest / "__1_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)

    said, _ = distributed.run(2, warnings_of_training, *flags, str(damaged), "--resume")
    assert len(said) == 1 and f"{newest} is damaged (__1_0.distcp" in said[0]
    assert "step-00000003, an earlier" in said[0]
    assert_same_checkpoint(whole / newest, damaged / newest)
