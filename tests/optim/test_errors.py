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

import curvadion
import distributed
import toy
from curvadion import (
    RMMC,
    AlwaysOpen,
    CurvaDion,
    Dion,
    FixedPeriod,
    Gate,
    LowRank,
    QuantizedAverage,
    Sync,
    WireMeter,
)
from curvadion.integrations.ddp import keep_gradients_local
from curvadion.update import hyperparameters as check

NAN = math.nan

# Arguments that may also stand in a group.
GROUP_KEYS = [
    ("lr", -1.0, ValueError),
    ("lr", NAN, ValueError),
    ("lr", math.inf, ValueError),
    ("lr", "fast", TypeError),
    ("lr", True, TypeError),
    ("lr", None, TypeError),
    ("lr", 10**400, ValueError),
    ("local_lr", -0.1, ValueError),
    ("local_lr", NAN, ValueError),
    ("local_lr", "slow", TypeError),
    ("mu", -0.1, ValueError),
    ("mu", 1.0, ValueError),
    ("mu", NAN, ValueError),
    ("mu", "0.9", TypeError),
    ("mu", True, TypeError),
    ("betas", 0.9, TypeError),
    ("betas", (0.9,), TypeError),
    ("betas", (0.9, 1.0), ValueError),
    ("betas", (-0.1, 0.9), ValueError),
    ("betas", (0.9, NAN), ValueError),
    ("betas", (0.9, "0.95"), TypeError),
    ("eps", -1e-8, ValueError),
    ("eps", NAN, ValueError),
    ("eps", False, TypeError),
    ("weight_decay", -0.1, ValueError),
    ("weight_decay", NAN, ValueError),
    ("weight_decay", None, TypeError),
    ("weight_decay", True, TypeError),
    ("rank_fraction", 0.0, ValueError),
    ("rank_fraction", -0.25, ValueError),
    ("rank_fraction", 1.5, ValueError),
    ("rank_fraction", NAN, ValueError),
    ("rank_fraction", 1e-300, ValueError),
    ("rank_fraction", 1e-10, ValueError),
    ("rank_fraction", True, TypeError),
    ("rank_fraction", "quarter", TypeError),
    ("rank_multiple_of", 0, ValueError),
    ("rank_multiple_of", 1.5, TypeError),
    ("rank_multiple_of", True, TypeError),
    ("stack_dims", -1, ValueError),
    ("stack_dims", 0.5, TypeError),
    ("stack_dims", True, TypeError),
    ("row_blocks", 0, ValueError),
    ("row_blocks", (2, 0), ValueError),
    ("row_blocks", (), ValueError),
    ("row_blocks", (2, 4.0), TypeError),
    ("row_blocks", 1.5, TypeError),
    ("row_blocks", "qkv", TypeError),
    ("momentum_rule", "nesterov", ValueError),
    ("momentum_rule", None, ValueError),
    ("right_factor", "svd", ValueError),
    ("momentum_dtype", torch.int32, ValueError),
    ("momentum_dtype", "float8", ValueError),
    ("momentum_dtype", 32, TypeError),
    ("q_dtype", torch.complex64, ValueError),
    ("q_dtype", True, TypeError),
    ("stochastic_rounding", 1, TypeError),
    ("stochastic_rounding", "bfloat16", TypeError),
]

