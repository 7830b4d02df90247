"""torchtitan's trainer with replicas; skipped where torchtitan, or what it needs, is missing."""

import importlib.util
import math

import pytest
import torch
import torch.distributed as dist

import curvadion
from support.documents import doc_checks
from support.references.tolerance import Rounding, assert_close
from support.runs import distributed, toy
from support.runs import torchtitan_runs as runs
from support.runs.drifts import drift

NEEDS = ("torchtitan", "torchdata", "tyro", "spmd_types", "datasets")
LACKING = [package for package in NEEDS if importlib.util.find_spec(package) is None]
pytestmark = [
    pytest.mark.usefixtures("own_workers"),
    pytest.mark.skipif(bool(LACKING), reason=f"needs {', '.join(LACKING)}"),
]

STEPS, SAVED, FEW, PERIOD = 9, 6, 6, 4
CODES = {
    "gate": curvadion.FixedPeriod(PERIOD),
    "sync": curvadion.QuantizedAverage(bits=2),
    "lr": 0.02,
}
WITHOUT_LR = {key: CODES[key] for key in ("gate", "sync")}
CLIP = 0.5  # below most gradients' norms


def trainer_of(rank, folder, *, degree=2, kind="CurvaDion", options=CODES, steps=STEPS, **settings):
    """A trainer on ranks of which ``degree`` are replicas, the others shards."""
    runs.on_processors(rank)
    from curvadion.integrations.torchtitan import with_curvadion

    given = runs.configuration(folder, steps=steps, degree=degree, **settings)
    return with_curvadion(given, kind=kind, **options).build()


@pytest.mark.parametrize(
    ("degree", "kind", "options"),
    [(2, "CurvaDion", CODES), (2, "Replicated", WITHOUT_LR), (1, "Muon", {"lr": 0.02})],
)
@distributed.on_ranks(2, timeout=100.0)
def test_a_run_resumes_bitwise_from_a_distributed_checkpoint(rank, tmp_path, degree, kind, options):
    saved = {"enable": True, "interval": SAVED}
    how = {"degree": degree, "kind": kind, "options": options}
    found = []
    for more in ({}, {"load_step": SAVED}):
        trainer = trainer_of(rank, str(tmp_path), checkpoint={**saved, **more}, **how)
        losses, _ = runs.noting(trainer)
        trainer.train()
        held = toy.held(trainer.model_parts[0], trainer.optimizers.optimizers[0])
        found.append((losses, held))
        trainer.close()
    (losses, state), (rest, again) = found
    assert len(losses) == STEPS and rest == losses[SAVED:]
    toy.assert_bitwise_equal(state, again)
    optimizer = trainer.optimizers.optimizers[0]
    # The last checkpoint keeps weights only, of one replica.
    assert not optimizer.drifted and drift(optimizer) == 0
    first, other = distributed.gathered(losses[0])
    assert first != other  # each reads batches of its own


