"""Real DeepSpeed engines on real gloo ranks, and a model whose gradients are prescribed.

The loss is linear in every parameter, so a step's gradients are what :func:`gradient` says: exact
in bfloat16, also their mean over the ranks, however it is divided.
"""

import copy
import os

import torch
import torch.distributed as dist
from torch import nn

from curvadion.integrations.deepspeed.sharded import partitions_of
from support.references.reference import DionReference, rank_of, relative_error
from support.references.tolerance import Rounding

FRACTION = 0.3
LR, ELEMENTWISE_LR = 0.02, 0.01
# The gate is open in the warm-up and then at every third step.
SCHEDULE = {
    "gate": {"type": "period", "period": 3},
    "warmup_steps": 3,
    "local_step": "gradient",
    "local_lr": 0.005,
}
OPEN_STEPS = (0, 1, 2, 5)  # of the first six
ROUNDING = Rounding(torch.float32, terms=16)  # of weights after a few steps
# Shapes that no world size divides, both orientations, matrices smaller than a padding.
MATRICES = {"tall": (11, 7), "wide": (5, 13), "square": (6, 6), "row": (1, 9), "two": (2, 3)}


# ---------------------------------------------------------------- the model


class Dot(nn.Linear):
    """Weights and a bias in a loss that is linear in them."""

    def __init__(self, m, n, bias=True):
        super().__init__(n, m, bias=bias)

    def forward(self, G):
        return sum((p.float() * G[name]).sum() for name, p in self.named_parameters())


class Frozen(Dot):
    def __init__(self):
        super().__init__(4, 3)
        self.requires_grad_(False)


class Model(nn.Module):
    """Matrices with biases, and a frozen one between them; ``skip`` gives some no gradient."""

    def __init__(self):
        super().__init__()
        for place, (name, shape) in enumerate(MATRICES.items()):
            setattr(self, name, Dot(*shape))
            if place == 1:
                self.frozen = Frozen()

    def forward(self, G, skip=()):
        parts = {name: getattr(self, name)(G[name]) for name in MATRICES}
        return sum(part.detach() if name in skip else part for name, part in parts.items())


def model(dtype=torch.float32):
    torch.manual_seed(3)
    of = Model()
    with torch.no_grad():
        for p in of.parameters():
            p.copy_(torch.randint(-64, 64, p.shape) / 64)
    return of.to(dtype)


def gradient(name, shape, step, rank, world):
    """A replica's gradient: small multiples of world / 8."""
    seed = 7919 * step + 101 * rank + sum(map(ord, name))
    drawn = torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(seed))
    return drawn.float() * world / 8


def gradients(step, rank, world):
    return {
        name: {
            "weight": gradient(f"{name}.weight", shape, step, rank, world),
            "bias": gradient(f"{name}.bias", shape[:1], step, rank, world),
        }
        for name, shape in MATRICES.items()
    }


# ---------------------------------------------------------------- configurations


def config(stage=0, params=None, kind="CurvaDion", **settings):
    """A configuration; ``zero`` holds further keys of zero_optimization."""
    zero = settings.pop("zero", {})
    given = {
        "lr": LR,
        "rank_fraction": FRACTION,
        "options": {"vector": {"lr": ELEMENTWISE_LR}},
        "gate": {"type": "always"},
    }
    given.update(params or {})
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "optimizer": {"type": kind, "params": given},
        "zero_optimization": {"stage": stage, **zero},
        **settings,
    }


BF16 = {"bf16": {"enabled": True}}
OFFLOAD = {"device": "cpu"}
CONFIGURATIONS = {
    "0": config(0),
    "0 bf16": config(0, **BF16),
    "0 accumulation": config(0, gradient_accumulation_steps=2),
    "1": config(1),
    "1 bf16": config(1, **BF16),
    "1 BF16_Optimizer": config(1, **BF16, data_types={"grad_accum_dtype": "fp32"}),
    "2": config(2),
    "2 round robin": config(2, zero={"round_robin_gradients": True}),
    "2 alignment": config(2, zero={"parameter_alignment": True}, **BF16),
    "2 autocast": config(2, torch_autocast={"enabled": True, "dtype": "bfloat16"}),
    "2 fp16": config(2, fp16={"enabled": True, "loss_scale": 8}),
    "2 accumulation": config(2, gradient_accumulation_steps=2),
    "2 offload": config(2, zero={"offload_optimizer": OFFLOAD}),
    "3": config(3),
    "3 sub-groups": config(3, zero={"sub_group_size": 30, "stage3_param_persistence_threshold": 0}),
    "3 bf16": config(3, **BF16),
    "3 offload": config(3, zero={"offload_optimizer": OFFLOAD}),
    "3 offload parameters": config(
        3, zero={"offload_optimizer": OFFLOAD, "offload_param": OFFLOAD}
    ),
    "3 hpZ": config(3, zero={"zero_hpz_partition_size": 2}),
}


