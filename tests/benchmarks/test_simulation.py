"""Simulated replicas go where real processes go, for the bytes that these send."""

from __future__ import annotations

import json
import math
import multiprocessing.dummy
import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import convergence
import corpora
import distributed
import ladder
import simulate
from curvadion import WireMeter
from curvadion.sync.coded_mean import RESIDUAL_DTYPES
from grids import SIZES, Run, Task
from scheduled import Scheduled
from simulation.inner import Inner, Replicas
from simulation.outer import Average, Codes, QuantizedAverage
from simulation.rivals import OuterMomentum, OuterStep, PowerSGD, Sparse, SparseAverage
from simulation.training import SYNCHRONISED, Training, trained
from simulation.world import World
from tolerance import Rounding, assert_close, assert_within

pytestmark = pytest.mark.numeric
STEPS, REPLICAS = 16, 2
TINY = Task(
    layers=1, dim=16, heads=2, context=16, batch_size=4, data_bytes=60_000, validation_tokens=256
)
# Roundings move a few codes to their neighbours: less with 8 bits than with 2.
TOLERANCE = {
    "ours": 0.02,
    "coded_gradients": 0.005,
    "2 bits": 0.1,
    "3 bits": 0.1,
    "coded_gradients in 3 bits": 0.1,
}
OURS = {"lr": 0.02, "budget": 0.08, "bits": 8, "steps": 8}
SIMULATED = (*SYNCHRONISED, "diloco", "powersgd", "coded_gradients")  # under the names of the cases
# The real method of a simulated one, and its settings.
REAL = {
    "adamw": ("adamw", {"lr": 0.01}, {}),
    # Few steps: directions amplify the roundings of those before them.
    "muon": ("muon", {"lr": 0.02, "steps": 8}, {}),
    "muon with a look-ahead of 2": (
        "muon",
        {"lr": 0.02, "look_ahead": 2.0, "steps": 8},
        {"nesterov": 2.0},
    ),
    "dion": (
        "dion_nesterov",
        {"lr": 0.02, "look_ahead": 1.0, "steps": 2},
        {"rank_fraction": 1.0},
    ),
    "diloco": ("diloco_adamw", {"lr": 0.01, "budget": 3 / 16, "bits": 0}, {"period": 6}),
    "powersgd": ("powersgd", {"lr": 0.01, "budget": 0.3}, {"rank": 2}),
    "ours": ("ours", OURS, {"wire_budget": 0.08, "bits": 8}),
    # Two steps: a code that moves to its neighbour moves far, and later steps farther.
    "2 bits": ("ours", {**OURS, "bits": 2, "steps": 2}, {"wire_budget": 0.08, "bits": 2}),
    "3 bits": ("ours", {**OURS, "bits": 3, "steps": 2}, {"wire_budget": 0.08, "bits": 3}),
    "in fragments": (
        "ours",
        {**OURS, "fragments": 3},
        {"wire_budget": 0.08, "bits": 8, "parts": 3},
    ),
    "delayed": ("ours", {**OURS, "delay": 2}, {"wire_budget": 0.08, "bits": 8, "delay": 2}),
    "spectra over openings": (
        "ours",
        {**OURS, "spectrum_decay": 0.8},
        {"wire_budget": 0.08, "bits": 8, "spectra": 0.8},
    ),
    "coded_gradients": (
        "coded_gradients",
        # Codes at every step: roundings are a thousand times as large after 16 steps as after 4.
        {"lr": 0.02, "budget": 0.4, "bits": 8, "steps": 4},
        {"bits": 8},
    ),
    "coded_gradients in 3 bits": (
        "coded_gradients",
        {"lr": 0.02, "budget": 0.2, "bits": 3, "steps": 2},
        {"bits": 3},
    ),
    "without corrections": (
        "ours",
        {**OURS, "align": 0.0, "polar": 0.0},
        {"wire_budget": 0.08, "bits": 8, "momenta": False, "polar": False},
    ),
}


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setitem(SIZES, "tiny", TINY)


def unit_columns(*shape, **_):
    """The first right factors of Dion and PowerSGD, here and there."""
    return torch.eye(*shape[-2:]).repeat(*shape[:-2], 1, 1)


def really_trained(rank, run):
    """Module-level, for the workers: the weights by name, and what was sent."""
    trial = convergence.Trial(run, torch.device("cpu"))  # DDP sends the weights
    float32 = dict.fromkeys(RESIDUAL_DTYPES, torch.float32)  # as simulated residuals
    with (
        mock.patch("torch.randn", unit_columns),
        mock.patch.dict(RESIDUAL_DTYPES, float32),
        WireMeter() as meter,
    ):
        for step in range(run.steps):
            trial.step(step)
        trial.method.finish()
    weights = {name: X.detach().clone() for name, X in trial.model.named_parameters()}
    return weights, meter.total_sent


