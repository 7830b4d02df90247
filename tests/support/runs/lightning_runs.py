"""Lightning's Trainer on the toy model, in a process group that exists; the same steps by hand."""

import os
import warnings

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import Logger
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

import curvadion
from curvadion.integrations.ddp import keep_gradients_local
from curvadion.integrations.lightning import ReplicasCallback
from support.runs import toy
from support.runs.drifts import drift

STEPS, SAVED = 14, 9


def coded(groups, replicas):
    """Replicas drift between openings, and codes of two bits owe them something after each."""
    sync = curvadion.QuantizedAverage(bits=2)
    gate = curvadion.FixedPeriod(4)
    return curvadion.CurvaDion(groups, replicas=replicas, gate=gate, sync=sync)


class Model(LightningModule):
    """The toy model; the step's number says which batch each rank reads."""

    def __init__(self, make=coded, sharded=None):
        super().__init__()
        self.toy = toy.model()
        self.make, self.sharded = make, sharded
        self.losses, self.reports, self.validated = [], [], []

    def configure_model(self):
        if self.sharded and not isinstance(self.toy, FSDPModule):  # not of an earlier fit
            names, shards = ("replicate", "shard"), dist.get_world_size() // 2
            self.mesh = init_device_mesh("cpu", (2, shards), mesh_dim_names=names)
            mesh = self.device_mesh["data_parallel"] if self.shards else self.mesh
            fully_shard(self.toy, mesh=mesh)

    def configure_optimizers(self):
        replicas = dist.group.WORLD if not self.sharded else self.mesh["replicate"]
        self.optimizer = self.make(toy.groups(self.toy), None if self.shards else replicas)
        return self.optimizer

    @property
    def shards(self):
        return self.sharded == "shards"

    def training_step(self, batch, batch_idx):
        loss = toy.loss(self.toy, batch_idx, dist.get_rank())
        self.losses.append(loss.item())
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.reports.append(self.optimizer.report)

    def validation_step(self, batch, batch_idx):
        self.validated.append((self.optimizer.drifted, drift(self.optimizer)))

    def train_dataloader(self):
        return torch.utils.data.DataLoader(range(60), batch_size=1)

    val_dataloader = train_dataloader


class Memory(Logger):
    """Keeps what it is told."""

    name, version = "memory", 0

    def __init__(self):
        super().__init__()
        self.told = []

    def log_metrics(self, metrics, step=None):
        self.told.append((step, metrics))

    def log_hyperparams(self, *args, **kwargs):
        pass


def as_if_torchrun_had_started(rank, nodes=1):
    """What Lightning reads of the ranks, whose process group exists."""
    world = dist.get_world_size()
    node, local = divmod(rank, size := world // nodes)
    names = {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": size}
    here = {"GROUP_RANK": node, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    for name, value in (names | here | {"TORCHELASTIC_RUN_ID": "tests"}).items():
        os.environ[name] = str(value)
    warnings.filterwarnings("ignore", module=r"lightning\.")


def fit(rank, model, *, callbacks=None, ckpt_path=None, steps=STEPS, **settings):
    """The trainer, after it has trained."""
    as_if_torchrun_had_started(rank)
    told = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    quiet = {"enable_checkpointing": False, "num_sanity_val_steps": 0, "limit_val_batches": 0}
    how = {"strategy": "ddp", "use_distributed_sampler": False, **told, **quiet} | settings
    trainer = Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        max_steps=steps,
        callbacks=[ReplicasCallback()] if callbacks is None else callbacks,
        **how,
    )
    trainer.fit(model, ckpt_path=ckpt_path)
    return trainer


def saving(folder):
    """Writes one checkpoint, after the step of that number."""
    return ModelCheckpoint(folder, filename="saved", every_n_train_steps=SAVED, save_top_k=-1)


def by_hand(rank, make=coded, *, steps=STEPS, clip=None, saved=None, by="norm", autocast=False):
    """The loop that users write without Lightning: model, optimizer, losses and reports."""
    model = toy.model()
    wrapped = keep_gradients_local(DistributedDataParallel(model))
    optimizer = make(toy.groups(model), dist.group.WORLD)
    losses, reports = [], []
    for step in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = toy.loss(wrapped, step, rank)
        loss.backward()
        losses.append(loss.item())
        if clip is not None and by == "value":
            torch.nn.utils.clip_grad_value_(model.parameters(), clip)
        elif clip is not None:
            curvadion.clip_grad_norm_(optimizer, clip)
        optimizer.step()
        reports.append(optimizer.report)
        if step + 1 == saved:
            optimizer.synchronize(exact=True)
    return model, optimizer, losses, reports
