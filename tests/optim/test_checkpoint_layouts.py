"""A distributed checkpoint written under any layout loads under any other, and the run goes on."""

from __future__ import annotations

import copy
import itertools
import zlib
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import distributed
import shards
from curvadion import CurvaDion, Dion, Gate, QuantizedAverage, param_groups
from curvadion.integrations import ddp, fsdp
from tolerance import Rounding, assert_close, assert_within

LAYOUTS = {
    "one process": 1,
    "ddp 2": 2,
    "fsdp 4": 4,
    "hsdp 2x2": 4,
    "fsdp x tp 2x2": 4,
}
VOCABULARY, BATCH = 13, 8
SAVED_AFTER, STEPS = 3, 5


def rounding(steps):
    """Of backward passes over a batch of tokens, at every step, and of directions made of them."""
    return Rounding(torch.float32, terms=64, condition=8, steps=steps)


# -------------------------------------------------------------------- a model in every layout


class Model(nn.Module):
    """Widths that neither two nor four ranks divide; ``narrow`` leaves one of four without a row.

    ``idle`` never has a gradient; its weights decay where replicas count it as zero.
    """

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 10)
        self.up = nn.Linear(10, 21)
        self.down = nn.Linear(21, 10, bias=False)
        self.narrow = nn.Linear(10, 3, bias=False)
        self.widen = nn.Linear(3, 10, bias=False)
        self.idle = nn.Linear(10, 5, bias=False)
        self.norm = nn.LayerNorm(10)
        self.head = nn.Linear(10, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = x + self.down(torch.tanh(self.up(x)))
        x = x + self.widen(torch.tanh(self.narrow(x)))
        return self.head(self.norm(x))


@dataclass
class Placed:
    """A model in its layout; this rank reads slice ``part`` of ``parts`` of each batch."""

    model: nn.Module
    replicas: object = None
    part: int = 0
    parts: int = 1

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

    def weights(self):
        return {n.removeprefix("module."): p.detach() for n, p in self.model.named_parameters()}

    def pieces(self):
        return {name: local(p).clone() for name, p in self.weights().items()}

    def distance(self, expected):
        """The largest distance of a local piece from its part of the whole, over its norm."""
        return max(
            ((local(p) - piece(p, expected[name])).norm() / expected[name].norm()).item()
            for name, p in self.weights().items()
        )


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


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def piece(tensor, whole):
    """The part of the whole tensor that lies where the local piece does."""
    if isinstance(tensor, DTensor):
        placed = tensor.shape, tensor.device_mesh, tensor.placements
        sizes, starts = compute_local_shape_and_global_offset(*placed)
        for d, (size, start) in enumerate(zip(sizes, starts, strict=True)):
            whole = whole.narrow(d, start if size else 0, size)
    assert local(tensor).shape == whole.shape
    return whole


class Remembering(Gate):
    """Opens when the changes of momenta since it last did add up to ``enough``."""

    reads_momentum = True

    def __init__(self, enough=0.0):
        self.enough, self.held, self.signals, self.openings = enough, 0.0, [], {}

    def signal(self, before, after):
        return (after - before).abs()

    def opens(self, signal, local_steps):
        self.signals.append(signal)
        self.held += signal
        if self.held < self.enough:
            return False
        self.held = 0.0
        self.openings[f"step {len(self.signals)}"] = local_steps
        return True

    def state_dict(self):
        return {"held": self.held, "signals": self.signals, "openings": self.openings}

    def load_state_dict(self, state):
        self.held, self.signals, self.openings = (state[key] for key in self.state_dict())


def build(placed, **options):
    module = placed.model.module if hasattr(placed.model, "module") else placed.model
    groups = param_groups(
        module,
        options={"matrix": {"lr": 0.02}, "embedding": {"lr": 0.003}},
        patterns={"idle.weight": {"kind": "matrix", "weight_decay": 0.0}},
    )
    options = {"gate": Remembering(), **options}
    return CurvaDion(groups, lr=0.01, replicas=placed.replicas, **options)


def states(optimizer):
    held = optimizer.state_dict()["state"]
    tensors = {f"{i}.{key}": torch.as_tensor(t) for i, s in held.items() for key, t in s.items()}
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


def assert_bitwise_equal(these, those):
    assert list(these) == list(those)
    for name, tensor in these.items():
        assert tensor.dtype == those[name].dtype, name
        assert torch.equal(tensor, those[name]), name


# -------------------------------------------------------------------- every pair of layouts


@dataclass
class Written:
    """What a rank reports of the run that wrote a checkpoint."""

    form: object
    new_form: object
    untouched: bool


def write(rank, layout, folder):
    placed = place(layout)
    before = placed.pieces()
    new = build(placed)
    new_form = form_of(get_optimizer_state_dict(placed.model, new))
    assert_bitwise_equal(placed.pieces(), before)
    untouched = new.progress.steps == 0 and new.gate.signals == [] and new.report is None

    optimizer = build(placed)
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
    return Written(form_of(optimizer_state), new_form, untouched)


def straight(rank):
    placed = place("one process")
    placed.train(build(placed), range(STEPS))
    return placed.pieces()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Their folder, and what the ranks that wrote them report, by layout."""
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    return folder, {
        layout: distributed.run(world, write, layout, folder) for layout, world in LAYOUTS.items()
    }


@pytest.fixture(scope="module")
def expected():
    """The weights of the uninterrupted run in one process."""
    return distributed.run(1, straight)[0]


class Loads:
    """Holds what the first of several checkpoints loads; the others must load the same."""

    def __init__(self):
        self.first = None

    def add(self, name, model, optimizer):
        held = {key: local(p.detach()).clone() for key, p in model.named_parameters()}
        names = [n for group in optimizer.param_groups for n in group.get("param_names", ())]
        for key, tensor in states(optimizer).items():
            # This right factor stays as it began unless replicas count the gradient as zero.
            if not (names and names[int(key.split(".")[0])] == "idle.weight"):
                held[key] = tensor
        if self.first is None:
            self.first = held
        assert list(held) == list(self.first), name
        for key, tensor in held.items():
            wanted = self.first[key]
            assert tensor.dtype == wanted.dtype, (name, key)
            assert_close(tensor, wanted, rounding(SAVED_AFTER), what=(name, key))


def ending_before(name, layouts):
    """All layouts, the one before ``name`` last: another one for each."""
    names = list(layouts)
    first = names.index(name)
    return names[first:] + names[:first]


def resume(rank, layout, folder, expected):
    """The distance from the uninterrupted run after loading each layout's checkpoint.

    All load the same, so the last one goes on for all.
    """
    placed = place(layout)
    loads = Loads()
    for saved in ending_before(layout, LAYOUTS):
        optimizer = build(placed)
        model_state, optimizer_state = get_state_dict(placed.model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=f"{folder}/{saved}")
        set_state_dict(
            placed.model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        assert_gate_is_loaded(optimizer)
        loads.add(saved, placed.model, optimizer)
    return go_on(placed, optimizer, expected)


def assert_gate_is_loaded(optimizer):
    assert optimizer.progress.steps == SAVED_AFTER
    assert len(optimizer.gate.signals) == SAVED_AFTER
    assert optimizer.gate.openings == {"step 1": 0, "step 2": 0, "step 3": 0}


def go_on(placed, optimizer, expected):
    placed.train(optimizer, range(SAVED_AFTER, STEPS))
    return placed.distance(expected)


@pytest.mark.numeric
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_checkpoint_goes_on_in_every_layout(checkpoints, expected, layout):
    folder, _ = checkpoints
    for distance in distributed.run(LAYOUTS[layout], resume, layout, folder, expected):
        assert_within(distance, rounding(STEPS))


def test_state_is_of_one_form_in_all_layouts_and_on_all_ranks(checkpoints):
    """Also of parameters without a gradient and without rows here, and of new optimizers.

    torch's first call, which creates the states of these, leaves weights and gate alone.
    """
    written = [report for reports in checkpoints[1].values() for report in reports]
    assert len(written) == sum(LAYOUTS.values())
    tensors, _ = written[0].form
    assert tensors.keys() == dict(Model().named_parameters()).keys()
    assert all(tensors.values())
    for report in written:
        assert report.form == report.new_form == written[0].form
        assert report.untouched


# -------------------------------------------------------------------- the same layout, options


def resume_bitwise(rank, layout, folder, options):
    after = range(SAVED_AFTER, SAVED_AFTER + 3)
    placed = place(layout)
    optimizer = build(placed, **options)
    reports = placed.train(optimizer, range(SAVED_AFTER))
    optimizer.synchronize(exact=True)
    how = StateDictOptions(flatten_optimizer_state_dict=True, cpu_offload=True)
    state = {
        "model": get_model_state_dict(placed.model, options=how),
        "optimizer": get_optimizer_state_dict(placed.model, optimizer, options=how),
    }
    dcp.save(state, checkpoint_id=folder)
    reports += placed.train(optimizer, after)

    again = place(layout)
    with torch.no_grad():
        for p in again.model.parameters():
            local(p).zero_()
    its = build(again, **options)
    state = {
        "model": get_model_state_dict(again.model, options=how),
        "optimizer": get_optimizer_state_dict(again.model, its, options=how),
    }
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(again.model, state["model"], options=how)
    set_optimizer_state_dict(again.model, its, state["optimizer"], options=how)
    assert again.train(its, after) == reports[SAVED_AFTER:]
    assert_bitwise_equal(again.pieces(), placed.pieces())
    assert_bitwise_equal(states(its), states(optimizer))
    assert vars(its.gate) == vars(optimizer.gate)
    assert its.progress == optimizer.progress
    momenta = {t.dtype for key, t in states(its).items() if key.endswith((".momentum", ".Q"))}
    return [report.gate_open for report in reports], momenta


CLOSING = {
    "narrow": {"local_step": "dion", "momentum_dtype": "bfloat16", "q_dtype": "bfloat16"},
    "gradient": {"local_step": "gradient", "local_lr": 0.01, "momentum_rule": "plain"},
    "quantized": {"sync": QuantizedAverage(fragments=3, spectrum_decay=0.8)},
}


SAME_LAYOUT = [("ddp 2", "narrow"), ("fsdp x tp 2x2", "gradient"), ("hsdp 2x2", "quantized")]


@pytest.mark.parametrize(("layout", "closing"), SAME_LAYOUT)
def test_same_layout_goes_on_bitwise(layout, closing, tmp_path):
    # Slices of a batch have noisier gradients. Closes before and after the checkpoint.
    enough = 0.15 if layout in ("ddp 2", "hsdp 2x2") else 0.08
    options = {"gate": Remembering(enough), **CLOSING[closing]}
    answers = distributed.run(LAYOUTS[layout], resume_bitwise, layout, str(tmp_path), options)
    for opened, momenta in answers:
        assert opened == answers[0][0]
        assert set(opened[:SAVED_AFTER]) == set(opened[SAVED_AFTER:]) == {True, False}
        narrow = "momentum_dtype" in options
        assert momenta == {torch.bfloat16 if narrow else torch.float32}


# -------------------------------------------------------------------- whole states


def load_whole(rank, layout, folder, saved_by, expected):
    """The distance after loading what rank 0 gathered, given to all ranks and to rank 0 alone."""
    placed = place(layout)
    loads = Loads()
    for saved in saved_by:
        whole = torch.load(f"{folder}/{saved}.pt", weights_only=True)
        for broadcast in (False, True):
            model_state, optimizer_state = copy.deepcopy(whole)
            if broadcast and rank:
                model_state, optimizer_state = {}, {}
            how = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
            optimizer = build(placed)
            set_model_state_dict(placed.model, model_state, options=how)
            set_optimizer_state_dict(placed.model, optimizer, optimizer_state, options=how)
            assert_gate_is_loaded(optimizer)
            loads.add((saved, broadcast), placed.model, optimizer)
    return go_on(placed, optimizer, expected)


@pytest.mark.numeric
@pytest.mark.parametrize("layout", ["one process", "ddp 2", "fsdp 4"])
def test_whole_states_go_on_in_every_layout(checkpoints, expected, layout):
    names = list(LAYOUTS)
    saved_by = {layout, names[names.index(layout) - 1]}
    arguments = (layout, checkpoints[0], sorted(saved_by), expected)
    for distance in distributed.run(LAYOUTS[layout], load_whole, *arguments):
        assert_within(distance, rounding(STEPS))


# -------------------------------------------------------------------- matrices inside parameters


class Views(nn.Module):
    """Stacked experts of either orientation, and one weight of three matrices, one transposed."""

    def __init__(self, mesh=None, layout=None):
        super().__init__()
        for name, shape in {"experts": (5, 6, 4), "wide": (3, 4, 6), "qkv": (13, 6)}.items():
            full = random(shape, name)
            if mesh is not None:
                full = shards.shard(full, layout[name == "qkv"], mesh)
            setattr(self, name, nn.Parameter(full))

    def groups(self):
        return [
            {"params": [self.experts, self.wide], "stack_dims": 1},
            {"params": [self.qkv], "row_blocks": [8, 3, 2]},
        ]


# Mesh, how stacked and flat weights are sharded, and the axis of replicas.
VIEW_LAYOUTS = {
    "one process": ((1,), None, None),
    "experts 4": ((4,), (("0",), ("0",)), None),
    "columns 2": ((2,), (("2",), ("0",)), None),
    "replicas x experts": ((2, 2), (("r", "0"), ("r", "0")), 0),
    "experts x rows, strided": ((2, 2), (("0", "1"), ("0s", "0")), None),
}


def random(shape, *key):
    generator = torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))
    return torch.randn(shape, generator=generator)


class PlacedViews:
    """Like Placed, with gradients drawn from a seed: the mean of two replicas' is what counts."""

    def __init__(self, name):
        sizes, self.layout, axis = VIEW_LAYOUTS[name]
        self.mesh = init_device_mesh("cpu", sizes) if self.layout else None
        self.model = Views(self.mesh, self.layout)
        self.replicas = None if axis is None else self.mesh.get_group(axis)
        self.halves = [0, 1] if axis is None else [self.mesh.get_local_rank(axis)]

    def build(self):
        return Dion(self.model.groups(), rank_fraction=0.4, replicas=self.replicas)

    def train(self, optimizer, steps):
        for step in steps:
            for name, p in self.model.named_parameters():
                halves = [random(p.shape, name, step, half) for half in self.halves]
                mean = torch.stack(halves).mean(dim=0)
                p.grad = self.sharded(name, mean)
            optimizer.step()
        optimizer.zero_grad()

    def sharded(self, name, full):
        return shards.shard(full, self.layout[name == "qkv"], self.mesh) if self.mesh else full

    def distance(self, expected):
        return max(
            ((local(p.detach()) - local(self.sharded(name, expected[name]))).norm()).item()
            / expected[name].norm().item()
            for name, p in self.model.named_parameters()
        )


def write_views(rank, layout, folder):
    placed = PlacedViews(layout)
    optimizer = placed.build()
    placed.train(optimizer, range(SAVED_AFTER))
    optimizer.synchronize()
    state = get_optimizer_state_dict(placed.model, optimizer)
    dcp.save(
        {"model": placed.model.state_dict(), "optimizer": state},
        checkpoint_id=f"{folder}/{layout}",
    )
    form = form_of(state)
    placed.train(optimizer, range(SAVED_AFTER, STEPS))
    return form, {name: local(p.detach()) for name, p in placed.model.named_parameters()}


def resume_views(rank, layout, folder, expected):
    placed = PlacedViews(layout)
    loads = Loads()
    for saved in ending_before(layout, VIEW_LAYOUTS):
        optimizer = placed.build()
        model_state, optimizer_state = get_state_dict(placed.model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=f"{folder}/{saved}")
        set_optimizer_state_dict(placed.model, optimizer, state["optimizer"])
        placed.model.load_state_dict(state["model"])
        loads.add(saved, placed.model, optimizer)
    placed.train(optimizer, range(SAVED_AFTER, STEPS))
    return placed.distance(expected)


def world(layout):
    return torch.Size(VIEW_LAYOUTS[layout][0]).numel()


@pytest.fixture(scope="module")
def view_checkpoints(tmp_path_factory):
    """Their folder, and the uninterrupted run's weights."""
    folder = str(tmp_path_factory.mktemp("views"))
    written = {
        layout: distributed.run(world(layout), write_views, layout, folder)
        for layout in VIEW_LAYOUTS
    }
    form, weights = written["one process"][0]
    assert set(form[0]["qkv"]) == {"momentum", "momentum_norm", "R_scale", "Q", "Q_rows"}
    assert all(its == form for reports in written.values() for its, _ in reports)
    return folder, weights


@pytest.mark.numeric
@pytest.mark.parametrize("layout", VIEW_LAYOUTS)
def test_stacked_experts_and_row_blocks_move_between_layouts(view_checkpoints, layout):
    for distance in distributed.run(world(layout), resume_views, layout, *view_checkpoints):
        assert_within(distance, rounding(STEPS))


# -------------------------------------------------------------------- flat shards of FSDP1


def flat(sizes, **options):
    torch.manual_seed(0)
    layers = [nn.Linear(m, n, bias=False) for m, n in itertools.pairwise(sizes)]
    model = FullyShardedDataParallel(
        nn.Sequential(*layers), use_orig_params=True, device_id=torch.device("cpu")
    )
    fsdp.declare_flat_shards(model)
    return model, CurvaDion(param_groups(model), gate=Remembering(), **options)


def train_flat(rank, model, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + rank)
        inputs = torch.randn(4, model.module[0].in_features, generator=generator)
        model(inputs).square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()


def resume_flat(rank, folder):
    model, optimizer = flat([6, 7, 9, 3])
    train_flat(rank, model, optimizer, range(SAVED_AFTER))
    weights = [p.detach().clone() for p in model.parameters()]
    torch.save(optimizer.state_dict(), f"{folder}/{rank}.pt")
    train_flat(rank, model, optimizer, range(SAVED_AFTER, STEPS))

    again, its = flat([6, 7, 9, 3])
    with torch.no_grad():
        for p, saved in zip(again.parameters(), weights, strict=True):
            p.copy_(saved)
    its.load_state_dict(torch.load(f"{folder}/{rank}.pt", weights_only=True))
    train_flat(rank, again, its, range(SAVED_AFTER, STEPS))
    assert_bitwise_equal(states(its), states(optimizer))
    for p, q in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q)
    assert vars(its.gate) == vars(optimizer.gate)


