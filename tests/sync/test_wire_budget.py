"""A budget of bytes: when it opens the gate, and what replicas then send and agree on."""

from __future__ import annotations

import copy
import math
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import distributed
import toy
from curvadion import RMMC, ByteBudget, CurvaDion, FixedPeriod, LowRank, QuantizedAverage, WireMeter
from curvadion.sync.coded_mean import message_bytes
from curvadion.sync.meeting import MEETING_BYTES
from curvadion.sync.quantized_average import divide
from gate_steps import ask
from tolerance import Rounding, assert_close

pytestmark = pytest.mark.numeric


def gate_that_costs(share, by="period", open_cost=0.05, closed_cost=0.001):
    gate = ByteBudget(share, by)
    gate.open_cost, gate.closed_cost = open_cost, closed_cost
    return gate


def test_a_period_is_as_even_as_the_budget_allows():
    openings = ask(gate_that_costs(0.01 + 0.001), 200)
    assert openings == list(range(9, 200, 5))  # the first pays for the last agreement too


@pytest.mark.parametrize("fragments", [1, 3])
@pytest.mark.parametrize("by", ["period", "rmmc"])
@pytest.mark.parametrize("share", [0.003, 0.03, 1.0])
def test_a_run_of_any_length_that_ends_with_an_agreement_keeps_to_the_budget(share, by, fragments):
    signals = torch.rand(400, generator=torch.Generator().manual_seed(0)).tolist()
    gate = gate_that_costs(share, by)
    gate.openings_per_full_sync = fragments
    openings = ask(gate, 400, signals=signals)
    # The last agreement is kept back at half of what is earned: that takes twice its time.
    for steps in range(math.ceil(2 * fragments / gate.rate) if fragments > 1 else 1, 400):
        made = sum(step < steps for step in openings)
        sent = 0.05 * (made + fragments) + 0.001 * steps
        assert sent <= share * steps * (1 + 1e-9) or not made
    waiting = 1 if by == "period" else 1 + gate.SLACK
    assert min(400 * gate.rate, 400) - len(openings) - fragments <= waiting + 1e-6


@pytest.mark.parametrize("by", ["period", "rmmc"])
@pytest.mark.parametrize("openings_sent", [0.5, 40])
def test_what_was_sent_too_much_is_paid_back_without_a_silence(by, openings_sent):
    signals = torch.rand(4000, generator=torch.Generator().manual_seed(0)).tolist()
    gate, agreed = gate_that_costs(0.01, by), []
    for step, signal in enumerate(signals):
        opens = gate.opens(signal, 0)
        if opens:
            gate.spend(1)
        if step == 100:
            gate.spend(openings_sent)
        if opens or step == 100:
            agreed.append(step)
    sent = 0.05 * (len(agreed) - 1 + openings_sent) + 0.001 * 4000
    assert 0.98 <= sent / (0.01 * 4000) <= 1.0
    gaps = [b - a for a, b in pairwise(agreed)]
    most = (2 if by == "period" else 2 * (1 + gate.SLACK)) / gate.rate
    assert max(gaps) <= math.ceil(most)


@pytest.mark.chosen_inputs
def test_openings_by_rmmc_fall_where_momenta_change_most():
    signals = torch.rand(3000, generator=torch.Generator().manual_seed(0)).tolist()
    openings = ask(gate_that_costs(0.01, "rmmc"), 3000, signals=signals)
    mean = sum(signals[i] for i in openings) / len(openings)
    assert mean > 0.75


@pytest.mark.parametrize("by", ["period", "rmmc"])
def test_openings_by_others_are_paid_for(by):
    signals = [1.0] * 2000
    openings = ask(gate_that_costs(0.01, by), 2000, signals=signals, opened_by_others=range(50))
    assert 0.05 * len(openings) + 0.001 * 2000 == pytest.approx(0.01 * 2000, rel=0.1)


