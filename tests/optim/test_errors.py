"""Malformed uses: each raises the right type and says which argument had which value."""

import copy
import inspect
import math
import re
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from curvadion import (
    RMMC,
    AlwaysOpen,
    CodedGradients,
    CurvaDion,
    Dion,
    FixedPeriod,
    LowRank,
    QuantizedAverage,
    clip_grad_norm_,
    factory,
)
from curvadion.layout.flat_shard import declare_flat_shard
from curvadion.optim import group_keys
from support.runs import distributed, toy

NAN = math.nan
ALWAYS = {"gate": AlwaysOpen()}

# One wrong value of each kind of check; all but the last six may also stand in a group.
ARGUMENTS = [
    ("lr", NAN, ValueError),
    ("lr", "fast", TypeError),
    ("lr", torch.ones(2), ValueError),
    ("local_lr", -0.1, ValueError),
    ("momentum", 1.0, ValueError),
    ("betas", (0.9,), TypeError),
    ("betas", (0.9, 1.0), ValueError),
    ("eps", -1e-8, ValueError),
    ("weight_decay", None, TypeError),
    ("rank_fraction", 1.5, ValueError),
    ("rank_multiple_of", 0, ValueError),
    ("stack_dims", -1, ValueError),
    ("row_blocks", (2, 0), ValueError),
    ("momentum_rule", "look_ahead", ValueError),
    ("right_factor", "svd", ValueError),
    ("state_dtype", torch.int32, ValueError),
    ("stochastic_rounding", 1, TypeError),
    ("replicas", "world", TypeError),
    ("threshold", -0.1, ValueError),
    ("wire_budget", 2, ValueError),
    ("local_step", "sgd", ValueError),
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
    if isinstance(value, torch.Tensor):
        return name
    parts = [value, *value] if isinstance(value, tuple) else [value]
    values = "|".join(re.escape(repr(part)) for part in parts)
    return rf"(?s){name}.*({values})"


@pytest.mark.parametrize(("name", "value", "error"), ARGUMENTS, ids=identify)
def test_constructor_names_argument_and_value(name, value, error):
    gate = {} if name in ("threshold", "wire_budget") else {"threshold": 0.3}
    with pytest.raises(error, match=says(name, value)):
        CurvaDion([matrix()], **gate, **{name: value})


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("momentun", "unexpected keyword argument 'momentun': did you mean 'momentum'"),
        ("treshold", "did you mean 'threshold'"),
        ("nesterov", "did you mean 'look_ahead'"),
        ("bits", r"'bits': pass sync=curvadion\.QuantizedAverage\(bits=\.\.\.\) to CurvaDion"),
        ("rho", "unexpected keyword argument 'rho'$"),
        ("options", "unexpected keyword argument 'options'$"),
    ],
)
def test_unknown_keyword_arguments_suggest_a_known_one(key, says):
    for more in ({"wire_budget": 0.5}, {}):  # also where something else is missing
        with pytest.raises(TypeError, match=says):
            CurvaDion([matrix()], **more, **{key: 0.5})


def test_dion_names_who_has_the_arguments_of_replicas_that_drift():
    arguments = [set(inspect.signature(kind).parameters) for kind in (CurvaDion, Dion)]
    assert arguments[0] - arguments[1] == set(group_keys.OF_CURVADION)
    for key in group_keys.OF_CURVADION:
        with pytest.raises(TypeError, match=f"'{key}': CurvaDion has it, Dion synchronises at"):
            Dion([matrix()], **{key: 1})


class Passing(CurvaDion):
    """One that passes its arguments on, so that only its constructor knows them."""

    def __init__(self, params, *, rate, **options):
        super().__init__(params, lr=rate, **options)


def test_a_factory_checks_arguments_of_our_classes_early_and_leaves_others_to_theirs():
    with pytest.raises(TypeError, match=r"argument 'treshold': did you mean 'threshold'"):
        factory(CurvaDion, treshold=0.1)
    create, settings = factory(Passing, rate=0.01, wire_budget=0.5, heads=False)
    optimizer = create()(torch.nn.Linear(8, 8), **settings)
    assert optimizer.param_groups[0]["lr"] == 0.01 and optimizer.gate.share == 0.5


def test_a_budget_of_one_is_all_bytes():
    with pytest.warns(UserWarning, match=r"wire_budget=1 is 100% of DDP's bytes: for 1 % pass"):
        CurvaDion([matrix()], wire_budget=1)


@pytest.mark.parametrize("options", [{}, {"sync": QuantizedAverage()}, {"local_step": "gradient"}])
def test_there_is_no_default_for_when_replicas_synchronise(options):
    with pytest.raises(ValueError) as told:
        CurvaDion([matrix()], **options)
    for choice in (
        "wire_budget=0.01 (recommended",
        "gate=",
        "threshold=",
        "CurvaDion.paper(params)",
    ):
        assert choice in str(told.value)


