"""Steps that are recorded in a CUDA graph and replayed, on fake CUDA tensors.

The graph raises where a real one could not hold what a step does; a replay is one launch, whatever
the step is.
"""

import copy
import warnings
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch import nn

from curvadion import CurvaDion, Dion, FixedPeriod, LowRank, QuantizedAverage
from curvadion.agreement import meeting
from curvadion.agreement.agreement import Agreement
from curvadion.hooks import CautiousWeightDecay, RowFloor
from curvadion.metering.wire import WireMeter
from curvadion.ops import page
from curvadion.optim import capture
from curvadion.update import registry
from curvadion.update.polar import Polar
from support.devices.counted_steps import Case, answers_of, parameters_of, replicas_of
from support.devices.fake_cuda import CUDA, Count, FakeGraph, fake_cuda, needs_fake_cuda

pytestmark = needs_fake_cuda

# The first step, at which states begin, and steps that are equal to the next one: fewer than an
# optimizer waits for by itself, because each fake step takes a second.
FIRST, EQUAL = 1, 1
DIRECTIONS = {
    "polar": {},
    "normuon": {},
    "dion2": {"rank_fraction": 0.5},
    "nordion2": {"rank_fraction": 0.5},
    "low_rank": {"rank_fraction": 0.25},
}
DTYPES = {
    "float32": (torch.float32, {}),
    "bfloat16": (torch.bfloat16, {"stochastic_rounding": True}),
}
# Whose steps need most cells on a page.
LARGEST = ("nordion2", "float32")


class Training:
    """Parameters of a model on fake CUDA, and their optimizer.

    graphs: those that have been made.
    """

    def __init__(self, optimizer, parameters, graphs):
        self.optimizer = optimizer
        self.parameters = parameters
        self.graphs = graphs
        self.last = None  # the count of the last step

    def step(self, change=None):
        """Take a step with new gradients; return whether it was a replay.

        change: of parameters and gradients, before it.
        """
        for p in self.parameters:
            p.grad = torch.empty_like(p) if p.requires_grad else None
        if change is not None:
            change(self)
        before = self.last
        # How many operations there had been when the host learnt of the last step.
        heard = []
        answers = answers_of(signal=1.0)
        read = answers["read"]

        def note_and_read(variables):
            heard.append(count.operations.total())
            return read(variables)

        with Count({**answers, "read": note_and_read}) as count:
            self.optimizer.step()
        self.last = count
        # The host waits for nothing but the verdict on the last step, before this one begins.
        if before is not None and before.recorded and change is None:
            assert count.awaited == before.recorded
            assert heard[0] == 0
        return self.optimizer.report.captured

    def steps(self, number):
        """Whether each of some equal steps was a replay."""
        return [self.step() for _ in range(number)]


@contextmanager
def training(
    build=Dion,
    dtype=torch.float32,
    ranks=1,
    sharded=False,
    model="a block of GPT-2 160M",
    equal_steps=EQUAL,
    **options,
):
    """Train a model.

    Args:
        build: makes the optimizer.
        dtype: of the weights.
        ranks: of which this process is one.
        sharded: whether they are one replica in shards.
        model: of MODELS.
        equal_steps: before a recording.
        options: of the optimizer.
    """
    graphs = []

    def make_graph(device):
        graphs.append(FakeGraph(device))
        return graphs[-1]

    with (
        fake_cuda(),
        mock.patch.object(capture, "make_graph", make_graph),
        mock.patch.object(capture, "EQUAL_STEPS", equal_steps),
        replicas_of(ranks) as replicas,
    ):
        case = Case(model, dtype, ranks, build, (), sharded)
        parameters, groups = parameters_of(case)
        optimizer = build(groups, replicas=None if sharded else replicas, **options)
        yield Training(optimizer, parameters, graphs)


def check_replay(count, graphs=1, **collectives):
    """The page is sent, the graphs are launched, and the verdict comes back; nobody waits."""
    assert count.operations == {"graph": graphs, "aten::copy_": 2, **collectives}
    assert [place.split()[-1] for place in count.sent] == ["send"]  # of the page
    assert len(count.fetched) == 1
    assert len(count.recorded) == 1
    assert not (count.reads or count.copies or count.refusals or count.absent)


# -------------------------------------------------------------------- what a replay does


