"""QK-clip, cautious weight decay and the floor of rows against their equations, on any shards."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from curvadion import Dion
from curvadion.hooks import Attention, CautiousWeightDecay, QKClip, RowFloor
from support.references.tolerance import Rounding, assert_close
from support.runs import distributed
from support.runs.flat_shards import declared, my_range
from support.runs.seeded import gradient, weights
from support.runs.shards import piece, shard

pytestmark = pytest.mark.numeric

LR, DECAY = 0.3, 0.5
FLOAT64 = Rounding(torch.float64, terms=12)
# Four heads of queries with three rows each, which share two heads of keys.
SHAPES = {"q": (12, 8), "k": (6, 8), "wide": (5, 16), "turned": (8, 12)}
STORED_TURNED = ("turned",)  # with the input first
ATTENTION = Attention("q", "k", heads=4, head_dim=3, key_heads=2)
MAXIMA = [torch.tensor([50.0, 400.0, 10.0, math.nan]), torch.tensor([90.0, 3.0, 10.0, 200.0])]
GAMMA = [100 / 400, 100 / 200]  # of both heads of keys, tau = 100


def optimizer_of(X, **options):
    """Of parameters by name."""
    options = {"lr": LR, "weight_decay": DECAY, "direction": "polar", **options}
    turned = [item for item in X.items() if item[0] in STORED_TURNED]
    groups = [{"params": [item for item in X.items() if item[0] not in STORED_TURNED]}]
    if turned:
        groups.append({"params": turned, "input_first": True})
    return Dion(groups, replicas="single", **options)


def unsharded(*names):
    return {name: nn.Parameter(weights(SHAPES[name]).double()) for name in names or SHAPES}


def step(optimizer, X, number=0):
    for name, x in X.items():
        x.grad = gradient(SHAPES[name], number, 0).double()
    optimizer.step()


class Looks:
    """What a step begins with, by name: X, U and the factor of U."""

    def __init__(self):
        self.seen = {}

    def __call__(self, batch):
        for m in batch:
            self.seen[m.name] = m.X.clone(), m.U.clone(), LR * m.scale


def outputs_first(name, x):
    return x.mT if name in STORED_TURNED else x


# -------------------------------------------------------------------- equations


def test_weights_decay_where_the_step_shrinks_them():
    X = unsharded()
    with torch.no_grad():
        X["q"][3] = 0.0
    optimizer = optimizer_of(X)
    looks = Looks()
    for hook in (looks, CautiousWeightDecay()):
        optimizer.register_update_hook(hook)
    step(optimizer, X)
    for name, x in X.items():
        before, U, rate = looks.seen[name]
        wanted = before.clone()
        for i, row in enumerate(before.tolist()):
            for j, w in enumerate(row):
                u = float(U[i, j])
                # x <- x - lr (u + wd [u x >= 0] x)
                wanted[i, j] = w - rate * u - (LR * DECAY * w if u * w >= 0 else 0.0)
        assert_close(outputs_first(name, x), wanted, FLOAT64, elementwise=True, what=name)


def test_rows_move_by_a_share_of_their_length():
    X = unsharded()
    with torch.no_grad():
        X["q"][3] = 0.0
        X["q"][5] *= 100
    optimizer = optimizer_of(X, weight_decay=0.0)
    looks = Looks()
    for hook in (looks, RowFloor(ratio=0.1)):
        optimizer.register_update_hook(hook)
    step(optimizer, X)
    lifted = 0
    for name, x in X.items():
        before, U, rate = looks.seen[name]
        wanted = before.clone()
        for i, row in enumerate(before):
            # u_i <- u_i max(1, ratio |x_i| / |u_i|), with lr u = rate U
            ratio = float(row.norm() / (U[i].norm() * rate / LR))
            lifted += 0.1 * ratio > 1
            wanted[i] -= rate * max(1.0, 0.1 * ratio) * U[i]
        assert_close(outputs_first(name, x), wanted, FLOAT64, elementwise=True, what=name)
    assert 0 < lifted < 31


def test_a_row_without_an_update_stays():
    X = unsharded("q")
    optimizer = optimizer_of(X, weight_decay=0.0, direction="dion2", rank_fraction=0.25)
    optimizer.register_update_hook(lambda batch: [m.U[2].zero_() for m in batch])
    optimizer.register_update_hook(RowFloor())
    before = X["q"].detach().clone()
    step(optimizer, X)
    assert torch.equal(X["q"][2], before[2]) and torch.isfinite(X["q"]).all()


def observed(optimizer, attention=ATTENTION):
    """QK-clip, registered, with the logits of two micro-batches."""
    clip = QKClip(optimizer, [attention], threshold=100.0)
    optimizer.register_update_hook(clip)
    for maxima in MAXIMA:
        clip.observe(0, maxima)
    return clip


@pytest.mark.parametrize("direction", ["polar", "low_rank"])
def test_heads_with_large_logits_are_scaled_after_the_step(direction):
    X, Y = unsharded("q", "k"), unsharded("q", "k")
    optimizer, plain = (optimizer_of(P, direction=direction) for P in (X, Y))
    observed(optimizer)
    step(optimizer, X)
    step(plain, Y)
    roots = [math.sqrt(gamma) for gamma in GAMMA]
    of_rows = {"q": [roots[i // 6] for i in range(12)], "k": [roots[i // 3] for i in range(6)]}
    for name, factors in of_rows.items():
        wanted = torch.stack([f * y for f, y in zip(factors, Y[name].detach(), strict=True)])
        assert_close(X[name], wanted, FLOAT64, what=name)
    # The logits of an input become gamma times as large: h is a head, of keys h // 2.
    one, other = weights((8,)).double(), weights((8,), 1).double()
    for h in range(4):
        logits = []
        for P in (X, Y):
            queries = P["q"].detach()[3 * h : 3 * h + 3] @ one
            logits.append(queries @ (P["k"].detach()[3 * (h // 2) : 3 * (h // 2) + 3] @ other))
        assert_close(logits[0], GAMMA[h // 2] * logits[1], FLOAT64)
    # What has been observed counts once.
    before = {name: x.detach().clone() for name, x in X.items()}
    step(optimizer, X, 1)
    for name, y in Y.items():
        y.data.copy_(before[name])
    step(plain, Y, 1)
    for name, x in X.items():
        assert_close(x, Y[name], Rounding(torch.float64, terms=12, condition=100))


@pytest.mark.parametrize("row_blocks", [1, [12, 6, 6], 8])
def test_a_fused_projection_has_queries_and_keys_in_its_rows(row_blocks):
    results = []
    for clips in (False, True):
        x = nn.Parameter(weights((24, 8)).double())
        optimizer = Dion(
            [{"params": [("qkv", x)], "row_blocks": row_blocks}],
            replicas="single",
            direction="polar",
        )
        if clips:
            fused = Attention("qkv", "qkv", heads=4, head_dim=3, key_heads=2, key_row=12)
            observed(optimizer, fused)
        x.grad = gradient((24, 8), 0, 0).double()
        optimizer.step()
        results.append(x.detach())
    plain, clipped = results
    roots = [math.sqrt(gamma) for gamma in GAMMA]
    factors = [roots[i // 6] for i in range(12)] + [roots[i // 3] for i in range(6)] + [1.0] * 6
    assert_close(clipped, torch.tensor(factors, dtype=torch.float64)[:, None] * plain, FLOAT64)


def test_wrong_attentions_are_errors():
    optimizer = optimizer_of(unsharded("q", "k"))
    with pytest.raises(ValueError, match="'v' is not the name of a matrix"):
        QKClip(optimizer, [Attention("q", "v", heads=4, head_dim=3)])
    with pytest.raises(ValueError, match="rows up to 12 of 'k', which has 6"):
        QKClip(optimizer, [Attention("q", "k", heads=4, head_dim=3)])
    with pytest.raises(ValueError, match="key_heads=3 does not divide heads=4"):
        Attention("q", "k", heads=4, head_dim=3, key_heads=3)
    with pytest.raises(ValueError, match=r"must have shape \(4,\)"):
        QKClip(optimizer, [ATTENTION]).observe(0, torch.zeros(2))


# -------------------------------------------------------------------- runs


STEPS = 2  # the second from what the first has left, with other logits
DIRECTIONS = {
    "polar": {"direction": "polar", "gather": "never"},
    "owners": {"direction": "polar"},
    "low_rank": {"direction": "low_rank", "rank_fraction": 0.5},
    "nordion2": {"direction": "nordion2", "rank_fraction": 0.5},
}


def floor_by_the_mean(batch):
    """Rows are 0.9 times as long as the mean row or longer."""
    lengths = [squares.sqrt() for squares in batch.row_sums([m.U.square() for m in batch])]
    for m, length, total in zip(batch, lengths, batch.sums(lengths), strict=True):
        floor = 0.9 * total / m.shape[0]
        m.U *= (floor / length.clamp_min(1e-30)).clamp_min(1.0)[:, None]


def all_hooks(optimizer):
    optimizer.register_update_hook(floor_by_the_mean)
    optimizer.register_update_hook(RowFloor(0.2))
    optimizer.register_update_hook(CautiousWeightDecay())
    clip = QKClip(optimizer, [ATTENTION])
    optimizer.register_update_hook(clip)
    return clip


def train(X, steps, place, options, saved=None):
    """Take the steps; return the optimizer.

    Args:
        X: parameters by name.
        steps: their numbers.
        place: a whole gradient and its name as the parameter's.
        options: of the optimizer.
        saved: a state to begin from.
    """
    optimizer = optimizer_of(X, **options)
    clip = all_hooks(optimizer)
    if saved is not None:
        optimizer.load_state_dict(saved)
    for number in steps:
        clip.observe(0, MAXIMA[number % 2] * 3)
        for name, x in X.items():
            x.grad = place(name, gradient(SHAPES[name], number, 0).double())
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_resumed_run_is_the_same_bit_for_bit(direction):
    def whole(name, G):
        return G

    X, Y = unsharded(), unsharded()
    train(X, range(4), whole, DIRECTIONS[direction])
    earlier = train(Y, range(2), whole, DIRECTIONS[direction])
    train(Y, range(2, 4), whole, DIRECTIONS[direction], earlier.state_dict())
    assert all(map(torch.equal, X.values(), Y.values()))


def on_mesh(sizes, layout):
    """Parameters over a mesh, where gradients go, and what a rank has of a whole matrix."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=tuple("ab"[: len(sizes)]))
    X = {name: nn.Parameter(shard(x.detach(), layout, mesh)) for name, x in unsharded().items()}
    return X, lambda _, G: shard(G, layout, mesh), lambda _, x: piece(x, layout, mesh)


