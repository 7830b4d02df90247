"""torchtitan's trainer and a tiny llama on processors, in a process group that exists."""

import functools
import os
import time
import types
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

import curvadion

VOCABULARY, LENGTH, BATCH = 32, 16, 2


def on_processors(rank):
    """Let torchtitan, which asks for an accelerator, train where there is none."""
    for name, value in {
        "LOCAL_RANK": rank,
        "RANK": rank,
        "WORLD_SIZE": dist.get_world_size(),
    }.items():
        os.environ[name] = str(value)
    from torchtitan.tools import utils

    if utils.device_type == "cpu":
        return
    memory = types.SimpleNamespace(total_memory=1)
    told = {
        "get_device_name": lambda *_: "cpu",
        "get_device_properties": lambda *_: memory,
        "memory_stats": lambda *_: {},
        "reset_peak_memory_stats": lambda *_: None,
        "empty_cache": lambda: None,
        "current_device": lambda: 0,
    }
    utils.device_type = "cpu"
    utils.device_module = types.SimpleNamespace(**{**vars(torch.cpu), **told})
    from torchtitan import trainer
    from torchtitan.distributed import utils as distributed_utils

    trainer.time = types.SimpleNamespace(**{**vars(time), "sleep": lambda _: None})  # at its end
    if not hasattr(dist, "set_timeout"):  # torch 2.13 lacks it
        distributed_utils.set_pg_timeouts = lambda **_: None


def configuration(folder, *, steps, degree, warmup=0, backend="partial_dtensor", **settings):
    """A small llama's trainer configuration; degree: of replicas, the other ranks being shards."""
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.config.configs import ParallelismConfig, TrainingConfig
    from torchtitan.trainer import Trainer

    return Trainer.Config(
        loss=CrossEntropyLoss.Config(global_vocab_size=VOCABULARY),
        model_spec=specification(),
        optimizer=default_adamw(lr=8e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=warmup, decay_ratio=0.0),
        training=TrainingConfig(
            local_batch_size=BATCH,
            seq_len=LENGTH,
            steps=steps,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
            **settings.pop("training", {}),
        ),
        tokenizer=components().Nothing.Config(),
        dataloader=components().Tokens.Config(),
        metrics=MetricsProcessor.Config(log_freq=1),
        parallelism=ParallelismConfig(data_parallel_replicate_degree=degree, spmd_backend=backend),
        checkpoint=CheckpointManager.Config(**settings.pop("checkpoint", {})),
        activation_checkpoint=None,
        dump_folder=folder,
        **settings,
    )


def specification():
    """A llama of two layers, whose shards are added up as gloo can."""
    import dataclasses

    from torchtitan.models import llama3
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common.attention import ScaledDotProductAttention

    dim, heads = 16, 2
    rope = ComplexRoPE.Config(dim=dim // heads, max_seq_len=LENGTH, theta=10000, scaling="none")
    model = llama3.Llama3Model.Config(
        dim=dim,
        vocab_size=VOCABULARY,
        tok_embeddings=Embedding.Config(
            num_embeddings=VOCABULARY, embedding_dim=dim, param_init=llama3._EMBEDDING_INIT
        ),
        norm=RMSNorm.Config(normalized_shape=dim, param_init=llama3._NORM_INIT),
        lm_head=Linear.Config(
            in_features=dim, out_features=VOCABULARY, param_init=llama3._output_linear_init(dim)
        ),
        layers=llama3._build_llama3_layers(
            n_layers=2, dim=dim, n_heads=heads, hidden_dim=32, rope=rope, attn_backend="flex"
        ),
    )
    for layer in model.layers:  # the default is compiled for GPUs
        layer.attention.inner_attention = ScaledDotProductAttention.Config()

    def parallelize(model, **settings):
        llama3.parallelize_llama(model, **settings)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        return model

    spec = llama3.model_registry("debugmodel")
    return dataclasses.replace(
        spec, flavor="tiny", model=model, parallelize_fn=parallelize, state_dict_adapter=None
    )


@functools.cache
def components():
    """A dataloader and a tokenizer of torchtitan's kinds."""
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.tokenizer import BaseTokenizer

    class Tokens(BaseDataLoader):
        """Random tokens; which follows from the number of the batch and from the reader."""

        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            infinite: bool = True

        def __init__(self, config, *, dp_rank, local_batch_size, seq_len, **_):
            self.reader, self.shape, self.read = dp_rank, (local_batch_size, seq_len + 1), 0

        def __iter__(self):
            while True:
                self.read += 1
                yield batch(self.read, self.reader, self.shape)

        def state_dict(self):
            return {"read": self.read}

        def load_state_dict(self, state):
            self.read = state["read"]

    class Nothing(BaseTokenizer):
        """Tokenizes nothing."""

        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config, **_):
            super().__init__()

        def encode(self, *_, **__):
            return []

        def decode(self, *_, **__):
            return ""

        def get_vocab_size(self):
            return VOCABULARY

    return types.SimpleNamespace(Tokens=Tokens, Nothing=Nothing)


def batch(number, reader, shape):
    drawn = torch.Generator().manual_seed(1000 * reader + number)
    tokens = torch.randint(VOCABULARY, shape, generator=drawn)
    return {"input": tokens[:, :-1]}, tokens[:, 1:]


def noting(trainer):
    """The trainer's own losses, each replica's mean over its tokens, and reports of its steps."""
    losses, reports = [], []
    body, step = trainer.fwd_bwd_fn, trainer.train_step
    replicas = trainer.parallel_dims.dp_replicate * trainer.parallel_dims.dp_shard

    def forward_backward(*given):
        loss = body(*given)
        losses.append(loss.item() * replicas)
        return loss

    def train_step(*given):
        step(*given)
        reports.append(trainer.optimizers.optimizers[0].report)

    trainer.fwd_bwd_fn, trainer.train_step = forward_backward, train_step
    return losses, reports


def whole_weights(trainer):
    """The weights, without shards, of one replica."""
    named = trainer.model_parts[0].named_parameters()
    return {name: x.detach().full_tensor().clone() for name, x in named}


def by_hand(weights, make, *, steps, clip, readers):
    """The steps of one whole replica without torchtitan's trainer; its losses and reports.

    weights: to begin with. readers: the numbers of the ranks whose batches it reads.
    """
    model = specification().model.build()
    with torch.no_grad():
        model.to_empty(device="cpu")
        model.init_weights(buffer_device=None)
        for name, x in model.named_parameters():
            x.copy_(weights[name])
    optimizer = make(curvadion.param_groups(model))
    losses, reports = [], []
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        for reader in readers:
            inputs, labels = batch(step, reader, (BATCH, LENGTH + 1))
            logits = model(inputs["input"]).float()
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            (loss / len(readers)).backward()
            losses.append(loss.item())
        curvadion.clip_grad_norm_(optimizer, clip)
        optimizer.step()
        reports.append(optimizer.report)
    return losses, reports