# ---------------------------------------------------------------- engines


def prepare():
    """Launched, and DeepSpeed knows the optimizers."""
    launch()
    import curvadion.deepspeed  # noqa: F401


def launch():
    """What a launcher does, in the process groups of this call."""
    rank = dist.get_rank()
    os.environ.update(
        DS_ACCELERATOR="cpu",
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(dist.get_world_size()),
        MASTER_ADDR="localhost",
        MASTER_PORT="29500",
    )
    import deepspeed

    deepspeed.logger.setLevel("ERROR")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled
    from deepspeed.accelerator import get_accelerator

    # Not all CPUs have its arithmetic; these gradients need none.
    type(get_accelerator()).is_fp16_supported = lambda self: True
    forget_groups()


def engine_of(configuration, of=None, **arguments):
    """A new engine."""
    prepare()
    import deepspeed

    settings = copy.deepcopy(configuration)
    for key, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if key in settings and of is None:
            of = model(dtype)
    return deepspeed.initialize(model=of or model(), config=settings, **arguments)[0]


def forget_groups():
    """What DeepSpeed remembers of the process groups and parameters of an earlier call."""
    import deepspeed.comm.comm as comm
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partition_parameters import Init
    from deepspeed.utils import groups

    # Workers of different age would count parameters and modules differently.
    Init.param_id = 0
    DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][0] = 0
    if groups._WORLD_GROUP not in dist.distributed_c10d._world.pg_map:
        comm.cdb = None
        groups._WORLD_GROUP = None
        groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None


def changed(name, params, **settings):
    """A named configuration with other optimizer parameters and settings."""
    configuration = copy.deepcopy(CONFIGURATIONS[name])
    configuration["optimizer"]["params"].update(params)
    return {**configuration, **settings}


def stage_of(engine):
    return engine.zero_optimization_stage()


