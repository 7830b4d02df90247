"""Malformed uses: each raises the right type and says which argument had which value."""

from __future__ import annotations

import copy
import math
import pickle
import re
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import distributed
import toy
from curvadion import (
    RMMC,
    AlwaysOpen,
    CurvaDion,
    Dion,
    FixedPeriod,
    LowRank,
    QuantizedAverage,
)
from curvadion.integrations.ddp import keep_gradients_local

NAN = math.nan

# Arguments that may also stand in a group.
GROUP_KEYS = [
    ("lr", -1.0, ValueError),
    ("lr", NAN, ValueError),
    ("lr", "fast", TypeError),
    ("lr", True, TypeError),
    ("lr", 10**400, ValueError),
    ("lr", torch.ones(2), ValueError),
    ("lr", torch.tensor(-1.0), ValueError),
    ("local_lr", -0.1, ValueError),
    ("local_lr", "slow", TypeError),
    ("momentum", 1.0, ValueError),
    ("momentum", "0.9", TypeError),
    ("betas", 0.9, TypeError),
    ("betas", (0.9,), TypeError),
    ("betas", (0.9, 1.0), ValueError),
    ("eps", -1e-8, ValueError),
    ("eps", False, TypeError),
    ("weight_decay", -0.1, ValueError),
    ("weight_decay", None, TypeError),
    ("rank_fraction", 0.0, ValueError),
    ("rank_fraction", 1.5, ValueError),
    ("rank_fraction", 1e-10, ValueError),
    ("rank_multiple_of", 0, ValueError),
    ("rank_multiple_of", 1.5, TypeError),
    ("stack_dims", -1, ValueError),
    ("row_blocks", 0, ValueError),
    ("row_blocks", (2, 0), ValueError),
    ("row_blocks", (), ValueError),
    ("row_blocks", "qkv", TypeError),
    ("momentum_rule", "look_ahead", ValueError),
    ("right_factor", "svd", ValueError),
    ("momentum_dtype", torch.int32, ValueError),
    ("q_dtype", True, TypeError),
    ("stochastic_rounding", 1, TypeError),
]

# Arguments of the optimizer alone.
CONSTRUCTOR_ONLY = [
    ("replicas", "world", TypeError),
    ("threshold", -0.1, ValueError),
    ("threshold", "0.3", TypeError),
    ("local_step", "sgd", ValueError),
    ("max_local_steps", 0, ValueError),
    ("max_local_steps", 2.5, TypeError),
    ("warmup_steps", -1, ValueError),
]


def identify(value):
    return getattr(value, "__name__", None) or repr(value)[:40]


def matrix():
    torch.manual_seed(0)
    return nn.Parameter(torch.randn(6, 4))


def says(name, value):
    """The message holds the argument's name and the value, or the offending part of a pair."""
    if isinstance(value, int) and value.bit_length() > 1000:
        return rf"{name}.*{value.bit_length()} bits"
    if isinstance(value, torch.Tensor):
        return name
    parts = [value, *value] if isinstance(value, tuple) else [value]
    values = "|".join(re.escape(repr(part)) for part in parts)
    return rf"(?s){name}.*({values})"


@pytest.fixture
def group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    if dist.is_initialized():
        dist.destroy_process_group()


# ---------------------------------------------------------------- the optimizers' arguments


@pytest.mark.parametrize(("name", "value", "error"), GROUP_KEYS + CONSTRUCTOR_ONLY, ids=identify)
def test_constructor_names_argument_and_value(name, value, error):
    with pytest.raises(error, match=says(name, value)):
        CurvaDion([matrix()], **{name: value})


@pytest.mark.parametrize(("name", "value", "error"), GROUP_KEYS[::3], ids=identify)
def test_group_names_key_and_value(name, value, error):
    with pytest.raises(error, match=says(name, value)):
        Dion([{"params": [matrix()], name: value}])


@pytest.mark.parametrize(("period", "bound"), [(100, {}), (52, {}), (5, {"max_local_steps": 3})])
def test_period_longer_than_the_longest_local_run(period, bound):
    """Else FixedPeriod(100) would be a period of 51, and nobody told."""
    with pytest.raises(ValueError, match=rf"period={period}.*max_local_steps=(50|3).*None"):
        CurvaDion([matrix()], gate=FixedPeriod(period), **bound)