def test_a_sync_that_opens_at_every_step_needs_no_gate():
    assert CurvaDion([matrix()], sync=CodedGradients()).gate.always_open


def test_a_period_longer_than_the_longest_local_run_is_an_error():
    """Else FixedPeriod(100) would be a period of 51, and nobody told."""
    with pytest.raises(ValueError, match="period=52.*max_local_steps=50.*None"):
        CurvaDion([matrix()], gate=FixedPeriod(52))


@pytest.mark.parametrize(
    ("make", "name", "value", "error"),
    [
        (RMMC, "threshold", -1, ValueError),
        (FixedPeriod, "period", 2.0, TypeError),
        (QuantizedAverage, "fragments", True, TypeError),
        (QuantizedAverage, "spectrum_decay", 1.0, ValueError),
        (LowRank, "average_weights", "average", TypeError),
    ],
    ids=identify,
)
def test_gates_and_syncs_name_argument_and_value(make, name, value, error):
    with pytest.raises(error, match=says(name, value)):
        make(**{name: value})


@pytest.mark.parametrize("make", [QuantizedAverage, CodedGradients])
@pytest.mark.parametrize(
    ("bits", "error"),
    [
        (5, ValueError),
        (True, TypeError),
        ((0, 2), ValueError),
        ((1, 2, 3), ValueError),
        (("a", 2), TypeError),
        ([1, None], TypeError),
    ],
)
def test_bits_are_a_number_or_a_pair(make, bits, error):
    said = (
        f"bits={bits!r} must be one of (1, 2, 3, 4, 8), or a pair of them: to the owners of "
        f"blocks and back, such as bits=(1, 2)"
    )
    with pytest.raises(error, match=re.escape(said)):
        make(bits)
    assert repr(make([1, 2])) == repr(make((1, 2))) != repr(make((2, 1)))
    assert repr(make(2)) == repr(make((2, 2)))
    assert make(2).bits == (2, 2) and repr(make(2).bits) == "Bits(up=2, down=2)"
    assert "bits=2, " in repr(make(2)) and "bits=(1, 2), " in repr(make((1, 2)))


@pytest.mark.parametrize(
    ("weight", "said"),
    [
        (torch.zeros(3), r"decoder\.bias"),
        (torch.zeros(0, 4), r"\(0, 4\)"),
    ],
    ids=["vector", "empty"],
)
def test_parameters_that_nothing_can_train_are_errors(weight, said):
    with pytest.raises(ValueError, match=said):
        CurvaDion([{"params": [("decoder.bias", nn.Parameter(weight))]}], threshold=0.3)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float16, torch.complex64])
def test_weights_of_a_dtype_that_nothing_trains_are_errors(dtype):
    X = nn.Parameter(torch.zeros(4, 3).to(dtype))
    with pytest.raises(ValueError, match=f"weight has dtype {dtype}: train float32"):
        CurvaDion([{"params": [("weight", X)], "algorithm": "adamw"}], threshold=0.3).step()


@pytest.mark.parametrize("dtype", ["float16", torch.float64])
def test_matrices_are_exchanged_in_one_of_two_dtypes(dtype):
    said = re.escape("must be one of ('float32', 'bfloat16') or None")
    with pytest.raises(ValueError, match=rf"exchange_dtype={dtype!r} {said}"):
        CurvaDion([matrix()], threshold=0.3, exchange_dtype=dtype)


def test_a_loss_is_no_closure():
    with pytest.raises(TypeError, match=r"closure=Tensor must be a function.*step\(\) alone"):
        CurvaDion([matrix()], threshold=0.3).step(torch.ones(()))


def test_an_unknown_algorithm_is_an_error():
    with pytest.raises(ValueError, match="algorithm='sgd'.*dion.*adamw.*lion"):
        CurvaDion([{"params": [matrix()], "algorithm": "sgd"}], threshold=0.3)


@pytest.mark.parametrize(
    ("key", "meant"), [("bettas", "betas"), ("lrs", "lr"), ("learning_rate", "lr")]
)
def test_unknown_group_key_suggests_a_known_one(key, meant):
    with pytest.raises(ValueError, match=rf" {key}=0\.5.*'{meant}'"):
        CurvaDion([{"params": [matrix()], key: 0.5}], threshold=0.3)


def test_weights_on_the_meta_device_are_refused():
    X = nn.Parameter(torch.empty(4, 3, device="meta"))
    with pytest.raises(ValueError, match=r"is on the meta device.*to_empty"):
        CurvaDion([X], replicas="single", threshold=0.3).step()


@pytest.mark.parametrize(
    ("params", "error", "text"),
    [
        ([], ValueError, "empty parameter list"),
        ([torch.zeros(3, 3).requires_grad_() * 2], ValueError, "non-leaf"),
        ([{"lr": 1.0}], KeyError, "params"),
    ],
    ids=["empty", "non-leaf", "no params"],
)
def test_params_that_are_none_are_errors(params, error, text):
    with pytest.raises(error, match=text):
        CurvaDion(params, threshold=0.3)