@pytest.mark.parametrize(
    ("direction", "dtype"),
    [
        ("polar", "float32"),
        ("polar", "bfloat16"),
        ("normuon", "bfloat16"),
        ("dion2", "bfloat16"),
        LARGEST,
        ("low_rank", "bfloat16"),
    ],
)
def test_a_replay_is_one_launch(direction, dtype):
    """And pages have room for twice the cells of a model: ranks record alone."""
    weights, rounding = DTYPES[dtype]
    options = {**DIRECTIONS[direction], **rounding, "direction": direction, "capture": True}
    if (direction, dtype) == LARGEST:
        options["model"] = "GPT-2 160M"
    with training(dtype=weights, **options) as run:
        assert run.steps(FIRST + EQUAL) == [False] * (FIRST + EQUAL)
        eager = run.last
        assert not (eager.reads or eager.copies)
        # The recording: what stays as it is, is sent once.
        assert run.step()
        assert run.last.operations["graph"] == 1
        for _ in range(3):
            assert run.step()
            check_replay(run.last)
        [graph] = run.graphs
        [recorded] = run.optimizer._captures._recorded.values()
        for memory in (recorded._page._tables, recorded._page._still):
            assert 2 * memory._used < len(memory._host)
    assert graph.launches == 4


def test_a_step_whose_page_is_too_small_is_eager_and_its_graph_is_released():
    with (
        mock.patch.object(page, "CELLS", 64),
        mock.patch.object(page, "CELLS_A_TENSOR", 0),
        training(direction="polar", capture=None) as run,
    ):
        run.steps(FIRST + EQUAL)
        with pytest.warns(UserWarning, match="tables of a step need more than 64 cells"):
            assert run.step() is False
        assert run.steps(2) == [False, False]
        [graph] = run.graphs
        assert graph.released


def test_closed_steps_of_a_schedule_are_replayed_and_openings_are_not():
    options = {"sync": QuantizedAverage(2), "direction": "polar", "capture": True}
    options["equal_steps"] = equal = capture.EQUAL_STEPS
    with training(CurvaDion, ranks=8, gate=FixedPeriod(8), **options) as run:
        captured = run.steps(16)
        assert len(run.graphs) == 1
    eager, replay = False, True
    # The first step also compares the replicas.
    assert captured[:8] == [eager] * (FIRST + equal) + [replay] * 3 + [eager]
    assert captured[8:] == [replay] * 7 + [eager]


def test_shards_of_a_replica_are_replayed_between_their_collectives():
    options = {"direction": "polar", "capture": None, "model": "GPT-2 160M"}
    with training(ranks=8, sharded=True, **options) as run:
        captured, sent, reported = [], [], []
        for _ in range(FIRST + EQUAL + 3):
            with WireMeter() as meter:
                captured.append(run.step())
            sent.append(meter.records)
            reported.append(run.optimizer.report.wire_bytes_by_ranks)
        # A graph ends at each collective, and where the step waits for one that it has begun
        # before, the exchange of momenta.
        collectives = {"c10d::allreduce_": 1, "c10d::alltoall_base_": 2}
        check_replay(run.last, graphs=1 + 3 + 1, **collectives)
    assert captured == [False] * (FIRST + EQUAL) + [True] * 3
    eager, *recorded = sent[EQUAL:]
    assert sum(count.calls for count in eager.values()) > 1
    assert recorded == [eager] * 3
    assert reported[EQUAL] and reported[EQUAL + 1 :] == [reported[EQUAL]] * 3


# -------------------------------------------------------------------- what may change


def every(run, **numbers):
    for group in run.optimizer.param_groups:
        group.update(numbers)


CHANGES = {
    "learning rates": lambda run: every(run, lr=0.5),
    "weight decays": lambda run: every(run, weight_decay=0.2),
    "momentum": lambda run: every(run, momentum=0.8),
    "betas": lambda run: every(run, betas=(0.8, 0.9)),
}


def test_other_numbers_keep_the_recording():
    with training(direction="polar", capture=True) as run:
        run.steps(FIRST + EQUAL + 1)
        for numbers, change in CHANGES.items():
            assert run.step(change), numbers
            check_replay(run.last)
            assert run.step(), numbers
        assert len(run.graphs) == 1


def freeze(run):
    run.parameters[3].requires_grad_(False)
    run.parameters[3].grad = None


def other_dtype(run):
    run.parameters[1].grad_dtype = None
    run.parameters[1].grad = run.parameters[1].grad.to(torch.bfloat16)


def other_strides(run):
    p = run.parameters[0]
    p.grad = torch.empty(p.shape[::-1], device=CUDA).mT


def load(run):
    run.optimizer.load_state_dict(copy.copy(run.optimizer.state_dict()))


def rates_as_tensors(run):
    every(run, lr=torch.tensor(0.5))


def add_group(run):
    p = nn.Parameter(torch.empty(64, 32, device=CUDA))
    p.grad = torch.empty_like(p)
    run.parameters.append(p)
    run.optimizer.add_param_group({"params": [p]})


