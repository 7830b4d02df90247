"""Hugging Face's Trainer with real process groups; skipped where it is not installed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import curvadion
import distributed
import doc_checks
import hugging_face as hf
from curvadion.integrations.ddp import keep_gradients_local
from tolerance import Rounding, assert_close

pytestmark = pytest.mark.usefixtures("own_workers")

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

STEPS, SAVED, MAX_NORM, LR = 20, 11, 0.5, 0.02
CODES = {"wire_budget": 0.04, "sync": curvadion.QuantizedAverage(bits=2)}


def arguments(folder, **settings):
    from transformers import TrainingArguments

    given = {
        "max_steps": STEPS, "save_steps": SAVED, "logging_steps": 1, "learning_rate": LR,
        "per_device_train_batch_size": 2, "max_grad_norm": MAX_NORM, "weight_decay": 0.01,
        "report_to": [], "disable_tqdm": True, "log_level": "error", "use_cpu": True,
        "dataloader_pin_memory": False, "ddp_find_unused_parameters": False, **settings,
    }  # fmt: skip
    return TrainingArguments(output_dir=str(folder), **given)


def trainer_of(folder, dropout=0.1, kind=None, trainer=None, args=None, **settings):
    """An attached Trainer; settings: of attach."""
    from transformers import Trainer

    from curvadion.integrations.huggingface import attach

    torch.manual_seed(5)
    made = (trainer or Trainer)(
        model=hf.gpt(dropout=dropout), args=arguments(folder, **(args or {})),
        train_dataset=hf.Tokens(), eval_dataset=hf.Tokens(),
    )  # fmt: skip
    return attach(made, *([] if kind is None else [kind]), **settings)


def logged(trainer, name):
    return [told[name] for told in trainer.state.log_history if name in told]


def weights(model):
    full = (
        (n, p.full_tensor() if hasattr(p, "full_tensor") else p)
        for n, p in model.named_parameters()
    )
    return {name: p.detach().clone() for name, p in full}


def assert_same(these, others):
    assert these.keys() == others.keys()
    for name, W in these.items():
        assert torch.equal(W, others[name]), name


# -------------------------------------------------------------------- DDP


def resumed(rank, folder):
    """A run, and one that goes on from its checkpoint: losses, weights, what was logged."""
    hf.launch()
    whole = trainer_of(f"{folder}/whole", **CODES)
    whole.train()
    hf.launch()
    again = trainer_of(f"{folder}/again", **CODES)
    again.train(resume_from_checkpoint=f"{folder}/whole/checkpoint-{SAVED}")
    optimizer = whole.optimizer.optimizer
    told = {name: logged(whole, f"curvadion/{name}") for name in ("open_gate_share", "wire_bytes")}
    ends = weights(whole.model), weights(again.model)
    return (
        logged(whole, "loss"),
        logged(again, "loss"),
        ends,
        told,
        repr(optimizer),
        optimizer.drifted,
    )


def test_a_run_resumes_bitwise_and_logs_what_steps_report(tmp_path):
    from safetensors.torch import load_file

    results = distributed.run(2, resumed, str(tmp_path), timeout=120.0)
    for whole, again, ends, told, shown, drifted in results:
        assert len(whole) == STEPS and whole == again
        assert_same(*ends)
        assert not drifted
        assert "weight_decay: 0.01" in shown and "initial_lr: 0.02" in shown
        assert "ByteBudget(share=0.04" in shown and "bits=2" in shown, shown
        gates, sent = told["open_gate_share"], told["wire_bytes"]
        assert len(gates) == STEPS and set(gates) == {0.0, 1.0} and 3 < sum(gates) < STEPS / 2
        # Codes and agreements are large; in between are Trainer's own numbers and the norm's.
        closed = [each for each, opened in zip(sent, gates, strict=True) if not opened]
        assert sorted(closed)[len(closed) // 2] < 100 < 1000 < max(sent)
    assert_same(results[0][2][0], results[1][2][0])
    folder = tmp_path / "whole" / f"checkpoint-{STEPS}"
    assert_same(results[0][2][0], {**results[0][2][0], **load_file(folder / "model.safetensors")})
    history = json.loads((folder / "trainer_state.json").read_text())
    assert "curvadion/local_steps" in history["log_history"][0]


# -------------------------------------------------------------------- a plain loop


def replayed(rank, folder):
    """A Trainer that accumulates, and a plain loop over what it has read."""
    from transformers import Trainer

    read = []

    class Reading(Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            read.append((dict(inputs), num_items_in_batch))
            return super().training_step(model, inputs, num_items_in_batch)

    hf.launch()
    args = {"gradient_accumulation_steps": 2, "lr_scheduler_type": "constant", "max_steps": 10}
    args |= {"save_strategy": "no"}
    trainer = trainer_of(folder, dropout=0.0, trainer=Reading, args=args, **CODES)
    with curvadion.WireMeter() as framework:
        trainer.train()
    torch.manual_seed(5)
    model = hf.gpt()
    groups = curvadion.param_groups(model)
    with curvadion.WireMeter() as by_hand:
        ddp = keep_gradients_local(DistributedDataParallel(model))
        optimizer = curvadion.CurvaDion(
            groups, lr=LR, weight_decay=0.01, replicas=dist.group.WORLD, **CODES
        )
        norms = []
        for place, (inputs, items) in enumerate(read):
            loss = ddp(**inputs, num_items_in_batch=items).loss * dist.get_world_size()
            loss.backward()
            if place % 2:
                norms.append(float(curvadion.clip_grad_norm_(optimizer, MAX_NORM)))
                optimizer.step()
                optimizer.zero_grad()
        optimizer.eval()
    ends = weights(trainer.model), weights(model)
    sent = framework.bytes_by_collective, by_hand.bytes_by_collective
    return logged(trainer, "grad_norm"), norms, ends, sent


def test_trains_like_a_plain_loop(tmp_path):
    for logged_norms, norms, ends, (framework, by_hand) in distributed.run(
        2, replayed, str(tmp_path), timeout=120.0
    ):
        assert logged_norms == norms and len(norms) == 10 and max(norms) > MAX_NORM
        assert_same(*ends)
        assert framework["all_to_all"] == by_hand["all_to_all"]
        assert framework["all_reduce"] == by_hand["all_reduce"]


# -------------------------------------------------------------------- shards


def sharded(rank, folder):
    def made(to):
        hf.launch("gpu")
        args = {
            "use_cpu": False, "fsdp": True, "ddp_find_unused_parameters": None,
            "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"]},
        }  # fmt: skip
        return trainer_of(to, kind=curvadion.Dion, args=args)

    whole = made(f"{folder}/whole")
    whole.train()
    again = made(f"{folder}/again")
    again.train(resume_from_checkpoint=f"{folder}/whole/checkpoint-{SAVED}")
    losses = logged(whole, "loss"), logged(again, "loss")
    return losses, (weights(whole.model), weights(again.model))


# HSDP takes longer than all others; test_accelerate.py has it.
def test_shards_resume_bitwise(tmp_path):
    for (whole, again), ends in distributed.run(2, sharded, str(tmp_path), timeout=120.0):
        assert len(whole) == STEPS and whole == again
        assert_same(*ends)


# -------------------------------------------------------------------- the best model


def best(rank, folder):
    """Losses of the evaluations, and of the best model at the end; replicas drift between."""
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 12

    hf.launch()
    args = {
        "save_steps": 5, "eval_steps": 5, "eval_strategy": "steps", "save_strategy": "best",
        "load_best_model_at_end": True, "metric_for_best_model": "eval_loss",
        "greater_is_better": True,  # so the first is the best
    }  # fmt: skip
    trainer = trainer_of(folder, args=args, gate=curvadion.FixedPeriod(4), sync=CODES["sync"])
    trainer.add_callback(Stop)
    trainer.train()
    seen = logged(trainer, "eval_loss")
    held = weights(trainer.model)
    again = trainer.evaluate()["eval_loss"]
    trainer.save_model(f"{folder}/final")
    dist.barrier()
    return seen, again, held, trainer.state.best_model_checkpoint, weights(trainer.model)


def test_best_model_is_loaded_and_stays(tmp_path):
    from safetensors.torch import load_file

    results = distributed.run(2, best, str(tmp_path), timeout=120.0)
    for seen, again, held, checkpoint, after in results:
        assert len(seen) == 2 and seen[0] > seen[1]
        assert_close(again, seen[0], Rounding(torch.float32))
        assert_same(held, after)
        for folder in (checkpoint, tmp_path / "final"):
            written = load_file(Path(folder) / "model.safetensors")
            for name, W in results[0][2].items():
                assert torch.equal(written[name], W) and torch.equal(held[name], W), name


# -------------------------------------------------------------------- one process, mistakes


def mistakes(rank, folder):
    from transformers import Trainer

    from curvadion.integrations.huggingface import attach

    def raised(function, *args, **kwargs):
        with pytest.raises((RuntimeError, TypeError, ValueError)) as error:
            function(*args, **kwargs)
        return f"{error.type.__name__}: {error.value}"

    def fresh(optimizer=None, **args):
        hf.launch()
        torch.manual_seed(5)
        model = hf.gpt()
        given = {} if optimizer is None else {"optimizers": (optimizer(model), None)}
        args = {"learning_rate": LR, **args}
        return Trainer(
            model=model, args=arguments(folder, **args), train_dataset=hf.Tokens(), **given
        )

    def ours(model):
        groups = curvadion.param_groups(model)
        return curvadion.Dion(groups, replicas=dist.group.WORLD)

    def sgd(model):
        return torch.optim.SGD(model.parameters())

    with pytest.warns(UserWarning, match="learning_rate=5e-05"):
        attach(fresh(learning_rate=5e-5))
    searched = attach(fresh())  # as a search of hyperparameters does, between trials
    searched.args.learning_rate, searched.args.weight_decay = 0.3, 0.5
    group = searched.create_optimizer().param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (0.3, 0.5)
    return {
        "not attached": raised(fresh(ours).train),
        "twice": raised(attach, attach(fresh())),
        "another optimizer": raised(attach, fresh(sgd)),
    }


MISTAKES = {
    "not attached": (
        "RuntimeError",
        "identical on all replicas",
        "with transformers call curvadion.integrations.huggingface.attach(trainer)",
    ),
    "twice": ("RuntimeError", "attached already"),
    "another optimizer": ("ValueError", "already has the optimizer SGD"),
}


def test_mistakes_are_errors_on_all_ranks(tmp_path):
    for messages in distributed.run(2, mistakes, str(tmp_path), timeout=120.0):
        for name, parts in MISTAKES.items():
            assert all(part in messages[name] for part in parts), (name, messages[name])


# -------------------------------------------------------------------- what its page shows


@pytest.mark.parametrize("name", doc_checks.names_of("docs/huggingface.md"))
def test_a_block_of_the_page_runs(name, tmp_path):
    doc_checks.check(name, tmp_path)