@pytest.mark.parametrize("kind", REAL)
def test_a_simulation_follows_real_processes(kind):
    method, own, settings = REAL[kind]
    own = {"steps": STEPS, **own}
    steps = own["steps"]
    run = Run("tiny", TINY, method, own["lr"], 0, steps, dict(settings), replicas=REPLICAS)
    (real, sent), *_ = distributed.run(REPLICAS, really_trained, run)
    training = Training(
        next((name for name in SIMULATED if kind.startswith(name)), "ours"),
        size="tiny",
        batch_size=TINY.batch_size,
        replicas=REPLICAS,
        **own,
    )
    world = World(training.task, 0, REPLICAS)
    with mock.patch("torch.randn", unit_columns):
        replicas, share = trained(training, world)
    tolerance = TOLERANCE.get(kind, TOLERANCE.get(training.method))
    for name, X in replicas.X.items():
        moved = (real[name] - world.initial[name]).norm()
        if tolerance is None:
            condition = float(real[name].norm() / moved)
            amplifying = 1 if "adamw" in method else steps
            rounding = Rounding(torch.float32, TINY.dim, condition, amplifying)
            assert_within(float((X[0] - real[name]).norm() / moved), rounding, what=name)
        else:
            assert (X[0] - real[name]).norm() < tolerance * moved, name
    if training.method not in SYNCHRONISED:
        dense = 4 * steps * world.parameters * 2 * (REPLICAS - 1) / REPLICAS
        # What ranks tell each other once, at the first step, weighs more in two steps.
        assert share == pytest.approx(sent / dense, rel=0.03 if steps > 2 else 0.06)


def test_held_out_files_are_not_trained_on():
    for corpus in corpora.CORPORA:
        training, held_out = corpora.text(corpus, 3_000_000)
        assert training.stop == held_out.start
        assert held_out.start in training.tokens.ends
        assert 0.05 <= (held_out.stop - held_out.start) / held_out.stop <= 0.1


def test_what_codes_lose_is_sent_later():
    torch.manual_seed(0)
    codes, x = Codes(2), {"x": torch.randn(3, 10, 30), "y": torch.randn(3, 7)}
    means = [codes.means(x) for _ in range(10)]
    [lost] = codes._lost.values()
    for name, rows in (("x", slice(0, 2)), ("y", slice(2, 3))):
        exact = x[name].mean(0)
        assert (means[0][name][0] - exact).norm() > 0.1 * exact.norm()
        left = lost[:, rows].flatten(1)[:, : exact.numel()].mean(0).view_as(exact)
        assert_close(
            sum(m[name][0] for m in means) + left, 10 * exact, Rounding(torch.float32, 256)
        )


def test_sparse_messages_are_the_largest_numbers_and_what_was_left_follows():
    world = World(TINY, 0, REPLICAS)
    sparse = SparseAverage(Sparse(1, 1.0, 0.0, kept=2, chunk=8, decay=1.0), world)
    x = torch.tensor([[1.0, -9, 2, 0, 0, 5, 0, 0], [0, 0, 0, 0, 0, 0, 3, -4]])[:, None]
    first = sparse._mean("x", x)
    expected = torch.tensor([[0, -9, 0, 0, 0, 5, 3, -4]])[:, None] / 2
    assert torch.equal(first, expected)
    assert torch.equal(sparse._mean("x", 0 * x)[0, 0, :3], torch.tensor([0.5, 0, 1]))


def test_chunks_hold_no_numbers_but_a_tensors_own():
    settings = Sparse(1, kept=4, chunk=8)
    assert [settings.chunks(size) for size in (3, 8, 10, 16)] == [(1, 3), (1, 8), (2, 5), (2, 8)]
    sparse = SparseAverage(settings, World(TINY, 0, REPLICAS))
    x = torch.tensor([[1.0, 2, 9], [-1, 2, 9]])
    assert torch.equal(sparse._mean("x", x), torch.tensor([[0, 1.5, 9]]))