def adamw_inside(groups, **options):
    """Replicated around the AdamW that torchtitan is configured with."""
    weights = [p for group in groups for _, p in group["params"]]
    inner = torch.optim.AdamW(weights, lr=8e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    return curvadion.Replicated(inner, **options)


@pytest.mark.numeric
@pytest.mark.parametrize(
    ("ranks", "degree", "backend", "kind"),
    [
        (2, 2, "partial_dtensor", "CurvaDion"),
        (2, 2, "partial_dtensor", "Replicated"),
        (4, 2, "full_dtensor", "CurvaDion"),
    ],
)
def test_replicas_and_shards_train_and_clip_as_whole_replicas(
    tmp_path, ranks, degree, backend, kind
):
    distributed.run(ranks, compared, str(tmp_path), degree, backend, kind)


def compared(rank, folder, degree, backend, kind):
    """The trainer with whole replicas by hand."""
    options, shards = CODES, dist.get_world_size() // degree
    built = curvadion.CurvaDion
    if kind == "Replicated":
        options = WITHOUT_LR
        built = adamw_inside
    if shards > 1:  # whose codes round otherwise
        options = {**CODES, "sync": curvadion.LowRank()}
    how = {"training": {"max_norm": CLIP}, "steps": FEW, "warmup": 0, "backend": backend}
    with curvadion.WireMeter():
        trainer = trainer_of(rank, folder, degree=degree, kind=kind, options=options, **how)
        before = runs.whole_weights(trainer)
        losses, reports = runs.noting(trainer)
        trainer.train()
        replica, shard = divmod(rank, shards)
        groups = [dist.new_group([i + j * shards for j in range(degree)]) for i in range(shards)]

        def make(of):
            return built(of, replicas=groups[shard], **options)

        readers = range(replica * shards, (replica + 1) * shards)
        wanted, by_hand = runs.by_hand(before, make, steps=FEW, clip=CLIP, readers=readers)
    # A code may flip at a rounding: what follows the first opening in codes is not compared.
    exact = PERIOD if shards == 1 else FEW
    rounding = Rounding(torch.float32, terms=runs.VOCABULARY)
    wanted = torch.tensor(wanted[shard::shards])
    assert_close(torch.tensor(losses[:exact]), wanted[:exact], rounding)
    assert (trainer.optimizers.max_norm, trainer.config.training.max_norm) == (CLIP, math.inf)
    if shards == 1:
        sent, its = ([r.wire_bytes for r in each] for each in (reports, by_hand))
        # The trainer adds up tokens and losses at every step.
        assert len({a - b for a, b in zip(sent[2:], its[2:], strict=True)}) == 1
        assert sent[3] - sent[2] == its[3] - its[2] > 0  # an opening


@distributed.on_ranks(2)
def test_the_validator_sees_weights_that_replicas_agree_on(rank, tmp_path):
    from torchtitan.components.validate import Validator

    runs.on_processors(rank)
    tokens = runs.components().Tokens.Config()
    validator = Validator.Config(enable=True, freq=3, steps=1, dataloader=tokens)
    trainer = trainer_of(rank, str(tmp_path), steps=FEW, validator=validator)
    [model], [optimizer] = trainer.model_parts, trainer.optimizers.optimizers
    seen = []

    def note(module, _):
        if not module.training:
            seen.append((optimizer.drifted, drift(optimizer)))

    model.register_forward_pre_hook(note)
    trainer.train()
    assert len(seen) >= 2 and set(seen) == {(False, 0.0)}


@distributed.on_ranks(2)
def test_wrong_configurations_are_named(rank, tmp_path):
    runs.on_processors(rank)
    from curvadion.integrations.torchtitan import ReplicaOptimizers, attach, with_curvadion

    config = runs.configuration(str(tmp_path), steps=FEW, degree=2)
    parts = [toy.model()]
    with pytest.raises(ValueError, match="kind='SGD'"):
        ReplicaOptimizers.Config(kind="SGD").build(model_parts=parts)
    with pytest.raises(ValueError, match=r"param_groups=\[\] with kind='Replicated'"):
        ReplicaOptimizers.Config(kind="Replicated").build(model_parts=parts)
    with pytest.raises(ValueError, match=r"wire_budget=0\.01 \(recommended"):
        ReplicaOptimizers.Config().build(model_parts=parts)
    with pytest.raises(TypeError, match=r"OptimizersContainer.*ReplicaOptimizers"):
        attach(config.build())
    with pytest.raises(TypeError, match=r"config=\S+ is another trainer's.*attach\(trainer\)"):
        with_curvadion(config.optimizer)
    trainer = with_curvadion(config, wire_budget=0.2).build()
    with pytest.raises(RuntimeError, match="attached already"):
        attach(trainer)
    assert trainer.optimizers.max_norm == config.training.max_norm
    trainer.parallel_dims = type("Stages", (), {"pp_enabled": True})()
    with pytest.raises(RuntimeError, match="pipeline_parallel_degree"):
        attach(trainer)


@pytest.mark.parametrize("name", doc_checks.names_of("docs/torchtitan.md"))
def test_a_block_of_the_page_runs(name, tmp_path):
    doc_checks.check(name, tmp_path)
