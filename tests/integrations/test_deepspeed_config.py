"""Configurations that cannot work give an error that names the key; importing costs nothing."""

import importlib.util
import inspect
import textwrap

import pytest
import torch
import torch.distributed as dist

import curvadion
from curvadion import CurvaDion, Replicated
from curvadion.optim.factory import GROUP_ARGUMENTS
from curvadion.optim.group_keys import DEFAULTS
from support.runs import deepspeed_engines as ds
from support.runs import distributed, fresh

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"
)


def with_params(stage=0, kind="CurvaDion", **params):
    configuration = ds.config(stage, params, kind)
    if {"threshold", "wire_budget"} & params.keys() or kind == "Dion":
        del configuration["optimizer"]["params"]["gate"]
    return configuration


def without_gate(stage):
    configuration = ds.config(stage)
    del configuration["optimizer"]["params"]["gate"]
    return configuration


MALFORMED = {
    "no gate": (
        without_gate(0),
        'Set one of: "wire_budget": 0.01 (recommended); "gate", such as {"type": "period", "period"'
        ': 50}, or "threshold"; or, for the method of the paper, "threshold": 0.3 with "local',
    ),
    "no gate, one replica": (
        without_gate(1),
        'optimizer.type="CurvaDion" without optimizer.params.replica_size: all ranks are one '
        'replica, which has nothing to synchronise with. Use "type": "Dion"',
    ),
    "misspelt params": (
        {**ds.config(), "optimizer": {"type": "Dion", "parms": {"lr": 0.1}}},
        "optimizer.parms is unknown",
    ),
    "misspelt key": (with_params(treshold=0.3), "argument 'treshold': did you mean"),
    "replicas": (with_params(replicas="world"), "'replicas'"),
    "lr of a wrong type": (with_params(lr="0.02"), "optimizer.params: lr='0.02'"),
    "gate as a string": (with_params(gate="always"), "optimizer.params.gate='always'"),
    "gate with a wrong argument": (
        with_params(gate={"type": "period", "period": 0}), "optimizer.params.gate: period=0",
    ),
    "budget where nothing drifts": (
        with_params(stage=1, wire_budget=0.1),
        "with zero_optimization.stage=1: one replica is sharded",
    ),
    "local steps where nothing drifts": (
        with_params(stage=1, threshold=0.3, local_step="dion"),
        "gate=RMMC(threshold=0.3) and sync=LowRank(average_weights=True) with zero_optimization",
    ),
    "all ranks in a replica of stage 0": (
        with_params(0, replica_size=4, wire_budget=0.1),
        "optimizer.params.replica_size=4 with zero_optimization.stage=0 makes all ranks one "
        "replica, which has nothing to synchronise with: leave replica_size out",
    ),
    "unknown sync": (with_params(sync={"type": "average"}), "optimizer.params.sync.type='average'"),
    "fp16 of stage 0": (ds.config(0, fp16={"enabled": True}), "fp16.enabled"),
    "no divisor": (with_params(3, replica_size=3), "replica_size=3 must divide the number of"),
    "no integer": (
        with_params(3, replica_size="2"), "TypeError: optimizer.params.replica_size='2' must",
    ),
    "local files": (
        {**with_params(3, replica_size=2), "checkpoint": {"use_node_local_storage": True}},
        "checkpoint.use_node_local_storage does not work with optimizer.params.replica_size=2",
    ),
    "one replica": (
        with_params(3, replica_size=4, gate={"type": "budget", "share": 0.1}),
        "one replica is sharded over all ranks",
    ),
}  # fmt: skip


@distributed.on_ranks(4)
def test_malformed_configurations_name_the_key(rank):
    for name, (configuration, part) in MALFORMED.items():
        with pytest.raises((TypeError, ValueError)) as told:
            ds.engine_of(configuration)
        assert part in f"{told.type.__name__}: {told.value}", (name, told.value)


def refuse_clients(rank):
    messages = []
    alone = [dist.new_group([each]) for each in range(2)][rank]
    for stage, replicas in ((2, alone), (0, dist.group.WORLD if rank else alone)):
        of = ds.model()
        configuration = ds.config(stage)
        del configuration["optimizer"]
        optimizer = CurvaDion(curvadion.param_groups(of), replicas=replicas, threshold=0.3)
        try:
            ds.engine_of(configuration, of, optimizer=optimizer)
            messages.append("nothing")
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_replicas_must_be_those_of_the_engine():
    first, second = distributed.run(2, refuse_clients)
    assert "with zero_optimization.stage=2 the engine's replicas are on the ranks None" in first[0]
    assert "replicas holds the ranks [1]" in second[0]
    assert "replicas holds the ranks [0], but" in first[1]


INSIDE = {
    "Replicated holds 2 optimizers, but with zero_optimization.stage=2": (
        torch.optim.AdamW, torch.optim.AdamW,
    ),
    "Muon in Replicated would step on the flat shards": (torch.optim.Muon,),
}  # fmt: skip


@pytest.mark.parametrize("part", INSIDE)
def test_flat_shards_need_one_optimizer_that_steps_each_element_alone(part):
    distributed.run(1, refuse_inside, part)


def refuse_inside(rank, part):
    of = ds.model()
    matrices = [p for p in of.parameters() if p.requires_grad and p.dim() == 2]
    inner = [kind([p], lr=0.1) for kind, p in zip(INSIDE[part], matrices, strict=False)]
    optimizer = Replicated(inner, replicas="single")
    configuration = ds.config(2)
    del configuration["optimizer"]
    with pytest.raises(ValueError, match=part):
        ds.engine_of(configuration, of, optimizer=optimizer)


def test_importing_curvadion_imports_no_deepspeed():
    program = """
        import sys
        finders = list(sys.meta_path)
        import curvadion
        import curvadion.integrations.deepspeed  # without register()
        assert not any(name.split(".")[0] == "deepspeed" for name in sys.modules)
        assert sys.meta_path == finders
        import deepspeed
        from deepspeed.runtime.engine import DeepSpeedEngine as Engine
        assert not Engine._is_supported_optimizer(None, "CurvaDion")
        import curvadion.deepspeed
        assert sys.meta_path == finders
        assert Engine._is_supported_optimizer(None, "CurvaDion")
        assert Engine._is_supported_optimizer(None, "Dion")
        assert not Engine._is_supported_optimizer(None, "NoSuchOptimizer")
    """
    said = fresh.python("-c", textwrap.dedent(program), DS_ACCELERATOR="cpu")
    assert said.returncode == 0, said.stderr


def test_every_key_of_the_json_is_described():
    described = (fresh.ROOT / "docs" / "deepspeed.md").read_text("utf-8")
    own = list(inspect.signature(CurvaDion).parameters)[1:]
    keys = {*own, *DEFAULTS, *GROUP_ARGUMENTS} - {"replicas"}
    assert [key for key in sorted(keys) if f"`{key}`" not in described] == []
