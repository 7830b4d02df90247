"""examples/train_gpt.py --parallel: one loss curve under every layout, and what each sends."""

import json
import shutil

import pytest
import torch

import distributed
import formulas
from example_runs import assert_same_checkpoint, assert_same_losses, train
from parallel import mesh_sizes
from run_log import read
from tolerance import Rounding, assert_close

DIM, LAYERS, VOCABULARY, SEQUENCES, RANK = 16, 1, 256, 8, 4
TINY = (
    f"--no-progress --data-bytes 60000 --validation-tokens 256 --layers {LAYERS} --heads 4 "
    f"--dim {DIM} --context 16 --steps 3 --warmup-steps 2"
).split()
DION = ["--optimizer", "dion"]
PERIOD = ["--optimizer", "curvadion", "--period", "2", "--local-lr", "0.1"]
# Processes, flags.
LAYOUTS = {
    "ddp 2": (2, "--parallel ddp"),
    "hsdp 2x2": (4, "--parallel hsdp"),
    "tp 2": (2, "--parallel tp"),
    "fsdp_tp 2x2": (4, "--parallel fsdp_tp"),
    "hsdp_tp 2x1x2": (4, "--parallel hsdp_tp --shards 1"),
}


def sizes_of(layout):
    processes, flags = LAYOUTS[layout]
    _, parallel, *rest = flags.split()
    return mesh_sizes(parallel, processes, int(rest[1]) if rest else None, None)


def run(out, processes, readers, *flags):
    """The first rank's log of a run whose processes read SEQUENCES a step together."""
    batch = ["--batch-size", str(SEQUENCES // readers)]
    distributed.run(processes, train, *TINY, *batch, *flags, "--out", str(out))
    return read(out / "log.jsonl", "train"), json.loads((out / "summary.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """Losses of one process."""
    log, summary = run(tmp_path_factory.mktemp("one"), 1, 1, *DION)
    return [*(record["loss"] for record in log), summary["val_loss"]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_curve_of_one_process_and_resumes_bitwise(
    tmp_path, one_process, layout
):
    processes, flags = LAYOUTS[layout]
    sizes = sizes_of(layout)
    flags = [*flags.split(), *DION, "--checkpoint-every", "2"]
    log, summary = run(tmp_path / "straight", processes, sizes.readers, *flags)
    assert_same_losses([*(r["loss"] for r in log), summary["val_loss"]], one_process)
    assert summary["tokens_per_step"] == SEQUENCES * 16
    assert summary["drift"] == 0
    sent = bytes_of_a_step(summary["parallel"], sizes)
    assert {record["optimizer_bytes"] for record in log[1:]} == {sent}

    resumed = tmp_path / "resumed"
    shutil.copytree(tmp_path / "straight", resumed)
    shutil.rmtree(resumed / "checkpoints" / "step-00000003")
    again, _ = run(resumed, processes, sizes.readers, *flags, "--resume")
    assert [record["loss"] for record in again] == [record["loss"] for record in log]
    ends = (folder / "checkpoints" / "step-00000003" for folder in (tmp_path / "straight", resumed))
    assert_same_checkpoint(*ends)


def bytes_of_a_step(parallel, sizes):
    """What the optimizer sends on the first rank at a step with the gate open."""
    shard, tensor = ("shard", sizes.shards, 0), ("tensor", sizes.tensor, 0)
    row_shards, column_shards = ([tensor, shard], []), ([shard], [tensor])
    block = [
        *3 * [((DIM, DIM), row_shards)],  # query, key, value
        ((DIM, DIM), column_shards),
        ((4 * DIM, DIM), row_shards),
        ((DIM, 4 * DIM), column_shards),
    ]
    matrices = [
        formulas.held(shape, RANK, m_cuts=m_cuts, n_cuts=n_cuts, replicas=sizes.replicas)
        for shape, (m_cuts, n_cuts) in LAYERS * block
    ]
    gains = (2 * LAYERS + 1) * DIM // sizes.shards
    tables = 2 * VOCABULARY * DIM // (sizes.shards * sizes.tensor)
    # Each tensor rank has the gains' gradients of its positions only; FSDP would add them up.
    summands = 4 * gains if parallel == "tp" else 0
    return summands + formulas.open_step(matrices, elementwise=gains + tables)


def test_sharded_replicas_drift_as_whole_ones_do(tmp_path):
    whole, expected = run(tmp_path / "whole", 2, 2, *PERIOD)
    log, actual = run(tmp_path / "sharded", 4, 4, "--parallel", "hsdp", *PERIOD)
    gates = [record["gate_open"] for record in log]
    assert gates == [record["gate_open"] for record in whole] == [False, True, False]
    assert_same_losses([r["loss"] for r in log], [r["loss"] for r in whole])
    # Of replicas that are close to each other.
    rounding = Rounding(torch.float32, condition=1 / expected["drift"])
    assert_close(actual["drift"], expected["drift"], rounding)


def test_other_layouts_resume_the_checkpoint_of_drifted_replicas(tmp_path):
    flags = [*PERIOD, "--steps", "4", "--checkpoint-every", "3"]
    straight, _ = run(tmp_path / "hsdp", 4, 4, "--parallel", "hsdp", *flags)
    assert not straight[2]["gate_open"]
    for processes, readers, layout in ((2, 2, "ddp"), (4, 2, "hsdp_tp --shards 1")):
        out = tmp_path / layout
        shutil.copytree(tmp_path / "hsdp", out)
        shutil.rmtree(out / "checkpoints" / "step-00000004")
        again, _ = run(out, processes, readers, "--parallel", *layout.split(), *flags, "--resume")
        losses = [[record["loss"] for record in log] for log in (again, straight)]
        assert_same_losses(*losses)


@pytest.mark.parametrize(
    ("arguments", "sizes"),
    [
        (("fsdp", 3, None, None), (1, 3, 1)),
        (("hsdp", 6, 3, None), (2, 3, 1)),
        (("fsdp_tp", 6, None, None), (1, 3, 2)),
        (("hsdp_tp", 24, 3, 4), (2, 3, 4)),
    ],
)
def test_the_mesh_follows_from_the_number_of_processes(arguments, sizes):
    assert mesh_sizes(*arguments) == sizes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("hsdp", 3, None, None), r"parallel='hsdp' \(2 shard\) .* multiple of 2 .* got 3"),
        (("fsdp", 4, 2, None), r"shards=2 with parallel='fsdp': .*\['hsdp', 'hsdp_tp'\]"),
        (("hsdp", 4, 0, None), "shards=0 .* a positive number"),
    ],
)
def test_what_does_not_fit_is_told(arguments, message):
    with pytest.raises(ValueError, match=message):
        mesh_sizes(*arguments)
