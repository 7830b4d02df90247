"""The code blocks of the documents, and what has to be there before one of them runs.

A block runs in a folder of its own on every rank of a gloo group, after COMMON and the code of its
entry in AROUND, here or in doc_frameworks.py. A key, "docs/guide.md: ByteBudget", is the page and
what only that block of the page holds. A block without an entry runs after COMMON alone, in one
process.
"""

from __future__ import annotations

import os
import re
import textwrap
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from support.runs import distributed

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCED = re.compile(r"^( *)```(\w+)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


# ---------------------------------------------------------------- blocks


@dataclass(frozen=True)
class Block:
    name: str
    page: str
    language: str
    code: str


def blocks(*languages: str) -> list[Block]:
    """The blocks of all pages in some languages, or in all, numbered by page and language."""
    found = []
    for path in PAGES:
        page, count = path.relative_to(ROOT).as_posix(), Counter[str]()
        for _, language, code in FENCED.findall(path.read_text("utf-8")):
            if not languages or language in languages:
                count[language] += 1
                name = f"{page}#{count[language]}"
                found.append(Block(name, page, language, textwrap.dedent(code)))
    return found


# ---------------------------------------------------------------- code before and after them

COMMON = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import curvadion
from curvadion import CurvaDion, Dion, param_groups

torch.manual_seed(0)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Residual() for _ in range(2)])
        self.head = nn.Linear(8, 8)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_function(outputs, targets):
    return (outputs - targets).square().mean()


def train(of=None, by=None, steps=3):
    generator = torch.Generator().manual_seed(dist.get_rank())
    of, by = of or model, by or optimizer
    for _ in range(steps):
        loss_function(of(torch.randn(4, 8, generator=generator)), torch.ones(4, 8)).backward()
        by.step()
        by.zero_grad()


model = Model()
groups = param_groups(model)
generator = torch.Generator().manual_seed(10 + dist.get_rank())
data = [(torch.randn(4, 8, generator=generator), torch.ones(4, 8)) for _ in range(3)]
"""

BUDGETED = """
optimizer = CurvaDion(groups, replicas=dist.group.WORLD, wire_budget=0.5)
train(steps=1)
assert optimizer.drifted
"""
WRAPPED = """
inner = torch.optim.AdamW(model.parameters())
optimizer = curvadion.Replicated(inner, replicas=dist.group.WORLD, wire_budget=0.5)
train(steps=1)
assert optimizer.drifted
"""
TRAINED = "optimizer = Dion(groups, replicas=dist.group.WORLD)\ntrain()\n"
REPORTED = TRAINED + "loss = torch.ones(())\n"
MESH = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
"""
TORCHS = """
matrices = [p for p in model.parameters() if p.dim() == 2 and p is not model.head.weight]
others = [p for p in model.parameters() if p not in set(matrices)]
saved = {"muon": torch.optim.Muon(matrices), "adamw": torch.optim.AdamW(others)}
for by in saved.values():
    train(by=by, steps=2)
saved = {name: by.state_dict() for name, by in saved.items()}
"""
# A run that saves, and another that loads.
BUILT = """
def build(**options):
    model = Model()
    return model, CurvaDion(param_groups(model), replicas=dist.group.WORLD, **options)


model, optimizer = build(wire_budget=0.5, rank_fraction=0.25)
train()
"""
BUILT_OF_SHARDS = f"""
{MESH}
def build(**options):
    model = Model()
    fully_shard(model, mesh=mesh)
    return model, Dion(param_groups(model), direction="polar")


mesh = init_device_mesh("cpu", (2,))
model, optimizer = build()
train()
"""
BUILT_AGAIN = """
wanted = nn.utils.parameters_to_vector(model.parameters()).detach()
model, optimizer = build(wire_budget=0.5, rank_fraction=0.25)
"""
NEXT_RUN = (("# In the next run, with the same model and optimizer", BUILT_AGAIN),)
SAVED = f"""
{BUILT}
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict as states

optimizer.synchronize(exact=True)
kept = states.get_state_dict(model, optimizer)
dcp.save(dict(zip(("model", "optimizer"), kept)), checkpoint_id="saved")
{BUILT_AGAIN}
"""
LOADED = """
assert torch.equal(nn.utils.parameters_to_vector(model.parameters()), wanted)
assert optimizer.progress.steps == 3
train()
"""
EXPERTS = """
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        for name in ("w1", "w2", "w3", "up"):
            setattr(self, name, nn.Parameter(torch.randn(4, 8, 8)))


model.layer = nn.Module()
model.layer.experts = Experts()
model.layer.c_attn = nn.Linear(8, 24)
model.layer.patch_embed = nn.Conv2d(3, 8, 4)
"""
DDP = "from curvadion.integrations.ddp import keep_gradients_local\n"
EMA = f"""
{DDP}
ddp = DistributedDataParallel(model)
keep_gradients_local(ddp)
"""
EMA_AGREES = """
assert optimizer.drifted
flat = nn.utils.parameters_to_vector(averaged.parameters()).detach()
everyones = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
dist.all_gather(everyones, flat)
assert all(torch.equal(each, flat) for each in everyones)
averaged.update_parameters(model)
"""
TAIL_SAVED = """
import torch.distributed.checkpoint as dcp

optimizer = Dion(groups)
earlier = curvadion.TailAverage(optimizer, start=1, decay=0.5)
train()
dcp.save({"tail": earlier.state_dict()}, checkpoint_id="saved")
tail = curvadion.TailAverage(optimizer, start=1)
"""
TOGETHER = "assert not optimizer.drifted\n"
STEPS = "train()\nassert optimizer.report.step == 3\n"
AMPLE = (("wire_budget=0.01", "wire_budget=0.5"),)  # these models are small
ON_CPUS = (("nccl", "gloo"), ("cuda", "cpu"))
TWO_NODES = (*AMPLE, ("cuda", "cpu"), ("(nodes, 8)", "(2, 1)"))
LIGHTHOUSE = """
import itertools, os
from torchft.coordination import LighthouseServer

lighthouse = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=100)
os.environ["TORCHFT_LIGHTHOUSE"] = lighthouse.address()
schedule, total_steps, data = (lambda step: 1.0), 3, itertools.cycle(data)
"""
ELASTIC = """
import pathlib, signal
from curvadion.integrations.torchft import ElasticReplicas
"""
STARTED = (
    "replicas.start(optimizer, scheduler=scheduler)",
    "inner = torch.optim.SGD(model.parameters(), lr=0.01)\n"
    "optimizer = curvadion.Replicated(inner, replicas=replicas, wire_budget=0.5)\n"
    "replicas.start(optimizer)",
)


