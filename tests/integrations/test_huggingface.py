"""Hugging Face's Trainer with real process groups; skipped where it is not installed."""

import contextlib
import io
import json
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import curvadion
from curvadion.integrations.ddp import keep_gradients_local
from support.documents import doc_checks
from support.references.tolerance import Rounding, assert_close
from support.runs import distributed, toy
from support.runs import hugging_face as hf

pytestmark = pytest.mark.usefixtures("own_workers")

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

STEPS, SAVED, MAX_NORM, LR = 20, 11, 0.5, 0.02
CODES = {"wire_budget": 0.04, "sync": curvadion.QuantizedAverage(bits=2)}


def arguments(folder, **settings):
    from transformers import TrainingArguments

    given = {
        "max_steps": STEPS,
        "save_steps": SAVED,
        "logging_steps": 1,
        "learning_rate": LR,
        "per_device_train_batch_size": 2,
        "max_grad_norm": MAX_NORM,
        "weight_decay": 0.01,
        "report_to": [],
        "disable_tqdm": True,
        "log_level": "error",
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "ddp_find_unused_parameters": False,
        **settings,
    }
    return TrainingArguments(output_dir=str(folder), **given)


def trainer_of(folder, dropout=0.1, kind=None, trainer=None, args=None, **settings):
    """An attached Trainer; settings: of attach."""
    from transformers import Trainer

    from curvadion.integrations.huggingface import attach

    torch.manual_seed(5)
    made = (trainer or Trainer)(
        model=hf.gpt(dropout=dropout),
        args=arguments(folder, **(args or {})),
        train_dataset=hf.Tokens(),
        eval_dataset=hf.Tokens(),
    )
    return attach(made, *([] if kind is None else [kind]), **settings)


def logged(trainer, name):
    return [told[name] for told in trainer.state.log_history if name in told]


