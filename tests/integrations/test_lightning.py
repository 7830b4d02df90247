"""Lightning's Trainer with replicas; skipped where lightning is not installed."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist

import curvadion
import distributed
import doc_checks
import toy

pytest.importorskip("lightning")

import lightning_runs as runs
from curvadion.integrations.lightning import Replicas
from tolerance import Rounding, assert_close

pytestmark = pytest.mark.usefixtures("own_workers")

STEPS, SAVED = runs.STEPS, runs.SAVED
LIGHTNINGS_OWN = 8  # bytes a batch, with which its ranks decide whether to stop
FEW = 6
ROUNDING = Rounding(torch.float32, terms=16)
CLIP = {"norm": 0.05, "value": 0.002}


def always(groups, replicas):
    return curvadion.Dion(groups, replicas=replicas)


def adamw(groups, replicas):
    return torch.optim.AdamW([p for group in groups for p in group["params"]])


# -------------------------------------------------------------------- training, saving, resuming


def trained_and_resumed(rank, folder):
    """With DDP: what a whole run, a resumed one and the steps by hand end with."""
    with curvadion.WireMeter():
        whole = runs.Model()
        callbacks = [Replicas(), runs.saving(folder)]
        runs.fit(rank, whole, callbacks=callbacks, enable_checkpointing=True)
        model, optimizer, losses, reports = runs.by_hand(rank, saved=SAVED)
    again = runs.Model()
    runs.fit(rank, again, ckpt_path=f"{folder}/saved.ckpt")
    found = {
        "whole": (whole.losses, runs.held(whole.toy, whole.optimizer)),
        "resumed": (losses[:SAVED] + again.losses, runs.held(again.toy, again.optimizer)),
    }
    optimizer.eval()
    found["by hand"] = losses, runs.held(model, optimizer)
    return found, [[r.wire_bytes for r in each] for each in (whole.reports, reports)]


def test_training_is_that_by_hand_and_resumes_bitwise(tmp_path):
    results = distributed.run(2, trained_and_resumed, str(tmp_path))
    for found, (sent, sent_by_hand) in results:
        losses, state = found["by hand"]
        assert len(losses) == STEPS
        for name in ("whole", "resumed"):
            assert found[name][0] == losses, name
            toy.assert_bitwise_equal(found[name][1], state)
        # The first steps also count what building the models sent, that after saving its barriers.
        these = [step for step in range(2, STEPS) if step != SAVED]
        more = {sent[step] - sent_by_hand[step] for step in these}
        assert more == {LIGHTNINGS_OWN}
        assert sent_by_hand[SAVED] > max(sent_by_hand[2:SAVED])  # the exact synchronisation
    (first, _), (second, _) = results
    weights = {name: first["whole"][1][name] for name in toy.weights(toy.model())}
    toy.assert_bitwise_equal(weights, {name: second["whole"][1][name] for name in weights})
    assert first["whole"][0] != second["whole"][0]


def sharded_and_resumed(rank, folder, sharded, make):
    """With FSDP2: losses and state of a whole run and of a resumed one, and reports."""
    settings = {"strategy": of_shards(), "enable_checkpointing": True}
    whole, again = runs.Model(make, sharded), runs.Model(make, sharded)
    callbacks = [Replicas(), runs.saving(folder)]
    with curvadion.WireMeter():
        runs.fit(rank, whole, callbacks=callbacks, **settings)
    settings = {"strategy": of_shards()}
    runs.fit(rank, again, ckpt_path=f"{folder}/saved.ckpt", **settings)
    found = [(m.losses, runs.held(m.toy, m.optimizer)) for m in (whole, again)]
    opened = [r.gate_open for r in whole.reports]
    sent = [between(r.wire_bytes_by_ranks) for r in whole.reports]
    return found, whole.optimizer.drift(), opened[2:SAVED], sent[2:SAVED]


def between(sent):
    """The bytes of what four ranks sent between their two replicas."""
    return sum(sent.get(ranks, 0) for ranks in ("0, 2", "1, 3"))


def of_shards():
    from lightning.pytorch.strategies import ModelParallelStrategy

    return ModelParallelStrategy(data_parallel_size=dist.get_world_size(), tensor_parallel_size=1)


@pytest.mark.parametrize(
    ("ranks", "sharded", "make"), [(2, "shards", always), (4, "hybrid", runs.coded)]
)
def test_fsdp2_resumes_bitwise_from_a_distributed_checkpoint(tmp_path, ranks, sharded, make):
    results = distributed.run(ranks, sharded_and_resumed, str(tmp_path), sharded, make)
    for found, drift, opened, sent in results:
        (losses, state), (rest, again) = found
        assert len(losses) == STEPS and rest == losses[SAVED:]
        toy.assert_bitwise_equal(state, again)
        if sharded == "hybrid":
            assert drift == 0
            assert [bytes > 0 for bytes in sent] == opened


# -------------------------------------------------------------------- a step


def clipped(rank, kind, precision=32, by="norm"):
    """Losses and state with Lightning, and by hand."""
    model = kind()
    settings = {"gradient_clip_val": CLIP[by], "gradient_clip_algorithm": by}
    runs.fit(rank, model, steps=FEW, precision=precision, **settings)
    by_hand = runs.by_hand(rank, steps=FEW, clip=CLIP[by], by=by, autocast=precision != 32)
    by_hand[1].eval()
    return model.losses, runs.held(model.toy, model.optimizer), by_hand[2], runs.held(*by_hand[:2])


@pytest.mark.parametrize(
    "how",
    [(runs.Model, "bf16-mixed"), (runs.Model, 32, "value")],
)
def test_clipping_is_that_by_hand(how):
    for losses, state, wanted, by_hand in distributed.run(2, clipped, *how):
        assert losses == wanted
        toy.assert_bitwise_equal(state, by_hand)


def scaled(rank):
    """Losses with a GradScaler, whose step clips unscaled gradients, and by hand."""
    from lightning.pytorch.plugins import MixedPrecision

    class Plain(MixedPrecision):
        def forward_context(self):
            return torch.autocast("cpu", enabled=False)

    plugin = Plain("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**10))
    model = runs.Model()
    runs.fit(rank, model, steps=FEW, plugins=[plugin], gradient_clip_val=CLIP["norm"])
    return model.losses, runs.by_hand(rank, steps=FEW, clip=CLIP["norm"])[2]


@pytest.mark.numeric
def test_a_scaler_is_taken_out_before_clipping():
    for losses, by_hand in distributed.run(2, scaled):
        assert_close(torch.tensor(losses), torch.tensor(by_hand), ROUNDING)


def threshold(groups, replicas):
    return curvadion.CurvaDion(groups, replicas=replicas, threshold=0.2)


# -------------------------------------------------------------------- evaluation, logs, errors


def validated(rank):
    model = runs.Model()
    runs.fit(rank, model, steps=FEW, val_check_interval=3, limit_val_batches=1)
    return model.validated, model.optimizer.drifted


def test_validation_and_the_end_see_weights_that_replicas_agree_on():
    for seen, drifted in distributed.run(2, validated):
        assert seen == [(False, 0.0)] * 2 and not drifted


def saved(rank, folder):
    """Weights of a file of weights only, and at the end; warnings where all is saved after fit."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    when = {"every_n_train_steps": FEW, "save_weights_only": True, "filename": "weights"}
    callbacks = [Replicas(), ModelCheckpoint(folder, **when)]
    model = runs.Model()
    trainer = runs.fit(rank, model, steps=FEW, callbacks=callbacks, enable_checkpointing=True)
    written = torch.load(f"{folder}/weights.ckpt", weights_only=True)["state_dict"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.save_checkpoint(f"{folder}/after.ckpt")
    found = {name.removeprefix("toy."): W for name, W in written.items()}
    return found, toy.weights(model.toy), [str(warning.message) for warning in caught]


def test_what_is_saved_without_state_is_agreed_and_what_is_saved_too_late_warns(tmp_path):
    for written, weights, warned in distributed.run(2, saved, str(tmp_path)):
        toy.assert_bitwise_equal(written, weights)
        assert any("synchronize(exact=True)" in text for text in warned)


def logged(rank):
    memory, model = runs.Memory(), runs.Model(threshold)
    runs.fit(rank, model, steps=FEW, logger=memory, log_every_n_steps=3)
    return [told for told in memory.told if "curvadion/wire_bytes" in told[1]], model.reports


def test_reports_reach_the_logger():
    told, reports = distributed.run(2, logged)[0]
    assert [step for step, _ in told] == [3, FEW]
    for step, values in told:
        these, last = reports[step - 3 : step], reports[step - 1]
        wanted = {
            "wire_bytes": sum(r.wire_bytes for r in these) / 3,
            "open_gate_share": sum(r.gate_open for r in these) / 3,
            "local_steps": last.local_steps,
            "skipped_steps": 0,
            "waited_seconds": 0,
            "rmmc": last.rmmc,
        }
        assert values == {f"curvadion/{name}": value for name, value in wanted.items()}


def failed(rank, make, callbacks):
    """What fit raised; the trainer is as it was."""
    trainer = None
    try:
        trainer = runs.fit(rank, runs.Model(make), steps=FEW, callbacks=callbacks)
    except (RuntimeError, TypeError) as error:
        return str(error), dist.get_rank()
    return trainer


@pytest.mark.parametrize(
    ("make", "callbacks", "wanted"),
    [
        (
            runs.coded,
            [],
            "with lightning add the callback curvadion.integrations.lightning.Replicas",
        ),
        (adamw, [Replicas()], "AdamW"),
    ],
)
def test_a_wrong_set_up_is_an_error_on_all_ranks(make, callbacks, wanted):
    for text, _ in distributed.run(2, failed, make, callbacks):
        assert wanted in text


# -------------------------------------------------------------------- what its page shows


@pytest.mark.parametrize("name", doc_checks.names_of("docs/lightning.md"))
def test_a_block_of_the_page_runs(name, tmp_path):
    doc_checks.check(name, tmp_path)
