"""Replicas that differ: what torch.distributed.checkpoint may write of them, and what is said."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

import distributed
import toy
from curvadion import CurvaDion, Dion, FixedPeriod, QuantizedAverage, param_groups

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
CODES = {"gate": FixedPeriod(3), "sync": QuantizedAverage(bits=8)}


def build(kind, replicas):
    model = toy.model()
    groups = param_groups(model)
    if kind == "codes":
        return model, CurvaDion(groups, replicas=replicas, **copy.deepcopy(CODES))
    direction = "polar" if kind == "polar" else "low_rank"
    return model, Dion(groups, replicas=replicas, direction=direction)


def outcome(function, *args, **kwargs):
    """The error's or warnings' texts."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            function(*args, **kwargs)
        except dcp.api.CheckpointException as error:
            assert len(error.failures) == dist.get_world_size()
            return " ".join(str(failure) for failure, _ in error.failures.values())
    return " ".join(str(w.message) for w in told if "mix the" in str(w.message))


def save(model, optimizer, folder, options=None, how=dcp.save, **kwargs):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"state_dict\(\) while the replicas' states differ")
        weights, state = get_state_dict(model, optimizer, options=options)
    result = how({"model": weights, "optimizer": state}, checkpoint_id=folder, **kwargs)
    if result is not None and how is dcp.async_save:
        result.result()


def train(rank, folder, kind, steps):
    """What comes of saving after so many steps: together, by one, and once all agree."""
    model, optimizer = build(kind, dist.group.WORLD)
    toy.train(model, optimizer, range(steps), rank)
    alone = [dist.new_group([r]) for r in range(2)][rank]
    texts = {
        "all": outcome(save, model, optimizer, f"{folder}/all"),
        "flat": outcome(save, model, optimizer, f"{folder}/flat", FLAT),
        "async": outcome(save, model, optimizer, f"{folder}/async", how=dcp.async_save),
        "no_dist": outcome(save, model, optimizer, f"{folder}/own{rank}", no_dist=True),
        "group of one": outcome(
            save, model, optimizer, f"{folder}/group{rank}", process_group=alone
        ),
    }
    optimizer.synchronize(exact=True)
    texts["agreed"] = outcome(save, model, optimizer, f"{folder}/agreed")
    return texts


FORBIDDEN = ["all", "flat", "async"]
ALLOWED = ["no_dist", "group of one", "agreed"]


# Of codes after four steps: weights have moved since the opening; after three: codes owe something.
@pytest.mark.parametrize("steps", [4, 3])
def test_weights_that_differ_are_not_mixed(tmp_path, steps):
    for texts in distributed.run(2, train, str(tmp_path), "codes", steps):
        for name in FORBIDDEN:
            assert "would mix the states of replicas" in texts[name], name
            assert "synchronize(exact=True)" in texts[name]
        assert [texts[name] for name in ALLOWED] == [""] * len(ALLOWED)


def test_momenta_that_differ_are_told_of(tmp_path):
    for texts in distributed.run(2, train, str(tmp_path), "low_rank", 2):
        assert texts["all"].startswith("torch.distributed.checkpoint would mix the momenta of")
        assert [texts[name] for name in ALLOWED] == [""] * len(ALLOWED)


def test_replicas_with_one_state_are_saved_in_silence(tmp_path):
    for texts in distributed.run(2, train, str(tmp_path), "polar", 2):
        assert set(texts.values()) == {""}


def recover(rank, folder):
    """Load a checkpoint into an optimizer whose replicas are apart; the distance from the saved."""
    model, optimizer = build("codes", dist.group.WORLD)
    toy.train(model, optimizer, range(4), rank)
    optimizer.synchronize(exact=True)
    save(model, optimizer, folder)
    saved = copy.deepcopy(model.state_dict())
    toy.train(model, optimizer, range(4, 8), rank)
    assert optimizer.apart
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weights, state = get_state_dict(model, optimizer)
    held = {"model": weights, "optimizer": copy.deepcopy(state)}
    dcp.load(held, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=held["model"], optim_state_dict=held["optimizer"]
    )
    equal = all(torch.equal(x, saved[name]) for name, x in model.state_dict().items())
    return equal, optimizer.apart, optimizer.progress.steps


def test_replicas_that_are_apart_may_load(tmp_path):
    for equal, apart, steps in distributed.run(2, recover, str(tmp_path)):
        assert equal and not apart and steps == 4


def pickled(rank, folder):
    """Types of the record after torch.save and torch.load of what torch has asked for."""
    model, optimizer = build("codes", dist.group.WORLD)
    toy.train(model, optimizer, range(4), rank)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, state = get_state_dict(model, optimizer)
    file = f"{folder}/{rank}.pt"
    torch.save(state, file)
    loaded = torch.load(file, weights_only=True)
    records = [group["progress"] for group in loaded["param_groups"]]
    return [type(r) for r in records], [r == optimizer._record() for r in records]