@pytest.mark.parametrize("bound", [50, None])
def test_a_bound_on_local_runs_leaves_room_to_pay_back(bound):
    """An opening at every fiftieth step, and one exact synchronisation that costs forty of them."""
    share, steps = 0.0013, 6000
    gate = gate_that_costs(share, open_cost=0.065, closed_cost=0.0)
    gate.check_feasible(bound)
    sent, local_steps, first, longest = 0.0, 0, None, 0
    for step in range(steps):
        most = gate.longest_run(bound)
        opens = gate.opens(1.0, local_steps) or (most is not None and local_steps >= most)
        local_steps = 0 if opens else local_steps + 1
        longest = max(longest, local_steps)
        if opens:
            first = step if first is None else first
            gate.spend(1)
            sent += 0.065
        if step == 1000:
            gate.spend(40)
            sent += 2.6
    assert sent + 0.065 <= share * steps * (1 + 1e-6)
    assert first == pytest.approx(100, abs=2) and longest <= 102


@pytest.mark.parametrize("by", ["period", "rmmc"])
def test_a_gate_goes_on_from_its_state(by):
    signals = torch.rand(200, generator=torch.Generator().manual_seed(0)).tolist()
    whole, first = gate_that_costs(0.01, by), gate_that_costs(0.01, by)
    opened = [i for i in ask(whole, 200, signals=signals) if i >= 100]
    ask(first, 100, signals=signals)
    second = gate_that_costs(0.01, by)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert [100 + i for i in ask(second, 100, signals=signals[100:])] == opened


def optimizer_of(model, **arguments):
    return CurvaDion(
        toy.groups(model),
        replicas=dist.group.WORLD,
        **{"lr": 0.02, "max_local_steps": None} | arguments,
    )


def bytes_of_codes(bits):
    return message_bytes((x.numel() for x in toy.model().parameters()), bits)


def train(rank, steps, arguments):
    """Weights after each step, reports, and bytes sent at each."""
    model = toy.model()
    optimizer = optimizer_of(model, **arguments)
    weights, reports, sent = [], [], []
    for step in range(steps):
        with WireMeter() as meter:
            reports += toy.train(model, optimizer, [step], rank)
        sent.append(meter.total_sent)
        weights.append(toy.weights(model))
    return weights, reports, sent


@pytest.mark.parametrize(
    ("bits", "local_step", "align_momentum"),
    [(1, "dion", True), (2, "gradient", True), (4, "dion", False), (8, "gradient", False)],
)
def test_an_open_step_makes_weights_equal_and_sends_the_codes(bits, local_step, align_momentum):
    sync = QuantizedAverage(bits, align_momentum=align_momentum)
    how = dict(gate=FixedPeriod(3), sync=sync, local_step=local_step)
    ranks = distributed.run(3, train, 7, how)
    for step in range(7):
        equal = [
            all(torch.equal(weights[step][name], x) for name, x in ranks[0][0][step].items())
            for weights, _, _ in ranks[1:]
        ]
        opened = step % 3 == 2
        assert all(equal) == ranks[0][1][step].gate_open == opened
        if step:  # the first also compares the replicas
            mean = sum(sent[step] for _, _, sent in ranks) / 3
            # Two thirds of a message go to others, in each of two exchanges.
            codes = 4 / 3 * (MEETING_BYTES + bytes_of_codes(bits))
            assert mean == pytest.approx(codes if opened else 0)


def rotate(rank, fragments, local_step):
    """Per step which parameters replicas agree on, and the codes' bytes against the formula's."""
    model = toy.model()
    how = dict(sync=QuantizedAverage(fragments=fragments), local_step=local_step)
    optimizer = optimizer_of(model, gate=FixedPeriod(2), **how)
    steps, count = [], 4 * min(fragments, 6)
    for step in range(count):
        with WireMeter() as meter:
            toy.train(model, optimizer, [step], rank)
        agreed = agreed_on(model)
        formula = message_bytes((x.numel() for x in agreed.values()), 2)
        steps.append((set(agreed), meter.total_sent - MEETING_BYTES * (step % 2), formula))
    with WireMeter() as meter:
        optimizer.synchronize(exact=False)
    formula = message_bytes((x.numel() for n, x in agreed_on(model).items() if n not in agreed), 2)
    steps.append((set(agreed_on(model)), meter.total_sent, formula))
    return steps