# Where the flat shards of each rank end: most cut a row, one is empty.
ENDS = {
    "q": (13, 50, 50, 96),
    "k": (5, 20, 31, 48),
    "wide": (3, 18, 40, 80),
    "turned": (13, 50, 62, 96),
}


def in_flat_shards():
    """The same in flat shards over four ranks."""
    place = dist.get_rank()

    def mine(name, x):
        start, stop = my_range(ENDS[name], place)
        return x.reshape(-1)[start:stop].clone()

    X = {}
    for name, x in unsharded().items():
        X[name] = declared(x.detach(), ENDS[name], place, dist.group.WORLD)
    return X, mine, mine


LAYOUTS = {
    "rows over 2": (2, on_mesh, (2,), ("0",)),
    "rows and columns over 2 x 2": (4, on_mesh, (2, 2), ("0", "1")),
    "flat shards of 4": (4, in_flat_shards),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_take_the_steps_of_one_process(layout):
    world, *how = LAYOUTS[layout]
    distributed.run(world, compare, *how)


def compare(rank, make, *arguments):
    for name, options in DIRECTIONS.items():
        whole = unsharded()
        train(whole, range(STEPS), lambda _, G: G, options)
        X, place, part = make(*arguments)
        train(X, range(STEPS), place, options)
        for key, x in X.items():
            here = x.detach()
            here = here.to_local() if hasattr(here, "to_local") else here
            wanted = part(key, whole[key].detach())
            scale = float(whole[key].detach().norm())
            rounding = Rounding(torch.float64, terms=24, condition=1e6, steps=STEPS)
            assert_close(here, wanted, rounding, scale=scale, what=(name, key))
