"""Replicas that come and go: each is a program of its own, and torchft knows who is alive.

    torchft_lighthouse --bind [::]:29510 --min_replicas 2 --heartbeat_timeout_ms 1000 &
    export TORCHFT_LIGHTHOUSE=http://localhost:29510 RUST_LOG=warn
    REPLICA_GROUP_ID=site_0 python examples/minimal/elastic.py &
    REPLICA_GROUP_ID=site_1 python examples/minimal/elastic.py

Needs ``pip install 'torchft>=0.2,<0.3'``. To see one die and rejoin, raise STEPS, start the
Lighthouse with ``--min_replicas 1``, kill a replica and start it again. With SIGTERM it sends its
steps first.
"""

import os
import signal
import time

import torch
from torch import nn

import curvadion
from curvadion.integrations.torchft import ElasticReplicas

STEPS = 20
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # openings use gloo on both
torch.manual_seed(0)  # the same task in all replicas; the first one's weights are copied
layers = [nn.Linear(16, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 8)]
model = nn.Sequential(*layers).to(device)
task = torch.randn(16, 8, device=device) / 4
replicas = ElasticReplicas()
groups = curvadion.param_groups(model)
optimizer = curvadion.CurvaDion(groups, lr=0.05, replicas=replicas, wire_budget=0.03)
replicas.start(optimizer)  # begins the run, or joins it with a copy of another one's state
signal.signal(signal.SIGTERM, lambda *_: replicas.leave())  # as before a node is taken away

torch.manual_seed(int(os.environ["REPLICA_GROUP_ID"].rpartition("_")[2]))  # samples of its own
while (step := optimizer.progress.steps) < STEPS and not replicas.leaving:
    inputs = torch.randn(64, 16, device=device)
    loss = nn.functional.mse_loss(model(inputs), inputs @ task)
    loss.backward()
    time.sleep(0.02)  # as if the model were larger
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.2f}, {replicas.present} at the last opening")
optimizer.synchronize()  # waits for the next opening of the others, if they still train
replicas.close()