# By change: the eager steps until there is a new recording. States that have been loaded and new
# parameters are compared first; other changes are the first of the equal steps.
ENDS = {
    freeze: EQUAL,
    other_dtype: EQUAL,
    other_strides: EQUAL,
    load: FIRST + EQUAL,
    add_group: FIRST + EQUAL,
    rates_as_tensors: EQUAL,  # last: load_state_dict cannot copy a rate that is a fake tensor
}


def test_other_tensors_end_the_recording():
    """Of which one begins after another."""
    with training(direction="polar", capture=True) as run:
        assert run.steps(FIRST + EQUAL + 2)[-2:] == [True, True]
        for number, (change, eager) in enumerate(ENDS.items(), start=1):
            assert not run.step(change), change
            assert run.steps(eager - 1) == [False] * (eager - 1), change
            assert run.graphs[-1].released, change
            assert run.steps(2) == [True, True], change
            check_replay(run.last)
            assert len(run.graphs) == 1 + number, change


def test_a_step_without_a_gradient_is_eager_and_keeps_the_recording():
    def drop(run):
        run.parameters[2].grad = None

    with training(direction="polar", capture=True) as run:
        run.steps(FIRST + EQUAL + 1)
        assert not run.step(drop)
        assert run.step()
        check_replay(run.last)
        assert len(run.graphs) == 1


# -------------------------------------------------------------------- what cannot be recorded


def lion(groups, **options):
    groups[1]["algorithm"] = "lion"
    return Dion(groups, **options)


def rmmc(groups, **options):
    return CurvaDion(groups, threshold=0.3, **options)


def test_a_step_that_cannot_be_recorded_warns_once():
    with training(lion, direction="polar") as run:
        assert not any(run.steps(FIRST + EQUAL))
        with pytest.warns(UserWarning, match=r"cannot be captured.*algorithm='lion'"):
            assert not run.step()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not any(run.steps(2 * EQUAL))
        assert not run.graphs


def test_a_direction_that_does_not_say_that_it_can_be_recorded_is_not():
    """Also a subclass of one that does: a graph would keep what it adds as it was."""

    class Mine(Polar):
        pass

    mine = mock.patch.dict(registry.DIRECTIONS, {"polar": Mine()})
    with mine, training(direction="polar") as run:
        run.steps(FIRST + EQUAL)
        with pytest.warns(UserWarning, match="direction='polar' is not capturable"):
            assert not run.step()


def test_a_step_with_hooks_is_recorded_if_all_of_them_say_so():
    def look(batch):
        pass

    with training(direction="polar", capture=None) as run, warnings.catch_warnings():
        warnings.simplefilter("error")
        run.optimizer.register_update_hook(RowFloor())
        assert run.steps(FIRST + EQUAL + 2)[-2:] == [True, True]
        looks = run.optimizer.register_update_hook(look)
        assert not any(run.steps(2))
        looks.remove()
        assert run.step()
        check_replay(run.last)
        # Steps with other hooks are other steps.
        run.optimizer.register_update_hook(CautiousWeightDecay())
        assert run.steps(EQUAL + 1) == [False] * EQUAL + [True]
        assert len(run.graphs) == 2


def test_a_sync_that_does_not_say_that_the_host_may_run_ahead_is_not_recorded():
    class Mine(LowRank):
        runs_ahead = False

    def build(groups, **options):
        optimizer = Dion(groups, **options)
        optimizer._sync = Mine()
        return optimizer

    with training(build, direction="polar") as run:
        assert not any(run.steps(FIRST + EQUAL + 2))


def test_gradients_that_cannot_be_recorded_warn_once():
    with training(direction="polar") as run:
        run.step()
        for _ in range(EQUAL):
            assert not run.step(other_strides)
        with pytest.warns(UserWarning, match=r"cannot be captured.*other strides"):
            assert not run.step(other_strides)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not any(run.steps(2 * EQUAL))


def test_gradients_that_cannot_be_recorded_are_an_error_if_captures_are_wanted():
    with training(direction="polar", capture=True) as run:
        run.step()
        for _ in range(EQUAL):
            assert not run.step(other_strides)
        with pytest.raises(ValueError, match=r"capture=True.*other strides"):
            run.step(other_strides)


def test_a_gradient_that_is_copied_first_cannot_be_recorded():
    """Its copy would be made from the memory of the recorded step's gradient."""
    with training(direction="polar", capture=True) as run:
        run.step()
        p = run.parameters[0]
        # As if it had been loaded so.
        run.optimizer.state[p]["momentum"] = torch.empty(p.shape[::-1], device=CUDA).mT
        run.steps(EQUAL)
        with pytest.raises(ValueError, match=r"capture=True.*copy_ reads a gradient"):
            run.step()