# Arguments of the optimizer alone.
CONSTRUCTOR_ONLY = [
    ("replicas", 3, TypeError),
    ("replicas", "world", TypeError),
    ("threshold", -0.1, ValueError),
    ("threshold", NAN, ValueError),
    ("threshold", "0.3", TypeError),
    ("threshold", True, TypeError),
    ("gate", "rmmc", TypeError),
    ("gate", RMMC, TypeError),
    ("gate", 0.3, TypeError),
    ("local_step", "sgd", ValueError),
    ("local_step", None, ValueError),
    ("max_local_steps", 0, ValueError),
    ("max_local_steps", -3, ValueError),
    ("max_local_steps", 2.5, TypeError),
    ("max_local_steps", True, TypeError),
    ("warmup_steps", -1, ValueError),
    ("warmup_steps", 1.0, TypeError),
    ("warmup_steps", True, TypeError),
    ("sync", "sometimes", TypeError),
    ("sync", True, TypeError),
    ("sync", QuantizedAverage, TypeError),
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


@pytest.mark.parametrize(
    ("name", "value", "error"), [c for c in GROUP_KEYS if c[0] != "local_lr"], ids=identify
)
def test_dion_names_argument_and_value(name, value, error):
    with pytest.raises(error, match=says(name, value)):
        Dion([matrix()], **{name: value})


@pytest.mark.parametrize(("name", "value", "error"), GROUP_KEYS, ids=identify)
def test_group_names_key_and_value(name, value, error):
    with pytest.raises(error, match=says(name, value)):
        CurvaDion([{"params": [matrix()], name: value}])


@pytest.mark.parametrize("argument", ["lr", "local_lr"])
@pytest.mark.parametrize(
    "value", [torch.ones(2), torch.empty(0), torch.tensor(NAN), torch.tensor(-1.0)], ids=repr
)
def test_tensor_learning_rates_are_checked(argument, value):
    with pytest.raises(ValueError, match=argument):
        CurvaDion([matrix()], **{argument: value})


@pytest.mark.parametrize("value", [torch.tensor(1j), torch.tensor(True)], ids=repr)
def test_tensor_learning_rate_must_be_real(value):
    with pytest.raises((TypeError, ValueError), match="lr"):
        CurvaDion([matrix()], lr=value)


@pytest.mark.parametrize("argument", ["threshold", "gate", "local_step", "sync", "wire_budget"])
def test_dion_has_no_arguments_of_a_closed_gate(argument):
    with pytest.raises(TypeError, match=argument):
        Dion([matrix()], **{argument: None})


@pytest.mark.parametrize("gate", [FixedPeriod(7), AlwaysOpen(), RMMC(0.2)], ids=repr)
def test_threshold_and_gate_conflict(gate):
    with pytest.raises(ValueError, match=re.escape(f"gate={gate!r} and threshold=0.25")):
        CurvaDion([matrix()], threshold=0.25, gate=gate)


@pytest.mark.parametrize(("period", "bound"), [(100, {}), (52, {}), (5, {"max_local_steps": 3})])
def test_period_longer_than_the_longest_local_run(period, bound):
    """Else FixedPeriod(100) would be a period of 51, and nobody told."""
    with pytest.raises(ValueError, match=rf"period={period}.*max_local_steps=(50|3).*None"):
        CurvaDion([matrix()], gate=FixedPeriod(period), **bound)


@pytest.mark.parametrize(
    ("make", "error", "name", "value"),
    [
        (RMMC, TypeError, "threshold", None),
        (RMMC, TypeError, "threshold", "0.1"),
        (RMMC, TypeError, "threshold", False),
        (RMMC, ValueError, "threshold", -1),
        (RMMC, ValueError, "threshold", NAN),
        (FixedPeriod, TypeError, "period", 2.0),
        (FixedPeriod, TypeError, "period", True),
        (FixedPeriod, TypeError, "period", "10"),
        (FixedPeriod, ValueError, "period", 0),
        (FixedPeriod, ValueError, "period", -5),
    ],
    ids=identify,
)
def test_gates_name_argument_and_value(make, error, name, value):
    with pytest.raises(error, match=says(name, value)):
        make(value)


@pytest.mark.parametrize(
    ("make", "name", "value", "error"),
    [
        (QuantizedAverage, "bits", 2.0, TypeError),
        (QuantizedAverage, "bits", True, TypeError),
        (QuantizedAverage, "bits", 5, ValueError),
        (QuantizedAverage, "bits", 0, ValueError),
        (QuantizedAverage, "fragments", 1.0, TypeError),
        (QuantizedAverage, "fragments", True, TypeError),
        (QuantizedAverage, "fragments", 0, ValueError),
        (QuantizedAverage, "align_momentum", 1, TypeError),
        (QuantizedAverage, "polar_correction", None, TypeError),
        (QuantizedAverage, "spectrum_decay", 1.0, ValueError),
        (QuantizedAverage, "spectrum_decay", -0.5, ValueError),
        (QuantizedAverage, "spectrum_decay", True, TypeError),
        (LowRank, "average_weights", 0, TypeError),
        (LowRank, "average_weights", "average", TypeError),
    ],
    ids=identify,
)
def test_syncs_name_argument_and_value(make, name, value, error):
    with pytest.raises(error, match=says(name, value)):
        make(**{name: value})


def test_sync_without_an_open_step_is_abstract():
    class Apart(Sync):
        pass

    with pytest.raises(TypeError, match="open_step"):
        Apart()


def test_gate_without_a_decision_is_abstract():
    class Undecided(Gate):
        pass

    with pytest.raises(TypeError, match="opens"):
        Undecided()


# ---------------------------------------------------------------- replicas


def test_replicas_of_two_dimensions(group_of_one):
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    with pytest.raises(ValueError, match="replicas.*2 dimensions"):
        CurvaDion([matrix()], replicas=mesh)
    CurvaDion([matrix()], replicas=mesh["replicate"])


def test_replicas_that_this_rank_is_not_part_of():
    with pytest.raises(ValueError, match="replicas.*not a member"):
        CurvaDion([matrix()], replicas=dist.GroupMember.NON_GROUP_MEMBER)


def test_unpickling_without_the_process_group(group_of_one):
    pickled = pickle.dumps(CurvaDion([matrix()], replicas=group_of_one))
    dist.destroy_process_group()
    with pytest.raises(RuntimeError, match="init_process_group"):
        pickle.loads(pickled)


def mismatched(rank, arguments, after=lambda rank, optimizer: None):
    """What each rank is told when the replicas' optimizers are not set up alike."""
    x = matrix()
    optimizer = CurvaDion([x], replicas=dist.group.WORLD, **arguments[rank])
    after(rank, optimizer)
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
        [{"local_step": "dion"}, {"local_step": "gradient"}],
        [{"sync": LowRank()}, {"sync": LowRank(average_weights=False)}],
        [{"max_local_steps": 4}, {"max_local_steps": 5}],
        [{"warmup_steps": 0}, {"warmup_steps": 3}],
        [{"gate": AlwaysOpen()}, {"gate": FixedPeriod(2)}],
    ],
    ids=repr,
)
def test_replicas_set_up_differently(arguments):
    for told in distributed.run(2, mismatched, arguments):
        assert told is not None
        assert "optimizers differ" in told