def test_flat_shards_resume_rank_by_rank(tmp_path):
    distributed.run(2, resume_flat, str(tmp_path))


def error_of(function):
    """What it raises, as text."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def move_flat(rank, folder):
    """What comes of loading another rank's state, and of torch.distributed.checkpoint."""
    model, optimizer = flat([8, 8])
    train_flat(rank, model, optimizer, range(2))
    errors = {}
    told = [None, None]
    dist.all_gather_object(told, optimizer.state_dict())
    errors["other rank"] = error_of(lambda: optimizer.load_state_dict(told[1 - rank]))
    whole = Dion(param_groups(nn.Sequential(nn.Linear(8, 8, bias=False))))
    errors["other layout"] = error_of(lambda: whole.load_state_dict(told[rank]))

    # Shards of equal length look like one replicated tensor.
    dcp.save(optimizer.state_dict(), checkpoint_id=folder)
    state = optimizer.state_dict()
    dcp.load(state, checkpoint_id=folder)
    errors["bare checkpoint"] = error_of(lambda: optimizer.load_state_dict(state))
    return errors


def test_flat_shards_do_not_move_silently(tmp_path):
    errors = distributed.run(2, move_flat, str(tmp_path))
    for of_rank in errors:
        assert of_rank["other rank"].startswith("ValueError: state_dict holds the flat shard from")
        assert "shape" in of_rank["other layout"]
    # Each tensor comes from one of the ranks, which alone finds its own.
    found = [of_rank["bare checkpoint"] for of_rank in errors if of_rank["bare checkpoint"]]
    assert found
    assert all("nor through torch.distributed.checkpoint" in text for text in found)


