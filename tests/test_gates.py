"""When replicas talk: what each gate sees, decides and remembers, alike on all of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import distributed
import toy
from curvadion import (
    RMMC,
    AlwaysOpen,
    ByteBudget,
    CurvaDion,
    Dion,
    FixedPeriod,
    Gate,
    LowRank,
    QuantizedAverage,
)
from curvadion.sync.decision import Notice, Settings, agree
from tolerance import Rounding, assert_close

pytestmark = pytest.mark.numeric

SHAPES = {"tall": (10, 4), "wide": (4, 9), "square": (6, 6)}


def parameters(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [
        (name, nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))
        for name, shape in SHAPES.items()
    ]


def give_gradients(X, step, rank=0, scale=1.0):
    generator = torch.Generator().manual_seed(1000 * rank + step)
    for _, x in X:
        x.grad = scale * torch.randn(x.shape, generator=generator).to(x.dtype)


def replicas():
    return dist.group.WORLD if dist.is_initialized() else None


# ---------------------------------------------------------------- the relative momentum change

RULES = {
    "dion": {"local_step": "dion"},
    "gradient": {"local_step": "gradient", "local_lr": 0.01},
    "plain dion": {"local_step": "dion", "momentum_rule": "plain", "mu": 0.8},
    "plain gradient": {"local_step": "gradient", "momentum_rule": "plain"},
    "qr": {"right_factor": "qr", "rank_fraction": 0.5, "mu": 0.5},
    "no averaging": {"sync": LowRank(average_weights=False)},
}


def momentum(optimizer, x):
    held = optimizer.state[x].get("momentum") if x in optimizer.state else None
    return torch.zeros_like(x, dtype=torch.float64) if held is None else held.double()


def rmmc_by_hand(rank, arguments, threshold, dtype, steps=8):
    """Per step: reports, own changes by the definition from M itself, and kept norms against M."""
    X = parameters(dtype)
    optimizer = CurvaDion(X, replicas=replicas(), threshold=threshold, **arguments)
    decay = 1.0
    if optimizer.defaults["momentum_rule"] == "plain":
        decay = optimizer.defaults["mu"]
    reports, changes, norms = [], [], []
    for step in range(steps):
        give_gradients(X, step, rank)
        own = {}
        for name, x in X:
            M = momentum(optimizer, x)
            after = (decay * M + x.grad.double()).norm()
            own[name] = ((after - M.norm()).abs() / M.norm()).item()
        optimizer.step()
        reports.append(optimizer.report)
        changes.append(own)
        kept = [optimizer.state[x]["momentum_norm"].item() for _, x in X]
        norms.append((kept, [momentum(optimizer, x).norm().item() for _, x in X]))
    return reports, changes, norms


# Changes are small differences of norms, relative to these; signals are float32.
ROUNDINGS = {
    torch.float64: Rounding(torch.float32),
    torch.float32: Rounding(torch.float32, terms=40, condition=4),
    torch.bfloat16: Rounding(torch.bfloat16),
}


def check_rmmc(answers, rounding):
    reports = answers[0][0]
    assert reports[0].rmmc == math.inf
    for step, report in enumerate(reports):
        by_matrix = {name: max(changes[step][name] for _, changes, _ in answers) for name in SHAPES}
        largest = max(by_matrix.values())
        if step:
            scale = max(1.0, largest)
            assert_close(report.rmmc, largest, rounding, scale=scale)
            assert_close(by_matrix[report.rmmc_parameter], largest, rounding, scale=scale)
        for their_reports, _, norms in answers:
            assert their_reports[step] == report
            kept, recomputed = norms[step]
            for a, b in zip(kept, recomputed, strict=True):
                assert_close(a, b, rounding)


@pytest.mark.parametrize("threshold", [0.0, 0.45, math.inf], ids=["open", "both", "closed"])
@pytest.mark.parametrize("arguments", RULES.values(), ids=RULES)
def test_rmmc_is_its_definition(arguments, threshold):
    answers = [rmmc_by_hand(0, arguments, threshold, torch.float32)]
    check_rmmc(answers, ROUNDINGS[torch.float32])
    opened = {report.gate_open for report in answers[0][0]}
    if threshold != 0.45:
        assert opened == {threshold == 0.0}


@pytest.mark.parametrize("dtype", ROUNDINGS, ids=str)
@pytest.mark.parametrize("arguments", [RULES["dion"], RULES["plain gradient"]], ids=["dion", "sgd"])
def test_rmmc_in_any_dtype(dtype, arguments):
    check_rmmc([rmmc_by_hand(0, arguments, 0.3, dtype)], ROUNDINGS[dtype])


@pytest.mark.parametrize("arguments", RULES.values(), ids=RULES)
@pytest.mark.parametrize("world_size", [2, 4])
def test_rmmc_is_the_largest_of_all_replicas(world_size, arguments):
    answers = distributed.run(world_size, rmmc_by_hand, arguments, 0.5, torch.float32)
    check_rmmc(answers, ROUNDINGS[torch.float32])
    reports = answers[0][0]
    assert {report.gate_open for report in reports} == {True, False}
    for report in reports:
        assert report.gate_open == (report.rmmc > 0.5)


def test_signal_of_rmmc():
    before = torch.tensor([2.0, 2.0, 0.0, 0.0, 4.0])
    after = torch.tensor([3.0, 1.0, 1.0, 0.0, 4.0])
    assert RMMC(0.1).signal(before, after).tolist() == [0.5, 0.5, math.inf, 0.0, 0.0]


@pytest.mark.parametrize(
    ("threshold", "signal", "opens"),
    [(0.3, 0.31, True), (0.3, 0.29, False), (0.5, 0.5, False), (0, 0.0, False), (0, 1e-30, True)],
)
def test_rmmc_opens_above_its_threshold(threshold, signal, opens):
    assert RMMC(threshold).opens(signal, 7) is opens


def test_infinite_threshold_never_opens():
    X = parameters()
    optimizer = CurvaDion(X, threshold=math.inf)
    for step in range(5):
        give_gradients(X, step)
        optimizer.step()
        assert not optimizer.report.gate_open


def test_default_gate():
    gate = CurvaDion(parameters()).gate
    assert isinstance(gate, RMMC)
    assert gate.threshold == 0.3
    assert isinstance(Dion(parameters()).gate, AlwaysOpen)


# ---------------------------------------------------------------- one replica opens it for all


def one_rank_exceeds(rank, culprit, arguments):
    """At step 6 the culprit's gradients are a hundred times the others'."""
    X = parameters()
    optimizer = CurvaDion(X, replicas=dist.group.WORLD, threshold=2.0, **arguments)
    reports, alone = [], []
    for step in range(8):
        scale = 100.0 if (rank, step) == (culprit, 6) else 1.0
        give_gradients(X, step, rank, scale)
        before = [momentum(optimizer, x) for _, x in X]
        changes = [
            (((M + x.grad).norm() - M.norm()).abs() / M.norm()).item()
            for M, (_, x) in zip(before, X, strict=True)
        ]
        alone.append(max(changes) > 2.0)
        optimizer.step()
        reports.append(optimizer.report)
    return reports, alone, [x.detach() for _, x in X]


@pytest.mark.parametrize("local_step", ["dion", "gradient"])
@pytest.mark.parametrize(("world_size", "culprit"), [(2, 0), (2, 1), (4, 0), (4, 2), (4, 3)])
def test_gate_opens_on_all_ranks_when_one_exceeds(world_size, culprit, local_step):
    answers = distributed.run(world_size, one_rank_exceeds, culprit, {"local_step": local_step})
    for rank, (reports, alone, _) in enumerate(answers):
        assert [report.gate_open for report in reports] == [step in (0, 6) for step in range(8)]
        assert alone[6] == (rank == culprit)
        assert reports == answers[0][0]
    assert answers[0][0][6].rmmc > 10


# ---------------------------------------------------------------- schedules


def gate_history(steps=24, **arguments):
    X = parameters()
    optimizer = CurvaDion(X, **arguments)
    history = []
    for step in range(steps):
        give_gradients(X, step)
        optimizer.step()
        history.append((optimizer.report.gate_open, optimizer.report.reason))
    return history


def open_steps(history):
    """Numbers, from 1, of the steps at which the gate was open."""
    return [i for i, (is_open, _) in enumerate(history, start=1) if is_open]


@pytest.mark.parametrize("period", [1, 2, 3, 5, 24, 25])
def test_fixed_period(period):
    history = gate_history(gate=FixedPeriod(period))
    assert open_steps(history) == [*range(period, 25, period)]
    assert {reason for _, reason in history} <= {"period", "closed"}


@pytest.mark.parametrize(("period", "bound"), [(51, 50), (52, None), (60, None), (60, 59)])
def test_long_fixed_periods(period, bound):
    history = gate_history(steps=61, gate=FixedPeriod(period), max_local_steps=bound)
    assert open_steps(history) == [period]


def test_always_open():
    assert gate_history(gate=AlwaysOpen()) == [(True, "always")] * 24


def test_longest_local_run():
    history = gate_history(threshold=math.inf, max_local_steps=4)
    assert open_steps(history) == [5, 10, 15, 20]
    assert {reason for is_open, reason in history if is_open} == {"longest local run"}


def test_unbounded_local_run():
    assert open_steps(gate_history(steps=70, threshold=math.inf, max_local_steps=None)) == []


def test_default_longest_local_run():
    assert open_steps(gate_history(steps=60, threshold=math.inf)) == [51]


def test_warm_up_is_synchronised():
    history = gate_history(threshold=math.inf, warmup_steps=6, max_local_steps=None)
    assert history == [(True, "warm-up")] * 6 + [(False, "closed")] * 18


def test_period_starts_after_the_warm_up():
    history = gate_history(gate=FixedPeriod(5), warmup_steps=4)
    assert open_steps(history) == [1, 2, 3, 4, 9, 14, 19, 24]


def test_gate_is_the_reason_before_the_longest_run():
    history = gate_history(gate=FixedPeriod(5), max_local_steps=4)
    assert {reason for is_open, reason in history if is_open} == {"period"}


def test_skipped_steps_neither_open_nor_prolong_a_run():
    X = parameters()
    optimizer = CurvaDion(X, gate=FixedPeriod(4))
    opened = []
    for step in range(12):
        give_gradients(X, step)
        if step in (1, 2, 6):
            X[0][1].grad.fill_(torch.inf)
        optimizer.step()
        opened.append(optimizer.report.gate_open)
        assert optimizer.report.skipped == (step in (1, 2, 6))
    assert [i for i, is_open in enumerate(opened, start=1) if is_open] == [6, 11]


# ---------------------------------------------------------------- gates that users write


class BelowTheMean(Gate):
    """Opens below the mean of the signals it has seen, and remembers all that it was asked."""

    reason = "below the mean"
    reads_momentum = True

    def __init__(self):
        self.asked = []
        self.shapes = set()

    def signal(self, before, after):
        self.shapes.add((tuple(before.shape), tuple(after.shape)))
        return after - before

    def opens(self, signal, local_steps):
        seen = [earlier for earlier, _ in self.asked]
        self.asked.append((signal, local_steps))
        return bool(seen) and signal < sum(seen) / len(seen)


def train_with_memory(rank, arguments):
    X = parameters()
    gate = BelowTheMean()
    optimizer = CurvaDion(X, replicas=replicas(), gate=gate, **arguments)
    reports, largest = [], []
    for step in range(10):
        give_gradients(X, step, rank)
        before = [momentum(optimizer, x) for _, x in X]
        largest.append(
            max(
                ((M + x.grad).norm() - M.norm()).clamp_min(0).item()
                for M, (_, x) in zip(before, X, strict=True)
            )
        )
        optimizer.step()
        reports.append(optimizer.report)
    return reports, largest, gate.asked, gate.shapes


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_gate_with_a_memory(world_size):
    answers = distributed.run(world_size, train_with_memory, {})
    reports, _, asked, shapes = answers[0]
    assert {report.gate_open for report in reports} == {True, False}
    assert {report.reason for report in reports} == {"below the mean", "closed"}
    assert shapes == {((3,), (3,))}
    signals = [signal for signal, _ in asked]
    assert signals == [report.rmmc for report in reports]
    expected = [max(of_rank) for of_rank in zip(*(a[1] for a in answers), strict=True)]
    for signal, wanted in zip(signals, expected, strict=True):
        # Differences of the norms of momenta.
        assert_close(signal, wanted, ROUNDINGS[torch.float32], scale=max(1.0, wanted))
    assert [runs for _, runs in asked] == [0, *(report.local_steps for report in reports[:-1])]
    for their_reports, _, their_asked, _ in answers:
        assert their_reports == reports
        assert their_asked == asked


def test_gate_is_asked_at_every_step_even_while_others_decide():
    _, _, asked, _ = train_with_memory(0, {"warmup_steps": 5, "max_local_steps": 1})
    assert len(asked) == 10


def test_signal_is_not_wanted_by_gates_that_read_no_momentum():
    class Deaf(Gate):
        def signal(self, before, after):
            raise AssertionError("no signal is wanted")

        def opens(self, signal, local_steps):
            assert signal == 0.0
            return local_steps == 2

    assert open_steps(gate_history(gate=Deaf())) == [*range(3, 25, 3)]


def test_gate_without_its_own_reason_or_memory():
    class Plain(Gate):
        def opens(self, signal, local_steps):
            return True

    gate = Plain()
    assert gate.state_dict() == {}
    gate.load_state_dict({})
    assert gate_history(steps=3, gate=gate) == [(True, "gate")] * 3


# ---------------------------------------------------------------- the agreement

FINITE = st.floats(0, 2.0**127, width=32)
SIGNALS = st.lists(FINITE | st.sampled_from([0.0, -0.0, math.inf, 2.0**-149]), max_size=6)
NORMS = st.lists(
    FINITE | st.sampled_from([0.0, 2.0**-149, math.inf, -math.inf, math.nan]),
    min_size=1,
    max_size=4,
)


SAME = Settings(steps=3, checksum=2**32 - 1)


def agreed(
    signals, norms, complete=True, group=None, notice=Notice.NOTHING, like=SAME, unread=None
):
    """agree() where every two matrices are one parameter's."""
    signals = torch.as_tensor(signals)
    return agree(
        signals,
        torch.arange(len(signals)) // 2,
        torch.as_tensor(norms),
        notice=notice if complete else max(notice, Notice.MISSING_GRADIENT),
        settings=like,
        unread=unread,
        group=group,
    )


