"""Lightning's Trainer with replicas; skipped where lightning is not installed."""

import pytest
import torch
import torch.distributed as dist

import curvadion
from support.documents import doc_checks
from support.runs import distributed, toy
from support.runs.drifts import drift

pytest.importorskip("lightning")

from curvadion.integrations.lightning import ReplicasCallback
from support.references.tolerance import Rounding, assert_close
from support.runs import lightning_runs as runs

pytestmark = pytest.mark.usefixtures("own_workers")

STEPS, SAVED = runs.STEPS, runs.SAVED
LIGHTNINGS_OWN = 8  # bytes a batch, with which its ranks decide whether to stop
FEW = 6
ROUNDING = Rounding(torch.float32, terms=16)
CLIP = {"norm": 0.05, "value": 0.002}


def always(groups, replicas):
    return curvadion.Dion(groups, replicas=replicas)


def adamw(groups, replicas):
    return torch.optim.AdamW([p for group in groups for p in group["params"]], lr=0.01)


def inside(groups, replicas):
    """AdamW, as it is, in the optimizer that Lightning gets."""
    sync = curvadion.QuantizedAverage(bits=2)
    gate = curvadion.FixedPeriod(4)
    return curvadion.Replicated(adamw(groups, replicas), replicas=replicas, gate=gate, sync=sync)


@pytest.mark.parametrize("make", [runs.coded, inside])
@distributed.on_ranks(2)
def test_training_is_that_by_hand_and_resumes_bitwise(rank, tmp_path, make):
    """Lightning trains with DDP."""
    with curvadion.WireMeter():
        whole = runs.Model(make)
        callbacks = [ReplicasCallback(), runs.saving(tmp_path)]
        runs.fit(rank, whole, callbacks=callbacks, enable_checkpointing=True)
        model, optimizer, losses, reports = runs.by_hand(rank, make, saved=SAVED)
    again = runs.Model(make)
    runs.fit(rank, again, ckpt_path=tmp_path / "saved.ckpt")
    optimizer.eval()
    state = toy.held(model, optimizer)
    assert whole.losses == losses[:SAVED] + again.losses == losses and len(losses) == STEPS
    for each in (whole, again):
        toy.assert_bitwise_equal(toy.held(each.toy, each.optimizer), state)
    # The first steps also count what building the models sent, that after saving its barriers.
    sent, by_hand = ([r.wire_bytes for r in each] for each in (whole.reports, reports))
    more = {sent[step] - by_hand[step] for step in range(2, STEPS) if step != SAVED}
    assert more == {LIGHTNINGS_OWN}
    assert by_hand[SAVED] > max(by_hand[2:SAVED])  # the exact synchronisation
    one, other = distributed.gathered((toy.weights(whole.toy), losses))
    toy.assert_bitwise_equal(one[0], other[0])
    assert one[1] != other[1]


def between(sent):
    """The bytes of what four ranks sent between their two replicas."""
    return sum(sent.get(ranks, 0) for ranks in ("0, 2", "1, 3"))


def of_shards():
    from lightning.pytorch.strategies import ModelParallelStrategy

    return ModelParallelStrategy(data_parallel_size=dist.get_world_size(), tensor_parallel_size=1)


@pytest.mark.parametrize(
    ("ranks", "sharded", "make"),
    [(2, "shards", always), (4, "hybrid", runs.coded), (4, "hybrid", inside)],
)
def test_fsdp2_resumes_bitwise_from_a_distributed_checkpoint(tmp_path, ranks, sharded, make):
    distributed.run(ranks, sharded_and_resumed, str(tmp_path), sharded, make)


def sharded_and_resumed(rank, folder, sharded, make):
    whole, again = runs.Model(make, sharded), runs.Model(make, sharded)
    how = {"callbacks": [ReplicasCallback(), runs.saving(folder)], "enable_checkpointing": True}
    with curvadion.WireMeter():
        runs.fit(rank, whole, strategy=of_shards(), **how)
    runs.fit(rank, again, ckpt_path=f"{folder}/saved.ckpt", strategy=of_shards())
    assert len(whole.losses) == STEPS and again.losses == whole.losses[SAVED:]
    held = [toy.held(model.toy, model.optimizer) for model in (whole, again)]
    toy.assert_bitwise_equal(*held)
    if sharded == "hybrid":
        assert drift(whole.optimizer) == 0
        for report in whole.reports[2:SAVED]:
            assert (between(report.wire_bytes_by_ranks) > 0) == report.gate_open