@pytest.mark.parametrize(
    ("make", "name", "value", "error"),
    [
        (RMMC, "threshold", None, TypeError),
        (RMMC, "threshold", -1, ValueError),
        (FixedPeriod, "period", 2.0, TypeError),
        (FixedPeriod, "period", 0, ValueError),
        (QuantizedAverage, "bits", 2.0, TypeError),
        (QuantizedAverage, "bits", 5, ValueError),
        (QuantizedAverage, "fragments", True, TypeError),
        (QuantizedAverage, "fragments", 0, ValueError),
        (QuantizedAverage, "align_momentum", 1, TypeError),
        (QuantizedAverage, "spectrum_decay", 1.0, ValueError),
        (LowRank, "average_weights", "average", TypeError),
    ],
    ids=identify,
)
def test_gates_and_syncs_name_argument_and_value(make, name, value, error):
    with pytest.raises(error, match=says(name, value)):
        make(**{name: value})


# ---------------------------------------------------------------- replicas


def test_replicas_that_are_none(group_of_one):
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    with pytest.raises(ValueError, match="replicas.*2 dimensions"):
        CurvaDion([matrix()], replicas=mesh)
    CurvaDion([matrix()], replicas=mesh["replicate"])
    with pytest.raises(ValueError, match="replicas.*not a member"):
        CurvaDion([matrix()], replicas=dist.GroupMember.NON_GROUP_MEMBER)


def test_unpickling_without_the_process_group(group_of_one):
    pickled = pickle.dumps(CurvaDion([matrix()], replicas=group_of_one))
    dist.destroy_process_group()
    with pytest.raises(RuntimeError, match="init_process_group"):
        pickle.loads(pickled)


def mismatched(rank, arguments, prepare=lambda rank, optimizer: None):
    """What each rank is told when the replicas' optimizers are set up differently."""
    x = matrix()
    optimizer = CurvaDion([x], replicas=dist.group.WORLD, **arguments[rank])
    prepare(rank, optimizer)
    generator = torch.Generator().manual_seed(rank)
    try:
        for _ in range(4):
            x.grad = torch.randn(x.shape, generator=generator)
            optimizer.step()
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize(
    "arguments",
    [
        [{"rank_fraction": 0.25}, {"rank_fraction": 0.5}],
        [{"sync": LowRank()}, {"sync": LowRank(average_weights=False)}],
        [{"warmup_steps": 0}, {"warmup_steps": 3}],
        [{"gate": FixedPeriod(2)}, {"gate": FixedPeriod(3)}],
        [{"gate": AlwaysOpen()}, {"gate": FixedPeriod(2)}],
    ],
    ids=repr,
)
def test_replicas_set_up_differently(arguments):
    for told in distributed.run(2, mismatched, arguments):
        assert told is not None
        assert "optimizers differ" in told


def load_on_rank_0(rank, optimizer):
    if rank == 0:
        other = CurvaDion([matrix()], gate=FixedPeriod(3), replicas="single")
        other.param_groups[0]["params"][0].grad = torch.ones(6, 4)
        other.step()
        optimizer.load_state_dict(copy.deepcopy(other.state_dict()))


def test_checkpoint_loaded_on_one_rank_only():
    arguments = [{"gate": FixedPeriod(3)}] * 2
    for told in distributed.run(2, mismatched, arguments, load_on_rank_0, timeout=10):
        assert told is not None
        assert "differ" in told


# ---------------------------------------------------------------- parameters and groups


@pytest.mark.parametrize(
    ("shape", "stack_dims"), [((), 0), ((5,), 0), ((3, 4), 1), ((2, 3, 4), 2)], ids=repr
)
def test_dion_takes_matrices_and_stacks_of_them(shape, stack_dims):
    text = re.escape(str(shape)) + f".*dion.*stack_dims={stack_dims}.*param_groups"
    with pytest.raises(ValueError, match=text):
        CurvaDion([nn.Parameter(torch.zeros(shape))], stack_dims=stack_dims)