def agreed_on(model):
    """The parameters of which all replicas hold the same bits."""
    agreed = {}
    for name, x in model.named_parameters():
        others = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(others, x.detach().contiguous())
        if all(other.equal(x) for other in others):
            agreed[name] = x
    return agreed


@pytest.mark.parametrize(("fragments", "local_step"), [(3, "dion"), (100, "gradient")])
def test_fragments_are_synchronised_in_rotation(fragments, local_step):
    ranks = distributed.run(2, rotate, fragments, local_step)
    assert [step[0] for step in ranks[0]] == [step[0] for step in ranks[1]]
    *agreed, last = (step[0] for step in ranks[0])
    names = dict(toy.model().named_parameters())
    assert not any(agreed[::2])  # the gate is closed
    rounds = agreed[1::2]
    count = len(rounds) // 2
    assert rounds[:count] == rounds[count:]
    assert all(rounds) and sum(map(len, rounds[:count])) == len(names)
    assert set().union(*rounds) == last == set(names)
    for step in range(1, 2 * len(rounds) + 1):  # the first also compares the replicas
        sent, formula = ((ranks[0][step][i] + ranks[1][step][i]) / 2 for i in (1, 2))
        assert sent == formula


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40), st.integers(1, 8))
def test_fragments_are_of_about_equal_size(sizes, count):
    fragments = divide(sizes, count)
    assert len(fragments) == len(sizes)
    assert set(fragments) == set(range(min(count, len(sizes))))
    filled = [0] * len(set(fragments))
    for size, fragment in zip(sizes, fragments, strict=True):
        filled[fragment] += size
    assert max(filled) - min(filled) <= max(sizes) + len(sizes)


# Their codes are 7.5 % of their numbers, where those of whole blocks are 6.4 %.
SIZES = [64 * 64, 96 * 64, *[40] * 8]
NUMBERS, CODES = sum(SIZES), message_bytes(SIZES, 2)


def parameters_with_padded_blocks():
    """Groups of two matrices and of eight vectors."""
    shapes = [(64, 64), (96, 64), *[(40,)] * 8]
    generator = torch.Generator().manual_seed(0)
    X = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    return [{"params": X[:2]}, {"params": X[2:], "algorithm": "adamw"}]


def spend_a_budget(rank, share, by, fragments, steps, exact_at):
    """Bytes sent in a run that ends with an agreement, and the steps at which replicas agreed."""
    groups = parameters_with_padded_blocks()
    X = [x for group in groups for x in group["params"]]
    optimizer = CurvaDion(
        groups,
        replicas=dist.group.WORLD,
        gate=ByteBudget(share, by),
        local_step="gradient",
        sync=QuantizedAverage(bits=2, fragments=fragments),
    )
    generator = torch.Generator().manual_seed(rank)
    agreed, exact = [], 0.0
    with WireMeter() as meter:
        for step in range(steps):
            for x in X:
                x.grad = torch.randn(x.shape, generator=generator)
            optimizer.step()
            if step == exact_at:
                before = meter.total_sent
                optimizer.synchronize(exact=True)
                exact = meter.total_sent - before
            if optimizer.report.gate_open or step == exact_at:
                agreed.append(step)
        optimizer.synchronize()
    return meter.total_sent, exact, agreed, [x.detach() for x in X]


def resume_in_debt(rank, share, before, after, saved_at, steps):
    """Bytes sent in a run whose sync is another from a checkpoint on, with an agreement at the end.

    The checkpoint follows an exact synchronisation, which many openings pay back.
    """
    same = torch.Generator().manual_seed(0)
    X = [nn.Parameter(torch.randn(64, 64, generator=same)) for _ in range(6)]
    generator = torch.Generator().manual_seed(rank)

    def optimizer_with(sync):
        how = {"wire_budget": share, "sync": sync, "local_step": "gradient"}
        return CurvaDion(X, replicas=dist.group.WORLD, max_local_steps=None, **how)

    optimizer = optimizer_with(before)
    with WireMeter() as meter:
        for step in range(steps):
            if step == saved_at:
                optimizer.synchronize(exact=True)
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer = optimizer_with(after)
                optimizer.load_state_dict(saved)
            for x in X:
                x.grad = torch.randn(x.shape, generator=generator)
            optimizer.step()
        optimizer.synchronize()
    return meter.total_sent / (share * steps * 4 * sum(x.numel() for x in X))


