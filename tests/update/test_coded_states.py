"""Momenta and moments in 8 bits: how far a run is from one in float32, and what stays exact."""

from __future__ import annotations

import copy
import io
import pickle
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from curvadion import (
    CurvaDion,
    Dion,
    FixedPeriod,
    QuantizedAverage,
    Replicated,
    load_torch_state,
    ops,
)
from curvadion.layout import matrix_shards
from curvadion.ops import state_codes
from curvadion.optim import matrix_statistics
from curvadion.plan import coded_states, parameter, plan
from support.runs import distributed, toy
from support.runs.seeded import gradient, weights

SHAPES = {
    "tall": (48, 30),
    "wide": (20, 64),
    "heads": (40, 24),
    "projections of heads": (24, 40),
    "experts": (3, 16, 20),
    "table": (90, 12),
    "bias": (33,),
}
KINDS = {
    "heads": {"row_blocks": 5},
    "projections of heads": {"column_blocks": 5},
    "experts": {"stack_dims": 1, "input_first": True},
    "table": {"algorithm": "adamw"},
    "bias": {"algorithm": "lion"},
}


def built(kind=Dion, *, state_dtype="int8", direction="polar", dtype=torch.float32, **options):
    """Parameters and their optimizer; lr 0.02 for matrices, 0.003 for others."""
    X = {name: nn.Parameter(weights(shape).to(dtype)) for name, shape in SHAPES.items()}
    groups = []
    for name, x in X.items():
        rate = 0.003 if "algorithm" in KINDS.get(name, {}) else 0.02
        groups.append({"params": [(name, x)], "lr": rate, **KINDS.get(name, {})})
    return X, kind(groups, state_dtype=state_dtype, direction=direction, **options)


def train(X, optimizer, steps, replica=0):
    for step in steps:
        for name, x in X.items():
            x.grad = gradient(SHAPES[name], step, replica).to(x.dtype)
        optimizer.step()


def moments(optimizer):
    """Momenta and moments as a checkpoint has them, float32, by parameter's number and key."""
    wanted = ("momentum", "exp_avg", "exp_avg_sq")
    states = optimizer.state_dict()["state"]
    return {(i, key): states[i][key].float() for i in states for key in wanted if key in states[i]}


def relative(x, y):
    return float((x - y).detach().norm() / y.detach().norm())