# ---------------------------------------------------------------- what each needs


@dataclass(frozen=True)
class Around:
    """Ranks, code before and after a block, and packages that it needs.

    launched: the block itself calls init_process_group, as under torchrun.
    instead: words of the block, and what is read in their place where there are no GPUs.
    """

    before: str = ""
    after: str = ""
    ranks: int = 1
    needs: tuple[str, ...] = ()
    launched: bool = False
    instead: tuple[tuple[str, str], ...] = ()


AROUND = {
    "README.md: # DDP stops averaging": Around(
        after="assert optimizer.report.step == len(data)\n" + TOGETHER, ranks=2
    ),
    "README.md: fully_shard": Around(MESH, STEPS, ranks=2, instead=TWO_NODES),
    "docs/index.md: # DDP no longer averages": Around(after=STEPS, ranks=2, instead=AMPLE),
    "docs/index.md: fully_shard": Around(MESH, STEPS, ranks=2, instead=TWO_NODES),
    "docs/index.md: curvadion.Replicated": Around(after=STEPS, ranks=2, instead=AMPLE),
    "CONTRIBUTING.md: class Growing": Around(
        after="optimizer = CurvaDion(groups, replicas=dist.group.WORLD, gate=Growing())\n"
        "train(steps=6)\nassert optimizer.gate.wait == 3 and optimizer.report.reason == 'growing'",
        ranks=2,
    ),
    "CONTRIBUTING.md: class Half": Around(
        after="optimizer = Dion(groups, direction='half')\n"
        + STEPS
        + "from curvadion.update.registry import DIRECTIONS\nDIRECTIONS.pop('half')",
    ),
    "CONTRIBUTING.md: class Mean": Around(
        after="optimizer = CurvaDion(groups, replicas=dist.group.WORLD, sync=Mean(),\n"
        "    gate=curvadion.FixedPeriod(3))\n" + STEPS + "assert not optimizer.drifted",
        ranks=2,
    ),
    "README.md: curvadion.Replicated": Around(DDP, STEPS, ranks=2, instead=AMPLE),
    "docs/any-optimizer.md: keep_gradients_local": Around(
        after="assert optimizer.report.step == len(data)",
        ranks=2,
        launched=True,
        instead=AMPLE,
    ),
    "docs/any-optimizer.md: torch.optim.Muon": Around(after=STEPS, ranks=2, instead=AMPLE),
    "docs/any-optimizer.md: mesh=mesh": Around(
        MESH, STEPS, ranks=4, instead=(*AMPLE, ("cuda", "cpu"), ("(nodes, 8)", "(2, 2)"))
    ),
    "docs/any-optimizer.md: checkpoint-": Around(WRAPPED, "assert optimizer.drifted\ntrain()", 2),
    "docs/elastic.md: import curvadion": Around(
        LIGHTHOUSE, "assert optimizer.report.step == 3", instead=AMPLE, needs=("torchft",)
    ),
    "docs/elastic.md: ElasticBatchSampler": Around(
        "from torch.utils.data import DataLoader\n"
        "from curvadion.integrations.torchft import ElasticBatchSampler\n"
        "dataset, batch_size, number, optimizer = range(24), 2, 1, Dion(groups)\ntrain(steps=1)",
        "assert len(next(data)) == batch_size",
        instead=(("num_workers=2", "num_workers=0"),),
        needs=("torchft",),
    ),
    "docs/elastic.md: .begun": Around(
        LIGHTHOUSE + ELASTIC,
        "assert begun.exists()\nreplicas.close()",
        instead=(("/shared/", ""), STARTED),
        needs=("torchft",),
    ),
    "docs/elastic.md: SIGTERM": Around(
        LIGHTHOUSE + ELASTIC + "replicas = ElasticReplicas()\n",
        "signal.signal(signal.SIGTERM, signal.SIG_DFL)\nassert optimizer.progress.steps == 3",
        instead=(("…", "train(steps=1)"), STARTED),
        needs=("torchft",),
    ),
    "docs/index.md: torchft": Around(
        LIGHTHOUSE, "train()\nassert optimizer.report.step == 3", instead=AMPLE, needs=("torchft",)
    ),
    "docs/getting-started.md: first.jsonl": Around(
        after="lines = open('first.jsonl').readlines() if rank == 0 else [0] * 100\n"
        "assert len(lines) == 100 and loss.item() < 4.5 and meter.total.sent < 0.011 * 400 * sum(\n"
        "    p.numel() for p in model.parameters())",
        ranks=2,
        launched=True,
    ),
    "docs/getting-started.md: dcp.save": Around(BUILT, LOADED, 2, instead=NEXT_RUN),
    "docs/guide.md: ByteBudget": Around(after=STEPS, ranks=2, instead=(("0.01", "0.5"),)),
    "docs/update-hooks.md: handle =": Around(
        after=STEPS + "assert len(optimizer.inner.update_hooks) == 2"
    ),
    "docs/update-hooks.md: floor_by_the_mean": Around("optimizer = Dion(groups)", STEPS),
    "docs/update-hooks.md: QKClip": Around(
        "optimizer = Dion(groups)\nResidual.largest_logits = torch.full((4,), 300.0)",
        "assert optimizer.report.step == len(data)",
        instead=(
            ("range(12)", "range(2)"),
            (".q.weight", ".up.weight"),
            (".k.weight", ".down.weight"),
            ("head_dim=64", "head_dim=4, key_heads=2"),
            ("heads=12", "heads=4"),
        ),
    ),
    "docs/kernels.md: use_backend": Around(
        after="assert curvadion.ops.backend_for(torch.device('cpu')) == 'cpu'\n"
        "curvadion.ops.use_backend(None)",
        needs=("the compiled library",),
    ),
    "docs/layouts.md: # DDP": Around(after=STEPS, ranks=2, instead=AMPLE),
    "docs/layouts.md: # HSDP": Around(
        MESH + "nodes, gpus = 2, 1", STEPS, 2, instead=(*AMPLE, ("cuda", "cpu"))
    ),
    "docs/layouts.md: patterns=": Around(
        EXPERTS, "kinds = {g['stack_dims'] for g in groups if 'stack_dims' in g}\nassert 1 in kinds"
    ),
    "docs/layouts.md: dcp.save": Around(
        BUDGETED, TOGETHER + "import os\nassert os.path.isfile('saved/.metadata')", 2
    ),
    "docs/layouts.md: # In the next run": Around(SAVED, LOADED, 2),
    "docs/layouts.md: allow_partial_load": Around(
        SAVED + "model, optimizer = build(threshold=0.1)\n", LOADED, 2
    ),
    "docs/muon.md: dcp.save": Around(BUILT_OF_SHARDS, LOADED, 2, instead=NEXT_RUN),
    "docs/muon.md: init_device_mesh": Around(
        MESH, "assert optimizer.report.step == len(data)", 2, launched=True, instead=ON_CPUS
    ),
    "docs/muon.md: load_torch_state": Around(
        TORCHS, "assert optimizer.progress.steps == 2\n" + STEPS.replace("3", "5")
    ),
    "docs/monitoring.md: PrometheusWriter": Around(
        "optimizer = Dion(groups)",
        "assert exporter._gauges['step']._value.get() == len(data)\nexporter.close()",
        instead=(("port=9464", "port=0"),),
        needs=("prometheus_client",),
    ),
    "docs/monitoring.md: SummaryWriter": Around(
        "optimizer = Dion(groups)",
        "train(steps=10)\nassert len(open('run.jsonl').readlines()) == 1",
        needs=("tensorboard",),
    ),
    "docs/monitoring.md: sync.diagnose": Around(
        "optimizer = CurvaDion(groups, replicas=dist.group.WORLD, gate=curvadion.FixedPeriod(4),\n"
        "    sync=curvadion.QuantizedAverage())\ntrain()\n"
        "inputs, targets = data[0]\nloss_function(model(inputs), targets).backward()",
        "assert optimizer.report.gate_open and optimizer.sync.take_diagnostics() is None",
        ranks=2,
    ),
    "docs/monitoring.md: matrix_statistics": Around(
        "optimizer = Dion(groups)\n"
        "inputs, targets = data[0]\nloss_function(model(inputs), targets).backward()",
        "assert updates.keys() == momenta.keys() and len(updates) == 5",
    ),
    "docs/reading-a-report.md: write_json_line": Around(
        "optimizer = Dion(groups)", "assert len(open('run.jsonl').readlines()) == len(data)"
    ),
    "docs/reading-a-report.md: add_scalar": Around(
        REPORTED, "writer.close()", needs=("tensorboard",)
    ),
    "docs/recipes.md: # exact=True for a loss": Around(
        BUDGETED + "inputs, targets = data[0]", TOGETHER, ranks=2
    ),
    "docs/recipes.md: schedule = lambda": Around(
        BUDGETED + "warmup, decay, total = 10, 10, 100",
        "assert scheduler.get_last_lr() == [0.1 * lr for lr in scheduler.base_lrs]",
        ranks=2,
    ),
    "docs/recipes.md: rate = 2e-5": Around(
        after="assert {group['lr'] for group in optimizer.param_groups} == {2e-5}\n" + STEPS,
        ranks=2,
        instead=(("wire_budget=0.05", "wire_budget=0.5"),),
    ),
    "docs/recipes.md: named_parameters": Around(
        "adamw = torch.optim.AdamW(model.parameters())\ntrain(by=adamw, steps=2)\n"
        "saved = {'optimizer': adamw.state_dict()}",
        "assert loaded.fresh == [] and 'head.bias' not in loaded.dropped\n"
        "train()\nassert optimizer.report.step == 5",
    ),
    "docs/recipes.md: micro_batches": Around(
        EMA + BUDGETED + "micro_batches = 3", "assert optimizer.report.step == 2", ranks=2
    ),
    "docs/recipes.md: AveragedModel": Around(EMA + BUDGETED, EMA_AGREES, ranks=2),
    "docs/recipes.md: TailAverage": Around(
        EMA + BUDGETED + "warmup, total = 2, 30\ndata = 10 * data",
        TOGETHER + "assert scheduler.get_last_lr() == [rate(30) * lr for lr in scheduler.base_lrs]",
        ranks=2,
    ),
    "docs/recipes.md: tail.begin()": Around(
        TAIL_SAVED, "assert str(tail.state_dict()) == str(earlier.state_dict())"
    ),
    "docs/recipes.md: FixedPeriod": Around(
        after=STEPS + "assert optimizer.inner.optimizers == (inner,)", ranks=2
    ),
    "docs/slow-links.md: integrations.ddp": Around(
        after="assert optimizer.report.step == len(data)\n" + TOGETHER,
        ranks=2,
        launched=True,
        instead=(*AMPLE, *ON_CPUS),
    ),
    "docs/slow-links.md: integrations.fsdp": Around(
        MESH,
        "assert mesh.shape == (2, 1)\n" + STEPS,
        ranks=2,
        launched=True,
        instead=(*AMPLE, *ON_CPUS),
    ),
}


