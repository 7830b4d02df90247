"""Checkpoints of DeepSpeed's replicas: one is written once all agree, and all go on from it."""

from __future__ import annotations

import importlib.util
import inspect
import re
import warnings
from pathlib import Path

import pytest
import torch

import deepspeed_engines as ds
import distributed
from curvadion.integrations.deepspeed import saving
from deepspeed_replicas import SIZE, engine_of

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"
)
PERIOD = {"gate": {"type": "period", "period": 3}, "local_step": "gradient", "local_lr": 0.005}
CODES = {
    "gate": {"type": "period", "period": 3},
    "sync": {"type": "quantized_average", "bits": 2, "fragments": 2},
}
DELAY = {**CODES, "delay": 2}
RMMC = {"threshold": 0.4, "max_local_steps": 3, "local_step": "gradient"}
CASES = {
    "0": CODES,
    "1": DELAY,
    "1 BF16_Optimizer": PERIOD,
    "2 round robin": RMMC,
    "2 offload": CODES,
    "3 sub-groups": DELAY,
    "3 bf16": CODES,
}

# DeepSpeed's script takes checkpoints of ZeRO only, and none of BF16_Optimizer.
UNREADABLE = ("0", "1 BF16_Optimizer")


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
        apart = engine.basic_optimizer.drift()
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
        found[name] = runs, apart, agreed, files, exported
    return found


def test_replicas_agree_are_written_once_and_go_on_bitwise(tmp_path):
    each = distributed.run(4, resumed, CASES, str(tmp_path))
    for name in CASES:
        agreed = each[0][name][2][0]
        for found in each:
            ((reports, weights), (again, others)), apart, (mine, drift), files, _ = found[name]
            assert [r.gate_open for r in reports] == [r.gate_open for r in again], name
            assert reports[-1].step == again[-1].step == 9
            assert any(r.gate_open for r in reports) and not all(r.gate_open for r in reports)
            assert apart > 0 and drift == 0, name
            for parameter, W in weights.items():
                assert torch.equal(W, others[parameter]), (name, parameter)
                assert torch.equal(mine[parameter], agreed[parameter]), (name, parameter)
            shards = [file for file in files if "optim_states" in file]
            assert len(shards) == (0 if name == "0" else SIZE), files
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
    """Weights as loaded, or the error; and whether the run goes on."""
    found = {}
    for name in names:
        params = PERIOD if size is None else {**PERIOD, "replica_size": size}
        engine = ds.engine_of(ds.changed(name, params))
        try:
            engine.load_checkpoint(f"{folder}/{name}", tag="here")
        except ValueError as error:
            found[name] = str(error)
            continue
        found[name] = ds.masters(engine)
        (report,) = ds.train(engine, [4])
        assert report.step == 5
    return found


def test_other_numbers_of_replicas_load_and_other_sizes_are_refused(tmp_path):
    names = ["1", "3"]
    wanted = distributed.run(4, saved, names, str(tmp_path))[0]
    for world, size in ((2, None), (2, 2), (6, 2)):
        for found in distributed.run(world, loaded, names, str(tmp_path), size):
            for name in names:
                for parameter, W in wanted[name].items():
                    assert torch.equal(found[name][parameter], W), (world, size, name)
    for world, size in ((4, None), (4, 1)):
        for found in distributed.run(world, loaded, names, str(tmp_path), size):
            for name in names:
                here = size or world
                assert "saved with 2 ranks in a replica (DeepSpeed's data" in found[name]
                assert f"here are {here}" in found[name] and "replica_size=2" in found[name]


def used_again(rank, names, folder):
    """Whether a checkpoint loads from where one of larger replicas was, and that is refused."""
    found = {}
    for name in names:
        to = f"{folder}/{name}"
        whole, engine = ds.engine_of(ds.changed(name, {})), engine_of(name, PERIOD)
        for each in (whole, engine):
            ds.train(each, range(2))
            each.save_checkpoint(to, tag="here")
        engine_of(name, PERIOD).load_checkpoint(to, tag="here")
        with pytest.raises(ValueError) as error:
            whole.load_checkpoint(to, tag="here")
        found[name] = len([*Path(to, "here").glob("*_optim_states.pt")]), str(error.value)
    return found