@pytest.mark.parametrize("row_blocks", [4, (2, 3)], ids=repr)
def test_row_blocks_that_do_not_add_up(row_blocks):
    with pytest.raises(ValueError, match=rf"qkv.*row_blocks={re.escape(repr(row_blocks))}.*6 rows"):
        CurvaDion([("qkv", matrix())], row_blocks=row_blocks)


@pytest.mark.parametrize(
    ("weight", "algorithm", "said"),
    [
        (torch.zeros(3), "dion", r"decoder\.bias"),
        (torch.zeros(0, 4), "dion", r"\(0, 4\)"),
        (torch.zeros(3, 4, dtype=torch.complex64), "lion", "complex64"),
        (torch.zeros(4, 3).to(torch.float8_e4m3fn), "adamw", "float8_e4m3fn: train float32"),
    ],
    ids=["vector", "empty", "complex", "float8"],
)
def test_parameters_that_nothing_can_train(weight, algorithm, said):
    with pytest.raises(ValueError, match=said):
        CurvaDion([{"params": [("decoder.bias", nn.Parameter(weight))], "algorithm": algorithm}])


@pytest.mark.parametrize("algorithm", ["sgd", None])
def test_unknown_algorithm(algorithm):
    with pytest.raises(ValueError, match=rf"algorithm={algorithm!r}.*dion.*adamw.*lion"):
        CurvaDion([{"params": [matrix()], "algorithm": algorithm}])


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("bettas", "betas"),
        ("beta1", "betas"),
        ("learning_rate", "lr"),
        ("mu", "momentum"),
    ],
)
def test_unknown_group_key_suggests_a_known_one(key, meant):
    with pytest.raises(ValueError, match=rf"'{key}'.*0\.5.*{meant}"):
        CurvaDion([{"params": [matrix()], key: 0.5}])


@pytest.mark.parametrize("key", ["gate", "maximize"])
def test_keys_that_no_group_may_have(key):
    with pytest.raises(ValueError, match=key):
        CurvaDion([{"params": [matrix()], key: True}])


@pytest.mark.parametrize(
    ("params", "error", "text"),
    [
        ([], ValueError, "empty parameter list"),
        (torch.zeros(3, 3), TypeError, "iterable"),
        ([torch.zeros(3, 3).requires_grad_() * 2], ValueError, "non-leaf"),
        ([3], TypeError, "int"),
        ([{"lr": 1.0}], ValueError, "params"),
        ([{"params": {nn.Parameter(torch.zeros(2, 2))}}], TypeError, "set"),
        ([{"params": [matrix()], 3: 0.5}], TypeError, r"key 3 \(=0\.5\).*no string"),
        ([{"params": [matrix()], "param_names": ["a", "b"]}], ValueError, "param_names"),
    ],
    ids=["empty", "tensor", "non-leaf", "int", "no params", "set", "key", "names"],
)
def test_params_that_are_none(params, error, text):
    with pytest.raises(error, match=text):
        CurvaDion(params)


@pytest.mark.parametrize(
    "group",
    [
        {"params": [("late", matrix()), ("later", nn.Parameter(torch.zeros(2)))]},
        {"params": [matrix()]},
        {"params": [("late", matrix())], "bettas": (0.9, 0.9)},
        {"params": [("late", matrix())], "lr": -1.0},
        {"lr": 0.1},
        [("params", [matrix()])],
    ],
    ids=repr,
)
def test_failed_add_param_group_changes_nothing(group):
    model, twin = toy.model(), toy.model()
    optimizer, undisturbed = CurvaDion(toy.groups(model)), CurvaDion(toy.groups(twin))
    toy.train(model, optimizer, range(2))
    toy.train(twin, undisturbed, range(2))
    held = [*optimizer.param_groups]
    before = copy.deepcopy(optimizer.state_dict())
    given = dict(group) if isinstance(group, dict) else group
    with pytest.raises((ValueError, TypeError)):
        optimizer.add_param_group(group)
    assert group == given
    assert [id(g) for g in optimizer.param_groups] == [id(g) for g in held]
    assert optimizer.state_dict()["param_groups"] == before["param_groups"]
    assert optimizer.state_dict()["state"].keys() == before["state"].keys()
    toy.train(model, optimizer, range(2, 4))
    toy.train(twin, undisturbed, range(2, 4))
    toy.assert_bitwise_equal(toy.weights(model), toy.weights(twin))