@pytest.mark.parametrize(
    "group",
    [
        {"params": [("late", matrix()), ("later", nn.Parameter(torch.zeros(2)))]},
        {"params": [("late", matrix())], "lr": -1.0},
    ],
    ids=["vector", "lr"],
)
def test_failed_add_param_group_changes_nothing(group):
    model, twin = toy.model(), toy.model()
    optimizer, undisturbed = (
        CurvaDion(toy.groups(model), threshold=0.3),
        CurvaDion(toy.groups(twin), threshold=0.3),
    )
    toy.train(model, optimizer, range(2))
    toy.train(twin, undisturbed, range(2))
    held = [*optimizer.param_groups]
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="later|lr=-1.0"):
        optimizer.add_param_group(dict(group))
    assert [id(g) for g in optimizer.param_groups] == [id(g) for g in held]
    assert optimizer.state_dict()["param_groups"] == before["param_groups"]
    assert optimizer.state_dict()["state"].keys() == before["state"].keys()
    toy.train(model, optimizer, range(2, 4))
    toy.train(twin, undisturbed, range(2, 4))
    toy.assert_bitwise_equal(toy.weights(model), toy.weights(twin))


def test_sparse_gradient_is_named():
    embedding = nn.Embedding(5, 4, sparse=True)
    group = {"params": [("words.weight", embedding.weight)], "algorithm": "adamw"}
    optimizer = CurvaDion([group], gate=AlwaysOpen())
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match=r"words\.weight.*sparse=False"):
        optimizer.step()


@distributed.on_ranks(2)
def test_a_call_that_another_rank_does_not_make_is_an_error(rank):
    x = nn.Parameter(torch.ones(4, 3))
    replicas = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    optimizer = CurvaDion([x], replicas=replicas, threshold=0.3)
    x.grad = torch.rand(4, 3, generator=torch.Generator().manual_seed(rank))
    optimizer.step()
    said = r"^optimizer\.step\(\) must be called on every rank.*in all ranks' logs"
    if rank == 0:
        with pytest.raises(RuntimeError, match=said):
            optimizer.step()


@pytest.mark.parametrize("call", ["clip_grad_norm_", "step", "synchronize"])
@distributed.on_ranks(2)
def test_a_lost_peer_is_explained_before_the_first_meeting_too(rank, call):
    """While ranks sum a norm to clip by, or compare flat shards for their first plan."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    if rank:
        return
    x = nn.Parameter(torch.ones(6))
    if call == "clip_grad_norm_":
        optimizer = CurvaDion([{"params": [x], "algorithm": "adamw"}], replicas=group, **ALWAYS)
        act = partial(clip_grad_norm_, optimizer, 1.0)
    else:
        declare_flat_shard(x, (4, 3), 0, 6, group)
        act = getattr(CurvaDion([x], **ALWAYS), call)
    x.grad = torch.ones(6)
    with pytest.raises(RuntimeError, match=rf"{call}\(\) must be called on every rank"):
        act()


def test_an_rmmc_gate_without_matrices_is_an_error():
    bias = nn.Parameter(torch.zeros(3))
    optimizer = CurvaDion([{"params": [bias], "algorithm": "adamw"}], threshold=0.2)
    bias.grad = torch.ones(3)
    with pytest.raises(ValueError, match=r"threshold=0\.2.*dion.*FixedPeriod"):
        optimizer.step()


# Values that a user, a scheduler or a script may write into a group between two steps.
MID_RUN = [
    ("lr", torch.tensor(NAN)),
    ("algorithm", "sgd"),
    ("betas", [0.9, 1.5]),
    ("maximize", True),
]


@pytest.mark.parametrize(("key", "value"), MID_RUN, ids=identify)
def test_wrong_values_in_mid_run_change_nothing(key, value):
    model = toy.model()
    optimizer = CurvaDion(toy.groups(model), threshold=0.3)
    group = optimizer.param_groups[0]
    group["betas"] = [0.9, 0.95]
    toy.train(model, optimizer, range(2))
    before, states = toy.weights(model), toy.states(optimizer)
    kept = copy.copy(group.get(key))
    if isinstance(value, list):  # in place
        group[key][:] = value
    else:
        group[key] = value
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"param_groups\[0\]: {key}"):
            optimizer.step()
    toy.assert_bitwise_equal(toy.weights(model), before)
    group[key] = kept
    toy.assert_bitwise_equal(toy.states(optimizer), states)
    toy.train(model, optimizer, [2])


def test_a_state_of_another_optimizer_is_an_error():
    x = matrix()
    x.grad = torch.ones_like(x)
    other = torch.optim.AdamW([x], lr=0.1)
    other.step()
    optimizer = CurvaDion([x], threshold=0.3)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="state_dict.*'progress'"):
        optimizer.load_state_dict(other.state_dict())
    assert optimizer.state_dict() == before
