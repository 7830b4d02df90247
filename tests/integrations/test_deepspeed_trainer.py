"""Hugging Face's Trainer with DeepSpeed's replicas; skipped where transformers is not installed."""

from __future__ import annotations

import copy
import importlib.util

import pytest
import torch

import deepspeed_engines as ds
import distributed
import doc_checks
import hugging_face as hf
from deepspeed_replicas import SIZE

pytestmark = [
    pytest.mark.usefixtures("own_workers"),
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"),
]
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

SAVED, STEPS = 4, 6
PERIOD = {"gate": {"type": "period", "period": 3}}
CODES = {**PERIOD, "sync": {"type": "quantized_average", "bits": 2}}
CASES = {3: CODES}


def configuration(stage, params):
    """A JSON as users of Trainer write it."""
    zero = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
    automatic = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_clipping")
    return {
        "optimizer": {"type": "CurvaDion", "params": {"replica_size": SIZE, **params}},
        "zero_optimization": zero,
        **dict.fromkeys(automatic, "auto"),
    }


def trainer_of(stage, folder, start, **settings):
    """A trainer, and where its callback notes whether replicas had drifted when it saved."""
    from transformers import GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    from curvadion.integrations.huggingface import attach

    class Note(TrainerCallback):
        def __init__(self):
            self.drifted = []

        def on_step_end(self, args, state, control, **kwargs):
            if control.should_save:
                self.drifted.append(trainer.deepspeed.basic_optimizer.drifted)

    # Arguments come first: from_pretrained builds in shards once they have named stage 3.
    arguments = TrainingArguments(
        output_dir=folder, deepspeed=copy.deepcopy(configuration(stage, CASES[stage])),
        max_steps=STEPS, save_steps=SAVED, logging_steps=1, per_device_train_batch_size=2,
        lr_scheduler_type="constant", report_to=[], disable_tqdm=True, log_level="error",
        dataloader_pin_memory=False, **settings,
    )  # fmt: skip
    note, model = Note(), GPT2LMHeadModel.from_pretrained(start)
    trainer = Trainer(
        model=model, args=arguments, train_dataset=hf.Tokens(), eval_dataset=hf.Tokens(),
        callbacks=[note],
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"got \['lr'\], but DeepSpeed's JSON names the optimizer"):
        attach(trainer, lr=0.01)
    return attach(trainer), note.drifted


def losses_of(trainer):
    told = [told for told in trainer.state.log_history if "loss" in told]
    assert all(each["curvadion/wire_bytes"] > 0 for each in told)
    if len(told) == STEPS:  # the first opening; a checkpoint shifts those after it
        assert [each["curvadion/open_gate_share"] for each in told[:SAVED]] == [0, 0, 1, 0]
    return [each["loss"] for each in told]


def trained(rank, stages, folder):
    """By stage: losses, those of a run that resumes, and weights at the end."""
    ds.prepare()
    hf.launch("deepspeed")
    found = {}
    for stage in stages:
        torch.manual_seed(rank)
        to = f"{folder}/{stage}"
        trainer, drifted = trainer_of(stage, to, f"{folder}/start")
        trainer.train()
        trainer.save_model(f"{to}/final")
        optimizer = trainer.deepspeed.basic_optimizer
        again, _ = trainer_of(stage, f"{to}/again", f"{folder}/start")
        again.train(resume_from_checkpoint=f"{to}/checkpoint-{SAVED}")
        runs = losses_of(trainer), losses_of(again)
        found[stage] = runs, drifted, optimizer.drift(), ds.masters(trainer.deepspeed)
    return found


@pytest.mark.numeric
def test_trainer_saves_what_replicas_agree_on_and_resumes(tmp_path):
    from safetensors.torch import load_file

    torch.manual_seed(7)
    start, tokens = hf.gpt(), torch.stack([hf.Tokens()[i]["input_ids"] for i in range(64)])
    start.save_pretrained(tmp_path / "start")
    wanted = start(tokens, labels=tokens).loss.item()
    first, *others = distributed.run(4, trained, [*CASES], str(tmp_path), timeout=120.0)
    for stage, ((losses, resumed), drifted, drift, weights) in first.items():
        assert losses[0] == pytest.approx(wanted, abs=0.1)
        assert len(losses) == STEPS and resumed == losses, stage
        assert drift == 0 and drifted[0], stage
        written = load_file(tmp_path / str(stage) / "final" / "model.safetensors")
        for name, W in written.items():
            held = "transformer.wte.weight" if name == "lm_head.weight" else name  # they are tied
            assert torch.equal(W, weights[held]), (stage, name)
            assert all(torch.equal(W, found[stage][3][held]) for found in others), (stage, name)


# -------------------------------------------------------------------- what its page shows


@pytest.mark.parametrize("name", doc_checks.names_of("docs/deepspeed.md"))
def test_a_block_of_the_page_runs(name, tmp_path):
    doc_checks.check(name, tmp_path)


@pytest.mark.parametrize("name", doc_checks.names_of("docs/muon.md"))
def test_a_block_of_the_page_of_muon_runs(name, tmp_path):
    doc_checks.check(name, tmp_path)