def test_a_tag_may_be_used_again_by_smaller_replicas(tmp_path):
    for found in distributed.run(4, used_again, ["1", "3 bf16"], str(tmp_path)):
        for files, told in found.values():
            assert files == 4 and "saved with 2 ranks in a replica" in told


def of_another_stage(rank, folder):
    """What is said where a checkpoint of one stage is loaded at another."""
    said = {}
    for saved, here in (("1", "3"), ("3", "1")):
        engine = engine_of(saved, PERIOD)
        ds.train(engine, range(2))
        engine.save_checkpoint(f"{folder}/{saved}", tag="here")
        with pytest.raises(ValueError) as error:
            engine_of(here, PERIOD).load_checkpoint(f"{folder}/{saved}", tag="here")
        said[saved] = str(error.value)
    return said


def test_a_checkpoint_of_another_stage_is_refused(tmp_path):
    for said in distributed.run(2, of_another_stage, str(tmp_path)):
        assert re.search(r"ZeRO stage 2 or less.*zero_optimization\.stage=3 here", said["1"])
        assert re.search(r"ZeRO stage 3, .*zero_optimization\.stage=1 here", said["3"])


class Harmful:
    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


def test_nothing_in_a_file_is_called_to_look_at_it(tmp_path):
    torch.save(
        {"dp_world_size": Harmful(tmp_path / "made")}, tmp_path / "mp_rank_00_model_states.pt"
    )
    (tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt").touch()
    assert saving._saved_ranks(tmp_path, cuts_weights=False) is None
    assert not (tmp_path / "made").exists()


# -------------------------------------------------------------------- weights alone


def exported(rank, names, folder):
    """What tools are warned of; weights that the engine writes and those that it has then."""
    found = {}
    for name in names:
        configuration = ds.changed(name, {"replica_size": SIZE, **CODES})
        if name.startswith("3"):
            key = "stage3_gather_16bit_weights_on_model_save"
            configuration["zero_optimization"][key] = True
        engine = ds.engine_of(configuration)
        ds.train(engine, range(4))
        warned = told_by(engine.module.state_dict)
        engine.save_16bit_model(folder, f"{name}.bin")
        assert engine.basic_optimizer.drift() == 0 and not told_by(engine.module.state_dict)
        weights = ds.masters(engine)
        ds.train(engine, [4])
        assert engine.basic_optimizer.drift() > 0
        # What Accelerate's wrapper of an optimizer calls.
        engine.optimizer.eval()
        assert engine.basic_optimizer.drift() == 0
        engine.optimizer.train()
        gathered = None
        if name.startswith("3"):
            ds.train(engine, [5, 6])
            assert engine.basic_optimizer.apart
            # What Accelerate's get_state_dict calls.
            read = engine._zero3_consolidated_16bit_state_dict()
            assert engine.basic_optimizer.drift() == 0
            gathered = read and {n: W.clone() for n, W in read.items()}, ds.masters(engine)
        found[name] = warned, weights, gathered
    return found


def told_by(function):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        function()
    return [str(w.message) for w in told if "replicas are apart" in str(w.message)]


def test_weights_alone_are_those_that_replicas_agree_on(tmp_path):
    names = ["1", "2 bf16", "3 sub-groups"]
    first, *others = distributed.run(4, exported, names, str(tmp_path))
    for name, (warned, weights, gathered) in first.items():
        assert len(warned) == 1 and "engine.basic_optimizer.eval()" in warned[0], name
        saved = torch.load(tmp_path / f"{name}.bin", weights_only=True)
        for parameter, W in weights.items():
            assert torch.equal(saved[parameter], W.to(saved[parameter].dtype)), (name, parameter)
            assert all(torch.equal(W, found[name][1][parameter]) for found in others), name
        if gathered is not None:
            for parameter, W in gathered[1].items():
                read = gathered[0][parameter]
                assert torch.equal(read, W.to(read.dtype)), (name, parameter)
                assert all(torch.equal(W, found[name][2][1][parameter]) for found in others), name