@pytest.mark.parametrize(
    ("build", "obstacle"), [(lion, "algorithm='lion'"), (rmmc, r"gate=RMMC\(")]
)
def test_an_optimizer_that_cannot_be_captured_is_an_error_if_captures_are_wanted(build, obstacle):
    with (
        training(build, direction="polar", capture=True) as run,
        pytest.raises(ValueError, match=obstacle),
    ):
        run.step()


def test_parameters_on_a_cpu_are_an_error_if_captures_are_wanted():
    x = nn.Parameter(torch.zeros(8, 4))
    x.grad = torch.ones_like(x)
    optimizer = Dion([x], replicas="single", direction="polar", capture=True)
    with pytest.raises(ValueError, match="capture=True.*the parameters are on cpu"):
        optimizer.step()


def test_a_collective_that_a_graph_would_hold_is_an_error_if_captures_are_wanted():
    called_directly = mock.patch.object(
        meeting, "communicate", lambda collective, *given: collective(*given)
    )
    with (
        training(ranks=8, sharded=True, direction="polar", capture=True) as run,
        called_directly,
    ):
        run.steps(FIRST + EQUAL)
        with pytest.raises(ValueError, match=r"c10d::allreduce_ is not called by communicate"):
            run.step()


def test_a_dtensor_in_a_recorded_step_is_an_error_if_captures_are_wanted():
    def norm_of_all(agreement, terms, plan, *given, **more):
        plan.parameters[0].X.detach().norm()
        return meet(agreement, terms, plan, *given, **more)

    meet = Agreement.meet
    with training(ranks=8, sharded=True, direction="polar", capture=True) as run:
        run.steps(FIRST + EQUAL)
        with (
            mock.patch.object(Agreement, "meet", norm_of_all),
            pytest.raises(ValueError, match="takes a DTensor"),
        ):
            run.step()


def test_nothing_is_recorded_if_captures_are_not_wanted():
    with training(direction="polar", capture=False) as run:
        assert not any(run.steps(FIRST + EQUAL + 3))
        assert not run.graphs


# -------------------------------------------------------------------- the graph itself


def pinned():
    return torch.empty(3).pin_memory()


FORBIDDEN = {
    "item": (lambda x, y: x.sum().item(), "a read by the host"),
    "tolist": (lambda x, y: x.tolist(), "a read by the host"),
    "bool": (lambda x, y: bool(x.sum() > 0), "a read by the host"),
    "cpu": (lambda x, y: x.cpu(), "aten::_to_copy"),
    "fetch": (lambda x, y: y.copy_(x, non_blocking=True), "aten::copy_"),
    "send": (lambda x, y: x.copy_(y, non_blocking=True), "aten::copy_"),
    "to": (lambda x, y: torch.empty(3).to(CUDA), "aten::_to_copy"),
    "tensor": (lambda x, y: torch.tensor([1.0, 2.0], device=CUDA), "host and device"),
    "index": (lambda x, y: x[[0, 2]], "host and device"),
    "frozen number": (lambda x, y: x.mul_(y[0]), "aten::mul_"),
    "pinned": (lambda x, y: pinned(), "pinned memory"),
    "event": (lambda x, y: torch.cuda.Event().record(), "an event"),
    "wait": (lambda x, y: torch.cuda.Event().synchronize(), "an event"),
    "stream": (lambda x, y: torch.cuda.current_stream().synchronize(), "a wait for the device"),
    "synchronize": (lambda x, y: torch.cuda.synchronize(), "a wait for the device"),
    "empty_cache": (lambda x, y: torch.cuda.empty_cache(), "freeing the cache"),
    "cholesky": (lambda x, y: torch.linalg.cholesky(x[:, None] * x), "a wait"),
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_a_graph_refuses_what_it_cannot_hold(what):
    body, reason = FORBIDDEN[what]
    with fake_cuda(), Count():
        x = torch.empty(3, device=CUDA)
        y = pinned()
        with pytest.raises(AssertionError, match=rf"{reason}.*test_captures\.py:\d+"):
            FakeGraph(CUDA).record(lambda: body(x, y))
        assert not torch.cuda.is_current_stream_capturing()


def test_recorded_work_is_not_counted():
    with fake_cuda():
        x = torch.empty(3, device=CUDA)
        graph = FakeGraph(CUDA)

        def body():
            assert torch.cuda.is_current_stream_capturing()
            assert torch.cuda.current_stream().stream_id
            x.add_(torch.tensor(2.0)).mul_(3)  # numbers that are the same at each replay

        with Count() as count:
            graph.record(body)
            assert not count.operations
            graph.replay()
        assert not torch.cuda.is_current_stream_capturing()
    assert count.operations == {"graph": 1}