@pytest.mark.parametrize(
    ("share", "steps", "before", "after"),
    [
        (0.02, 300, QuantizedAverage(), QuantizedAverage(fragments=3)),
        (0.02, 300, QuantizedAverage(bits=8, fragments=2), QuantizedAverage(bits=1)),
    ],
    ids=["into fragments", "fewer bits"],
)
def test_a_debt_is_the_same_where_an_opening_costs_something_else(share, steps, before, after):
    sent = distributed.run(2, resume_in_debt, share, before, after, 20, steps)
    assert 0.97 <= sum(sent) / 2 <= 1.0


def sent_of_the_budget(ranks, share, steps):
    return sum(rank[0] for rank in ranks) / len(ranks) / (share * steps * 4 * NUMBERS)


@pytest.mark.parametrize(("by", "fragments"), [("period", 1), ("rmmc", 3)])
def test_a_run_that_ends_with_an_agreement_sends_no_more_than_its_budget(by, fragments):
    share = 0.02
    waiting = 1 if by == "period" else 1 + ByteBudget.SLACK
    for steps in (8, 61):
        ranks = distributed.run(2, spend_a_budget, share, by, fragments, steps, None)
        left = (waiting / fragments + 1) * CODES / (share * steps * 4 * NUMBERS)
        assert 1 - left <= sent_of_the_budget(ranks, share, steps) <= 1.0
        assert all(x.equal(y) for x, y in zip(ranks[0][3], ranks[1][3], strict=True))


def test_an_exact_synchronisation_is_paid_back_by_later_steps():
    share, steps = 0.05, 240
    ranks = distributed.run(2, spend_a_budget, share, "period", 1, steps, 20)
    assert 0.98 <= sent_of_the_budget(ranks, share, steps) <= 1.0
    assert ranks[0][1] > 2 * 4 * NUMBERS  # as much as 40 steps may send
    agreed = ranks[0][2]
    period = (CODES + MEETING_BYTES) / (share * 4 * NUMBERS)
    assert max(b - a for a, b in pairwise(agreed)) <= math.ceil(2 * period)
    soon = [step for step in agreed if 20 < step <= 60]
    assert len(soon) == pytest.approx(40 / (2 * period), abs=1)


@pytest.mark.parametrize(("share", "bits"), [(0.003, 2), (0.05, 2), (0.1, 3), (0.2, 4), (1.0, 8)])
def test_bits_are_those_that_the_budget_pays_for_at_every_step(share, bits):
    assert optimizer_of(toy.model(), wire_budget=share).sync.bits == bits
    gate = ByteBudget(share, by="rmmc")
    assert optimizer_of(toy.model(), gate=gate).sync.bits == bits
    assert optimizer_of(toy.model(), gate=gate, sync=QuantizedAverage()).sync.bits == bits
    one = QuantizedAverage(bits=1)
    assert optimizer_of(toy.model(), wire_budget=share, sync=one).sync.bits == 1
    # A step opens for one of them only.
    halves = QuantizedAverage(fragments=2)
    whole = optimizer_of(toy.model(), wire_budget=min(2 * share, 1.0)).sync
    assert optimizer_of(toy.model(), wire_budget=share, sync=halves).sync.bits == whole.bits


