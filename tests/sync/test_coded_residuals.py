"""Residuals in 8 bits: what is sent in all is what was wanted, up to roundings of mean zero."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from curvadion import AlwaysOpen, CodedGradients, FixedPeriod, QuantizedAverage, Replicated
from curvadion.comm.replicas import FixedMembers
from curvadion.ops.code_format import Bits
from curvadion.plan.coded_states import coded_zeros, decoded
from curvadion.plan.parameter import Parameter
from curvadion.sync.coded_mean import empty_residual, open_residuals
from curvadion.sync.in_flight import InFlight
from support.runs import distributed, toy

RATE = 0.1
SHAPE = (40, 30)  # the last of five blocks is not full
OPENINGS = 16
SYNCS = {
    "weights": (QuantizedAverage, {}),
    "weights, a delay": (QuantizedAverage, {"delay": 1}),
    "gradients": (CodedGradients, {}),
}


def built(kind, residual_dtype):
    """A turned parameter, whose blocks in memory are not those of messages, in SGD."""
    x = nn.Parameter(torch.zeros(SHAPE).mT)
    make, options = SYNCS[kind]
    gate = AlwaysOpen() if make is CodedGradients else FixedPeriod(2)
    sync = make(bits=2, residual_dtype=residual_dtype, **options)
    inner = torch.optim.SGD([x], lr=RATE)
    return x, Replicated(inner, replicas=dist.group.WORLD, gate=gate, sync=sync)


def gradient(step, rank):
    generator = torch.Generator().manual_seed(2 * step + rank)
    return torch.randn(SHAPE, generator=generator).mT + 0.5


def take(x, optimizer, steps, rank):
    for step in steps:
        x.grad = gradient(step, rank)
        optimizer.step()


def residual_of(x, optimizer):
    """In float64."""
    stored = optimizer.state[x]["residual"]
    assert stored.dtype == torch.int8 and stored.nbytes == 5 * 260
    return decoded("residual", x, stored).double()


@pytest.mark.parametrize("kind", SYNCS)
@distributed.on_ranks(2)
def test_what_is_sent_and_what_is_left_add_up_to_what_was_wanted(rank, kind):
    """The sum over replicas of X + residual is that of their own movements, in float64.

    A residual is rounded once an opening, with a delay once more when its mean arrives, by less
    than its scale s: a mean of zero and a variance of s^2 / 4 at most. The replicas' roundings may
    be equal. A seed that stayed the same, or residuals that were lost, would add up to more.
    """
    x, optimizer = built(kind, "int8")
    wanted = torch.zeros_like(x, dtype=torch.float64)
    largest = 0.0
    gradients = kind == "gradients"
    steps = OPENINGS if gradients else 2 * OPENINGS
    for step in range(steps):
        take(x, optimizer, [step], rank)
        # What gradients owe is in units of gradients.
        wanted -= (1.0 if gradients else RATE) * gradient(step, rank).double()
        largest = max(largest, float(residual_of(x, optimizer).abs().max()))
    optimizer.synchronize()  # with a delay one mean is under way, and one more opening follows
    residual = residual_of(x, optimizer)
    largest = max(largest, float(residual.abs().max()))
    reached = x.detach().double() + residual
    if gradients:
        reached = x.detach().double() / RATE - residual
    told = distributed.gathered((wanted, reached))
    error = sum(reached for _, reached in told) - sum(wanted for wanted, _ in told)
    # Of float32 weights, whose steps are 2^-24 of their size at most.
    slack = 4 * steps * 2**-24 * float(reached.abs().max())
    s = largest / 127
    roundings = (OPENINGS + 1) * (2 if "delay" in kind else 1)
    deviation = 2 * (s / 2) * roundings**0.5  # of an element, if both replicas' are equal
    assert float(error.abs().max()) < 2 * s * roundings + slack
    assert float(error.square().mean().sqrt()) < 1.2 * deviation + slack
    assert abs(float(error.mean())) < 5 * deviation / error.numel() ** 0.5 + slack
    assert float(error.square().mean().sqrt()) > s / 4  # they are rounded
    assert float(residual.square().mean().sqrt()) > 10 * s  # and would be missed


def test_roundings_have_a_mean_of_zero_over_steps():
    """To five standard errors of 400 steps; a step of the codes is 1.5 / 127."""
    X = torch.zeros(256)
    wanted = torch.linspace(-1.5, 1.5, 256) + 0.001
    p = Parameter(X, {"algorithm": "inner"}, {X: {"residual": coded_zeros("residual", X)}}, "x")
    total = torch.zeros(256, dtype=torch.float64)
    for step in range(400):
        with open_residuals([p], step) as (residual,):
            residual.copy_(wanted)
        total += decoded("residual", X, p.state["residual"])
    assert (total / 400 - wanted).abs().max() < 5 * (1.5 / 127) / 2 / 20
    assert p.state_seed(3, "residual") != p.state_seed(3, "momentum")


@distributed.on_ranks(2)
def test_both_roundings_of_an_exchange_with_a_delay_have_a_mean_of_zero(rank):
    """Of what encoding left, and of what a mean replaced: the mean of 100 exchanges, by element.

    The parameter is turned, so that a block of the residual has elements of both kinds.
    """
    X = gradient(0, rank).bfloat16().float()  # as it is kept beside residuals in 8 bits
    thread = FixedMembers(dist.group.WORLD).during_training(X.device)

    def residual_after(due, residual_dtype):
        state = {"anchor": torch.zeros_like(X), "residual": empty_residual(X, residual_dtype)}
        in_flight = InFlight()
        p = Parameter(X, {"algorithm": "inner"}, {X: state}, "x")
        in_flight.send([p], Bits(2, 2), thread, due)
        in_flight.settle()
        return state["residual"]

    wanted = residual_after(0, "float32")
    drawn = [decoded("residual", X, residual_after(due, "int8")) for due in range(100)]
    error = torch.stack(drawn).double() - wanted
    varies = error.std(0) > 0
    in_standard_errors = error.mean(0)[varies] / (error.std(0)[varies] / 10)
    assert varies.float().mean() > 0.9
    assert float(in_standard_errors.square().mean()) < 1.3  # 1, with a deviation of 0.04


@pytest.mark.filterwarnings("ignore:state_dict")
@pytest.mark.parametrize("before", ["int8", "bfloat16"])
@distributed.on_ranks(2)
def test_a_state_loads_into_a_run_of_another_dtype(rank, before):
    """And into one of the same, which goes on bitwise, also if it first synchronises."""
    x, optimizer = built("weights", before)
    take(x, optimizer, range(5), rank)
    saved = optimizer.state_dict()
    residual = saved["state"][0]["residual"]
    assert residual.shape == x.shape and residual.is_floating_point()
    assert residual.any()
    runs = {before: (x, optimizer)}
    for after in ("int8", "bfloat16"):
        again, other = built("weights", after)
        with torch.no_grad():
            again.copy_(x)
        other.load_state_dict(saved)
        stored = other.state[again]["residual"]
        if after == "int8":
            lost = residual_of(again, other) - residual
            # To the nearest code; elements of one block share its scale.
            assert lost.abs().max() <= 0.51 * residual.abs().max() / 127
        else:
            assert stored.dtype == residual.dtype and stored.equal(residual)
        if after == before:
            original = optimizer.state[x]["residual"]
            assert stored.dtype == original.dtype and stored.equal(original)
            other.synchronize()
            optimizer.synchronize()
        runs[f"loaded, {after}"] = again, other
    for run in runs.values():
        take(*run, range(5, 9), rank)
    again, other = runs[f"loaded, {before}"]
    assert again.equal(x)
    toy.assert_bitwise_equal(toy.states(other), toy.states(optimizer))


@distributed.on_ranks(2)
def test_an_exact_synchronisation_averages_the_elements(rank):
    """Of gradients; what weights owe is added to them."""
    for kind in SYNCS:
        x, optimizer = built(kind, "int8")
        take(x, optimizer, range(4), rank)
        optimizer.sync.settle()
        own = residual_of(x, optimizer)
        weights = x.detach().double() + optimizer.state[x].get("mean", 0.0)
        weights -= optimizer.state[x].get("sent", 0.0)
        (first, one), (second, other) = distributed.gathered((own, weights))
        assert (first - second).norm() > 0.1 * own.norm()
        optimizer.synchronize(exact=True)
        after = residual_of(x, optimizer)
        if kind == "gradients":
            mean = (first + second) / 2
            assert (after - mean).abs().max() <= 0.51 * mean.abs().max() / 127
        else:
            assert not after.any()
            mean = (first + second + one + other) / 2
            assert (x.detach() - mean).abs().max() < 1e-5
        everyone = distributed.gathered((x.detach(), after))
        assert all(map(torch.equal, *everyone))


@pytest.mark.parametrize("make", [QuantizedAverage, CodedGradients])
def test_an_unknown_dtype_is_refused_by_the_names_of_those_known(make):
    said = r"residual_dtype='int4' must be one of \('bfloat16', 'float32', 'int8'\)"
    with pytest.raises(ValueError, match=said):
        make(residual_dtype="int4")
    assert "residual_dtype='int8'" in repr(make(residual_dtype=torch.int8))