@given(st.integers(0, 2**40), st.integers(0, 2**32 - 1), st.sampled_from(Notice))
def test_settings_and_notices_travel_whole(steps, checksum, notice):
    told = agreed([], [1.0], notice=notice, like=Settings(steps, checksum))
    assert (told.notice, told.alike, told.read) == (notice, True, [])


def test_numbers_left_on_the_device_are_read_with_the_agreement():
    assert agreed([], [1.0], unread=torch.tensor([5, -(2**62)])).read == [5, -(2**62)]


def tell(rank, notices, settings):
    told = agreed([], [1.0], True, dist.group.WORLD, notices[rank], Settings(*settings[rank]))
    return told.notice, told.alike


@pytest.mark.parametrize(
    ("notices", "settings", "alike"),
    [
        ((0, 1, 0, 0), [(7, 5)] * 4, {True}),
        ((2, 1, 0, 5), [(7, 5)] * 4, {True}),
        ((0, 0, 0, 0), [(7, 5), (7, 5), (7, 6), (7, 5)], {True, False}),
        ((4, 0, 0, 0), [(7, 5), (8, 5), (7, 5), (7, 5)], {True, False}),
    ],
)
def test_the_highest_notice_counts_and_other_settings_are_seen_by_some_rank(
    notices, settings, alike
):
    told = distributed.run(4, tell, [Notice(n) for n in notices], settings)
    assert {notice for notice, _ in told} == {max(notices)}
    assert {same for _, same in told} == alike