@pytest.mark.parametrize(("share", "bits"), [(0.003, 2), (0.0029, 1), (0.0001, 1)])
def test_small_budgets_take_codes_of_one_bit(share, bits):
    for sync in (None, QuantizedAverage(), QuantizedAverage(fragments=3)):
        assert optimizer_of(toy.model(), wire_budget=share, sync=sync).sync.bits == bits
        gate = ByteBudget(share, by="rmmc")
        assert optimizer_of(toy.model(), gate=gate, sync=sync).sync.bits == bits
    two = QuantizedAverage(bits=2)
    assert optimizer_of(toy.model(), wire_budget=share, sync=two).sync.bits == 2
    # Where 2 bits fit into every step, nothing would be synchronised more often with 1.
    many = QuantizedAverage(fragments=math.ceil(0.07 / share))
    assert optimizer_of(toy.model(), wire_budget=share, sync=many).sync.bits == 2
    # Without a budget there is none to be small.
    assert optimizer_of(toy.model(), gate=FixedPeriod(50), sync=QuantizedAverage()).sync.bits == 2


@pytest.mark.parametrize(
    ("options", "look_ahead"),
    [
        ({"gate": FixedPeriod(6), "sync": QuantizedAverage()}, 3.9),
        ({"gate": FixedPeriod(6), "sync": QuantizedAverage(), "look_ahead": 1.0}, 1.0),
        ({"gate": RMMC(0.3), "sync": QuantizedAverage()}, 1.6),
        ({"wire_budget": 0.1}, 1.6),  # 3 bits and their scales are 9.6 %
        ({"wire_budget": 0.01}, 4.1),
        ({"wire_budget": 0.01, "sync": QuantizedAverage(bits=1)}, 2.9),
        ({"wire_budget": 0.0025, "sync": QuantizedAverage(fragments=3)}, 4.1),
        ({"gate": FixedPeriod(7), "sync": QuantizedAverage()}, 4.1),
    ],
)
def test_the_look_ahead_grows_with_the_period_up_to_that_of_a_hundredth_of_the_bytes(
    options, look_ahead
):
    X = [nn.Parameter(torch.zeros(512, 512)) for _ in range(3)]
    optimizer = CurvaDion(X, max_local_steps=None, **options)
    assert optimizer.param_groups[0]["look_ahead"] == look_ahead


@pytest.mark.parametrize("fragments", [1, 3])
def test_the_look_ahead_is_that_of_the_period_in_use(fragments):
    optimizer = CurvaDion(
        parameters_with_padded_blocks(),
        wire_budget=0.02,
        sync=QuantizedAverage(fragments=fragments),
        max_local_steps=None,
        replicas=None,
    )
    known = [group["look_ahead"] for group in optimizer.param_groups]
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(8, 8))]})
    assert optimizer.param_groups[-1]["look_ahead"] == known[0] == optimizer.defaults["look_ahead"]
    optimizer.param_groups.pop()
    opened = []
    for step in range(200):
        for group in optimizer.param_groups:
            for x in group["params"]:
                x.grad = torch.ones_like(x)
        optimizer.step()
        if optimizer.report.gate_open:
            opened.append(step)
    period = (CODES + MEETING_BYTES * fragments) / (0.02 * 4 * NUMBERS)
    assert 3.75 < period < 4  # 3.2 without the padding and the gate's bytes, and 2.9
    steps_per_opening = (opened[-1] - opened[0]) / (len(opened) - 1)
    assert steps_per_opening * fragments == pytest.approx(period, rel=0.03)
    assert set(known) == {round(1.6 * math.sqrt(period), 1)} == {3.1}


def train_and_resume(rank, how, fragments):
    model = toy.model()
    optimizer = optimizer_of(model, wire_budget=0.05, sync=QuantizedAverage(fragments=fragments))
    if how == "whole":
        toy.train(model, optimizer, range(14), rank)
        return toy.weights(model)
    toy.train(model, optimizer, range(5), rank)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    model = toy.model()
    optimizer = optimizer_of(model, wire_budget=0.05, sync=QuantizedAverage(fragments=fragments))
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    toy.train(model, optimizer, range(5, 14), rank)
    return toy.weights(model)


