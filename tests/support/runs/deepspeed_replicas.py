"""Engines on 2 x 2 ranks, the optimizer that they should equal, and what crosses between replicas.

The optimizer is made in code, on flat shards that are declared here, without DeepSpeed.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import curvadion
from curvadion import CurvaDion
from curvadion.integrations.deepspeed.replicas import replica_groups
from curvadion.integrations.deepspeed.sharded import partitions_of
from curvadion.layout.flat_shard import declare_flat_shard
from support.runs import deepspeed_engines as ds

SIZE = 2


def engine_of(name, params, size=SIZE, of=None, **settings):
    """A new engine whose ranks are divided into replicas."""
    configuration = ds.changed(name, {"replica_size": size, **params}, **settings)
    if not {"gate"} & params.keys() and {"threshold", "wire_budget"} & params.keys():
        del configuration["optimizer"]["params"]["gate"]
    return ds.engine_of(configuration, of)


def ranges_of(engine):
    """The ranges of parameters that this rank holds; whole ones at stage 0."""
    if ds.stage_of(engine):
        partitions = partitions_of(engine.optimizer)
        return [
            (engine.param_names[r.parameter], r.shape, r.start, r.stop)
            for partition in partitions
            for r in partition.ranges
        ]
    named = ds.model().named_parameters()
    return [(name, p.shape, 0, p.numel()) for name, p in named if p.requires_grad]


class ByHand:
    """The same optimizer on flat shards with the ranges of an engine, and their gradients.

    build: makes it of a group of matrices and one of vectors.
    """

    def __init__(self, engine, build=CurvaDion, **chosen):
        self.inside, self.between = replica_groups(SIZE)
        whole = dict(ds.model().named_parameters())
        self.held, kinds = [], ([], [])
        for name, shape, start, stop in ranges_of(engine):
            if ds.stage_of(engine):
                shard = nn.Parameter(whole[name].detach().reshape(-1)[start:stop].clone())
                declare_flat_shard(shard, shape, start, stop, self.inside)
            else:
                shard = nn.Parameter(whole[name].detach().clone())
            self.held.append((name, start, stop, shard))
            kinds[len(shape) == 1].append((name, shard))
        groups = [
            {"params": kinds[0]},
            {"params": kinds[1], "algorithm": "adamw", "lr": ds.ELEMENTWISE_LR, "weight_decay": 0},
        ]
        if build is CurvaDion:
            chosen["rank_fraction"] = ds.FRACTION
        self.optimizer = build(groups, ds.LR, replicas=self.between, **chosen)

    def step(self, number, spoil=()):
        world, replica = dist.get_world_size(), dist.get_rank() // SIZE
        G = ds.replica_gradients(number, replica, SIZE, world)
        if {(number, rank) for rank in range(replica * SIZE, (replica + 1) * SIZE)} & {*spoil}:
            G["tall"]["weight"][1, 1] = float("nan")
        for name, start, stop, shard in self.held:
            owner, kind = name.split(".")
            shard.grad = G[owner][kind].reshape(-1)[start:stop].reshape(shard.shape).clone()
        self.optimizer.step()

    def unlike(self, weights):
        """The names of parameters of which an engine has other weights than are held here."""
        return {
            name
            for name, start, stop, shard in self.held
            if not torch.equal(weights[name].reshape(-1)[start:stop], shard.detach().reshape(-1))
        }


def crossing(engine, meter):
    """Of a meter's bytes those over groups that span replicas, by group and how."""
    inside = {*dist.get_process_group_ranks(engine.seq_data_parallel_group)}
    ranks = {
        group.group_name: {*dist.get_process_group_ranks(group)}
        for group in dist.distributed_c10d._world.pg_map
    }
    return {
        key: count.bytes
        for key, count in meter.records.items()
        if count.bytes and not ranks[key[0]] <= inside
    }


def by_hand_groups(of):
    return curvadion.param_groups(of, options={"vector": {"lr": ds.ELEMENTWISE_LR}})
