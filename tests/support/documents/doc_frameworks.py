"""What the documents' blocks about frameworks need around them, for tiny models on processors."""

from __future__ import annotations

import ast

from support.documents.doc_blocks import Around, blocks


def definitions(page: str, part: str) -> str:
    """What the block of a page that holds ``part`` imports and defines, for a later block of it."""
    [code] = [block.code for block in blocks("python") if block.page == page and part in block.code]
    kinds = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef)
    kept = [node for node in ast.parse(code).body if isinstance(node, kinds)]
    return ast.unparse(ast.Module(kept, [])) + "\n"


# A budget of 1 % allows no opening in 50 steps where shards are much smaller than a block of codes.
WIDE = """
model = nn.Sequential(nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 256), nn.Linear(256, 8))
"""

# -------------------------------------------------------------------- DeepSpeed

JSON = {block.page: block.code for block in blocks("json")}
LAUNCHED = """
import json
from pathlib import Path
from support.runs import deepspeed_engines as ds

ds.launch()
"""
WRITTEN = """
if dist.get_rank() == 0:
    Path("ds_config.json").write_text(json.dumps(config))
dist.barrier()
"""
ENGINES = f"""{LAUNCHED}
config = json.loads({JSON["docs/deepspeed.md"]!r})
config["optimizer"]["params"]["replica_size"] = 2  # of four ranks
{WRITTEN}"""
ENGINE_STEPS = """
for inputs, targets in data:
    engine.backward(loss_function(engine(inputs), targets))
    engine.step()
optimizer = engine.basic_optimizer
assert optimizer.report.step == len(data) and engine.zero_optimization_stage() == 3
assert optimizer.drifted
optimizer.eval()
assert not optimizer.drifted
"""
SAVED_GPT = """
from support.runs import hugging_face as hf

hf.launch("deepspeed")
from functools import partial
from transformers import GPT2LMHeadModel

if dist.get_rank() == 0:
    hf.gpt().save_pretrained("start")
dist.barrier()
make_model = partial(GPT2LMHeadModel.from_pretrained, "start")
dataset = torch.utils.data.Subset(hf.Tokens(), range(32))
"""
DEEPSPEED = {
    "docs/deepspeed.md: deepspeed.initialize(": Around(
        ENGINES + WIDE, ENGINE_STEPS, 4, needs=("deepspeed",)
    ),
    "docs/muon.md: deepspeed.initialize(": Around(
        f"{LAUNCHED}\nimport deepspeed\nconfig = json.loads({JSON['docs/muon.md']!r})\n{WRITTEN}",
        "for inputs, targets in data:\n"
        "    engine.backward(loss_function(engine(inputs), targets))\n"
        "    engine.step()\n"
        "assert engine.basic_optimizer.param_groups[0]['direction'] == 'polar'\n"
        "assert engine.basic_optimizer.report.step == len(data)",
        2,
        needs=("deepspeed",),
    ),
    "docs/deepspeed.md: TrainingArguments(": Around(
        ENGINES + SAVED_GPT,
        "optimizer = trainer.deepspeed.basic_optimizer\n"
        "assert optimizer.report.step == 3 and not optimizer.drifted\n"
        "assert optimizer.report.wire_bytes > 0  # which attach counts",
        4,
        needs=("deepspeed", "transformers", "accelerate"),
    ),
}

# -------------------------------------------------------------------- Hugging Face

GPT = """
import os
from support.runs import hugging_face as hf

hf.launch()
model = hf.gpt()
dataset = torch.utils.data.Subset(hf.Tokens(), range(32))
loader = torch.utils.data.DataLoader(dataset, batch_size=4)
os.environ["ACCELERATE_USE_CPU"] = "true"
"""
STEPS = """
optimizer = trainer.optimizer.optimizer
assert optimizer.report.step == 6 and optimizer.param_groups[0]["initial_lr"] == 0.02
"""
NEEDS_HUGGING_FACE = ("transformers", "accelerate")
HUGGING_FACE = {
    "docs/huggingface.md: attach(trainer, wire_budget": Around(
        GPT,
        STEPS + "assert 'ByteBudget(share=0.01' in repr(optimizer)\nassert not optimizer.drifted",
        2,
        NEEDS_HUGGING_FACE,
    ),
    "docs/huggingface.md: curvadion.factory": Around(
        GPT + "from transformers import Trainer, TrainingArguments\n",
        "optimizer = trainer.optimizer.optimizer\n"
        "assert type(optimizer) is curvadion.Muon and optimizer.report.step > 0",
        2,
        NEEDS_HUGGING_FACE,
        instead=(('"out", ', '"out", use_cpu=True, max_steps=6, '),),
    ),
    "docs/huggingface.md: attach(Accelerator())": Around(
        GPT,
        "assert optimizer.optimizer.report.step == len(loader) == 4\n"
        "import torch.distributed as dist\n"
        "assert not optimizer.optimizer.drifted\n"
        "dist.barrier()  # the first rank has written\n"
        "assert os.path.isfile('checkpoint/model.safetensors')",
        2,
        NEEDS_HUGGING_FACE,
    ),
}