def entry_of(block: Block, entries: Mapping[str, Around]) -> str | None:
    """The key of the entry that is about a block; None if it needs nothing."""
    split = ((key, *key.split(": ", 1)) for key in entries)
    found = [key for key, page, part in split if page == block.page and part in block.code]
    assert len(found) <= 1, f"{block.name} has several entries: {found}"
    return found[0] if found else None


# ---------------------------------------------------------------- running one


def run(rank: int, block: Block, around: Around, folder: str, port: int) -> None:
    """Run a block on this rank, in a folder; what it writes stays there."""
    here, environment = os.getcwd(), dict(os.environ)
    own = Path(folder) if around.launched or around.ranks > 1 else Path(folder) / str(rank)
    own.mkdir(parents=True, exist_ok=True)
    os.chdir(own)
    names: dict[str, object] = {"__name__": "__main__"}
    try:
        _execute(COMMON + around.before, f"before {block.name}", names)
        code = block.code
        for word, other in around.instead:
            code = code.replace(word, other)
        launched = distributed.as_torchrun_starts(rank, port) if around.launched else nullcontext()
        with launched:
            _execute(code, block.name, names)
            _execute(around.after, f"after {block.name}", names)
    finally:
        os.chdir(here)
        os.environ.clear()
        os.environ.update(environment)


def _execute(code: str, name: str, names: dict[str, object]) -> None:
    exec(compile(code, name, "exec"), names)
