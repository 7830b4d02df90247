"""Checkpoints of DeepSpeed's replicas: one is written once all agree, and all go on from it."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path

import pytest
import torch

import deepspeed_engines as ds
import distributed
from deepspeed_replicas import SIZE, engine_of

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


def resumed(rank, cases, folder):
    """By name: how a run goes on and how a new engine does; agreed weights, also from files."""
    found = {}
    for name, params in cases.items():
        to = f"{folder}/{name}"
        engine = engine_of(name, params)
        ds.train(engine, range(4))
        before = engine.basic_optimizer.drift()
        # Tools ask whether it takes what they want to say.
        assert "exclude_frozen_parameters" in inspect.signature(engine.save_checkpoint).parameters
        engine.save_checkpoint(to, tag="here")
        if rank >= SIZE:  # it would write files of the same names
            assert not (engine.save_non_zero_checkpoint or engine.save_zero_checkpoint)
        agreed = ds.masters(engine), engine.basic_optimizer.drift()
        runs = [(ds.train(engine, range(4, 9)), ds.masters(engine))]
        again = engine_of(name, params)
        again.load_checkpoint(to, tag="here")
        runs.append((ds.train(again, range(4, 9)), ds.masters(again)))
        files = sorted(path.name for path in Path(to, "here").glob("*.pt"))
        reads = rank == 3 and name not in UNREADABLE
        exported = fp32_of(to) if reads else None
        found[name] = runs, before, agreed, files, exported
    return found


def test_replicas_agree_are_written_once_and_go_on_bitwise(tmp_path):
    each = distributed.run(4, resumed, CASES, str(tmp_path))
    for name in CASES:
        agreed = each[0][name][2][0]
        for found in each:
            ((reports, weights), (again, others)), before, (mine, drift), files, _ = found[name]
            assert [r.gate_open for r in reports] == [r.gate_open for r in again], name
            assert reports[-1].step == again[-1].step == 9
            assert any(r.gate_open for r in reports) and not all(r.gate_open for r in reports)
            assert before > 0 and drift == 0, name
            for parameter, W in weights.items():
                assert torch.equal(W, others[parameter]), (name, parameter)
                assert torch.equal(mine[parameter], agreed[parameter]), (name, parameter)
            shards = [file for file in files if "optim_states" in file]
            assert len(shards) == (0 if name.startswith("0") else SIZE), files
            assert len(files) - len(shards) == (SIZE if name.startswith("3") else 1), files
        if name not in UNREADABLE:
            exported = each[3][name][-1]
            for parameter, W in agreed.items():
                assert torch.equal(exported[parameter], W), (name, parameter)


# -------------------------------------------------------------------- other replicas


def saved(rank, names, folder):
    weights = {}
    for name in names:
        engine = engine_of(name, PERIOD)
        ds.train(engine, range(4))
        engine.save_checkpoint(f"{folder}/{name}", tag="here")
        weights[name] = ds.masters(engine)
    return weights


def loaded(rank, names, folder, size):
    """Weights as loaded; the run goes on."""
    found = {}
    for name in names:
        params = PERIOD if size is None else {**PERIOD, "replica_size": size}
        engine = ds.engine_of(ds.changed(name, params))
        engine.load_checkpoint(f"{folder}/{name}", tag="here")
        found[name] = ds.masters(engine)
        (report,) = ds.train(engine, [4])
        assert report.step == 5
    return found


def test_other_numbers_of_replicas_load(tmp_path):
    names = ["3"]
    wanted = distributed.run(4, saved, names, str(tmp_path))[0]
    for world, size in ((2, None), (2, 2)):
        for found in distributed.run(world, loaded, names, str(tmp_path), size):
            for name in names:
                for parameter, W in wanted[name].items():
                    assert torch.equal(found[name][parameter], W), (world, size, name)


# -------------------------------------------------------------------- weights alone


def exported(rank, names, folder):
    """Weights that the engine writes and those that it has then, once all replicas agree."""
    found = {}
    for name in names:
        configuration = ds.changed(name, {"replica_size": 1 if name[0] == "0" else SIZE, **CODES})
        if name.startswith("3"):
            key = "stage3_gather_16bit_weights_on_model_save"
            configuration["zero_optimization"][key] = True
        engine = ds.engine_of(configuration)
        optimizer = engine.basic_optimizer
        ds.train(engine, range(4))
        assert optimizer.drift() > 0
        engine.save_16bit_model(folder, f"{name}.bin")
        assert optimizer.drift() == 0
        weights = ds.masters(engine)
        ds.train(engine, [4])
        assert optimizer.drift() > 0
        # What Accelerate's wrapper of an optimizer calls.
        engine.optimizer.eval()
        assert optimizer.drift() == 0
        engine.optimizer.train()
        gathered = None
        if name.startswith("3"):
            ds.train(engine, [5, 6])
            assert optimizer.drifted
            # What Accelerate's get_state_dict calls.
            read = engine._zero3_consolidated_16bit_state_dict()
            assert optimizer.drift() == 0
            gathered = read and {n: W.clone() for n, W in read.items()}, ds.masters(engine)
        found[name] = weights, gathered
    return found


def test_weights_alone_are_those_that_replicas_agree_on(tmp_path):
    names = ["0 bf16", "1", "3 sub-groups"]
    first, *others = distributed.run(4, exported, names, str(tmp_path))
    for name, (weights, gathered) in first.items():
        saved = torch.load(tmp_path / f"{name}.bin", weights_only=True)
        for parameter, W in weights.items():
            assert torch.equal(saved[parameter], W.to(saved[parameter].dtype)), (name, parameter)
            assert all(torch.equal(W, found[name][0][parameter]) for found in others), name
        if gathered is not None:
            for parameter, W in gathered[1].items():
                read = gathered[0][parameter]
                assert torch.equal(read, W.to(read.dtype)), (name, parameter)
                assert all(torch.equal(W, found[name][1][1][parameter]) for found in others), name
