"""Configurations that cannot work give an error that names the key; importing costs nothing."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
import textwrap
from pathlib import Path

import pytest
import torch.distributed as dist

import curvadion
import deepspeed_engines as ds
import distributed
import fresh
from curvadion import CurvaDion
from curvadion.integrations.deepspeed.config import ROUTING

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"
)


ROOT = Path(__file__).resolve().parents[2]


def with_params(stage=0, kind="CurvaDion", **params):
    configuration = ds.config(stage, params, kind)
    if {"threshold", "wire_budget"} & params.keys() or kind == "Dion":
        del configuration["optimizer"]["params"]["gate"]
    return configuration


MALFORMED = {
    "misspelt params": (
        {**ds.config(), "optimizer": {"type": "Dion", "parms": {"lr": 0.1}}},
        "optimizer.parms is unknown",
    ),
    "misspelt key": (with_params(treshold=0.3), "optimizer.params: CurvaDion.__init__() got an"),
    "replicas": (with_params(replicas="world"), "'replicas'"),
    "lr of a wrong type": (with_params(lr="0.02"), "optimizer.params: lr='0.02'"),
    "gate as a string": (with_params(gate="always"), "optimizer.params.gate='always'"),
    "gate with a wrong argument": (
        with_params(gate={"type": "period", "period": 0}), "optimizer.params.gate: period=0",
    ),
    "budget where nothing drifts": (
        with_params(stage=1, wire_budget=0.01),
        "with zero_optimization.stage=1: one replica is sharded",
    ),
    "unknown sync": (with_params(sync={"type": "average"}), "optimizer.params.sync.type='average'"),
    "fp16 of stage 0": (ds.config(0, fp16={"enabled": True}), "fp16.enabled"),
}  # fmt: skip


def refuse(rank, configurations):
    """What each configuration raises, as text."""
    messages = {}
    for name, configuration in configurations.items():
        try:
            ds.engine_of(configuration)
            messages[name] = "nothing"
        except (TypeError, ValueError) as error:
            messages[name] = f"{type(error).__name__}: {error}"
        except Exception as error:
            messages[name] = f"no user error: {type(error).__name__}: {error}"
    return messages


def test_malformed_configurations_name_the_key():
    configurations = {name: configuration for name, (configuration, _) in MALFORMED.items()}
    (messages,) = distributed.run(1, refuse, configurations)
    wrong = {n: messages[n] for n, (_, part) in MALFORMED.items() if part not in messages[n]}
    assert not wrong
    assert not [m for m in messages.values() if m.startswith(("nothing", "no user error"))]


def refuse_clients(rank):
    messages = []
    alone = [dist.new_group([each]) for each in range(2)][rank]
    for stage, replicas in ((2, alone), (0, dist.group.WORLD if rank else alone)):
        of = ds.model()
        configuration = ds.config(stage)
        del configuration["optimizer"]
        optimizer = CurvaDion(curvadion.param_groups(of), replicas=replicas)
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


def python(program, **environment):
    """Run a program in a fresh process."""
    paths = {"DS_ACCELERATOR": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    environment = {**os.environ, **paths, **environment}
    said = fresh.python("-c", textwrap.dedent(program), environment=environment, cwd=ROOT)
    assert said.returncode == 0, said.stderr


def test_importing_curvadion_imports_no_deepspeed():
    python(
        """
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
    )


def test_every_key_of_the_json_is_described():
    described = (Path(__file__).parents[2] / "docs" / "deepspeed.md").read_text("utf-8")
    keys = {*list(inspect.signature(CurvaDion).parameters)[1:], *ROUTING} - {"replicas"}
    assert [key for key in sorted(keys) if f"`{key}`" not in described] == []