@distributed.on_ranks(2, timeout=120.0)
def test_a_run_resumes_bitwise_and_logs_what_steps_report(rank, tmp_path):
    from safetensors.torch import load_file

    hf.launch()
    whole = trainer_of(tmp_path / "whole", **CODES)
    whole.train()
    hf.launch()
    again = trainer_of(tmp_path / "again", **CODES)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{SAVED}"))
    optimizer, held = whole.optimizer.optimizer, hf.whole(whole.model)
    losses, shown = logged(whole, "loss"), repr(optimizer)
    assert len(losses) == STEPS and losses == logged(again, "loss")
    toy.assert_bitwise_equal(held, hf.whole(again.model))
    toy.assert_bitwise_equal(*distributed.gathered(held))
    assert not optimizer.drifted
    assert "weight_decay: 0.01" in shown and "initial_lr: 0.02" in shown
    assert "ByteBudget(share=0.04" in shown and "bits=2" in shown, shown
    gates, sent = (logged(whole, f"curvadion/{name}") for name in ("open_gate_share", "wire_bytes"))
    assert len(gates) == STEPS and set(gates) == {0.0, 1.0} and 3 < sum(gates) < STEPS / 2
    # Codes and agreements are large; in between are Trainer's own numbers and the norm's.
    closed = [each for each, opened in zip(sent, gates, strict=True) if not opened]
    assert sorted(closed)[len(closed) // 2] < 100 < 1000 < max(sent)
    folder = tmp_path / "whole" / f"checkpoint-{STEPS}"
    toy.assert_bitwise_equal(held, {**held, **load_file(folder / "model.safetensors")})
    history = json.loads((folder / "trainer_state.json").read_text())
    assert "curvadion/local_steps" in history["log_history"][0]


def adamw_inside(model, **options):
    """Replicated around the AdamW of TrainingArguments, without decay of biases and norms."""
    weights = list(model.parameters())
    groups = [
        {"params": [p for p in weights if p.dim() > 1], "weight_decay": 0.01},
        {"params": [p for p in weights if p.dim() == 1], "weight_decay": 0.0},
    ]
    return curvadion.Replicated(torch.optim.AdamW(groups, lr=LR), **options)


def curvadion_of(model, **options):
    groups = curvadion.param_groups(model)
    return curvadion.CurvaDion(groups, lr=LR, weight_decay=0.01, **options)


@pytest.mark.parametrize(
    ("kind", "make"), [(curvadion.CurvaDion, curvadion_of), (curvadion.Replicated, adamw_inside)]
)
@distributed.on_ranks(2, timeout=120.0)
def test_trains_like_a_plain_loop(rank, tmp_path, kind, make):
    """Over what a Trainer has read that accumulates."""
    from transformers import Trainer

    read = []

    class Reading(Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            read.append((dict(inputs), num_items_in_batch))
            return super().training_step(model, inputs, num_items_in_batch)

    hf.launch()
    args = {"gradient_accumulation_steps": 2, "lr_scheduler_type": "constant", "max_steps": 10}
    args |= {"save_strategy": "no", "optim": "adamw_torch"}
    trainer = trainer_of(tmp_path, dropout=0.0, kind=kind, trainer=Reading, args=args, **CODES)
    with curvadion.WireMeter() as framework:
        trainer.train()
    torch.manual_seed(5)
    model = hf.gpt()
    with curvadion.WireMeter() as by_hand:
        ddp = keep_gradients_local(DistributedDataParallel(model))
        optimizer = make(model, replicas=dist.group.WORLD, **CODES)
        norms = []
        for place, (inputs, items) in enumerate(read):
            loss = ddp(**inputs, num_items_in_batch=items).loss * dist.get_world_size()
            loss.backward()
            if place % 2:
                norms.append(float(curvadion.clip_grad_norm_(optimizer, MAX_NORM)))
                optimizer.step()
                optimizer.zero_grad()
        optimizer.eval()
    assert logged(trainer, "grad_norm") == norms and len(norms) == 10 and max(norms) > MAX_NORM
    toy.assert_bitwise_equal(hf.whole(trainer.model), hf.whole(model))
    for how in ("all_to_all", "all_reduce"):
        assert framework.by_collective[how].bytes == by_hand.by_collective[how].bytes


# HSDP takes longer than all others; test_accelerate.py has it.
@distributed.on_ranks(2, timeout=120.0)
def test_shards_resume_bitwise(rank, tmp_path):
    def made(to):
        hf.launch("gpu")
        args = {
            "use_cpu": False,
            "fsdp": True,
            "ddp_find_unused_parameters": None,
            "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"]},
        }
        return trainer_of(tmp_path / to, kind=curvadion.Dion, args=args)

    whole = made("whole")
    whole.train()
    again = made("again")
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{SAVED}"))
    losses = logged(whole, "loss")
    assert len(losses) == STEPS and losses == logged(again, "loss")
    toy.assert_bitwise_equal(hf.whole(whole.model), hf.whole(again.model))


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
@pytest.mark.numeric
@distributed.on_ranks(2, timeout=120.0)
def test_a_factory_trains_on_mean_gradients(rank, tmp_path, layout):
    """Trainer averages them and clips; attached, the optimizer does."""
    from transformers import Trainer

    args = {"max_steps": 6, "save_strategy": "no", "max_grad_norm": 0.0}
    if layout == "fsdp2":
        args |= {"use_cpu": False, "fsdp": True, "ddp_find_unused_parameters": None}
        args["fsdp_config"] = {"version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"]}
    settings = {"lr": LR, "elementwise_lr": 0.001, "weight_decay": 0.01}

    def made(kind=None, **more):
        hf.launch("gpu" if layout == "fsdp2" else "cpu")
        torch.manual_seed(5)
        given = (
            {} if kind is None else {"optimizer_cls_and_kwargs": curvadion.factory(kind, **more)}
        )
        options = arguments(tmp_path, **args)
        return Trainer(model=hf.gpt(), args=options, train_dataset=hf.Tokens(), **given)

    from curvadion.integrations.huggingface import attach

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        plain = made(curvadion.Muon, **settings)
        plain.train()
    attached = attach(made(), curvadion.Muon, **settings)
    attached.train()
    # Only rank 0 says, once, which parameters take which update.
    assert printed.getvalue().count("curvadion: Muon with gate=AlwaysOpen()") == (rank == 0)
    assert (
        "polar, lr=0.02: 3 tensors of 2,304 elements: transformer.h.*.attn.c_proj.weight, "
        in printed.getvalue()
    ) == (rank == 0)
    rounding = Rounding(torch.float32, terms=16, condition=1e3, steps=6)
    expected = hf.whole(attached.model)
    for name, W in hf.whole(plain.model).items():
        assert_close(W, expected[name], rounding, what=name)
    with pytest.raises(ValueError, match=r"on 2 ranks: Trainer averages .*huggingface\.attach"):
        made(curvadion.CurvaDion, wire_budget=0.5).train()
    for kind, settings, says in (
        (curvadion.Replicated, {"wire_budget": 0.5}, r"factory\(Replicated\)"),
        ("Muon", {}, "kind='Muon' must be a class"),
        (curvadion.Muon, {"learning_rate": 0.1}, "Muon got .* did you mean 'lr'"),
    ):
        with pytest.raises(TypeError, match=says):
            made(kind, **settings)


