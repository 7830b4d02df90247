"""Two replicas, each of one rank or sharded over two, with gradients of their own."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from curvadion import CurvaDion

SHAPES = [(24, 16), (16, 12), (40,), (12,)]
RANKS = {"whole": 2, "sharded": 4}


class Replica:
    """This rank's parameters and optimizer."""

    def __init__(self, rank, layout, gate, sync, **options):
        generator = torch.Generator().manual_seed(0)
        X = [torch.randn(shape, generator=generator) for shape in SHAPES]
        self.number, self.inside, replicas = rank, None, dist.group.WORLD
        self.mesh = None
        if layout == "sharded":
            self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
            X = [distribute_tensor(x, self.mesh, [Replicate(), Shard(0)]) for x in X]
            self.number, replicas = rank // 2, self.mesh["replicate"]
            self.inside = self.mesh.get_group("shard").group_name
        self.X = [nn.Parameter(x) for x in X]
        groups = [{"params": self.X[:2]}, {"params": self.X[2:], "algorithm": "adamw"}]
        how = {"gate": copy.deepcopy(gate), "sync": sync, "max_local_steps": None} | options
        self.optimizer = CurvaDion(groups, replicas=replicas, **how)

    @property
    def progress(self):
        return self.optimizer.progress

    def give_gradients(self, step, missing=(), spoilt=False):
        """The replica's own; missing: which it lacks. spoilt: whether one number is not finite."""
        for i, x in enumerate(self.X):
            x.grad = None
            if i in missing or not x.requires_grad:
                continue
            x.grad = torch.zeros_like(x)
            seed = 1000 * step + 100 * dist.get_rank() + i
            generator = torch.Generator().manual_seed(seed)
            here = self.local(x.grad)
            here.copy_(torch.randn(here.shape, generator=generator))
            if spoilt and i == 1:
                here[0, 0] = float("nan")

    def step(self, step, **how):
        self.give_gradients(step, **how)
        self.optimizer.step()
        return self.optimizer.report

    def loaded(self, gate, sync):
        """Another that has loaded what this one saves."""
        layout = "whole" if self.mesh is None else "sharded"
        other = type(self)(dist.get_rank(), layout, gate, sync)
        other.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        with torch.no_grad():
            for x, weights in zip(other.X, self.weights(), strict=True):
                self.local(x).copy_(weights)
        return other

    def weights(self):
        return [self.local(x).detach().clone() for x in self.X]

    def state(self):
        """Every tensor and number of the state, by parameter and key."""
        self.optimizer.sync.settle()
        return {
            (i, key): torch.as_tensor(self.local(value)).clone()
            for i, x in enumerate(self.X)
            for key, value in self.optimizer.state[x].items()
        }

    def local(self, tensor):
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def same(these, those):
    return all(torch.equal(a, b) for a, b in zip(these, those, strict=True))


def same_state(this, that):
    return this.keys() == that.keys() and all(torch.equal(this[key], that[key]) for key in this)
