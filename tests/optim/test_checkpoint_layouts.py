"""A distributed checkpoint written under any layout loads under any other, and the run goes on."""

import itertools
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from curvadion import CodedGradients, CurvaDion, QuantizedAverage, param_groups
from curvadion.integrations import ddp, fsdp
from curvadion.layout.dtensor import local
from curvadion.plan.coded_states import decoded
from support.references.tolerance import Rounding, assert_close
from support.runs import distributed, raised, toy
from support.runs.scheduled import Patient

# Numbers of ranks.
LAYOUTS = {
    "one process": 1,
    "ddp 2": 2,
    "fsdp 4": 4,
    "hsdp 2x2": 4,
    "fsdp x tp 2x2": 4,
}
VOCABULARY, BATCH = 13, 8
SAVED_AFTER, STEPS = 3, 5


# -------------------------------------------------------------------- a model in every layout


class Model(nn.Module):
    """Widths that neither two nor four ranks divide; ``narrow`` leaves one of four without a row.

    ``up`` holds three matrices, and experts are stacked matrices of either orientation. ``idle``
    never has a gradient; its weights decay where replicas count it as zero.
    """

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 10)
        self.up = nn.Linear(10, 21)
        self.down = nn.Linear(21, 10, bias=False)
        self.narrow = nn.Linear(10, 3, bias=False)
        self.widen = nn.Linear(3, 10, bias=False)
        self.wide_experts = nn.Parameter(torch.randn(5, 4, 10) / 4)
        self.tall_experts = nn.Parameter(torch.randn(5, 10, 4) / 4)
        self.idle = nn.Linear(10, 5, bias=False)
        self.norm = nn.LayerNorm(10)
        self.head = nn.Linear(10, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = x + self.down(torch.tanh(self.up(x)))
        x = x + self.widen(torch.tanh(self.narrow(x)))
        inner = torch.tanh(torch.einsum("...i,eoi->...eo", x, self.wide_experts))
        x = x + torch.einsum("...ei,eoi->...o", inner, self.tall_experts)
        return self.head(self.norm(x))


@dataclass
class Placed:
    """A model in its layout; this rank reads slice ``part`` of ``parts`` of each batch."""

    model: nn.Module
    replicas: object = None
    part: int = 0
    parts: int = 1

    def build(self, **options):
        module = getattr(self.model, "module", self.model)
        groups = param_groups(
            module,
            options={"matrix": {"lr": 0.02}, "embedding": {"lr": 0.003}},
            patterns={
                "idle.weight": {"kind": "matrix", "weight_decay": 0.0},
                "up.weight": {"kind": "matrix", "row_blocks": [8, 9, 4]},
                "*_experts": "stack",
            },
        )
        options = {"gate": Patient(), **options}
        return CurvaDion(groups, lr=0.01, replicas=self.replicas, **options)

    def train(self, optimizer, steps):
        """The reports of the numbered steps."""
        reports = []
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            tokens, targets = torch.randint(VOCABULARY, (2, BATCH, 16), generator=generator)
            tokens, targets = (t.chunk(self.parts)[self.part] for t in (tokens, targets))
            optimizer.zero_grad()
            logits = self.model(tokens).flatten(0, 1)
            nn.functional.cross_entropy(logits, targets.flatten()).backward()
            optimizer.step()
            reports.append(optimizer.report)
        optimizer.zero_grad()
        return reports


def place(layout):
    torch.manual_seed(0)
    model = Model()
    if layout == "one process":
        return Placed(model)
    if layout == "ddp 2":
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
        return Placed(ddp.keep_gradients_local(wrapped), dist.group.WORLD, dist.get_rank(), 2)
    if layout == "fsdp x tp 2x2":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        model = shard(tensor_parallel(model, mesh["tensor"]), mesh["data"])
        return Placed(model, None, mesh.get_local_rank("data"), 2)
    if layout == "hsdp 2x2":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = fsdp.keep_gradients_local(shard(model, mesh))
        return Placed(model, mesh["replicate"], dist.get_rank(), 4)
    mesh = init_device_mesh("cpu", (LAYOUTS[layout],))
    return Placed(shard(model, mesh), None, dist.get_rank(), LAYOUTS[layout])


def shard(model, mesh):
    for module in (model.up, model.narrow):
        fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tensor_parallel(model, mesh):
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "up": ColwiseParallel(use_local_output=False),
        "down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    return parallelize_module(model, mesh, plan)


# -------------------------------------------------------------------- what a run holds


def pieces(model, optimizer):
    states = optimizer.state_dict()["state"].items()
    tensors = {f"{i}.{key}": torch.as_tensor(t) for i, s in states for key, t in s.items()}
    tensors |= {name: p.detach() for name, p in model.named_parameters()}
    return {name: local(t).clone() for name, t in tensors.items()}


def form_of(state):
    """Global shapes and dtypes of every parameter's state, and the groups' keys."""
    tensors = {
        name: {
            key: (tuple(t.shape), t.dtype) for key, t in s.items() if isinstance(t, torch.Tensor)
        }
        for name, s in state["state"].items()
    }
    return tensors, [sorted(group) for group in state["param_groups"]]


def held(model, optimizer):
    """Weights, and what the optimizer keeps of each, as whole tensors.

    Without the state of the idle weight: only replicas count its gradient as zero.
    """
    tensors = {}
    for name, p in model.named_parameters():
        name = name.removeprefix("module.")
        kept = {} if name == "idle.weight" else optimizer.state[p]
        of_state = {f"{name}: {key}": value for key, value in kept.items()}
        for key, value in {name: p.detach(), **of_state}.items():
            tensor = torch.as_tensor(value)
            tensors[key] = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()
    return tensors


def assert_holds(placed, optimizer, expected, start, steps):
    """Up to rounding; errors of weights are relative to how far they have moved."""
    # Of sums over a batch's tokens, in gradients of which a step takes directions.
    rounding = Rounding(torch.float32, terms=64, condition=2, steps=steps)
    found = held(placed.model, optimizer)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype, name
        moved = float((expected[name] - start[name]).norm()) if name in start else None
        assert_close(tensor, expected[name], rounding, scale=moved or None, what=name)


@dataclass
class Course:
    """Weights at first, and all that the uninterrupted run in one process holds later."""

    start: dict[str, torch.Tensor]
    saved: dict[str, torch.Tensor]
    end: dict[str, torch.Tensor]


def straight(rank):
    placed = place("one process")
    optimizer = placed.build()
    start = {name: p.detach().clone() for name, p in placed.model.named_parameters()}
    placed.train(optimizer, range(SAVED_AFTER))
    optimizer.synchronize()
    saved = held(placed.model, optimizer)
    placed.train(optimizer, range(SAVED_AFTER, STEPS))
    optimizer.synchronize()
    return Course(start, saved, held(placed.model, optimizer))


# -------------------------------------------------------------------- from layout to layout


def write(rank, layout, folder):
    """Save a checkpoint and a whole state; the forms of the state, and of a new optimizer's."""
    placed = place(layout)
    new = form_of(get_optimizer_state_dict(placed.model, placed.build()))
    optimizer = placed.build()
    placed.train(optimizer, range(SAVED_AFTER))
    optimizer.synchronize()
    model_state, optimizer_state = get_state_dict(placed.model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.save(state, checkpoint_id=f"{folder}/{layout}")
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = get_state_dict(placed.model, optimizer, options=full)
    if rank == 0:
        torch.save(whole, f"{folder}/{layout}.pt")
    else:
        assert whole == ({}, {})
    return form_of(optimizer_state), new


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Their folder, and the forms of states by layout."""
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    return folder, {
        layout: distributed.run(world, write, layout, folder) for layout, world in LAYOUTS.items()
    }


@pytest.fixture(scope="module")
def course():
    (of_one_process,) = distributed.run(1, straight)
    return of_one_process


def resume(rank, layout, folder, course):
    """Load one process' checkpoint and the one of the layout before, and go on from that."""
    placed, names = place(layout), list(LAYOUTS)
    for saved in dict.fromkeys((names[0], names[names.index(layout) - 1])):
        optimizer = placed.build()
        model_state, optimizer_state = get_state_dict(placed.model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=f"{folder}/{saved}")
        set_state_dict(
            placed.model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        assert_loaded(placed, optimizer, course)
    go_on(placed, optimizer, course)


def assert_loaded(placed, optimizer, course):
    assert optimizer.progress.steps == SAVED_AFTER
    assert len(optimizer.gate.signals) == SAVED_AFTER
    assert optimizer.gate.openings == {"step 1": 0, "step 2": 0, "step 3": 0}
    assert_holds(placed, optimizer, course.saved, course.start, SAVED_AFTER)


def go_on(placed, optimizer, course):
    placed.train(optimizer, range(SAVED_AFTER, STEPS))
    optimizer.synchronize()
    assert_holds(placed, optimizer, course.end, course.start, STEPS)


@pytest.mark.numeric
@pytest.mark.parametrize("layout", LAYOUTS)
def test_checkpoints_go_on_in_every_layout(checkpoints, course, layout):
    distributed.run(LAYOUTS[layout], resume, layout, checkpoints[0], course)


def test_state_is_of_one_form_in_all_layouts_and_on_all_ranks(checkpoints):
    """Also of parameters without a gradient and without rows here, and of new optimizers."""
    forms = [form for ranks in checkpoints[1].values() for pair in ranks for form in pair]
    tensors, _ = forms[0]
    assert all(tensors.values())
    assert all(form == forms[0] for form in forms)


# -------------------------------------------------------------------- whole states


def load_whole(rank, layout, folder, saved, course):
    """Load what rank 0 gathered, given to all ranks and to rank 0 alone."""
    placed = place(layout)
    for broadcast in (False, True):
        whole = torch.load(f"{folder}/{saved}.pt", weights_only=True)
        model_state, optimizer_state = ({}, {}) if broadcast and rank else whole
        how = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        optimizer = placed.build()
        set_model_state_dict(placed.model, model_state, options=how)
        set_optimizer_state_dict(placed.model, optimizer, optimizer_state, options=how)
        assert_loaded(placed, optimizer, course)
    go_on(placed, optimizer, course)


@pytest.mark.numeric
@pytest.mark.parametrize(
    ("layout", "saved"), [("one process", "fsdp x tp 2x2"), ("fsdp 4", "ddp 2")]
)
def test_whole_states_go_on_in_every_layout(checkpoints, course, layout, saved):
    arguments = (layout, checkpoints[0], saved, course)
    distributed.run(LAYOUTS[layout], load_whole, *arguments)


# -------------------------------------------------------------------- the same layout, options


def resume_bitwise(rank, layout, folder, options):
    after = range(SAVED_AFTER, SAVED_AFTER + 3)
    placed = place(layout)
    optimizer = placed.build(**options)
    reports = placed.train(optimizer, range(SAVED_AFTER))
    optimizer.synchronize(exact=True)
    how = StateDictOptions(flatten_optimizer_state_dict=True, cpu_offload=True)
    weights, state = get_state_dict(placed.model, optimizer, options=how)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    reports += placed.train(optimizer, after)

    again = place(layout)
    its = again.build(**options)
    with torch.no_grad():
        for p in again.model.parameters():
            local(p).zero_()
    weights, state = get_state_dict(again.model, its, options=how)
    state = {"model": weights, "optimizer": state}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(again.model, state["model"], options=how)
    set_optimizer_state_dict(again.model, its, state["optimizer"], options=how)
    assert again.train(its, after) == reports[SAVED_AFTER:]
    toy.assert_bitwise_equal(pieces(again.model, its), pieces(placed.model, optimizer))
    assert vars(its.gate) == vars(optimizer.gate)
    assert its.progress == optimizer.progress
    return [report.gate_open for report in reports]


NARROW = {"local_step": "dion", "state_dtype": "bfloat16", "q_dtype": "bfloat16"}
GRADIENT = {"local_step": "gradient", "local_lr": 0.01, "momentum_rule": "plain"}
CODES = {"sync": QuantizedAverage(fragments=3, spectrum_decay=0.8)}
EIGHT_BITS = {
    "local_step": "dion",
    "direction": "polar",
    "state_dtype": "int8",
    "sync": QuantizedAverage(fragments=3, residual_dtype="int8"),
}


@pytest.mark.parametrize(
    ("layout", "options", "enough"),
    [
        ("ddp 2", NARROW, 0.15),
        ("fsdp x tp 2x2", GRADIENT, 0.08),
        ("hsdp 2x2", CODES, 0.15),
        ("hsdp 2x2", EIGHT_BITS, 0.15),
    ],
    ids=["narrow", "gradient", "codes", "eight bits"],
)
def test_same_layout_goes_on_bitwise(layout, options, enough, tmp_path):
    """The gate closes before and after the checkpoint."""
    options = {"gate": Patient(enough), **options}
    answers = distributed.run(LAYOUTS[layout], resume_bitwise, layout, str(tmp_path), options)
    for opened in answers:
        assert opened == answers[0]
        assert set(opened[:SAVED_AFTER]) == set(opened[SAVED_AFTER:]) == {True, False}


# -------------------------------------------------------------------- residuals in 8 bits


def save_residuals(rank, file):
    """The mean residuals of sharded replicas, whose codes are of their shards."""
    placed = place("hsdp 2x2")
    optimizer = placed.build(gate=None, sync=CodedGradients(residual_dtype="int8"))
    placed.train(optimizer, range(SAVED_AFTER))
    optimizer.synchronize(exact=True)
    how = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = get_state_dict(placed.model, optimizer, options=how)
    if rank == 0:
        torch.save(whole, file)


def load_residuals(rank, file):
    """Into 8 bits in other blocks, and as they are; both go on."""
    for dtype in ("int8", "bfloat16"):
        placed = place("one process")
        optimizer = placed.build(gate=None, sync=CodedGradients(residual_dtype=dtype))
        weights, state = torch.load(file, weights_only=True)
        how = StateDictOptions(full_state_dict=True)
        set_model_state_dict(placed.model, weights, options=how)
        set_optimizer_state_dict(placed.model, optimizer, state, options=how)
        owed = 0.0
        for name, p in placed.model.named_parameters():
            saved = state["state"][name]["residual"]
            loaded = optimizer.state[p]["residual"]
            assert (loaded.dtype == torch.int8) == (dtype == "int8")
            if dtype == "int8":
                loaded = decoded("residual", p, loaded)
                assert (loaded - saved).abs().max() <= 0.51 * saved.abs().max() / 127, name
            else:
                assert loaded.equal(saved), name
            owed = max(owed, float(saved.abs().max()))
        assert owed > 0.0
        placed.train(optimizer, range(SAVED_AFTER, STEPS))


def test_residuals_in_8_bits_load_in_another_layout(tmp_path):
    file = str(tmp_path / "whole.pt")
    distributed.run(LAYOUTS["hsdp 2x2"], save_residuals, file)
    distributed.run(1, load_residuals, file)


# -------------------------------------------------------------------- flat shards of FSDP1


def flat(sizes):
    torch.manual_seed(0)
    layers = [nn.Linear(m, n, bias=False) for m, n in itertools.pairwise(sizes)]
    model = FullyShardedDataParallel(
        nn.Sequential(*layers), use_orig_params=True, device_id=torch.device("cpu")
    )
    fsdp.declare_flat_shards(model)
    return model, CurvaDion(param_groups(model), gate=Patient())


def train_flat(rank, model, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + rank)
        inputs = torch.randn(4, model.module[0].in_features, generator=generator)
        model(inputs).square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()


@distributed.on_ranks(2)
def test_flat_shards_resume_rank_by_rank(rank, tmp_path):
    model, optimizer = flat([6, 7, 9, 3])
    train_flat(rank, model, optimizer, range(SAVED_AFTER))
    weights = [p.detach().clone() for p in model.parameters()]
    torch.save(optimizer.state_dict(), tmp_path / f"{rank}.pt")
    train_flat(rank, model, optimizer, range(SAVED_AFTER, STEPS))

    again, its = flat([6, 7, 9, 3])
    with torch.no_grad():
        for p, saved in zip(again.parameters(), weights, strict=True):
            p.copy_(saved)
    its.load_state_dict(torch.load(tmp_path / f"{rank}.pt", weights_only=True))
    train_flat(rank, again, its, range(SAVED_AFTER, STEPS))
    toy.assert_bitwise_equal(pieces(again, its), pieces(model, optimizer))
    assert vars(its.gate) == vars(optimizer.gate)


@distributed.on_ranks(2)
def test_flat_shards_do_not_move_silently(rank, tmp_path):
    """To another rank, and through torch.distributed.checkpoint."""
    model, optimizer = flat([8, 8])
    train_flat(rank, model, optimizer, range(2))
    told = distributed.gathered(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"^state_dict holds the flat shard from"):
        optimizer.load_state_dict(told[1 - rank])

    # Shards of equal length look like one replicated tensor.
    dcp.save(optimizer.state_dict(), checkpoint_id=tmp_path)
    state = optimizer.state_dict()
    dcp.load(state, checkpoint_id=tmp_path)
    # Each tensor comes from one of the ranks, which alone finds its own.
    found = distributed.gathered(raised.by(ValueError, optimizer.load_state_dict, state))
    assert any(found)
    assert all("use torch.save and torch.load on each rank" in text for text in found if text)


# -------------------------------------------------------------------- what cannot be loaded


@distributed.on_ranks(2)
def test_states_that_torch_would_lose(rank, tmp_path):
    placed = Placed(shard(Model(), init_device_mesh("cpu", (2,))))
    optimizer = placed.build()
    placed.train(optimizer, range(SAVED_AFTER))
    state = {"optimizer": get_optimizer_state_dict(placed.model, optimizer)}
    dcp.save(state, checkpoint_id=tmp_path)

    for p in placed.model.parameters():
        p.grad = torch.zeros_like(p)
    its = placed.build()
    state = {"optimizer": get_optimizer_state_dict(placed.model, its)}
    dcp.load(state, checkpoint_id=tmp_path)
    with pytest.raises(ValueError, match=r"^state_dict holds no state.*zero_grad"):
        set_optimizer_state_dict(placed.model, its, state["optimizer"])
    placed.model.zero_grad()

    how = StateDictOptions(full_state_dict=True)
    whole = get_optimizer_state_dict(placed.model, optimizer, options=how)
    said = r"^The state of .* has a 'momentum'.*full_state_dict=True"
    with pytest.raises(ValueError, match=said):
        placed.build().load_state_dict(whole)