@pytest.mark.parametrize(("precision", "by"), [("bf16-mixed", "norm"), (32, "value")])
@distributed.on_ranks(2)
def test_clipping_is_that_by_hand(rank, precision, by):
    model = runs.Model()
    settings = {"gradient_clip_val": CLIP[by], "gradient_clip_algorithm": by}
    runs.fit(rank, model, steps=FEW, precision=precision, **settings)
    how = {"clip": CLIP[by], "by": by, "autocast": precision != 32}
    by_hand, optimizer, losses, _ = runs.by_hand(rank, steps=FEW, **how)
    optimizer.eval()
    assert model.losses == losses
    toy.assert_bitwise_equal(toy.held(model.toy, model.optimizer), toy.held(by_hand, optimizer))


@pytest.mark.numeric
@distributed.on_ranks(2)
def test_a_scaler_is_taken_out_before_clipping(rank):
    from lightning.pytorch.plugins import MixedPrecision

    class Plain(MixedPrecision):
        def forward_context(self):
            return torch.autocast("cpu", enabled=False)

    plugin = Plain("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**10))
    model = runs.Model()
    runs.fit(rank, model, steps=FEW, plugins=[plugin], gradient_clip_val=CLIP["norm"])
    _, _, losses, _ = runs.by_hand(rank, steps=FEW, clip=CLIP["norm"])
    assert_close(torch.tensor(model.losses), torch.tensor(losses), ROUNDING)


def threshold(groups, replicas):
    return curvadion.CurvaDion(groups, replicas=replicas, threshold=0.2)


@distributed.on_ranks(2)
def test_validation_and_the_end_see_weights_that_replicas_agree_on(rank):
    model = runs.Model()
    runs.fit(rank, model, steps=FEW, val_check_interval=3, limit_val_batches=1)
    assert model.validated == [(False, 0.0)] * 2 and not model.optimizer.drifted


@distributed.on_ranks(2)
def test_what_is_saved_without_state_is_agreed_and_what_is_saved_too_late_warns(rank, tmp_path):
    from lightning.pytorch.callbacks import ModelCheckpoint

    when = {"every_n_train_steps": FEW, "save_weights_only": True, "filename": "weights"}
    callbacks = [ReplicasCallback(), ModelCheckpoint(tmp_path, **when)]
    model = runs.Model()
    trainer = runs.fit(rank, model, steps=FEW, callbacks=callbacks, enable_checkpointing=True)
    written = torch.load(tmp_path / "weights.ckpt", weights_only=True)["state_dict"]
    written = {name.removeprefix("toy."): W for name, W in written.items()}
    toy.assert_bitwise_equal(written, toy.weights(model.toy))
    with pytest.warns(UserWarning, match=r"synchronize\(exact=True\)"):
        trainer.save_checkpoint(tmp_path / "after.ckpt")


@distributed.on_ranks(2)
def test_reports_reach_the_logger(rank):
    memory, model = runs.Memory(), runs.Model(threshold)
    runs.fit(rank, model, steps=FEW, logger=memory, log_every_n_steps=3)
    told = [told for told in memory.told if "curvadion/wire_bytes" in told[1]]
    assert rank or [step for step, _ in told] == [3, FEW]
    for step, values in told:
        these, last = model.reports[step - 3 : step], model.reports[step - 1]
        wanted = {
            "steps": 3,
            "wire_bytes": sum(r.wire_bytes for r in these) / 3,
            "open_gate_share": sum(r.gate_open for r in these) / 3,
            "local_steps": last.local_steps,
            "skipped_steps": 0,
            "waited_seconds": 0,
            "rmmc": last.rmmc,
            "threshold": last.threshold,
        }
        # Seconds differ from run to run.
        seconds = {f"curvadion/{name}" for name in ("opening_seconds", "step_seconds")}
        assert seconds <= values.keys()
        told_of = {name: value for name, value in values.items() if name not in seconds}
        assert told_of == {f"curvadion/{name}": value for name, value in wanted.items()}


ATTACH = "the module of curvadion.integrations for your framework"


@pytest.mark.parametrize("attached", [False, True])
@distributed.on_ranks(2)
def test_a_wrong_set_up_is_an_error_on_all_ranks(rank, attached):
    if attached:
        make, callbacks, said = adamw, [ReplicasCallback()], r"return Replicated\(AdamW\("
    else:
        make, callbacks, said = runs.coded, [], ATTACH
    with pytest.raises((RuntimeError, TypeError), match=said):
        runs.fit(rank, runs.Model(make), steps=FEW, callbacks=callbacks)


@pytest.mark.parametrize("name", doc_checks.names_of("docs/lightning.md"))
def test_a_block_of_the_page_runs(name, tmp_path):
    doc_checks.check(name, tmp_path)