@pytest.mark.parametrize(
    "arguments",
    [
        [{"gate": FixedPeriod(2)}, {"gate": FixedPeriod(3)}],
        [{"threshold": 0.0}, {"threshold": 0.5}],
    ],
    ids=repr,
)
def test_replicas_whose_gates_differ(arguments):
    for told in distributed.run(2, mismatched, arguments, timeout=10):
        assert told is not None
        assert "optimizers differ" in told


def send_in_another_format_on_rank_1(rank, optimizer):
    optimizer.sync.message_format += rank


def test_replicas_of_versions_whose_messages_differ():
    arguments = [{"sync": QuantizedAverage()}] * 2
    for told in distributed.run(2, mismatched, arguments, send_in_another_format_on_rank_1):
        assert "the format of the sync's messages" in told


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


@pytest.mark.parametrize("row_blocks", [4, (2, 3), [1, 2, 4]], ids=repr)
def test_row_blocks_that_do_not_add_up(row_blocks):
    with pytest.raises(ValueError, match=rf"qkv.*row_blocks={re.escape(repr(row_blocks))}.*6 rows"):
        CurvaDion([("qkv", matrix())], row_blocks=row_blocks)


def test_error_names_the_parameter():
    with pytest.raises(ValueError, match=r"decoder\.bias"):
        CurvaDion([("decoder.bias", nn.Parameter(torch.zeros(3)))])
    with pytest.raises(ValueError, match=r"param_groups\[1\]\['params'\]\[2\]"):
        CurvaDion(
            [
                {"params": [matrix()]},
                {"params": [matrix(), matrix(), nn.Parameter(torch.zeros(3))]},
            ]
        )


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0)], ids=repr)
def test_empty_matrix(shape):
    with pytest.raises(ValueError, match=re.escape(str(shape))):
        CurvaDion([nn.Parameter(torch.zeros(shape))])


