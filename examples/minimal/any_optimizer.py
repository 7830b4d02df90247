"""Any torch optimizer, here AdamW, on replicas that synchronise every few steps.

    torchrun --standalone --nproc-per-node 2 examples/minimal/any_optimizer.py

It takes GPUs with NCCL if there are any, otherwise CPUs with gloo.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import curvadion
from curvadion.integrations.ddp import keep_gradients_local

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
ddp = keep_gradients_local(DistributedDataParallel(model))  # DDP no longer averages gradients
inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
optimizer = curvadion.Replicated(inner, replicas=dist.group.WORLD, wire_budget=0.03)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 20)  # not of inner

torch.manual_seed(1 + rank)  # each replica draws samples of its own
for step in range(20):
    inputs = torch.randn(64, 16, device=device)
    loss = nn.functional.mse_loss(ddp(inputs), inputs @ task)
    loss.backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    if rank == 0:
        how = "" if optimizer.drifted else ", synchronised"
        print(f"step {step}: loss {loss.item():.2f}{how}")
optimizer.synchronize()  # on all ranks, before an evaluation or at the end
dist.barrier()  # leaves gloo's threads idle: a busy one can abort Python when it exits
dist.destroy_process_group()
