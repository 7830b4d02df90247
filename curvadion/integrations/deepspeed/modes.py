"""Modes of DeepSpeed in which no update is right, and those that replicas rule out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

REPLICA_SIZE = "replica_size"
KEY = f"optimizer.params.{REPLICA_SIZE}"


def check_engine(engine: Any) -> None:
    """Raise ValueError, naming the key, for a mode of DeepSpeed in which no update is right."""
    settings = engine._config
    zero, stage = settings.zero_config, engine.zero_optimization_stage()
    half = engine.torch_autocast_enabled() and engine.torch_autocast_dtype() is torch.float16
    elastic, deep = "zero_optimization.elastic_checkpoint", settings.compile_config.deepcompile
    sums = stage == 0 and not engine.gradient_average
    sequences = stage == 0 and engine.sequence_parallel_size > 1
    refused = [
        (engine.fp16_enabled() and stage == 0, "fp16.enabled", "use bf16, or ZeRO stage 1, 2 or 3"),
        (engine.pipeline_parallelism, "PipelineModule", "train without pipeline stages"),
        (engine.has_moe_layers, "deepspeed.moe layers", "use dense layers"),
        (engine.autotp_size() > 1, "tensor_parallel.autotp_size", "set it to 1"),
        (engine.mpu is not None, "mpu", f"pass none: {KEY} chooses replicas"),
        (deep, "compile.deepcompile", "set it to false"),
        (zero.zenflow is not None, "zero_optimization.zenflow", "remove it"),
        (zero.elastic_checkpoint, elastic, "set it to false: optimizer state is not elastic"),
        (engine.load_universal_checkpoint(), "checkpoint.load_universal", "set it to false"),
        (half, "torch_autocast.dtype", "use bfloat16: ranks would scale float16 losses alone"),
        (sequences, "sequence_parallel_size", "use zero_optimization.stage >= 1"),
        (sums, "gradient_allreduce_op", "use 'mean', which is what replicas take"),
    ]
    for key in ("offload_optimizer", "offload_param"):
        name, offload = f"zero_optimization.{key}", getattr(zero, key)
        device, ratio = getattr(offload, "device", ""), getattr(offload, "ratio", 1.0)
        refused += [
            (str(device).endswith("nvme"), f"{name}.device='nvme'", "use 'cpu'"),
            (getattr(offload, "super_offload", False), f"{name}.super_offload", "set it to false"),
            (ratio != 1.0, f"{name}.ratio={ratio}", "set it to 1.0"),
        ]
    _refuse(refused, "CurvaDion and Dion")


def check_with_replicas(engine: Any, size: int) -> None:
    """Raise ValueError, naming the key, for a mode that replicas of ``size`` ranks rule out."""
    zero, checkpoint = engine._config.zero_config, engine._config.checkpoint_config
    sequences = engine.sequence_parallel_size > 1 or engine.mesh_device is not None
    secondary = (zero.zero_hpz_partition_size or 1) > 1
    coded, serial = "zero_optimization.zero_quantized_gradients", zero.pipeline_loading_checkpoint
    parallel = (checkpoint["writer"] or {}).get("data_parallel") is not None
    node, off = engine.use_node_local_storage(), "set it to false"
    refused = [
        (sequences, "sequence_parallel_size", "leave it out"),
        (secondary, "zero_optimization.zero_hpz_partition_size", "leave it out"),
        (bool(zero.zero_quantized_gradients), coded, f"{off}: its groups span all ranks"),
        (not engine.gradient_average, "gradient_allreduce_op", "use 'mean'"),
        (node, "checkpoint.use_node_local_storage", f"{off}: one replica writes for all"),
        (parallel, "checkpoint.writer.data_parallel", "leave it out: one replica writes for all"),
        (serial, "zero_optimization.pipeline_loading_checkpoint", f"{off}: ranks would wait"),
    ]
    _refuse(refused, f"{KEY}={size}")


def _refuse(modes: Iterable[tuple[bool, str, str]], beside: str) -> None:
    for is_set, key, advice in modes:
        if is_set:
            raise ValueError(f"{key} does not work with {beside}: {advice}.")
