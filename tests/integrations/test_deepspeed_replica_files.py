"""Checkpoints of DeepSpeed's replicas: one is written once all agree, and all go on from it."""

import importlib.util
import inspect

import pytest
import torch
import torch.distributed as dist

from support.runs import deepspeed_engines as ds
from support.runs import distributed, toy
from support.runs.deepspeed_replicas import SIZE, engine_of

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"
)
PERIOD = {"gate": {"type": "period", "period": 3}, "local_step": "gradient", "local_lr": 0.005}
CODES = {
    "gate": {"type": "period", "period": 3},
    "sync": {"type": "quantized_average", "bits": 2, "fragments": 2},
}
DELAY = {**CODES, "sync": {**CODES["sync"], "delay": 2}}
RMMC = {"threshold": 0.4, "max_local_steps": 3, "local_step": "gradient"}
CASES = {
    "0 bf16": DELAY,
    "1 BF16_Optimizer": PERIOD,
    "2 round robin": RMMC,
    "3 sub-groups": DELAY,
}

# DeepSpeed's script takes checkpoints of ZeRO only, and none of BF16_Optimizer.
UNREADABLE = ("0 bf16", "1 BF16_Optimizer")


def fp32_of(folder):
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    return get_fp32_state_dict_from_zero_checkpoint(folder, tag="here")


@pytest.mark.parametrize("name", CASES)
@distributed.on_ranks(4)
def test_replicas_agree_are_written_once_and_go_on_bitwise(rank, name, tmp_path):
    engine = engine_of(name, CASES[name])
    ds.train(engine, range(4))
    assert engine.basic_optimizer.drifted
    # Tools ask whether it takes what they want to say.
    assert "exclude_frozen_parameters" in inspect.signature(engine.save_checkpoint).parameters
    engine.save_checkpoint(str(tmp_path), tag="here")
    if rank >= SIZE:  # it would write files of the same names
        assert not (engine.save_non_zero_checkpoint or engine.save_zero_checkpoint)
    assert not engine.basic_optimizer.drifted
    agreed = ds.masters(engine)
    toy.assert_bitwise_equal(agreed, distributed.gathered(agreed)[0])
    reports, weights = ds.train(engine, range(4, 9)), ds.masters(engine)
    again = engine_of(name, CASES[name])
    again.load_checkpoint(str(tmp_path), tag="here")
    its = ds.train(again, range(4, 9))
    assert [r.gate_open for r in reports] == [r.gate_open for r in its]
    assert {r.gate_open for r in reports} == {True, False}
    assert reports[-1].step == its[-1].step == 9
    toy.assert_bitwise_equal(ds.masters(again), weights)
    files = [path.name for path in (tmp_path / "here").glob("*.pt")]
    shards = [file for file in files if "optim_states" in file]
    assert len(shards) == (0 if name.startswith("0") else SIZE), files
    assert len(files) - len(shards) == (SIZE if name.startswith("3") else 1), files
    if rank == 3 and name not in UNREADABLE:
        exported = fp32_of(str(tmp_path))
        assert all(torch.equal(exported[parameter], W) for parameter, W in agreed.items())


def saved(rank, folder):
    engine = engine_of("3", PERIOD)
    ds.train(engine, range(4))
    engine.save_checkpoint(folder, tag="here")
    return ds.masters(engine)


def loaded(rank, folder, size, wanted):
    params = PERIOD if size is None else {**PERIOD, "replica_size": size}
    engine = ds.engine_of(ds.changed("3", params))
    engine.load_checkpoint(folder, tag="here")
    toy.assert_bitwise_equal(ds.masters(engine), wanted)
    (report,) = ds.train(engine, [4])
    assert report.step == 5


def test_other_numbers_of_replicas_load(tmp_path):
    wanted = distributed.run(4, saved, str(tmp_path))[0]
    for size in (None, 2):
        distributed.run(2, loaded, str(tmp_path), size, wanted)


def assert_agreed(weights, read):
    """What was read, in any dtype, are an engine's weights, which all others have too."""
    for name, W in weights.items():
        assert torch.equal(read[name], W.to(read[name].dtype)), name
    toy.assert_bitwise_equal(weights, distributed.gathered(weights)[0])


@pytest.mark.parametrize("name", ["0 bf16", "1", "3 sub-groups"])
@distributed.on_ranks(4)
def test_weights_alone_are_those_that_replicas_agree_on(rank, name, tmp_path):
    configuration = ds.changed(name, {"replica_size": 1 if name[0] == "0" else SIZE, **CODES})
    if name.startswith("3"):
        key = "stage3_gather_16bit_weights_on_model_save"
        configuration["zero_optimization"][key] = True
    engine = ds.engine_of(configuration)
    optimizer = engine.basic_optimizer
    ds.train(engine, range(4))
    assert optimizer.drifted
    engine.save_16bit_model(str(tmp_path), "weights.bin")
    assert not optimizer.drifted
    dist.barrier()  # the first rank has written
    assert_agreed(ds.masters(engine), torch.load(tmp_path / "weights.bin", weights_only=True))
    ds.train(engine, [4])
    assert optimizer.drifted
    # What Accelerate's wrapper of an optimizer calls.
    engine.optimizer.eval()
    assert not optimizer.drifted
    engine.optimizer.train()
    if name.startswith("3"):
        ds.train(engine, [5, 6])
        assert optimizer.drifted
        # What Accelerate's get_state_dict calls; the first rank has the answer.
        read = engine._zero3_consolidated_16bit_state_dict()
        assert not optimizer.drifted
        weights = ds.masters(engine)
        assert_agreed(weights, read or weights)