def test_low_rank_gradients_are_means_and_what_they_missed_follows():
    torch.manual_seed(0)
    world = World(TINY, 0, REPLICAS)
    G = {name: torch.randn(REPLICAS, *x.shape) for name, x in world.initial.items()}
    sgd, sums = PowerSGD(1, world), {name: torch.zeros_like(each[0]) for name, each in G.items()}
    for step in range(8):
        sent = sgd.gradients(step, G)
        for name, each in sent.items():
            assert len(each) == 1  # for all replicas
            sums[name] += each[0]
            if step < 2:
                assert_close(each[0], G[name].mean(0), Rounding(torch.float32))
    assert set(sgd._lost) == {name for name, x in world.initial.items() if x.ndim == 2}
    for name, total in sums.items():
        left = sgd._lost[name].mean(0) if name in sgd._lost else 0
        assert_close(total + left, 8 * G[name].mean(0), Rounding(torch.float32, terms=64))


def test_means_in_codes_are_ours_without_corrections():
    """Real processes hold those to account; of the rival in codes there is no other program."""
    ended = []
    for outer_of in (
        lambda world: OuterMomentum(OuterStep(4, 1.0, 0.0, bits=2), world),
        lambda world: QuantizedAverage(Average(0.1, align=0.0, polar=0.0), world),
    ):
        world = World(TINY, 0, REPLICAS)
        own = Replicas(Inner("polar", 0.02, look_ahead=1.0), world, REPLICAS)
        outer = outer_of(world)
        if isinstance(outer, QuantizedAverage):
            outer.gate = Scheduled(range(4, STEPS + 1, 4))
            outer.gate.open_cost = 1.0
        for step in range(STEPS):
            own.step(step, 1.0, world.gradients(step, own.X))
            outer.after(step, own, 0.02, last=step == STEPS - 1)
        ended.append(own.X)
    for name, X in ended[0].items():
        assert torch.equal(X[0], X[1])
        assert_close(X, ended[1][name], Rounding(torch.float32, terms=64))


@pytest.mark.parametrize("bits", [0, 8])
def test_gradients_in_codes_train_as_exact_ones_do(bits):
    task = {"size": "tiny", "batch_size": TINY.batch_size, "replicas": REPLICAS, "steps": 8}
    world = World(TINY, 0, REPLICAS)
    task["look_ahead"] = 2.0
    coded = Training("coded_gradients", 0.02, budget=1.0, bits=bits, **task)
    own, share = trained(coded, world)
    exact, _ = trained(Training("muon", 0.02, **task), world)
    assert share == pytest.approx(bits / 32 or 1.0, rel=0.2)
    for name, X in own.X.items():
        assert len(X) == 1
        moved = (exact.X[name] - world.initial[name]).norm()
        error, size = ((x.norm() / moved).item() for x in (X - exact.X[name], X))
        if bits:  # what codes lose, not roundings
            assert error < 0.2, name
        else:
            assert_within(error, Rounding(torch.float32, TINY.dim, size, steps=8), what=name)


def test_rivals_keep_to_their_budget():
    world = World(TINY, 0, REPLICAS)
    for steps, budget, period in ((16, 3 / 16, 6), (16, 2 / 16, 8), (640, 0.01, 107)):
        outer = OuterMomentum.within(budget, steps, OuterStep(1), world)
        assert outer.settings.period == period
    with pytest.raises(ValueError, match="do not reach"):
        OuterMomentum.within(0.01, 16, OuterStep(1), world)
    with pytest.raises(ValueError, match="bits=2: gradients at every step send 6.86"):
        Training("coded_gradients", 0.01, size="tiny", budget=0.05).outer(world)
    with pytest.raises(ValueError, match="PowerSGD"):
        Training("powersgd", 0.01, size="tiny", budget=0.001).outer(world)


def test_momenta_keep_their_mean_if_replicas_have_one_spectrum():
    """M_i <- M_i - (D - D_i) S / L with the weighted mean S of this opening and of those before."""
    torch.manual_seed(0)
    world, decay, L = World(TINY, 0, REPLICAS), 0.75, 0.5
    outer = QuantizedAverage(Average(0.1, spectrum_decay=decay), world)
    own = Replicas(Inner("polar", 0.02), world, REPLICAS)
    wide = next(name for name, M in own.M.items() if M.shape[1] < M.shape[2])
    openings = []
    for _ in range(3):
        own.M[wide] = torch.randn_like(own.M[wide])
        own.U[wide] = torch.randn_like(own.M[wide])
        missing = 0.01 * torch.randn_like(own.M[wide])
        M, U, D = own.M[wide].double(), own.U[wide].double(), missing.double()
        now = torch.stack([m @ u.mT for m, u in zip(M, U, strict=True)])
        openings.insert(0, now)
        weights = [decay**age for age in range(len(openings))]
        S = sum(w * each for w, each in zip(weights, openings, strict=True)) / sum(weights)
        outer._align(own, wide, missing, L)
        assert_close(own.M[wide], M - S @ D / L, Rounding(torch.float32, terms=64))
    total, weight = outer._spectra[wide]
    outer._spectra[wide] = total.mean(0, keepdim=True).expand_as(S), weight
    outer.settings = replace(outer.settings, spectrum_decay=1 - 1e-12)
    before = own.M[wide].mean(0)
    centred = missing - missing.mean(0)
    outer._align(own, wide, centred, L)
    assert_close(own.M[wide].mean(0), before, Rounding(torch.float32, terms=64))