@pytest.mark.parametrize("direction", ["polar", "normuon"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_run_is_close_to_one_in_float32_with_a_quarter_of_the_memory(direction, dtype):
    """A rounding moves an element by a step at most, 1 / 127 of its largest neighbour."""
    coded = built(direction=direction, dtype=dtype)
    wide = built(direction=direction, dtype=dtype, state_dtype=None)
    for X, optimizer in (coded, wide):
        train(X, optimizer, range(6))
    for key, exact in moments(wide[1]).items():
        assert 0 < relative(moments(coded[1])[key], exact) < 0.06, key
    for name, x in wide[0].items():
        # A rounding may change a sign, by which Lion moves.
        limit = 0.4 if name == "bias" else 0.1
        moved = x - weights(SHAPES[name])
        assert 0 < relative(coded[0][name] - weights(SHAPES[name]), moved) < limit, name
    for name, x in coded[0].items():
        state = coded[1].state[x]
        for key in ("momentum", "exp_avg", "exp_avg_sq"):
            if key in state:
                # Heads and experts have blocks of their own, which begin at multiples of 16 bytes.
                apart = {"heads": 4 * 272 + 260, "experts": 2 * 528 + 520}
                assert state[key].nbytes == apart.get(name, -(-x.numel() // 256) * 260)


def test_a_second_moment_is_never_zero_after_a_gradient():
    """Zero would make the step m / eps."""
    x = nn.Parameter(torch.zeros(512))
    optimizer = Dion([{"params": [x], "algorithm": "adamw"}], lr=0.01, state_dtype="int8")
    for step in range(8):
        x.grad = torch.full((512,), 1e-6)
        x.grad[::100] = 1.0
        optimizer.step()
        assert float(moments(optimizer)[0, "exp_avg_sq"].min()) > 0
        assert x.abs().max() < 0.011 * (step + 1)


def test_a_skipped_step_keeps_every_bit_of_the_elements():
    X, optimizer = built()
    train(X, optimizer, range(2))
    before = moments(optimizer)
    X["bias"].grad[3] = torch.nan
    optimizer.step()
    assert optimizer.report.skipped
    toy.assert_bitwise_equal(moments(optimizer), before)


def test_a_checkpoint_has_tensors_like_parameters_and_goes_on_bitwise():
    X, optimizer = built()
    train(X, optimizer, range(3))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    for i, shape in enumerate(SHAPES.values()):
        for key in ("momentum", "exp_avg", "exp_avg_sq"):
            if key in saved["state"][i]:
                assert saved["state"][i][key].shape == shape
    again, other = built()
    with torch.no_grad():
        for name, x in again.items():
            x.copy_(X[name])
    other.load_state_dict(saved)
    for run in ((X, optimizer), (again, other)):
        train(*run, range(3, 6))
    toy.assert_bitwise_equal(dict(again.items()), dict(X.items()))
    toy.assert_bitwise_equal(moments(other), moments(optimizer))


def test_statistics_of_momenta_and_update_hooks_read_elements():
    X, optimizer = built()
    seen = {}

    def hook(batch):
        seen.update({(update.name, update.index): update.M.clone() for update in batch})

    optimizer.register_update_hook(hook)
    train(X, optimizer, range(1))
    assert relative(seen["tall", 0], gradient(SHAPES["tall"], 0, 0)) < 0.02
    assert relative(seen["heads", 2], gradient(SHAPES["heads"], 0, 0)[16:24]) < 0.02
    statistics = matrix_statistics.of_momenta(optimizer)
    expected = gradient(SHAPES["wide"], 0, 0).square().mean().sqrt()
    assert abs(statistics["wide"].rms / expected - 1) < 0.01


@pytest.mark.parametrize(
    "options",
    [
        {"direction": "low_rank"},
        {"direction": "dion2"},
        {"direction": None, "rank_fraction": 0.5},
    ],
)
def test_directions_that_change_momenta_themselves_are_refused(options):
    with pytest.raises(ValueError, match=r"state_dtype='int8' with direction="):
        built(**options)


def test_parameters_of_adamw_have_noise_of_their_own():
    """With the same noise all of them would be rounded in the same direction at the same places."""
    X = [nn.Parameter(weights((512,))) for _ in range(2)]
    optimizer = Dion(
        [{"params": X, "algorithm": "adamw"}], lr=0.01, direction="polar", state_dtype="int8"
    )
    for x in X:
        x.grad = gradient((512,), 0, 0)
    optimizer.step()
    means, others = (optimizer.state[x]["exp_avg"] for x in X)
    assert not torch.equal(means, others)


def test_other_refusals():
    gradient_steps = {"gate": FixedPeriod(2), "local_step": "gradient"}
    with pytest.raises(ValueError, match=r"need local_step='dion'"):
        built(CurvaDion, **gradient_steps)
    with pytest.raises(ValueError, match=r"eps=1e-20 with state_dtype='int8': .* 1e-16 at least"):
        built(eps=1e-20)
    _, optimizer = built(state_dtype=None)
    optimizer.param_groups[0].update(state_dtype="int8", direction="low_rank")
    with pytest.raises(ValueError, match=r"param_groups\[0\]: state_dtype='int8' with"):
        train({}, optimizer, range(1))
    _, optimizer = built(CurvaDion, state_dtype=None, **gradient_steps)
    with pytest.raises(ValueError, match=r"need local_step='dion'"):
        optimizer.load_state_dict(built(CurvaDion, gate=FixedPeriod(2))[1].state_dict())
    assert optimizer.param_groups[0]["state_dtype"] is None


@pytest.mark.parametrize(("before", "after"), [(None, "int8"), ("int8", None)])
def test_states_change_their_form_by_loading_only(before, after):
    """A run that went on with the old form would differ from one that is resumed."""
    X, optimizer = built(state_dtype=before)
    train(X, optimizer, range(2))
    for group in optimizer.param_groups:
        group["state_dtype"] = after
    with pytest.raises(ValueError, match=rf"state_dtype={after!r} of tall, whose 'momentum' is"):
        train(X, optimizer, range(1))
    optimizer.load_state_dict(optimizer.state_dict())
    train(X, optimizer, range(2, 3))
    for state in optimizer.state.values():
        for key in state.keys() & {"momentum", "exp_avg", "exp_avg_sq"}:
            assert (state[key].dtype == torch.int8) == (after == "int8")
    other = built(state_dtype=before)[1]
    with pytest.warns(UserWarning, match=f"state_dtype={before!r} of param group 0 becomes"):
        other.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("direction", ["polar", "normuon"])
def test_codes_that_operations_take_as_they_are_give_the_bits_of_opened_ones(
    direction, monkeypatch
):
    """In plain PyTorch, where both are the same arithmetic; also of a transposed gradient."""

    def run():
        X, optimizer = built(direction=direction)
        for step in range(4):
            for i, x in enumerate(X.values()):
                x.grad = gradient(x.shape, step, i).mT.contiguous().mT if x.dim() > 1 else None
            optimizer.step()
        return [x.detach() for x in X.values()], optimizer.state_dict()["state"]

    with ops.use_backend("torch"):
        as_they_are, states = run()
        monkeypatch.setattr(parameter.Matrix, "stays_coded", False)
        opened, opened_states = run()
    assert all(map(torch.equal, as_they_are, opened))
    for i, state in states.items():
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(opened_states[i][key]))


@pytest.mark.parametrize("backend", ["torch", None])
def test_weights_of_one_shape_may_lie_in_memory_in_two_orders(backend):
    """They share a stack; the first of them has no gradient at one step."""

    def run(state_dtype):
        X = [nn.Parameter(weights((40, 24), i)) for i in range(3)]
        X[1] = nn.Parameter(X[1].detach().mT.contiguous().mT)
        optimizer = Dion(X, lr=0.01, direction="polar", state_dtype=state_dtype)
        for step in range(4):
            for i, x in enumerate(X):
                x.grad = None if (i, step) == (0, 2) else gradient(x.shape, step, i)
            optimizer.step()
        saved = optimizer.state_dict()["state"].values()
        return [state["momentum"] for state in saved]

    with ops.use_backend(backend):
        for coded, wide in zip(run("int8"), run(None), strict=True):
            assert (coded - wide).norm() < 0.05 * wide.norm()


def test_a_gate_that_reads_momenta_decodes_each_only_once(monkeypatch):
    """Of stacks of matrices. A step of plain PyTorch decodes each twice more."""
    decoded = []

    def counted(values, codes, *, roots):
        if values:
            decoded.append(sum(x.numel() for x in values))
        decode(values, codes, roots=roots)

    decode = state_codes._decode_into
    monkeypatch.setattr(state_codes, "_decode_into", counted)
    monkeypatch.setattr(plan, "MOST_ON_CPU", 1000)
    X = [nn.Parameter(weights((6, 10, 10))) for _ in range(4)]
    optimizer = CurvaDion(X, threshold=1e9, stack_dims=1, direction="polar", state_dtype="int8")
    with ops.use_backend("torch"):
        for step in range(2):
            decoded.clear()
            for x in X:
                x.grad = gradient((6, 10, 10), step, 0)
            optimizer.step()
    assert not optimizer.report.gate_open
    assert decoded[:4] == [600] * 4
    assert sum(decoded[4:]) == 2 * 4 * 600


def test_matrices_with_codes_stay_the_same():
    X, optimizer = built()
    train(X, optimizer, range(2))
    group = optimizer.param_groups[list(SHAPES).index("heads")]
    for row_blocks in (1, [16, 24], 4):
        group["row_blocks"] = row_blocks
        with pytest.raises(ValueError, match="heads"):
            train(X, optimizer, [2])
    group["row_blocks"] = [8] * 5
    train(X, optimizer, [2])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"row_blocks": [16, 48]}, {"row_blocks": [48, 16]}),
        ({"row_blocks": 4}, {"row_blocks": 1, "column_blocks": 4}),
        ({"row_blocks": 4}, {"input_first": True}),
    ],
)
def test_codes_say_into_which_matrices_they_were_divided(before, after):
    """Of as many bytes in both divisions; also where no plan has seen the earlier one."""
    x = nn.Parameter(weights((64, 64)))
    first = Dion([{"params": [x], **before}], direction="polar", state_dtype="int8", lr=0.02)
    train_alone(x, first, range(3))
    for optimizer in (copy.deepcopy(first), pickle.loads(pickle.dumps(first)), first):
        held = moments(optimizer)
        if optimizer is first:
            optimizer.load_state_dict(optimizer.state_dict())
        [group] = optimizer.param_groups
        [x] = group["params"]
        group.update(after)
        toy.assert_bitwise_equal(moments(optimizer), held)
        with pytest.raises(ValueError, match="load_state_dict"):
            train_alone(x, optimizer, [3])
        optimizer.load_state_dict(optimizer.state_dict())
        # The same 256 elements share a scale as before, though other matrices do.
        toy.assert_bitwise_equal(moments(optimizer), held)
        train_alone(x, optimizer, [3])


