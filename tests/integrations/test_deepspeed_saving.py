"""Weights that DeepSpeed, or a tool beside it, writes at stage 0 are those of all replicas."""

from __future__ import annotations

import warnings

import pytest
import torch

import deepspeed_engines as engines
import distributed
from tolerance import Rounding, assert_close

pytest.importorskip("deepspeed")

CLOSED = {"gate": {"type": "period", "period": 5}}


def told_by(function, *args):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        function(*args)
    return [str(w.message) for w in told if "replicas are apart" in str(w.message)]


def save_weights(rank, name, folder, way):
    engine = engines.engine_of(engines.changed(name, CLOSED))
    engines.train(engine, range(2))
    optimizer = engine.basic_optimizer
    apart = {n: p.detach().clone() for n, p in engine.module.named_parameters()}
    before = told_by(engine.module.state_dict)
    if way == "engine":
        engine.save_16bit_model(folder)
    else:
        # What Accelerate's wrapper of an optimizer calls.
        engine.optimizer.eval()
        engine.optimizer.train()
    after = told_by(engine.module.state_dict)
    together = {n: p.detach().clone() for n, p in engine.module.named_parameters()}
    return before, after, apart, together, engines.masters(engine), optimizer.drift()


@pytest.mark.parametrize("name", ["0", "0 bf16"])
@pytest.mark.parametrize("way", ["engine", "optimizer"])
def test_weights_of_stage_0_are_the_replicas_mean(name, way, tmp_path):
    answers = distributed.run(2, save_weights, name, str(tmp_path), way)
    (_, _, mine, together, masters, _), (_, _, others, its, _, _) = answers
    for before, after, *_, drift in answers:
        assert len(before) == 1
        assert "engine.basic_optimizer.eval()" in before[0]
        assert after == []
        assert drift == 0.0
    if way == "engine":
        saved = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
        assert saved.keys() == together.keys()
        for key, tensor in saved.items():
            assert torch.equal(tensor, together[key]), key
    assert any(not torch.equal(mine[key], others[key]) for key in mine)
    for key, tensor in together.items():
        assert torch.equal(tensor, its[key]), key
        if key in masters:
            assert torch.equal(tensor, masters[key].to(tensor.dtype)), key
        mean = (mine[key].double() + others[key].double()) / 2
        if tensor.dtype == torch.float32:
            assert_close(tensor, mean, Rounding(torch.float32), what=key)
        else:  # two roundings, by 2^-9 of the number each
            torch.testing.assert_close(tensor.double(), mean, rtol=2**-7, atol=2**-7)
