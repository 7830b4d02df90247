"""Hugging Face's Trainer with DeepSpeed's replicas; skipped where transformers is not installed."""

import copy
import importlib.util

import pytest
import torch
import torch.distributed as dist

from support.documents import doc_checks
from support.runs import deepspeed_engines as ds
from support.runs import distributed, toy
from support.runs import hugging_face as hf
from support.runs.deepspeed_replicas import SIZE

pytestmark = [
    pytest.mark.usefixtures("own_workers"),
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"),
]
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

SAVED, STEPS = 4, 6
CODES = {
    "replica_size": SIZE,
    "gate": {"type": "period", "period": 3},
    "sync": {"type": "quantized_average", "bits": 2},
}


def configuration():
    automatic = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_clipping")
    return {
        "optimizer": {"type": "CurvaDion", "params": copy.deepcopy(CODES)},
        "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
        **dict.fromkeys(automatic, "auto"),
    }


def trainer_of(folder, start):
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
        output_dir=str(folder),
        deepspeed=configuration(),
        dataloader_pin_memory=False,
        max_steps=STEPS,
        save_steps=SAVED,
        logging_steps=1,
        per_device_train_batch_size=2,
        lr_scheduler_type="constant",
        report_to=[],
        disable_tqdm=True,
        log_level="error",
    )
    note, model = Note(), GPT2LMHeadModel.from_pretrained(start)
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=hf.Tokens(),
        eval_dataset=hf.Tokens(),
        callbacks=[note],
    )
    with pytest.raises(ValueError, match=r"set \['lr'\] in DeepSpeed's JSON"):
        attach(trainer, lr=0.01)
    return attach(trainer), note.drifted


def losses_of(trainer):
    told = [told for told in trainer.state.log_history if "loss" in told]
    assert all(each["curvadion/wire_bytes"] > 0 for each in told)
    if len(told) == STEPS:  # the first opening; a checkpoint shifts those after it
        assert [each["curvadion/open_gate_share"] for each in told[:SAVED]] == [0, 0, 1, 0]
    return [each["loss"] for each in told]


@pytest.mark.numeric
@distributed.on_ranks(4, timeout=120.0)
def test_trainer_saves_what_replicas_agree_on_and_resumes(rank, tmp_path):
    from safetensors.torch import load_file

    ds.prepare()
    hf.launch("deepspeed")
    torch.manual_seed(7)
    start, tokens = hf.gpt(), torch.stack([hf.Tokens()[i]["input_ids"] for i in range(64)])
    wanted = start(tokens, labels=tokens).loss.item()
    if rank == 0:
        start.save_pretrained(tmp_path / "start")
    dist.barrier()
    torch.manual_seed(rank)
    trainer, drifted = trainer_of(tmp_path, tmp_path / "start")
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    optimizer = trainer.deepspeed.basic_optimizer
    again, _ = trainer_of(tmp_path / "again", tmp_path / "start")
    again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{SAVED}"))
    losses = losses_of(trainer)
    assert losses[0] == pytest.approx(wanted, abs=0.1)
    assert len(losses) == STEPS and losses_of(again) == losses
    assert not optimizer.drifted and (rank or drifted[0])
    weights = ds.masters(trainer.deepspeed)
    toy.assert_bitwise_equal(weights, distributed.gathered(weights)[0])
    for name, W in load_file(tmp_path / "final" / "model.safetensors").items():
        held = "transformer.wte.weight" if name == "lm_head.weight" else name  # they are tied
        assert torch.equal(W, weights[held]), name


@pytest.mark.parametrize("name", doc_checks.names_of("docs/deepspeed.md"))
def test_a_block_of_the_page_runs(name, tmp_path):
    doc_checks.check(name, tmp_path)


@pytest.mark.parametrize("name", doc_checks.names_of("docs/muon.md"))
def test_a_block_of_the_page_of_muon_runs(name, tmp_path):
    doc_checks.check(name, tmp_path)