def test_a_marked_state_is_pickled_as_a_plain_one(tmp_path):
    for types, same in distributed.run(2, pickled, str(tmp_path)):
        assert set(types) == {str} and all(same)


def save_in_shards(rank, folder):
    """Two replicas of two shards: all ranks together, and each replica by itself."""
    from torch.distributed.fsdp import fully_shard

    from curvadion.integrations.fsdp import keep_gradients_local

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = toy.model()
    fully_shard(model, mesh=mesh)
    keep_gradients_local(model)
    optimizer = CurvaDion(param_groups(model), replicas=mesh["replicate"], **copy.deepcopy(CODES))
    toy.train(model, optimizer, range(4), rank)
    return outcome(save, model, optimizer, f"{folder}/all")


def test_replicas_in_shards_are_not_mixed(tmp_path):
    for text in distributed.run(4, save_in_shards, str(tmp_path)):
        assert "would mix the states of replicas" in text


# -------------------------------------------------------------------- weights alone


def read_weights(rank, layout):
    """What is said of model.state_dict() before the first step, apart, and together again."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from curvadion.integrations import ddp, fsdp

    model, replicas = toy.model(), dist.group.WORLD
    if layout == "ddp":
        model = ddp.keep_gradients_local(DistributedDataParallel(model))
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh)
        fsdp.keep_gradients_local(fsdp.keep_gradients_local(model))
        replicas = mesh["replicate"]
    inner = model.module if layout == "ddp" else model
    optimizer = CurvaDion(param_groups(inner), replicas=replicas, **copy.deepcopy(CODES))

    def said():
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            model.state_dict()
        return [str(w.message) for w in told]

    texts = [said()]
    toy.train(inner, optimizer, range(4), rank)
    texts.append(said())
    optimizer.eval()
    return [*texts, said()]


@pytest.mark.parametrize(("layout", "world"), [("ddp", 2), ("hsdp", 4)])
def test_reading_weights_of_replicas_that_are_apart_is_told(layout, world):
    for before, apart, together in distributed.run(world, read_weights, layout):
        assert before == together == []
        [text] = apart
        assert text.startswith("The model's state_dict() while the replicas are apart (local")
        assert "optimizer.eval()" in text


def copied(rank):
    """A copy and a pickle of a model whose replicas are apart, and of its optimizer."""
    from torch.nn.parallel import DistributedDataParallel

    from curvadion.integrations import ddp

    model = toy.model()
    for _ in range(2):
        ddp.keep_gradients_local(DistributedDataParallel(model))
    optimizer = CurvaDion(param_groups(model), replicas=dist.group.WORLD, **copy.deepcopy(CODES))
    toy.train(model, optimizer, range(4), rank)
    others = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    named = pickle.loads(pickle.dumps(dict(model.named_parameters())))
    pickle.dumps(optimizer)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for other in others:
            other.state_dict()
    equal = all(torch.equal(p, named[n]) for n, p in model.named_parameters())
    ddp.keep_gradients_local(DistributedDataParallel(model))
    with pytest.warns(UserWarning, match="while the replicas are apart"):
        model.state_dict()  # as before it was wrapped anew
    hooks = len(model._state_dict_pre_hooks)
    return len(told), hooks, equal


def test_models_are_copied_and_pickled_and_copies_say_nothing():
    for told, hooks, equal in distributed.run(2, copied):
        assert (told, hooks, equal) == (0, 1, True)


def of_pairs(rank):
    """What a step says where DDP has four replicas and the optimizer knows of two."""
    from torch.nn.parallel import DistributedDataParallel

    from curvadion.integrations import ddp

    model = ddp.keep_gradients_local(DistributedDataParallel(toy.model())).module
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    optimizer = Dion(param_groups(model), replicas=pairs[rank // 2])
    with pytest.raises(ValueError) as raised:
        toy.train(model, optimizer, range(1), rank)
    return str(raised.value)


def of_more(rank):
    """Steps where DDP has one replica and the optimizer knows of two."""
    from torch.nn.parallel import DistributedDataParallel

    from curvadion.integrations import ddp

    alone = [dist.new_group([r]) for r in range(2)][rank]
    wrapped = DistributedDataParallel(toy.model(), process_group=alone)
    model = ddp.keep_gradients_local(wrapped).module
    optimizer = Dion(param_groups(model), replicas=dist.group.WORLD)
    toy.train(model, optimizer, range(2), rank)
    return optimizer.drift()


def test_an_optimizer_may_know_of_replicas_that_ddp_does_not():
    assert distributed.run(2, of_more) == [0, 0]


def test_replicas_of_which_the_optimizer_does_not_know_are_an_error():
    for text in distributed.run(4, of_pairs):
        assert "apart on ranks [0, 1, 2, 3]" in text and "pass a group that has all of them" in text