def train(engine, steps, skip_on=None, spoil=None):
    """Take the numbered steps.

    skip_on: {(step, rank): names without a gradient}, spoil: {(step, rank)} with a NaN.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    reports = []
    for step in steps:
        G = gradients(step, rank, world)
        if (step, rank) in (spoil or ()):
            G["tall"]["weight"][1, 1] = float("nan")
        for _ in range(engine.gradient_accumulation_steps()):
            engine.backward(engine(G, skip=(skip_on or {}).get((step, rank), ())))
            engine.step()
        reports.append(engine.basic_optimizer.report)
    return reports


def masters(engine):
    """Name to full float32 weights, as the engine itself tells them."""
    import deepspeed

    parameters = dict(engine.module.named_parameters())
    if stage_of(engine) == 0:
        wrapper = engine.optimizer
        if hasattr(wrapper, "fp32_groups"):
            groups = zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True)
            of = {
                id(weight): master
                for group in groups
                for weight, master in zip(*group, strict=True)
            }
            return {n: of[id(p)].detach().clone() for n, p in parameters.items() if id(p) in of}
        return {n: p.detach().clone() for n, p in parameters.items() if p.requires_grad}
    if engine.bfloat16_enabled() or engine.fp16_enabled():
        from deepspeed.utils import safe_get_full_fp32_param

        return {
            n: safe_get_full_fp32_param(p).clone() for n, p in parameters.items() if p.requires_grad
        }
    with deepspeed.zero.GatheredParameters(
        list(parameters.values()), enabled=stage_of(engine) == 3
    ):
        return {n: p.detach().clone() for n, p in parameters.items() if p.requires_grad}


def coverage(engine):
    """How often the ranks of a replica hold each element, and whether with its first value."""
    initial = dict(model().named_parameters())
    counts = {n: torch.zeros(p.numel(), dtype=torch.int64) for n, p in initial.items()}
    right = []
    for partition in partitions_of(engine.optimizer):
        for r in partition.ranges:
            name = engine.param_names[r.parameter]
            counts[name][r.start : r.stop] += 1
            mine = partition.flat[r.offset : r.offset + r.stop - r.start]
            assert r.shape == initial[name].shape
            right.append(torch.equal(mine, initial[name].view(-1)[r.start : r.stop]))
    for count in counts.values():
        dist.all_reduce(count, group=engine.seq_data_parallel_group)
    return counts, all(right)


# ---------------------------------------------------------------- what is expected


class Expected:
    """What the papers' equations, in float64, make of the model's parameters on every replica.

    Replicas: by default as many as ranks at stage 0; from stage 1 on the ranks hold one. Each has
    the mean gradient of its ranks, which are ``world / replicas`` in a row.
    """

    def __init__(self, stage, world, local_step="gradient", local_lr=None, clip=0.0, replicas=None):
        self.world, self.replicas = world, replicas or (world if stage == 0 else 1)
        self.ranks = self.world // self.replicas
        self.local_steps, self.clip = 0, clip
        start = {n: p.detach() for n, p in model().named_parameters() if p.requires_grad}
        self.matrices = {
            name: DionReference(
                W,
                self.replicas,
                rank_of(FRACTION, W.shape),
                lr=LR,
                local_step=local_step,
                local_lr=local_lr,
            )
            for name, W in start.items()
            if W.dim() == 2
        }
        self.vectors = {
            name: [nn.Parameter(b.double().clone()) for _ in range(self.replicas)]
            for name, b in start.items()
            if b.dim() == 1
        }
        self.adamw = [
            torch.optim.AdamW(
                [copies[i] for copies in self.vectors.values()],
                lr=ELEMENTWISE_LR,
                betas=(0.9, 0.95),
                weight_decay=0.0,
            )
            for i in range(self.replicas)
        ]

    def step(self, number, gate_open):
        if gate_open and self.local_steps:
            self._average_vectors()
        self.local_steps = 0 if gate_open else self.local_steps + 1
        each = [replica_gradients(number, i, self.ranks, self.world) for i in range(self.replicas)]
        if self.clip:
            scale_(each, self.clip)
        for name, reference in self.matrices.items():
            owner = name.split(".")[0]
            reference.step([G[owner]["weight"] for G in each], gate_open)
        for name, copies in self.vectors.items():
            owner = name.split(".")[0]
            own = [G[owner]["bias"].double() for G in each]
            for copy_, G in zip(copies, own, strict=True):
                copy_.grad = sum(own) / len(own) if gate_open else G.clone()
        for optimizer in self.adamw:
            optimizer.step()

    @torch.no_grad()
    def _average_vectors(self):
        """Parameters and moments are averaged when the gate opens after local steps."""
        for copies in self.vectors.values():
            average_(copies)
            states = [optimizer.state[b] for optimizer, b in zip(self.adamw, copies, strict=True)]
            for key in ("exp_avg", "exp_avg_sq"):
                average_([state[key] for state in states])

    def distances(self, actual, rank):
        """Relative error of every parameter as a rank holds it, by name."""
        place = rank // self.ranks
        wanted = {name: reference.X[place] for name, reference in self.matrices.items()}
        wanted.update({name: copies[place].detach() for name, copies in self.vectors.items()})
        assert sorted(wanted) == sorted(actual)
        return {name: relative_error(actual[name], W) for name, W in wanted.items()}


def scale_(each, max_norm):
    """One factor for all replicas, from the root mean square of their gradients' norms."""
    flat = [torch.cat([t.flatten() for G in own.values() for t in G.values()]) for own in each]
    norm = (sum(g.double().square().sum() for g in flat) / len(flat)).sqrt()
    for own in each:
        for G in own.values():
            for t in G.values():
                t.mul_((max_norm / norm).clamp(max=1.0))


def average_(tensors):
    mean = sum(t.detach().clone() for t in tensors) / len(tensors)
    for t in tensors:
        t.copy_(mean)


def replica_gradients(step, replica, ranks, world):
    """The mean of a replica's ranks' gradients."""
    return mean_of([gradients(step, replica * ranks + i, world) for i in range(ranks)])


def mean_of(each):
    return {
        name: {k: sum(G[name][k] for G in each) / len(each) for k in each[0][name]}
        for name in each[0]
    }
