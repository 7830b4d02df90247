"""examples/gpt/train_gpt.py --parallel: one loss curve under every layout, and what each sends."""

import json
import shutil

import pytest

from parallel import mesh_sizes
from run_log import read
from support.documents.example_runs import assert_same_checkpoint, assert_same_losses, train
from support.runs import distributed

DIM, LAYERS, VOCABULARY, SEQUENCES, RANK = 16, 1, 256, 8, 4
TINY = (
    f"--no-progress --data-bytes 60000 --validation-tokens 256 --layers {LAYERS} --heads 4 "
    f"--dim {DIM} --context 16 --steps 3 --warmup-steps 2"
).split()
DION = ["--optimizer", "dion"]
PERIOD = ["--optimizer", "curvadion", "--period", "2", "--local-lr", "0.1"]


def run(out, processes, readers, *flags):
    """The first rank's log of a run whose processes read SEQUENCES a step together."""
    batch = ["--batch-size", str(SEQUENCES // readers)]
    distributed.run(processes, train, *TINY, *batch, *flags, "--out", str(out))
    return read(out / "log.jsonl", "train"), json.loads((out / "summary.json").read_text("utf-8"))


def losses(log, summary):
    return [*(record["loss"] for record in log), summary["val_loss"]]


@pytest.mark.numeric
def test_shards_have_the_curve_of_one_process_and_resume_bitwise(tmp_path):
    flags = ["--parallel", "fsdp_tp", *DION, "--checkpoint-every", "2"]
    readers = mesh_sizes("fsdp_tp", 4, None, None).readers
    log, summary = run(tmp_path / "straight", 4, readers, *flags)
    assert_same_losses(losses(log, summary), losses(*run(tmp_path / "one", 1, 1, *DION)))
    assert summary["tokens_per_step"] == SEQUENCES * 16
    assert summary["drift"] == 0

    resumed = tmp_path / "resumed"
    shutil.copytree(tmp_path / "straight", resumed)
    shutil.rmtree(resumed / "checkpoints" / "step-00000003")
    again, _ = run(resumed, 4, readers, *flags, "--resume")
    assert [record["loss"] for record in again] == [record["loss"] for record in log]
    ends = (folder / "checkpoints" / "step-00000003" for folder in (tmp_path / "straight", resumed))
    assert_same_checkpoint(*ends)


@pytest.mark.numeric
def test_other_layouts_resume_the_checkpoint_of_drifted_replicas(tmp_path):
    flags = [*PERIOD, "--steps", "4", "--checkpoint-every", "3"]
    straight, _ = run(tmp_path / "hsdp", 4, 4, "--parallel", "hsdp", *flags)
    assert not straight[2]["gate_open"]
    for processes, readers, layout in ((2, 2, "ddp"), (4, 2, "hsdp_tp --shards 1")):
        out = tmp_path / layout
        shutil.copytree(tmp_path / "hsdp", out)
        shutil.rmtree(out / "checkpoints" / "step-00000004")
        again, _ = run(out, processes, readers, "--parallel", *layout.split(), *flags, "--resume")
        assert_same_losses(*([record["loss"] for record in log] for log in (again, straight)))