@pytest.mark.parametrize("algorithm", ["dion", "adamw", "lion"])
def test_complex_parameter(algorithm):
    parameter = nn.Parameter(torch.zeros(3, 4, dtype=torch.complex64))
    with pytest.raises(ValueError, match="complex64"):
        CurvaDion([{"params": [("spectrum", parameter)], "algorithm": algorithm}])


@pytest.mark.parametrize("algorithm", ["sgd", "Dion", "", None, 1])
def test_unknown_algorithm(algorithm):
    with pytest.raises(ValueError, match=rf"algorithm={algorithm!r}.*dion.*adamw.*lion"):
        CurvaDion([{"params": [matrix()], "algorithm": algorithm}])


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("bettas", "betas"),
        ("beta", "betas"),
        ("beta1", "betas"),
        ("weight_decy", "weight_decay"),
        ("rank_frac", "rank_fraction"),
        ("algoritm", "algorithm"),
        ("local_learning_rate", "lr"),
        ("momentum_rules", "momentum_rule"),
    ],
)
def test_unknown_group_key_suggests_a_known_one(key, meant):
    with pytest.raises(ValueError, match=rf"'{key}'.*0\.5.*{meant}"):
        CurvaDion([{"params": [matrix()], key: 0.5}])


@pytest.mark.parametrize(("key", "meant"), [("momentum", "mu"), ("learning_rate", "lr")])
def test_other_optimizers_names_of_our_keys(key, meant):
    with pytest.raises(ValueError, match=f"'{key}'.*'{meant}'"):
        CurvaDion([{"params": [matrix()], key: 0.5}])


def test_group_key_that_is_no_string():
    with pytest.raises(TypeError, match=r"key 3 \(=0\.5\).*no string"):
        CurvaDion([{"params": [matrix()], 3: 0.5}])


@pytest.mark.parametrize("key", ["threshold", "gate", "local_step", "warmup_steps", "sync"])
def test_what_concerns_all_replicas_is_no_group_key(key):
    with pytest.raises(ValueError, match=key):
        CurvaDion([{"params": [matrix()], key: 1}])


def test_maximize_is_refused():
    with pytest.raises(ValueError, match="maximize=True"):
        CurvaDion([{"params": [matrix()], "maximize": True}])


@pytest.mark.parametrize(
    ("params", "error", "text"),
    [
        ([], ValueError, "empty parameter list"),
        (torch.zeros(3, 3), TypeError, "iterable"),
        ([torch.zeros(3, 3).requires_grad_() * 2], ValueError, "non-leaf"),
        ([3], TypeError, "int"),
        ([{"lr": 1.0}], ValueError, "params"),
        ([{"params": {nn.Parameter(torch.zeros(2, 2))}}], TypeError, "set"),
    ],
    ids=["empty", "tensor", "non-leaf", "int", "no params", "set"],
)
def test_params_that_are_none(params, error, text):
    with pytest.raises(error, match=text):
        CurvaDion(params)


def test_parameter_in_two_groups():
    x = matrix()
    with pytest.raises(ValueError, match="more than one parameter group"):
        CurvaDion([{"params": [x]}, {"params": [x], "algorithm": "adamw"}])