# ---------------------------------------------------------------- steps


def test_sparse_gradient_is_named():
    embedding = nn.Embedding(5, 4, sparse=True)
    group = {"params": [("words.weight", embedding.weight)], "algorithm": "adamw"}
    optimizer = CurvaDion([group], gate=AlwaysOpen())
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match=r"words\.weight.*sparse=False"):
        optimizer.step()


@pytest.mark.parametrize("kind", ["low_rank", "polar"])
def test_weights_on_the_meta_device(kind):
    x = nn.Parameter(torch.empty(4, 3, device="meta"))
    optimizer = Dion([x], direction=kind)
    x.grad = torch.empty_like(x)
    with pytest.raises(ValueError, match="meta device.*to_empty"):
        optimizer.step()


def test_a_model_that_was_cast_after_a_step():
    layer = nn.Linear(4, 3)
    optimizer = Dion([{"params": [("bias", layer.bias)], "algorithm": "adamw"}])
    layer.bias.grad = torch.ones(3)
    optimizer.step()
    layer.to(torch.bfloat16)
    layer.bias.grad = torch.ones(3, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="bias has dtype torch.bfloat16.*cast the model before"):
        optimizer.step()


def alone(rank):
    """What rank 0 is told of a step that rank 1 does not take."""
    x = nn.Parameter(torch.ones(4, 3))
    replicas = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    optimizer = CurvaDion([x], replicas=replicas, threshold=0.3)
    x.grad = torch.rand(4, 3, generator=torch.Generator().manual_seed(rank))
    optimizer.step()
    if rank:
        return None
    with pytest.raises(RuntimeError) as raised:
        optimizer.step()
    return str(raised.value)


def test_a_call_that_another_rank_does_not_make():
    said, _ = distributed.run(2, alone)
    assert re.match(r"optimizer\.step\(\) is a call of all ranks.*make the call on every", said)


def test_rmmc_gate_without_matrices():
    bias = nn.Parameter(torch.zeros(3))
    optimizer = CurvaDion([{"params": [bias], "algorithm": "adamw"}], threshold=0.2)
    bias.grad = torch.ones(3)
    with pytest.raises(ValueError, match=r"threshold=0\.2.*dion.*FixedPeriod"):
        optimizer.step()


# Values that a user, a scheduler or a script may write into a group between two steps.
MID_RUN = [
    ("lr", math.inf),
    ("lr", torch.tensor(NAN)),
    ("lr", torch.ones(2)),
    ("right_factor", "xx"),
    ("algorithm", "sgd"),
    ("betas", [0.9, 1.5]),
    ("row_blocks", [0, 6]),
    ("maximize", True),
]


@pytest.mark.parametrize(("key", "value"), MID_RUN, ids=identify)
def test_wrong_values_in_mid_run_change_nothing(key, value):
    model = toy.model()
    optimizer = CurvaDion(toy.groups(model))
    toy.train(model, optimizer, range(2))
    before, states = toy.weights(model), toy.states(optimizer)
    kept = optimizer.param_groups[0].get(key)
    optimizer.param_groups[0][key] = value
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"param_groups\[0\]: {key}"):
            optimizer.step()
    toy.assert_bitwise_equal(toy.weights(model), before)
    optimizer.param_groups[0][key] = kept
    toy.assert_bitwise_equal(toy.states(optimizer), states)
    toy.train(model, optimizer, [2])


# ---------------------------------------------------------------- checkpoints


def test_state_of_another_optimizer():
    x = matrix()
    x.grad = torch.ones_like(x)
    other = torch.optim.AdamW([x], lr=0.1)
    other.step()
    optimizer = CurvaDion([x])
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="state_dict.*'algorithm'"):
        optimizer.load_state_dict(other.state_dict())
    assert optimizer.state_dict() == before


@pytest.mark.parametrize("model", [nn.Linear(3, 4), None], ids=type)
def test_keep_gradients_local_of_no_ddp(model):
    with pytest.raises(TypeError, match=rf"ddp.*{type(model).__name__}"):
        keep_gradients_local(model)