def check_agreement(found, signals, norms, complete):
    """Against every replica's signals, norms and completeness."""
    assert found.complete == all(complete)
    assert found.finite == all(math.isfinite(norm) for of_rank in norms for norm in of_rank)
    if not found.finite:
        return
    largest = max((s for of_rank in signals for s in of_rank), default=0.0)
    assert found.signal == largest
    zero = largest == 0 and not any(norm > 0 for of_rank in norms for norm in of_rank)
    assert found.all_zero == zero
    if any(signals):
        first = 2 * found.parameter
        assert largest in [s for of_rank in signals for s in of_rank[first : first + 2]]


@settings(max_examples=300, deadline=None)
@example([-0.0], [0.0], True)
@given(SIGNALS, NORMS, st.booleans())
def test_agreement_with_oneself(signals, norms, complete):
    check_agreement(agreed(signals, norms, complete), [signals], [norms], [complete])


@given(st.integers(0, 40), FINITE.filter(bool))
def test_agreement_finds_the_parameter(index, largest):
    signals = torch.zeros(41)
    signals[index] = largest
    found = agreed(signals, torch.ones(1))
    assert (found.signal, found.parameter) == (largest, index // 2)


@given(FINITE, FINITE)
def test_agreement_of_narrow_and_wide_signals(first, second):
    """float64 signals are compared and told as float32."""
    wide = torch.tensor([first / 3, second / 3], dtype=torch.float64)
    found = agreed(wide, torch.ones(1, dtype=torch.float64))
    assert found.signal == max(np.float32(first / 3), np.float32(second / 3))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_nan_among_the_signals_is_not_finite(sign):
    """The processor's own 0 / 0 has the sign bit set."""
    nan = torch.tensor(math.nan).copysign(torch.tensor(sign))
    assert not agreed(torch.stack([torch.tensor(0.5), nan]), torch.ones(1)).finite


def agreements(rank, cases):
    found = [
        agreed(signals[rank], norms[rank], complete[rank], dist.group.WORLD)
        for signals, norms, complete in cases
    ]
    assert all(decision.group is dist.group.WORLD for decision in found)
    return [decision._replace(group=None) for decision in found]


def random_cases(world_size, count=150):
    """Signals, norms and completeness of every rank; special values are frequent."""
    random = np.random.default_rng(world_size)

    def number(special, chance):
        if random.random() < chance:
            return float(random.choice(special))
        return float(np.float32(random.exponential() * 10.0 ** random.integers(-30, 30)))

    cases = []
    for _ in range(count):
        chance = random.choice([0.0, 0.3, 1.0])
        matrices = random.integers(0, 6)
        zeros = random.random() < 0.2
        signals = [
            [0.0 if zeros else number([0.0, math.inf], chance) for _ in range(matrices)]
            for _ in range(world_size)
        ]
        broken = [0.0] if zeros or random.random() < 0.6 else [0.0, math.inf, math.nan]
        norms = [
            [0.0 if zeros else number(broken, chance / 4) for _ in range(3)]
            for _ in range(world_size)
        ]
        cases.append((signals, norms, [bool(random.random() < 0.8) for _ in range(world_size)]))
    return cases


@pytest.mark.parametrize("world_size", [2, 4])
def test_agreement_of_replicas(world_size):
    cases = random_cases(world_size)
    answers = distributed.run(world_size, agreements, cases)
    kinds = set()
    for case, found in zip(cases, zip(*answers, strict=True), strict=True):
        check_agreement(found[0], *case)
        assert len({repr(of_rank) for of_rank in found}) == 1
        kinds.add((found[0].finite, found[0].all_zero, found[0].complete))
    assert {(True, True, True), (True, False, False), (False, False, True)} <= kinds


# ---------------------------------------------------------------- a model


def test_gate_closes_and_opens_on_a_model():
    model = toy.model()
    reports = toy.train(model, CurvaDion(toy.groups(model), threshold=0.3), range(12))
    assert {report.gate_open for report in reports} == {True, False}
    assert reports[0].gate_open


# ---------------------------------------------------------------- delays that cannot work


class EveryThird(Gate):
    """A user's own, which reads no momentum."""

    def opens(self, signal, local_steps):
        return local_steps >= 2


def test_a_delay_that_is_no_number_says_what_it_may_be():
    with pytest.raises(TypeError, match="delay='1' must be 0 or 1"):
        RMMC(0.3, delay="1")


@pytest.mark.parametrize(
    "gate",
    [FixedPeriod(3), FixedPeriod(1), AlwaysOpen(), ByteBudget(0.5), EveryThird()],
    ids=lambda gate: type(gate).__name__,
)
def test_a_delay_without_a_signal_is_an_error(gate):
    optimizer = CurvaDion(parameters(), gate=gate)
    give_gradients([("", X) for X in optimizer.param_groups[0]["params"]], 0)
    gate.delay = 1
    with pytest.raises(ValueError, match=r"delay=1, but reads no momentum.*QuantizedAverage"):
        optimizer.step()
    with pytest.raises(ValueError, match=r"delay=1, but reads no momentum.*QuantizedAverage"):
        CurvaDion(parameters(), gate=gate)
    gate.delay = 0
    optimizer.step()


def test_a_delay_of_two_steps_set_by_hand_is_an_error():
    optimizer = CurvaDion(parameters(), gate=RMMC(0.3))
    give_gradients([("", X) for X in optimizer.param_groups[0]["params"]], 0)
    optimizer.gate.delay = 2
    with pytest.raises(ValueError, match=r"gate\.delay=2 must be one of \(0, 1\)"):
        optimizer.step()


def test_the_delay_of_a_sync_is_checked_too():
    sync = QuantizedAverage()
    sync.delay = "1"
    with pytest.raises(TypeError, match=r"sync\.delay='1' must be an integer"):
        CurvaDion(parameters(), gate=FixedPeriod(3), sync=sync)
