"""A partial average of the last weights: its equation, its bits, and what it refuses."""

import copy
import math
import pickle
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from curvadion import (
    AlwaysOpen,
    CurvaDion,
    Dion,
    FixedPeriod,
    LowRank,
    QuantizedAverage,
    Replicated,
    TailAverage,
    WireMeter,
)
from curvadion.comm.background import background_of
from curvadion.layout.dtensor import is_dtensor
from support.references.tolerance import Rounding, assert_close
from support.runs import distributed, toy
from support.runs.scheduled import Scheduled

pytestmark = pytest.mark.numeric
DECAY, BLEND = 0.9, 0.6


# ---------------------------------------------------------------- the equation


class Reference:
    """One step of E at a time, in float64, from what replicas have in common."""

    def __init__(self, common):
        self.E = {name: x.double() for name, x in common.items()}

    def move(self, common, steps):
        for _ in range(steps):
            self.E = {n: DECAY * E + (1 - DECAY) * common[n].double() for n, E in self.E.items()}

    def blended(self, common):
        return {n: (1 - BLEND) * common[n].double() + BLEND * E for n, E in self.E.items()}


def tail_of(optimizer, start=0):
    return TailAverage(optimizer, start=start, decay=DECAY, blend=BLEND)


def averaged(tail, model):
    with tail.averaged():
        return toy.weights(model)


def assert_blended(actual, expected, dtype, steps):
    assert actual.keys() == expected.keys()
    for name, W in expected.items():
        assert_close(actual[name], W, Rounding(dtype, steps=steps), what=name)


