"""DeepSpeed with Muon: ZeRO 2 shards gradients and optimizer state over all processes.

    torchrun --standalone --nproc-per-node 2 examples/minimal/deepspeed_zero.py

Needs ``pip install deepspeed``.
"""

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

import curvadion.deepspeed  # noqa: F401  DeepSpeed now knows "Dion" and "CurvaDion"

config = {
    "train_micro_batch_size_per_gpu": 64,
    "gradient_clipping": 1.0,
    "optimizer": {
        "type": "Dion",
        "params": {"lr": 0.05, "look_ahead": 1 / 0.95, "direction": "polar"},
    },
    "zero_optimization": {"stage": 2},
}

if not torch.cuda.is_available():  # or DeepSpeed would first compile a shared-memory all-reduce
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")

torch.manual_seed(0)  # the same weights and the same task on all ranks
layers = [nn.Linear(16, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 8)]
engine, *_ = deepspeed.initialize(model=nn.Sequential(*layers), config=config)
task = torch.randn(16, 8, device=engine.device) / 4

torch.manual_seed(1 + dist.get_rank())  # each rank draws samples of its own
for step in range(20):
    inputs = torch.randn(64, 16, device=engine.device)
    loss = nn.functional.mse_loss(engine(inputs), inputs @ task)
    engine.backward(loss)
    engine.step()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.2f}")
dist.barrier()  # leaves gloo's threads idle: a busy one can abort Python when it exits
dist.destroy_process_group()
