"""FSDP2 with Muon: one model sharded over all processes, which synchronise at every step.

    torchrun --standalone --nproc-per-node 2 examples/minimal/fsdp2.py

It takes GPUs with NCCL if there are any, otherwise CPUs with gloo.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import curvadion

device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
rank = dist.get_rank()

torch.manual_seed(0)  # the same weights and the same task on all ranks
layers = [nn.Linear(16, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 8)]
model = nn.Sequential(*layers).to(device)
task = torch.randn(16, 8, device=device) / 4
mesh = init_device_mesh(device.type, (dist.get_world_size(),))
for module in [*model, model]:
    fully_shard(module, mesh=mesh)
groups = curvadion.param_groups(model)  # after fully_shard, which replaces the parameters
optimizer = curvadion.Dion(groups, lr=0.05, look_ahead=1 / 0.95, direction="polar")

torch.manual_seed(1 + rank)  # each rank draws samples of its own
for step in range(20):
    inputs = torch.randn(64, 16, device=device)
    loss = nn.functional.mse_loss(model(inputs), inputs @ task)
    loss.backward()  # FSDP averages the gradients
    curvadion.clip_grad_norm_(optimizer, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step}: loss {loss.item():.2f}")
dist.barrier()  # leaves gloo's threads idle: a busy one can abort Python when it exits
dist.destroy_process_group()
