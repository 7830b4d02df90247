"""The simulation of variants: what its averages, codes and replays do, its bytes, and resuming."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import explore
import token_data
from explore import VARIANTS, Averaging, Mean, Replay, Replicas, Variant, World
from grids import Task

TINY = Task(
    layers=1, dim=16, heads=2, context=16, batch_size=8, data_bytes=60_000, validation_tokens=256
)
# With bfloat16 scales: of 256 numbers, in bytes.
BLOCK_BYTES = {1: 34, 2: 66, 3: 98, 4: 130}
EXACT = Variant("exact", bits=None, period=1, correction=0.0, lr=0.03)


@pytest.fixture(autouse=True)
def one_text_on_every_machine(monkeypatch):
    """The standard library, which is the default, is another one with every Python."""
    sources = sorted((Path(__file__).parents[2] / "curvadion").rglob("*.py"))
    monkeypatch.setattr(token_data, "standard_library", lambda: sources)


def weights_after(variant, steps=4, replicas=3, *, same_data=False):
    """What replicas hold after steps at the highest learning rate, and who agreed on it."""
    world = World(TINY, seed=0, replicas=replicas)
    own = Replicas(variant, world, 1 if variant.synchronised else replicas)
    agreement = (Replay if variant.replay else Averaging)(variant, world)
    window = []
    for step in range(steps):
        gradients = world.gradients(step, own.X)
        if same_data:
            gradients = {name: G[:1].expand_as(G) for name, G in gradients.items()}
        window.append((step, 1.0))
        own.step(step, 1.0, gradients)
        agreement.gather(gradients)
        if not variant.synchronised and variant.averages_after(step, len(window), steps):
            agreement.agree(own, window)
            window.clear()
    return own.X


def assert_close(X, expected, tolerance=1e-4):
    for name, x in X.items():
        torch.testing.assert_close(x, expected[name].expand_as(x), rtol=0, atol=tolerance)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_a_variant_trains(variant):
    result = explore.train(variant, TINY, steps=3, seed=0, replicas=2)
    assert 4 < result["loss"] < 7
    assert 0 < result["share"] <= 1


def test_one_replica_that_averages_exactly_is_dion():
    synchronised = weights_after(replace(EXACT, synchronised=True), replicas=1)
    assert_close(weights_after(EXACT, replicas=1), synchronised)


@pytest.mark.parametrize(
    "options",
    [{"momenta": True}, {"correction": 1.0}, {"momenta": True, "period": 3}, {"replay": True}],
    ids=str,
)
def test_agreeing_changes_nothing_where_replicas_read_the_same(options):
    alone = weights_after(replace(EXACT, period=99), same_data=True)
    X = weights_after(replace(EXACT, **options), same_data=True)
    assert_close(X, alone)


def test_a_replay_of_every_step_is_dion_on_mean_gradients():
    # AdamW's too: its moments follow from mean gradients alone.
    synchronised = weights_after(replace(EXACT, synchronised=True))
    assert_close(weights_after(replace(EXACT, replay=True)), synchronised)


def test_averaged_momenta_are_those_of_mean_gradients_while_weights_agree():
    world = World(TINY, seed=0, replicas=3)
    own, agreement = Replicas(EXACT, world, 3), Averaging(replace(EXACT, momenta=True), world)
    gradients = world.gradients(0, own.X)
    own.step(0, 1.0, gradients)
    agreement.agree(own, [(0, 1.0)])
    mean = {name: EXACT.mu * gradients[name].mean(0, keepdim=True) for name in own.M}
    assert_close(own.M, mean)


def test_a_correction_gives_momenta_the_mean_direction_and_leaves_their_spectrum():
    world, variant = World(TINY, seed=0, replicas=3), replace(EXACT, correction=1.0)
    own, agreement = Replicas(variant, world, 3), Averaging(variant, world)
    expected = {}
    for name, M in own.M.items():
        M.normal_(generator=torch.Generator().manual_seed(1))
        left, sizes, right = torch.linalg.svd(M, full_matrices=False)
        own.U[name] = left @ right
        own.X[name].sub_(own.U[name], alpha=variant.lr * explore.shape_scale(M))
        mean = own.U[name].mean(0)
        tall = M.shape[1] >= M.shape[2]
        within = right.mT @ sizes.diag_embed() @ right if tall else left * sizes[:, None] @ left.mT
        expected[name] = mean @ within if tall else within @ mean
    agreement.agree(own, [(0, 1.0)])
    assert_close(own.M, expected, tolerance=1e-4)


def test_an_orthonormalized_step_is_as_long_as_a_local_one():
    world = World(TINY, seed=0, replicas=3)
    variant = replace(EXACT, orthonormalized=True)
    own, agreement = Replicas(variant, world, 3), Averaging(variant, world)
    own.step(0, 1.0, world.gradients(0, own.X))
    agreement.agree(own, [(0, 1.0)])
    for name in world.matrices:
        step = own.X[name][0] - world.initial[name]
        lengths = torch.linalg.svdvals(step) / (variant.lr * explore.shape_scale(step))
        torch.testing.assert_close(lengths, torch.ones_like(lengths), rtol=0, atol=1e-3)


def test_what_codes_lose_is_sent_later():
    torch.manual_seed(0)
    mean, x = Mean(2, 1), torch.randn(3, 10, 30)
    exact = x.mean(0, keepdim=True)
    means = [mean("x", x) for _ in range(10)]
    assert (means[0] - exact).norm() > 0.2 * exact.norm()
    later = mean.lost["down", "x"] + mean.lost["up", "x"].mean(0, keepdim=True)
    torch.testing.assert_close(sum(means) + later, 10 * exact)
    assert mean.bytes == pytest.approx(10 * 2 * (BLOCK_BYTES[1] + BLOCK_BYTES[2]) / 2)


def bytes_of_one_average(variant, X, *, matrix):
    """What a replica sends of one tensor; half of it up, half of it down."""
    if matrix and variant.drift_rank is not None:
        return 4 * sum(X.shape) * min(variant.drift_rank, *X.shape)
    up, down = variant.uplink_bits or variant.bits, variant.bits
    if down is None:
        return 4 * X.numel()
    return -(-X.numel() // 256) * (BLOCK_BYTES[up] + BLOCK_BYTES[down]) / 2


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_bytes_follow_from_bits_and_averages(variant):
    steps = 12
    local, averages = 0, 0
    for step in range(steps):
        local += 1
        if variant.averages_after(step, local, steps):
            averages, local = averages + 1, 0
    expected, dense = 0.0, 0
    for i, (name, X) in enumerate(TINY.model().named_parameters()):
        matrix = name.startswith("blocks.") and X.ndim == 2
        every = 1 if matrix else variant.elementwise_every
        turns = [a for a in range(1, averages) if a % every == 0 == (a - i) % variant.parts]
        times = 1 + len(turns)  # and always at the last
        expected += times * bytes_of_one_average(variant, X, matrix=matrix)
        if matrix and variant.momenta:
            expected += averages * bytes_of_one_average(variant, X, matrix=matrix)
        dense += 4 * steps * X.numel()
    result = explore.train(variant, TINY, steps, seed=0, replicas=2)
    assert result["share"] == pytest.approx(1.0 if variant.synchronised else expected / dense)


def test_what_a_low_rank_leaves_of_drifts_is_sent_later():
    torch.manual_seed(0)
    mean, x = Mean(2, None), torch.randn(3, 12, 8)
    means = [mean.low_rank("x", x, 2) for _ in range(20)]
    assert all(torch.linalg.matrix_rank(each[0]) == 2 for each in means)
    total = torch.cat(means).sum(0, keepdim=True)
    torch.testing.assert_close(total + mean.lost["low rank", "x"].mean(0), 20 * x.mean(0, True))
    # A rank of 2 reaches all 8 directions in turn.
    assert (total / 20 - x.mean(0)).norm() < 0.3 * x.mean(0).norm()


def test_periods_follow_the_schedule():
    def averages(variant, steps=24):
        local, found = 0, []
        for step in range(steps):
            local += 1
            if variant.averages_after(step, local, steps):
                local = 0
                found.append(step + 1)
        return found

    assert averages(Variant("x", period=7)) == [7, 14, 21, 24]
    assert averages(Variant("x", first_half=4, period=12)) == [4, 8, 12, 24]
    assert averages(Variant("x", first_half=12, period=4)) == [12, 16, 20, 24]
    assert averages(Variant("x", averaged_start=3, period=10)) == [1, 2, 3, 13, 23, 24]


def test_records_are_added_and_not_run_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(explore, "TASK", TINY)
    file = tmp_path / "folder" / "explored.json"
    arguments = ["--steps", "2", "--out", str(file), "--only"]
    explore.main([*arguments, "default"])
    [first] = json.loads(file.read_text("utf-8"))["variants"]
    explore.main([*arguments, "default", "exact-period-6"])
    written = json.loads(file.read_text("utf-8"))
    assert written["variants"][0] == first
    assert [r["name"] for r in written["variants"]] == ["default", "exact-period-6"]
    assert written["command"].endswith("--only default exact-period-6")
    assert written["torch"] == torch.__version__
    assert first["variant"]["period"] == 6 and first["steps"] == 2 and first["seed"] == 0
    assert len(file.read_text("utf-8").splitlines()) == 2 + 1 + 2 + 1

    monkeypatch.setattr(explore, "train", None)
    capsys.readouterr()
    explore.main([*arguments, "default"])
    header, row = capsys.readouterr().out.splitlines()
    assert header.split() == ["variant", "held-out", "loss", "bytes"]
    assert row.split()[:2] == ["default", f"{first['loss']:.4f}"]


def test_a_changed_variant_is_run_again(tmp_path, monkeypatch):
    monkeypatch.setattr(explore, "TASK", TINY)
    file = tmp_path / "explored.json"
    arguments = ["--steps", "1", "--out", str(file), "--only", "default"]
    explore.main(arguments)
    monkeypatch.setattr(explore, "VARIANTS", (Variant("default", mu=0.5),))
    explore.main(arguments)
    records = json.loads(file.read_text("utf-8"))["variants"]
    assert [record["variant"]["mu"] for record in records] == [0.95, 0.5]


def test_unknown_names_are_refused_with_the_known():
    with pytest.raises(ValueError, match=r"only=\['nothing'\].*'default'"):
        explore.main(["--only", "default", "nothing"])


def test_names_tell_variants_apart():
    assert len({variant.name for variant in VARIANTS}) == len(VARIANTS)