def test_param_names_of_another_length():
    with pytest.raises(ValueError, match="param_names"):
        CurvaDion([{"params": [matrix(), matrix()], "param_names": ["one"]}])


@pytest.mark.parametrize(
    "group",
    [
        {"params": [("late", nn.Parameter(torch.zeros(3)))]},
        {"params": [("late", matrix()), ("later", nn.Parameter(torch.zeros(2)))]},
        {"params": [("late", nn.Parameter(torch.zeros(2, 2) * 1j))], "algorithm": "lion"},
        {"params": [matrix()], "param_names": ["late", "later"]},
        {"params": [matrix()]},
        {"params": [("late", matrix())], "bettas": (0.9, 0.9)},
        {"params": [("late", matrix())], "lr": -1.0},
        {"params": [("late", matrix())], "algorithm": "sgd"},
        {"params": [("late", matrix())], "momentum_dtype": "int8"},
        {"params": [("late", matrix())], "maximize": True},
        {"params": [3]},
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
    groups = curvadion.param_groups(nn.ModuleDict({"words": embedding}))
    optimizer = CurvaDion(groups, gate=AlwaysOpen())
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


@pytest.mark.parametrize("algorithm", ["dion", "adamw"])
def test_weights_of_a_dtype_that_nothing_is_added_in(algorithm):
    x = nn.Parameter(torch.zeros(4, 3).to(torch.float8_e4m3fn))
    with pytest.raises(ValueError, match="float8_e4m3fn: train float32"):
        Dion([{"params": [x], "algorithm": algorithm}])


def test_a_model_that_was_cast_after_a_step():
    layer = nn.Linear(4, 3)
    optimizer = Dion([{"params": [("bias", layer.bias)], "algorithm": "adamw"}])
    layer.bias.grad = torch.ones(3)
    optimizer.step()
    layer.to(torch.bfloat16)
    layer.bias.grad = torch.ones(3, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="bias has dtype torch.bfloat16.*cast the model before"):
        optimizer.step()


def alone(rank, call):
    """What rank 0 is told of a call that rank 1 does not make."""
    x = nn.Parameter(torch.ones(4, 3))
    replicas = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    optimizer = CurvaDion([x], replicas=replicas, threshold=0.3)
    x.grad = torch.rand(4, 3, generator=torch.Generator().manual_seed(rank))
    optimizer.step()
    if rank:
        return None
    with pytest.raises(RuntimeError) as raised:
        getattr(optimizer, call)()
    return str(raised.value)


@pytest.mark.parametrize("call", ["step", "synchronize"])
def test_a_call_that_another_rank_does_not_make(call):
    said, _ = distributed.run(2, alone, call)
    assert re.match(rf"optimizer\.{call}\(\) is a call of all ranks.*make the call on every", said)


def test_rmmc_gate_without_matrices():
    bias = nn.Parameter(torch.zeros(3))
    optimizer = CurvaDion([{"params": [bias], "algorithm": "adamw"}], threshold=0.2)
    bias.grad = torch.ones(3)
    with pytest.raises(ValueError, match=r"threshold=0\.2.*dion.*FixedPeriod"):
        optimizer.step()


def test_gate_whose_signals_do_not_fit():
    class Wrong(Gate):
        reads_momentum = True

        def signal(self, before, after):
            return torch.arange(7.0)

        def opens(self, signal, local_steps):
            return True

    x = matrix()
    x.grad = torch.ones_like(x)
    with pytest.raises((ValueError, TypeError), match="signal"):
        CurvaDion([x], gate=Wrong()).step()


# Values that a user, a scheduler or a script may write into a group between two steps.
MID_RUN = [
    ("lr", math.inf),
    ("lr", NAN),
    ("lr", torch.tensor(NAN)),
    ("lr", torch.ones(2)),
    ("lr", -1.0),
    ("local_lr", math.inf),
    ("right_factor", "xx"),
    ("algorithm", "sgd"),
    ("betas", [0.9, 1.5]),
    ("eps", True),
    ("row_blocks", [0, 6]),
    ("rank_fraction", 0.0),
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


def test_settings_are_seen_when_they_change():
    """1, 1.0 and True are equal, but not the same setting; a tensor changes in place."""
    group = CurvaDion([matrix()]).param_groups[0]
    assert check.settings([group]) is None
    assert check.settings([{**group, "rank_multiple_of": 1}]) is None
    assert "integer" in check.settings([{**group, "rank_multiple_of": 1.0}])
    assert "integer" in check.settings([{**group, "rank_multiple_of": True}])
    lr = torch.tensor(0.1)
    assert check.settings([{**group, "lr": lr}]) is None
    lr.fill_(NAN)
    assert "lr=nan" in check.settings([{**group, "lr": lr}])
    assert check.settings([group, {**group, "lr": torch.ones((), device="meta")}]) is None
    assert "shape (2,)" in check.settings([{**group, "lr": torch.ones(2, device="meta")}])
    del group["mu"]
    assert check.settings([group]) == "param_groups[0]: the key 'mu' is missing"


def test_another_algorithm_in_mid_run():
    x = matrix()
    optimizer = CurvaDion([("w", x)], gate=AlwaysOpen())
    x.grad = torch.ones_like(x)
    optimizer.step()
    optimizer.param_groups[0]["algorithm"] = "adamw"
    with pytest.raises(ValueError, match=r"w .*'exp_avg'.*algorithm='adamw'.*optimizer\.state"):
        optimizer.step()
    optimizer.param_groups[0]["algorithm"] = "dion"
    optimizer.step()


# ---------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("foreign", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
@pytest.mark.parametrize("make", [CurvaDion, Dion])
def test_state_of_another_optimizer(make, foreign):
    x = matrix()
    x.grad = torch.ones_like(x)
    other = foreign([x], lr=0.1)
    other.step()
    optimizer = make([x])
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="state_dict.*'algorithm'"):
        optimizer.load_state_dict(other.state_dict())
    assert optimizer.state_dict() == before


def saved_state():
    x = matrix()
    optimizer = CurvaDion([("w", x)], gate=AlwaysOpen())
    x.grad = torch.ones_like(x)
    optimizer.step()
    return optimizer.state_dict()


@pytest.mark.parametrize("saved", [None, [], [1], "state", 3], ids=repr)
def test_no_state_dict_at_all(saved):
    with pytest.raises(TypeError, match=f"state_dict=.*{type(saved).__name__}"):
        CurvaDion([matrix()]).load_state_dict(saved)


DAMAGED = [
    "", "{", "null", "[]", "3", "{}", None, 3, {"steps": 1},
    '{"steps": 1, "local_steps": 0}',
    '{"gate": {}, "steps": 1}',
    '{"gate": {}, "steps": "1", "local_steps": 0}',
    '{"gate": {}, "steps": true, "local_steps": 0}',
    '{"gate": {}, "steps": -1, "local_steps": 0}',
    '{"gate": {}, "steps": 1.5, "local_steps": 0}',
    '{"gate": [], "steps": 1, "local_steps": 0}',
    '{"gate": {}, "steps": 1, "local_steps": 0, "hops": 1}',
    '{"gate": {}, "steps": 1, "local_steps": 0, "replica": [1]}',
    '{"gate": {}, "sync": {}, "steps": 1, "local_steps": 0, "group_defaults": 1}',
    '{"gate": {}, "sync": {}, "steps": 1, "local_steps": 0, "sync_keys": "anchor"}',
    '{"gate": {}, "sync": {}, "steps": 1, "local_steps": 0, "part": 0}',
    '{"gate": {}, "sync": [], "steps": 1, "local_steps": 0}',
    '{"gate": {}, "sync": {"fragments_apart": -1}, "steps": 1, "local_steps": 0}',
    # As earlier versions wrote it.
    '{"gate": {}, "steps": 1, "local_steps": 0, "defaults_by_sync": 1}',
    '{"gate": {}, "steps": 1, "local_steps": 0, "parts_apart": -1}',
    '{"gate": {}, "steps": 1, "local_steps": 0, "parts_apart": true}',
    '{"gate": {}, "steps": 1, "local_steps": 0, "part": "1"}',
    '{"gate": {}, "steps": 1, "local_steps": 0, "reconcile": "sometimes"}',
]  # fmt: skip


@pytest.mark.parametrize("progress", DAMAGED, ids=repr)
def test_damaged_progress(progress):
    saved = saved_state()
    saved["param_groups"][0]["progress"] = progress
    optimizer = CurvaDion([matrix()])
    before = optimizer.state_dict()
    with pytest.raises(ValueError, match="damaged: 'progress'"):
        optimizer.load_state_dict(saved)
    assert optimizer.state_dict() == before


def test_damaged_memory_of_a_gate():
    x = matrix()
    optimizer = CurvaDion([x], wire_budget=0.5)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["progress"] = saved["param_groups"][0]["progress"].replace("cre", "")
    before = optimizer.state_dict()
    with pytest.raises(ValueError, match=r"memory.*gate=ByteBudget.*KeyError"):
        optimizer.load_state_dict(saved)
    assert optimizer.state_dict() == before


class Counting(LowRank):
    told = 0

    def state_dict(self):
        return {**super().state_dict(), "told": self.told}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.told = state["told"]


def test_memory_that_a_sync_cannot_load_changes_nothing():
    x = matrix()
    optimizer = CurvaDion([x], wire_budget=0.5)
    x.grad = torch.ones_like(x)
    optimizer.step()
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        group["progress"] = group["progress"].replace('"next_fragment": 0', '"next_fragment": "x"')
    into = CurvaDion([matrix()], wire_budget=0.5)
    before, memory = copy.deepcopy(into.state_dict()), into.gate.state_dict()
    with pytest.raises(ValueError, match=r"memory.*'next_fragment': 'x'.*sync=Quantized.*TypeErr"):
        into.load_state_dict(saved)
    assert into.state_dict() == before
    assert into.gate.state_dict() == memory

    optimizer = CurvaDion([matrix()], gate=FixedPeriod(2), sync=Counting())
    optimizer.sync.told = 3
    saved = optimizer.state_dict()
    into = CurvaDion([matrix()], gate=FixedPeriod(2), sync=Counting())
    for group in saved["param_groups"]:
        group["progress"] = group["progress"].replace('"told"', '"tolled"')
    with pytest.raises(ValueError, match=r"memory.*sync=.*KeyError: 'told'"):
        into.load_state_dict(saved)
    assert into.sync.told == 0
    into.load_state_dict(optimizer.state_dict())
    assert into.sync.told == 3


@pytest.mark.parametrize("key", ["momentum", "Q", "momentum_norm"])
@pytest.mark.parametrize("value", [None, 1.0], ids=["missing", "a number"])
def test_state_that_lacks_a_key(key, value):
    saved = saved_state()
    if value is None:
        del saved["state"][0][key]
    else:
        saved["state"][0][key] = value
    optimizer = CurvaDion([("w", matrix())])
    with pytest.raises((ValueError, TypeError), match=rf"state_dict.*{key}.*w\b"):
        optimizer.load_state_dict(saved)
    assert not optimizer.state


@pytest.mark.parametrize(
    ("key", "value"), [("lr", NAN), ("lr", "0.1"), ("right_factor", "xx"), ("betas", 1)]
)
def test_saved_group_with_an_impossible_value(key, value):
    saved = saved_state()
    saved["param_groups"][0][key] = value
    with pytest.raises(ValueError, match=rf"state_dict.*param_groups\[0\]: {key}"):
        CurvaDion([matrix()]).load_state_dict(saved)


@pytest.mark.parametrize("where", ["state", "param_groups", "of a parameter", "params"])
def test_parts_of_a_state_dict_that_are_none(where):
    saved = saved_state()
    if where == "of a parameter":
        saved["state"][0] = None
    elif where == "params":
        saved["param_groups"][0]["params"] = None
    else:
        saved[where] = [3] if where == "param_groups" else None
    with pytest.raises((ValueError, TypeError), match="state_dict"):
        CurvaDion([matrix()]).load_state_dict(saved)


@pytest.mark.parametrize("saved", [{}, {"state": {}, "param_groups": []}], ids=repr)
def test_state_of_nothing(saved):
    with pytest.raises(ValueError, match="param"):
        CurvaDion([matrix()]).load_state_dict(saved)


# ---------------------------------------------------------------- from a model to groups


def tiny():
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))