# -------------------------------------------------------------------- Lightning

LAUNCHED = """
from support.runs import lightning_runs
from lightning.pytorch.accelerators import CPUAccelerator

lightning_runs.as_if_torchrun_had_started(dist.get_rank(), dist.get_world_size() // 2)
# It takes one processor unless told, and as many GPUs as there are.
CPUAccelerator.auto_device_count = staticmethod(dist.get_world_size)
dataset = [(torch.randn(8), torch.ones(8)) for _ in range(16)]
data = torch.utils.data.DataLoader(dataset, batch_size=4)


class Base(lightning_runs.LightningModule):  # what the page leaves to its reader
    def __init__(self, model):
        super().__init__()
        self.model = model

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        return loss_function(self.model(inputs), targets)
"""
OF_READER = ("lightning.LightningModule", "Base")
TRAINING = definitions("docs/lightning.md", "class Training(").replace(*OF_READER)
FITTED = """
from torch.distributed.tensor import DTensor

trainer.fit(Hybrid(model), data)
assert all(isinstance(p, DTensor) for p in model.parameters())
optimizer = trainer.optimizers[0]
assert optimizer.report.step == 3 and not optimizer.drifted
"""
LIGHTNING = {
    "docs/lightning.md: class Training(": Around(
        LAUNCHED,
        "optimizer = trainer.optimizers[0]\nassert optimizer.report.step == 6\n"
        "assert not optimizer.drifted",
        2,
        ("lightning",),
        instead=(OF_READER,),
    ),
    "docs/lightning.md: class Hybrid(": Around(
        LAUNCHED + TRAINING + WIDE,
        FITTED,
        4,
        ("lightning",),
        instead=(("cuda", "cpu"), ("num_nodes=2", "num_nodes=2, max_epochs=3")),
    ),
}

# -------------------------------------------------------------------- torchtitan

TITAN = "from support.runs import torchtitan_runs\ntorchtitan_runs.on_processors(dist.get_rank())\n"
TINY = """
import dataclasses

tiny = torchtitan_runs.configuration("dump", steps=4, degree=2)
settings = {f.name: getattr(tiny, f.name) for f in dataclasses.fields(tiny)}
"""
TITAN_STEPS = """
trainer.train()
trainer.optimizers.synchronize(exact=False)
[optimizer] = trainer.optimizers.optimizers
assert optimizer.report.step == 4 and not optimizer.drifted
assert "ByteBudget(share=0.01" in repr(optimizer)
"""
NEEDS_TITAN = ("torchtitan", "torchdata", "tyro", "spmd_types", "datasets")
TORCHTITAN = {
    "docs/torchtitan.md: with_curvadion(llama3_8b()": Around(
        TITAN,
        TINY + "settings['optimizer'] = llama3_8b_replicas().optimizer\n"
        "trainer = dataclasses.replace(llama3_8b_replicas(), **settings).build()" + TITAN_STEPS,
        2,
        NEEDS_TITAN,
    ),
    "docs/torchtitan.md: on_processors": Around(
        after="[optimizer] = trainer.optimizers.optimizers\n"
        "assert optimizer.report.step == 30 and 'ByteBudget(share=0.5' in repr(optimizer)",
        ranks=2,
        needs=NEEDS_TITAN,
        launched=True,
    ),
}

AROUND = DEEPSPEED | HUGGING_FACE | LIGHTNING | TORCHTITAN