@pytest.mark.numeric
@distributed.on_ranks(2, timeout=120.0)
def test_best_model_is_loaded_and_stays(rank, tmp_path):
    """Though replicas drift between the evaluations."""
    from safetensors.torch import load_file
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 12

    hf.launch()
    args = {
        "save_steps": 5,
        "eval_steps": 5,
        "eval_strategy": "steps",
        "save_strategy": "best",
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": True,  # so the first is the best
    }
    trainer = trainer_of(tmp_path, args=args, gate=curvadion.FixedPeriod(4), sync=CODES["sync"])
    trainer.add_callback(Stop)
    trainer.train()
    seen, held = logged(trainer, "eval_loss"), hf.whole(trainer.model)
    assert len(seen) == 2 and seen[0] > seen[1]
    assert_close(trainer.evaluate()["eval_loss"], seen[0], Rounding(torch.float32))
    trainer.save_model(str(tmp_path / "final"))
    dist.barrier()
    toy.assert_bitwise_equal(held, hf.whole(trainer.model))
    toy.assert_bitwise_equal(*distributed.gathered(held))
    for folder in (trainer.state.best_model_checkpoint, tmp_path / "final"):
        written = load_file(Path(folder) / "model.safetensors")
        toy.assert_bitwise_equal(held, {**held, **written})
        assert written.keys() >= {name for name in held if name != "lm_head.weight"}


@distributed.on_ranks(2, timeout=120.0)
def test_mistakes_are_errors_on_all_ranks(rank, tmp_path):
    from transformers import Trainer

    from curvadion.integrations.huggingface import attach

    def fresh(optimizer=None, **args):
        hf.launch()
        torch.manual_seed(5)
        model = hf.gpt()
        given = {} if optimizer is None else {"optimizers": (optimizer(model), None)}
        args = {"learning_rate": LR, **args}
        return Trainer(
            model=model, args=arguments(tmp_path, **args), train_dataset=hf.Tokens(), **given
        )

    def ours(model):
        return curvadion.Dion(curvadion.param_groups(model), replicas=dist.group.WORLD)

    def sgd(model):
        return torch.optim.SGD(model.parameters())

    with pytest.warns(UserWarning, match="learning_rate=5e-05"):
        attach(fresh(learning_rate=5e-5))
    gate = curvadion.FixedPeriod(2)  # which keeps state
    searched = attach(fresh(), gate=gate)  # as a search of hyperparameters does, between trials
    searched.args.learning_rate, searched.args.weight_decay = 0.3, 0.5
    fused, group, *others = searched.create_optimizer().param_groups
    assert (
        (group["lr"], group["weight_decay"]) == (fused["lr"], fused["weight_decay"]) == (0.3, 0.5)
    )
    assert [other["lr"] for other in others] == [0.15, 0.045, 0.15]  # positions, tokens, norms
    assert searched.optimizer.gate is not gate
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attach(fresh(learning_rate=5e-5), curvadion.Replicated)
    with pytest.raises(ValueError, match=r"\['lr', 'patterns'\] are no arguments of Replicated"):
        attach(fresh(), curvadion.Replicated, lr=LR, patterns={})
    with_json = fresh()
    with_json.is_deepspeed_enabled = True
    with pytest.raises(ValueError, match="Replicated does not work with DeepSpeed in Trainer"):
        attach(with_json, curvadion.Replicated)
    with pytest.raises(RuntimeError, match="identical on all replicas") as told:
        fresh(ours).train()
    assert "the module of curvadion.integrations for your framework" in str(told.value)
    with pytest.raises(RuntimeError, match="attached already"):
        attach(attach(fresh()))
    with pytest.raises(ValueError, match="already has the optimizer SGD"):
        attach(fresh(sgd))


@pytest.mark.parametrize("name", doc_checks.names_of("docs/huggingface.md"))
def test_a_block_of_the_page_runs(name, tmp_path):
    doc_checks.check(name, tmp_path)