@pytest.mark.parametrize("model", [None, [matrix()], nn.Linear, tiny().state_dict()], ids=type)
def test_param_groups_of_no_module(model):
    with pytest.raises(TypeError, match=rf"model.*{type(model).__name__}"):
        curvadion.param_groups(model)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"elementwise": "adam"}, "elementwise='adam'"),
        ({"elementwise": None}, "elementwise=None"),
        ({"options": {"matrices": {"lr": 1.0}}}, "options.*'matrices'.*matrix"),
        ({"patterns": {"*": "matrices"}}, "patterns.*'matrices'.*matrix"),
        ({"patterns": {"*.router.weight": "vector"}}, r"\*\.router\.weight.*0\.weight"),
        ({"patterns": {"*": "vector", "0.weight": "head"}}, r"0\.weight.*match no"),
        ({"patterns": {"1.weight": "matrix"}}, r"1\.weight.*\(4,\).*matrix"),
        ({"patterns": {"*.bias": "matrix"}}, r"0\.bias.*\(4,\).*matrix"),
    ],
    ids=repr,
)
def test_param_groups_names_what_is_wrong(arguments, text):
    with pytest.raises(ValueError, match=text):
        curvadion.param_groups(tiny(), **arguments)


@pytest.mark.parametrize("model", [nn.ReLU(), tiny().requires_grad_(False)], ids=["none", "frozen"])
def test_param_groups_of_nothing_trainable(model):
    with pytest.raises(ValueError, match="model has no trainable parameters"):
        curvadion.param_groups(model)