def train_alone(x, optimizer, steps):
    for step in steps:
        x.grad = gradient(tuple(x.shape), step, 0)
        optimizer.step()


def test_matrices_without_codes_may_still_change():
    X, optimizer = built()
    optimizer.synchronize()
    X["tall"].requires_grad_(False)
    optimizer.synchronize()
    optimizer.param_groups[list(SHAPES).index("heads")]["row_blocks"] = [16, 24]
    train(X, optimizer, range(1))


def test_a_step_does_not_divide_parameters_again(monkeypatch):
    """Also where a gate reads momenta, and a hook."""
    divided = []

    def counted(X, options):
        divided.append(X)
        return divide(X, options)

    divide = matrix_shards.sizes_in_memory
    for module in (coded_states, parameter):
        monkeypatch.setattr(module, "sizes_in_memory", counted)
    X, optimizer = built(CurvaDion, threshold=1e9)
    optimizer.register_update_hook(lambda batch: [update.M for update in batch])
    train(X, optimizer, range(1))
    assert divided
    divided.clear()
    train(X, optimizer, range(1, 3))
    assert not divided


def test_codes_of_a_parameter_with_one_matrix_are_taken_without_a_view():
    """Each view takes the host as long as its share of an operation."""
    X, optimizer = built()
    train(X, optimizer, range(1))
    momenta = {name: optimizer.state[X[name]]["momentum"] for name in ("tall", "heads")}
    for m in optimizer._collective_plan().matrices:
        name = m.parameter.name
        if name in momenta:
            [codes] = parameter.shards_without_gaps([m], [momenta[name]], [True])
            assert (codes is momenta[name]) == (name == "tall")