# -------------------------------------------------------------------- what cannot be loaded


def load_badly(rank, folder):
    placed = Placed(shard(Model(), init_device_mesh("cpu", (2,))))
    optimizer = build(placed)
    placed.train(optimizer, range(SAVED_AFTER))
    state = {"optimizer": get_optimizer_state_dict(placed.model, optimizer)}
    dcp.save(state, checkpoint_id=folder)
    errors = {}

    for p in placed.model.parameters():
        p.grad = torch.zeros_like(p)
    its = build(placed)
    state = {"optimizer": get_optimizer_state_dict(placed.model, its)}
    dcp.load(state, checkpoint_id=folder)
    errors["gradients"] = error_of(
        lambda: set_optimizer_state_dict(placed.model, its, state["optimizer"])
    )
    placed.model.zero_grad()

    how = StateDictOptions(full_state_dict=True)
    whole = get_optimizer_state_dict(placed.model, optimizer, options=how)
    errors["whole"] = error_of(lambda: build(placed).load_state_dict(whole))
    return errors


def test_states_that_torch_would_lose(tmp_path):
    for errors in distributed.run(2, load_badly, str(tmp_path)):
        assert errors["gradients"].startswith("ValueError: state_dict holds no state")
        assert "zero_grad" in errors["gradients"]
        assert errors["whole"].startswith("ValueError: state_dict holds a 'momentum'")
        assert "StateDictOptions(full_state_dict=True)" in errors["whole"]