def test_param_groups_options_are_checked_by_the_optimizer():
    groups = curvadion.param_groups(tiny(), options={"vector": {"bettas": (0.9, 0.99)}})
    with pytest.raises(ValueError, match="'bettas'.*'betas'"):
        CurvaDion(groups)


@pytest.mark.parametrize("key", ["params", "param_names"])
def test_param_groups_options_cannot_replace_the_parameters(key):
    with pytest.raises(ValueError, match=key):
        curvadion.param_groups(tiny(), options={"matrix": {key: []}})


# ---------------------------------------------------------------- the rest of the surface


@pytest.mark.parametrize("model", [tiny(), None, "model"], ids=type)
def test_keep_gradients_local_of_no_ddp(model):
    with pytest.raises(TypeError, match=rf"ddp.*{type(model).__name__}"):
        keep_gradients_local(model)


def test_meter_entered_twice():
    with (
        WireMeter() as meter,
        pytest.raises(RuntimeError, match="already active"),
        meter,
    ):
        pass


def test_meter_left_twice():
    with WireMeter() as meter:
        pass
    with pytest.raises(ValueError, match="not active"):
        meter.__exit__(None, None, None)
    with meter:
        pass


def test_snapshot_of_another_meter():
    snapshot = WireMeter().snapshot()
    with pytest.raises(ValueError, match="snapshot"):
        WireMeter().since(snapshot)