def test_exact_momenta_are_means_after_an_opening():
    world = World(TINY, 0, REPLICAS)
    momenta = []
    for exact in (False, True):
        average = Average(1.0, bits=None, spectrum_decay=0.0, exact_momenta=exact)
        outer, own = (
            QuantizedAverage(average, world),
            Replicas(Inner("polar", 0.02), world, REPLICAS),
        )
        own.step(0, 1.0, world.gradients(0, own.X))
        before = {name: M.clone() for name, M in own.M.items()}
        while not outer.sent:
            outer.after(0, own, 0.02, last=False)
        momenta.append(own.M)
    for name, M in momenta[1].items():
        wanted = before[name].mean(0, keepdim=True).expand_as(M)
        assert_close(M, wanted, Rounding(torch.float32))
        assert (momenta[0][name] - M).norm() > 0.01 * M.norm()


@pytest.mark.parametrize("each", [False, True])
def test_compiled_gradients_are_the_same(each):
    traced = partial(torch.compile, backend="aot_eager")  # needs no C++ compiler
    with mock.patch("torch.compile", side_effect=traced) as compile_:
        eager, compiled = World(TINY, 0, REPLICAS), World(TINY, 0, REPLICAS, compiled=True)
    assert compile_.call_count == 2
    X = {name: x[None] for name, x in eager.initial.items()}
    for step in range(2):
        expected = eager.gradients(step, X, each=each)
        for name, G in compiled.gradients(step, X, each=each).items():
            assert_close(G, expected[name], Rounding(torch.float32, terms=64))


@pytest.mark.parametrize("direction", ["adamw", "polar", "low_rank"])
def test_replicas_with_equal_gradients_take_equal_steps(direction):
    world = World(TINY, 0, 1)
    inner = Inner(direction, 0.02, 0.5, look_ahead=1.0)
    one, two = Replicas(inner, world, 1), Replicas(inner, world, 2)
    for step in range(3):
        G = world.gradients(step, one.X)
        torch.manual_seed(0)  # of the first right factors
        one.step(step, 1.0, G)
        torch.manual_seed(0)
        two.step(step, 1.0, {name: g.expand(2, *g.shape[1:]) for name, g in G.items()})
    for name, X in two.X.items():
        assert_close(X, one.X[name].expand_as(X), Rounding(torch.float32, terms=64))


def test_the_grid_has_each_training_once_and_records_are_not_run_again(tmp_path, monkeypatch):
    options = simulate.parse(
        simulate.Options,
        ["--method", "muon", "ours", "--budget", "0.0025", "0.01", "0.1", "--lr", "0.1", "0.2"],
    )
    trainings = list(simulate.selected(options))
    assert [t.method for t in trainings] == ["muon"] * 2 + ["ours"] * 6
    bits = {t.budget: t.bits for t in trainings if t.method == "ours"}
    assert bits == {0.0025: 1, 0.01: 2, 0.1: 3}
    file = tmp_path / "records.json"
    arguments = ["--size", "tiny", "--steps", "2", "--workers", "1", "--out", str(file)]
    monkeypatch.setattr(simulate, "map_trainings", lambda pending, *_: map(fake, pending))
    simulate.main([*arguments, "--lr", "0.1", "--compile"])
    simulate.main([*arguments, "--lr", "0.1", "0.2"])
    records = json.loads(file.read_text("utf-8"))["records"]
    assert [r["lr"] for r in records] == [0.1, 0.2]
    assert "--lr 0.1 0.2" in records[1]["command"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--lr -0.1", "lr=-0.1 must be finite, >= 0"),
        ("--steps 0", "steps=0 must be >= 1"),
        ("--budget 2", "budget=2.0 must be .* <= 1.0"),
        ("--bits 20", "bits=20 must be one of"),
        ("--fragments 0", "fragments=0 must be >= 1"),
        ("--delay -3", "delay=-3 must be >= 0"),
        ("--warmdown 7", "warmdown=7.0 must be .* <= 1.0"),
        ("--update-scale foo", "update_scale='foo' must be one of"),
        ("--size huge", "size='huge' must be one of"),
        ("--method sgd", "invalid choice: 'sgd'"),
        ("--corpus java", "invalid choice: 'java'"),
    ],
)
def test_wrong_settings_end_before_any_training(flags, message, tmp_path, capsys):
    out = tmp_path / "records.json"
    with pytest.raises(SystemExit) as refused:
        simulate.main([*flags.split(), "--out", str(out)])
    assert re.search(message, capsys.readouterr().err + str(refused.value))
    assert not out.exists()