@pytest.mark.parametrize(("algorithm", "moments"), [("adamw", 2), ("lion", 1)])
def test_moments_are_freed_before_the_next_are_opened(algorithm, moments, monkeypatch):
    """Each tensor's are a run; of one, both moments are open."""
    alive = []
    opened = []

    def followed(values, codes, *, roots):
        decode(values, codes, roots=roots)
        opened.extend(map(weakref.ref, values))
        alive.append(sum(value() is not None for value in opened))

    decode = state_codes._decode_into
    monkeypatch.setattr(state_codes, "_decode_into", followed)
    monkeypatch.setattr(ops.runs_to_open, "__defaults__", (1,))
    X = [nn.Parameter(weights((30,))) for _ in range(3)]
    optimizer = Dion([{"params": X, "algorithm": algorithm}], state_dtype="int8")
    for x in X:
        x.grad = gradient((30,), 0, 0)
    with ops.use_backend("torch"):
        optimizer.step()
    assert len(alive) == 3 * moments and max(alive) == moments


class Byte(torch.optim.Optimizer):
    """Sums of signs, in 8 bits of its own."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self):
        for x in self.param_groups[0]["params"]:
            state = self.state[x].setdefault("exp_avg", torch.zeros_like(x, dtype=torch.int8))
            x.sub_(state.add_(x.grad.sign().to(torch.int8)), alpha=0.01)


def test_another_optimizers_states_of_8_bits_are_its_own_affair():
    X = {"tall": nn.Parameter(weights(SHAPES["tall"]))}
    optimizer = Replicated(Byte(X.values()), gate=FixedPeriod(2))
    train(X, optimizer, range(3))
    before = optimizer.state[X["tall"]]["exp_avg"].clone()
    optimizer.synchronize(exact=True)
    assert matrix_statistics.of_momenta(optimizer)
    saved = optimizer.state_dict()
    assert torch.equal(saved["state"][0]["exp_avg"], before)
    optimizer.load_state_dict(saved)
    train(X, optimizer, range(1))


def test_a_run_of_torchs_adamw_goes_on_in_8_bits():
    X, optimizer = built()
    adamw = torch.optim.AdamW([("table", X["table"])])
    X["table"].grad = gradient(SHAPES["table"], 0, 0)
    adamw.step()
    load_torch_state(optimizer, adamw.state_dict())
    for key in ("exp_avg", "exp_avg_sq"):
        assert optimizer.state[X["table"]][key].dtype == torch.int8
        number = list(SHAPES).index("table")
        assert relative(moments(optimizer)[number, key], adamw.state[X["table"]][key]) < 0.02


@distributed.on_ranks(2)
def test_an_exact_synchronisation_averages_the_elements(rank):
    sync = QuantizedAverage(bits=2)
    X, optimizer = built(CurvaDion, gate=FixedPeriod(2), sync=sync, replicas=dist.group.WORLD)
    train(X, optimizer, range(5), replica=rank)
    own = moments(optimizer)
    means = {}
    for key, tensor in own.items():
        total = tensor.clone()
        dist.all_reduce(total)
        means[key] = total / 2
    optimizer.synchronize(exact=True)
    after = moments(optimizer)
    for key, mean in means.items():
        assert relative(own[key], mean) > 0.1
        assert 0 < relative(after[key], mean) < 0.02, key
    for tensor in (*after.values(), *(x.detach() for x in X.values())):
        first = tensor.clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, tensor)