@pytest.mark.filterwarnings("ignore:state_dict")
@pytest.mark.parametrize("fragments", [1, 3])
def test_a_run_goes_on_bitwise_from_each_replicas_state(fragments):
    whole = distributed.run(2, train_and_resume, "whole", fragments)
    resumed = distributed.run(2, train_and_resume, "resumed", fragments)
    for ours, theirs in zip(whole, resumed, strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def synchronize(rank):
    model = toy.model()
    optimizer = optimizer_of(model, gate=FixedPeriod(3), sync=QuantizedAverage(bits=1))
    toy.train(model, optimizer, range(4), rank)
    true = []
    for x in model.parameters():
        mean = x.detach() + optimizer.state[x]["residual"]
        dist.all_reduce(mean)
        true.append(mean / 2)
    optimizer.synchronize(exact=True)
    for x, mean in zip(model.parameters(), true, strict=True):
        state = optimizer.state[x]
        assert_close(x, mean, Rounding(torch.float32))
        assert torch.equal(state["anchor"], x) and not state["residual"].any()
    return toy.weights(model)


def test_synchronize_sends_what_the_codes_have_lost():
    first, second = distributed.run(2, synchronize)
    assert all(torch.equal(first[name], second[name]) for name in first)


def agree_before_the_end(rank):
    model = toy.model()
    optimizer = optimizer_of(model, gate=FixedPeriod(3), sync=QuantizedAverage())
    toy.train(model, optimizer, range(4), rank)
    with WireMeter() as meter:
        optimizer.synchronize()
        optimizer.synchronize(exact=False)  # nothing has moved
    optimizer_of(model).synchronize()
    with pytest.raises(ValueError, match="exact=False needs a sync that sends codes"):
        optimizer_of(model).synchronize(exact=False)
    return toy.weights(model), meter.total_sent


def test_replicas_can_agree_before_the_gate_opens():
    (first, sent), (second, more) = distributed.run(2, agree_before_the_end)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert (sent + more) / 2 == bytes_of_codes(2)


def narrow(rank):
    model = toy.model(torch.bfloat16)
    optimizer = optimizer_of(model, gate=FixedPeriod(2), sync=QuantizedAverage())
    toy.train(model, optimizer, range(6), rank)
    for x in model.parameters():
        anchor = optimizer.state[x]["anchor"]
        assert anchor.dtype == torch.float32
        assert torch.equal(x, anchor.to(torch.bfloat16))
    return toy.weights(model)


def test_bfloat16_weights_follow_a_float32_anchor():
    first, second = distributed.run(2, narrow)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"wire_budget": 0.0}, ValueError, "wire_budget=0.0"),
        ({"wire_budget": 2}, ValueError, "wire_budget=2"),
        ({"wire_budget": "1%"}, TypeError, "wire_budget='1%'"),
        ({"wire_budget": 0.01, "threshold": 0.3}, ValueError, "threshold=0.3 and wire_budget"),
        ({"wire_budget": 0.01, "gate": RMMC(0.1)}, ValueError, "gate=RMMC"),
        ({"wire_budget": 0.01, "sync": LowRank()}, ValueError, "sync=LowRank.*ByteBudget"),
    ],
)
def test_impossible_arguments_are_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        CurvaDion(toy.groups(toy.model()), **arguments)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"bits": 5}, ValueError),
        ({"bits": True}, TypeError),
        ({"fragments": 0}, ValueError),
        ({"polar_correction": "yes"}, TypeError),
    ],
)
def test_impossible_arguments_of_quantized_averages_are_errors(arguments, error):
    ((name, value),) = arguments.items()
    with pytest.raises(error, match=f"{name}={value!r}"):
        QuantizedAverage(**arguments)


def too_small_a_budget(rank):
    model = toy.model()
    with pytest.raises(ValueError, match="less than a closed gate sends"):
        toy.train(model, optimizer_of(model, gate=ByteBudget(1e-4, "rmmc")), [0], rank)
    with pytest.raises(ValueError, match="max_local_steps=1 "):
        toy.train(model, optimizer_of(model, wire_budget=0.03, max_local_steps=1), [0], rank)


def test_a_budget_that_cannot_be_met_is_an_error():
    distributed.run(2, too_small_a_budget)


def test_a_budget_without_known_costs_is_an_error():
    with pytest.raises(RuntimeError, match="must know what an open step sends"):
        ByteBudget(0.01).opens(0.0, 0)
    assert math.isclose(gate_that_costs(0.011).rate, 0.2)