def test_workers_train_as_the_machine_says(tmp_path, monkeypatch):
    # Threads instead of processes, which would not know the tiny size.
    threads = SimpleNamespace(get_context=lambda _: multiprocessing.dummy)
    monkeypatch.setattr(simulate, "multiprocessing", threads)
    out = tmp_path / "records.json"
    flags = "--method muon --size tiny --steps 2 --workers 1 --compile".split()
    with mock.patch("torch.compile", side_effect=lambda function: function) as compile_:
        simulate.main([*flags, "--out", str(out)])
    assert compile_.call_count == 2
    [record] = json.loads(out.read_text("utf-8"))["records"]
    assert math.isfinite(record["loss"])
    with pytest.raises(SystemExit, match=r"simulate.py: bits=2: .* more than the budget of 1.00%"):
        simulate.main(["--size", "tiny", "--method", "coded_gradients", "--out", str(out)])


def fake(training):
    return {**training.__dict__, "loss": 1.0, "share": 0.01, "seconds": 0.0}


def test_the_ladder_runs_each_rung_and_tells_the_gap(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(simulate, "map_trainings", lambda pending, *_: map(ended, pending))
    out, picture = tmp_path / "records.json", tmp_path / "gaps.png"
    ladder.main(["--size", "small", "--tokens", "20", "5", "--out", str(out)])
    table = capsys.readouterr().out.splitlines()[-2:]
    ran = [record["method"] for record in json.loads(out.read_text("utf-8"))["records"]]
    assert {each: ran.count(each) for each in ran} == {"dion": 4, "muon": 4, "ours": 6, "muloco": 4}
    for line, steps in zip(table, (160, 640), strict=True):
        assert f" {steps} " in line
        # The lowest of dion's is 1.02, of ours 1.52, and of the rival 2.02.
        assert line.split()[-6:] == ["1", "1.0200", "1.5200", "2.0200", "+49.0", "%"]
    ladder.main(["--out", str(out), "--draw", str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG")


def ended(training):
    """A record whose loss tells the method and the rate."""
    loss = {"dion": 1.0, "muon": 1.1, "ours": 1.5, "muloco": 2.0}[training.method] + training.lr
    task = training.task
    tokens = training.steps * training.replicas * task.batch_size * task.context
    parameters = sum(p.numel() for p in task.model().parameters())
    return {
        **training.__dict__, "loss": loss, "share": 0.01, "seconds": 0.0,
        "tokens_per_parameter": round(tokens / parameters, 2),
    }  # fmt: skip


def test_gaps_are_of_the_settings_with_most_seeds():
    place = {"size": "small", "corpus": "python", "batch_size": 8, "replicas": 8, "steps": 640,
             "tokens_per_parameter": 20.0}  # fmt: skip
    said = [
        ("dion", 0.04, 0.0, 0, 1.0), ("dion", 0.04, 0.0, 1, 1.2), ("dion", 0.02, 0.0, 0, 0.9),
        ("ours", 0.08, 0.01, 0, 1.3), ("ours", 0.08, 0.03, 0, 1.0), ("muloco", 0.04, 0.01, 0, None),
    ]  # fmt: skip
    records = [
        {**place, "method": m, "lr": lr, "budget": b, "seed": s, "loss": loss}
        for m, lr, b, s, loss in said
    ]
    for record in records:
        record["fragments"] = 3 if record["method"] == "ours" else 1
    [_, _, _, ours, *_] = records
    records.append({**ours, "fragments": 1, "loss": 0.5})
    records.append({**ours, "exact_momenta": True, "loss": 0.5})
    without_spectra = {**ours, "spectrum_decay": 0.0, "loss": 0.75}
    records.append(without_spectra)
    [(_, gap)] = ladder.gaps(records).items()
    assert (gap.baseline, gap.ours, gap.rival, gap.seeds) == (1.1, 1.3, math.inf, 1)
    records.remove(ours)
    [(_, gap)] = ladder.gaps(records).items()
    assert gap.ours == 0.75
    for record in records:
        record["loss"] = None if record["seed"] == 1 else record["loss"]  # two seeds, one diverged
    [(_, gap)] = ladder.gaps(records).items()
    assert gap.baseline == math.inf