def bits(tail):
    state = tail.state_dict()
    averages = state.pop("averages")
    numbers = {name: torch.tensor(value) for name, value in state.items()}
    return numbers | {name: E.clone() for name, E in averages.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", ["sgd", "dion"])
def test_every_step_of_one_replica_counts(kind, dtype):
    """From ``start`` on; a frozen parameter has no average, and a skipped step stands still."""
    model = toy.model(dtype)
    model.norm.weight.requires_grad_(False)
    if kind == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    else:
        optimizer = Dion(toy.groups(model), lr=0.1)
    tail = tail_of(optimizer, start=2)
    for step in range(2):
        toy.train(model, optimizer, [step])
        assert not tail.state_dict()["averages"]
        toy.assert_bitwise_equal(averaged(tail, model), toy.weights(model))
    reference = Reference(toy.weights(model))
    for step in range(2, 7):
        if kind == "dion" and step == 4:
            for p in model.parameters():
                p.grad = torch.full_like(p, math.nan)
            optimizer.step()
            assert optimizer.report.skipped
        else:
            toy.train(model, optimizer, [step])
        own = toy.weights(model)
        reference.move(own, 1)
        assert_blended(averaged(tail, model), reference.blended(own), dtype, steps=step)
        toy.assert_bitwise_equal(toy.weights(model), own)
    wide = torch.promote_types(dtype, torch.float32)
    assert {E.dtype for E in tail.state_dict()["averages"].values()} == {wide}
    assert len(tail.state_dict()["averages"]) == len(list(model.parameters())) - 1


def test_weights_may_share_storage():
    layers = [nn.Linear(4, 4, bias=False) for _ in range(2)]
    for layer in layers:
        layer.weight.data = layers[0].weight.data
    optimizer = torch.optim.SGD([layer.weight for layer in layers], lr=0.3)
    tail = tail_of(optimizer)
    X = layers[0].weight.detach()
    reference = Reference({"X": X})
    for _ in range(3):
        reference.move({"X": X}, 1)
        for layer in layers:
            layer.weight.grad = torch.randn(4, 4)
        optimizer.step()
    own = X.clone()
    reference.move({"X": own}, 1)
    expected = reference.blended({"X": own})
    with tail.averaged():
        assert_blended({"X": X.clone()}, expected, torch.float32, 3)
    assert X.equal(own)
    tail.apply_()
    assert_blended({"X": X}, expected, torch.float32, 3)


OPENINGS = (2, 3, 7, 12)
SYNCS = {
    "codes": QuantizedAverage(bits=2),
    "fragments": QuantizedAverage(bits=4, fragments=3),
    "a delay": QuantizedAverage(bits=4, delay=1),
    "averaged weights": LowRank(),
}


STEPS = 13


class Run:
    """One of two replicas, evaluated after each step if it has an average."""

    def __init__(self, rank, how, *, with_tail):
        self.model = toy.model()
        gate = Scheduled(OPENINGS)
        self.optimizer = CurvaDion(
            toy.groups(self.model), gate=gate, sync=SYNCS[how], replicas=dist.group.WORLD
        )
        self.tail = tail_of(self.optimizer) if with_tail else None
        self.reference = Reference(toy.weights(self.model))
        self.moved_at = 0
        self.evaluated = []  # W
        with WireMeter() as self.meter:
            for step in range(STEPS):
                toy.train(self.model, self.optimizer, [step], rank)
                if with_tail:
                    self.evaluate(step + 1, opened=self.optimizer.report.gate_open)
            self.optimizer.synchronize()  # all anchors are now those of the last step
            if with_tail:
                self.evaluate(STEPS, opened=True)

    def common(self):
        """The anchors, or weights where there are none."""
        states = self.optimizer.state
        named = self.model.named_parameters()
        return {name: states[p].get("anchor", p).detach().double() for name, p in named}

    def evaluate(self, steps, *, opened):
        own, common = toy.weights(self.model), self.common()
        if opened:
            self.reference.move(common, steps - self.moved_at)
            self.moved_at = steps
        elif isinstance(self.optimizer.sync, LowRank) and self.optimizer.drifted:
            with pytest.raises(RuntimeError, match=r"call optimizer.synchronize\(\)"):
                averaged(self.tail, self.model)
            return
        W = averaged(self.tail, self.model)
        assert_blended(W, self.reference.blended(common), torch.float32, STEPS)
        toy.assert_bitwise_equal(toy.weights(self.model), own)
        self.evaluated.append(W)


@pytest.mark.parametrize("how", SYNCS)
@distributed.on_ranks(2)
def test_replicas_average_what_they_have_in_common_and_send_nothing(rank, how):
    """Openings are 1 to 5 steps apart."""
    background_of(dist.group.WORLD, torch.device("cpu"))  # a delay's group connects once
    run, plain = (Run(rank, how, with_tail=with_tail) for with_tail in (True, False))
    toy.assert_bitwise_equal(toy.weights(run.model), toy.weights(plain.model))
    assert run.meter.total == plain.meter.total
    one, other = distributed.gathered(run.evaluated)
    assert len(one) == len(other) >= len(OPENINGS)
    for these, those in zip(one, other, strict=True):
        toy.assert_bitwise_equal(these, those)


@pytest.mark.parametrize("how", ["codes", "averaged weights"])
@distributed.on_ranks(2)
def test_what_is_kept_at_the_end_is_what_was_evaluated(rank, how):
    run = Run(rank, how, with_tail=True)
    run.tail.apply_()
    toy.assert_bitwise_equal(toy.weights(run.model), run.evaluated[-1])
    for name, common in run.common().items():
        assert common.equal(run.evaluated[-1][name].double())
    assert not run.optimizer.drifted
    assert not run.tail.state_dict()["averages"]
    toy.train(run.model, run.optimizer, range(3), rank)  # a new average begins
    assert run.tail.state_dict()["averages"]


# ---------------------------------------------------------------- checkpoints


def make(kind):
    model = toy.model()
    if kind == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    else:
        gate, sync = FixedPeriod(4), QuantizedAverage()
        optimizer = CurvaDion(toy.groups(model), gate=gate, sync=sync, replicas=dist.group.WORLD)
    return model, optimizer, tail_of(optimizer, start=3)


@pytest.mark.parametrize("kind", ["sgd", "curvadion"])
@pytest.mark.parametrize("saved_after", [2, 6, 8])
@distributed.on_ranks(2)
def test_a_run_goes_on_with_the_same_bits(rank, kind, saved_after):
    """Before the average begins, between two openings, and after one."""
    model, optimizer, tail = make(kind)
    toy.train(model, optimizer, range(saved_after), rank)
    parts = model, optimizer, tail
    with pytest.warns() if kind == "curvadion" and saved_after != 8 else nullcontext():
        saved = copy.deepcopy([part.state_dict() for part in parts])
    resumed = make(kind)
    for part, state in zip(resumed, saved, strict=True):
        part.load_state_dict(state)
    for one in (parts, resumed):
        toy.train(*one[:2], range(saved_after, 14), rank)
    toy.assert_bitwise_equal(bits(tail), bits(resumed[2]))
    toy.assert_bitwise_equal(averaged(tail, model), averaged(resumed[2], resumed[0]))


def saved_state():
    model, optimizer, tail = make("sgd")
    toy.train(model, optimizer, range(6))
    return tail.state_dict()


def of_first(change):
    """A change of the first average."""

    def damage(state):
        name = next(iter(state["averages"]))
        state["averages"][name] = change(state["averages"][name])

    return damage


HOSTILE = {
    "no count": (lambda s: s.pop("count"), "has the entries .*averages"),
    "a further entry": (lambda s: s.update(x=1), "has the entries .*'x'"),
    "steps as text": (lambda s: s.update(steps="6"), "steps='6' must be an integer"),
    "steps before the first": (lambda s: s.update(steps=-1), "steps=-1 must be >= 0"),
    "a step to come": (lambda s: s.update(averaged_at=7), "averaged_at=7 must be <= 6"),
    "averages of no step": (lambda s: s.update(averaged_at=None), "averaged_at=None"),
    "averages as a list": (lambda s: s.update(averages=[]), "must be a dictionary"),
    "one average less": (
        lambda s: s["averages"].popitem(),
        "of 5 parameters instead of 6: .* call tail.begin",
    ),
    "another model's": (
        lambda s: s["averages"].update(x=s["averages"].popitem()[1]),
        "average of 'x', which is no parameter",
    ),
    "no tensor": (of_first(lambda E: 0.5), "is 0.5 instead of torch.float32"),
    "another shape": (of_first(lambda E: E[1:]), r"\(10, 6\) .* instead of .*\(11, 6\)"),
    "another dtype": (of_first(torch.Tensor.double), "is torch.float64"),
    "a NaN": (of_first(lambda E: E.fill_(math.nan)), "not finite"),
    "on no device": (of_first(lambda E: E.to("meta")), "on meta"),
}


@pytest.mark.parametrize("damage", HOSTILE)
def test_a_damaged_state_is_refused_and_changes_nothing(damage):
    change, says = HOSTILE[damage]
    state = copy.deepcopy(saved_state())
    change(state)
    model, optimizer, tail = make("sgd")
    toy.train(model, optimizer, range(4))
    before = bits(tail)
    with pytest.raises(ValueError, match=says):
        tail.load_state_dict(state)
    toy.assert_bitwise_equal(bits(tail), before)


# ---------------------------------------------------------------- shards


def sharded():
    """Every rank reads the same data, so that shards are those of one process."""
    model = toy.model()
    fully_shard(model.linear)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    return model, optimizer, tail_of(optimizer)


def full(tensors):
    return {name: E.full_tensor() for name, E in tensors.items()}


@distributed.on_ranks(2)
def test_shards_of_fsdp2(rank, tmp_path):
    model, optimizer, tail = sharded()
    first = full(toy.weights(model))
    reference = Reference(first)
    toy.train(model, optimizer, [0])
    for step in (1, 2):
        reference.move(full(toy.weights(model)), 1)
        toy.train(model, optimizer, [step])
    # The root's weights stay gathered after a forward pass without a backward.
    own, own_loss = full(toy.weights(model)), toy.loss(model, 9).item()
    reference.move(own, 1)
    another = fully_shard(nn.Linear(4, 4))
    another.unshard()
    with tail.averaged():
        W, loss = full(toy.weights(model)), toy.loss(model, 9).item()
    assert not is_dtensor(another.weight)  # still gathered
    assert_blended(W, reference.blended(own), torch.float32, 3)
    whole = toy.model()
    whole.load_state_dict(W)
    assert_close(loss, toy.loss(whole, 9).item(), Rounding(torch.float32, terms=64, steps=3))
    assert loss != own_loss
    toy.assert_bitwise_equal(full(toy.weights(model)), own)
    assert toy.loss(model, 9).item() == own_loss

    folder = distributed.gathered(str(tmp_path))[0]
    dcp.save({"tail": tail.state_dict()}, checkpoint_id=folder)
    _, _, other = sharded()
    lost = {"tail": other.state_dict()}
    dcp.load(lost, checkpoint_id=folder)
    with pytest.raises(ValueError, match=r"of 0 parameters instead of 6: .* tail.begin\(\)"):
        other.load_state_dict(lost["tail"])
    held = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    assert any(key.startswith("tail.averages.") for key in held)
    other.begin()
    state = {"tail": other.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    other.load_state_dict(state["tail"])
    toy.assert_bitwise_equal(bits(other), bits(tail))
    _, _, whole = make("sgd")
    whole.begin()
    state = {"tail": whole.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    whole.load_state_dict(state["tail"])
    expected = full(tail.state_dict()["averages"]).values()
    for E, other_E in zip(whole.state_dict()["averages"].values(), expected, strict=True):
        assert E.equal(other_E)
    with pytest.raises(ValueError, match=r"Shard\(dim=0\)"):
        make("sgd")[2].load_state_dict(tail.state_dict())


@distributed.on_ranks(2)
def test_optimizer_states_sharded_by_torch(rank):
    model = toy.model()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.3)
    tail = tail_of(optimizer)
    alone = toy.model()
    other = torch.optim.SGD(alone.parameters(), lr=0.3)
    tail_alone = tail_of(other)
    toy.train(model, optimizer, range(3))
    toy.train(alone, other, range(3))
    toy.assert_bitwise_equal(averaged(tail, model), averaged(tail_alone, alone))


# ---------------------------------------------------------------- what is refused


def test_weights_come_back_after_an_error():
    model, optimizer, tail = make("sgd")
    other = tail_of(optimizer)
    toy.train(model, optimizer, range(6))
    own = toy.weights(model)
    with pytest.raises(KeyError, match="in an evaluation"), tail.averaged():
        raise KeyError("in an evaluation")
    toy.assert_bitwise_equal(toy.weights(model), own)
    calls = [optimizer.step]
    for each in (tail, other):
        calls += each.begin, each.apply_, each.averaged().__enter__
    for call in calls:
        with tail.averaged():
            W = toy.weights(model)
            with pytest.raises(RuntimeError, match=r"inside tail.averaged\(\)"):
                call()
            toy.assert_bitwise_equal(toy.weights(model), W)
        toy.assert_bitwise_equal(toy.weights(model), own)
    toy.train(model, optimizer, [6])


@distributed.on_ranks(2)
def test_no_steps_are_lost_and_no_average_is_sent(rank):
    model, optimizer, tail = make("curvadion")
    first = toy.weights(model)
    toy.train(model, optimizer, range(2), rank)
    assert optimizer.drifted
    toy.assert_bitwise_equal(averaged(tail, model), first)  # also before ``start``
    toy.train(model, optimizer, range(2, 6), rank)
    assert optimizer.drifted
    own = toy.weights(model)
    with pytest.raises(RuntimeError, match=r"optimizer.synchronize\(\) on all ranks before"):
        tail.apply_()
    for call in (optimizer.synchronize, optimizer.eval, tail_of(optimizer).averaged().__enter__):
        with tail.averaged(), pytest.raises(RuntimeError, match=r"tail.averaged\(\)"):
            call()
    toy.assert_bitwise_equal(toy.weights(model), own)
    optimizer.synchronize()
    tail.apply_()


def test_wrong_arguments_are_errors():
    model = toy.model()
    optimizer = torch.optim.SGD(model.parameters())
    for given, says in [
        ({"start": 0.8}, "start=0.8 must be an integer"),
        ({"start": -1}, "start=-1 must be >= 0"),
        ({"start": 1, "decay": 1.0}, r"decay=1.0 must be in \[0.0, 1.0\)"),
        ({"start": 1, "blend": 1.5}, r"blend=1.5 must be in \[0.0, 1.0\]"),
    ]:
        with pytest.raises((TypeError, ValueError), match=says):
            TailAverage(optimizer, **given)
    with pytest.raises(TypeError, match="optimizer=Toy must be .* pass the attribute .optimizer"):
        TailAverage(model, start=1)
    apart = CurvaDion(toy.groups(model), gate=AlwaysOpen(), sync=LowRank(average_weights=False))
    with pytest.raises(ValueError, match="replicas still differ"):
        TailAverage(apart, start=1)
    with pytest.raises(RuntimeError, match="no average after 0 steps: .* after start=5 steps"):
        TailAverage(optimizer, start=5).apply_()


def test_an_average_of_another_run_is_an_error():
    model = toy.model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = Replicated(inner, gate=FixedPeriod(2), replicas="single")
    tail = tail_of(optimizer)
    tail.load_state_dict({"steps": 9, "averaged_at": 9, "count": 0, "averages": {}})
    with pytest.raises(RuntimeError, match="counts 0 steps, but the average has moved at step 9"):
        toy.train(model, optimizer, [0])


def test_the_optimizer_inside_replicated_is_refused():
    model = toy.model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    tail_of(inner)
    optimizer = Replicated(inner, gate=FixedPeriod(2), replicas="single")
    with pytest.raises(ValueError, match="optimizer=SGD is inside Replicated"):
        toy.train(model, optimizer, [0])


def test_equal_names_are_refused():
    layers = nn.Linear(4, 4), nn.Linear(4, 4)
    groups = [{"params": layer.named_parameters()} for layer in layers]
    tail = tail_of(torch.optim.SGD(groups, lr=0.1))
    with pytest.raises(ValueError, match="two parameters of the name 'weight'"):
        tail.begin()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_copy_would_not_hear_of_steps(copied):
    _, _, tail = make("sgd")
    with pytest.raises(TypeError, match=r"make one .* load_state_dict\(tail.state_dict\(\)\)"):
        copied(tail)


@pytest.mark.parametrize("began_by", ["begin", "load_state_dict"])
def test_an_average_that_begins_in_an_evaluation_goes_on(began_by):
    model, optimizer, tail = make("sgd")
    state = saved_state()
    with torch.inference_mode():
        tail.begin() if began_by == "begin" else tail.load_state_dict(state)
        with tail.averaged():
            pass
    toy.train(model, optimizer, range(2))
    assert tail.state_dict()["averages"]


def test_flat_shards_are_refused():
    model = toy.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tail_of(optimizer)
    model.linear.weight._fsdp_flattened = True  # as FSDP1 marks its parameters
    with pytest.raises(ValueError, match=r"\['params'\]\[1\] is a flat shard of FSDP1"):
        toy.train(model, optimizer, [0])
