"""What DeepSpeed's replicas decide as one: bad gradients, norms, errors, first weights."""

import importlib.util

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from curvadion import AlwaysOpen, CurvaDion, Muon, load_torch_state
from support.references.tolerance import Rounding, assert_close, assert_within, worst
from support.runs import deepspeed_engines as ds
from support.runs import distributed
from support.runs.deepspeed_replicas import SIZE, by_hand_groups, engine_of
from support.runs.seeded import gradient, weights

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"),
]
PERIOD = {"gate": {"type": "period", "period": 3}, "local_step": "gradient", "local_lr": 0.005}
RMMC = {"threshold": 0.18, "local_step": "gradient"}
CODES = {"gate": {"type": "period", "period": 3}, "sync": {"type": "quantized_average"}}


# Replicas hear each other at every step but under a schedule, unless they clip.
SPOILED = [
    ("0", {}, 0.0, False),
    ("0 bf16", CODES, 0.0, True),
    ("1 BF16_Optimizer", RMMC, 10.0, False),
    ("3 sub-groups", PERIOD, 10.0, False),
]


@pytest.mark.parametrize(("name", "params", "clip", "alone"), SPOILED)
@distributed.on_ranks(4)
def test_a_nan_on_one_rank_harms_no_replica(rank, name, params, clip, alone):
    """The NaN is on the last rank."""
    engine = engine_of(name, params, gradient_clipping=clip)
    ds.train(engine, range(3))
    before, mine = ds.masters(engine), rank >= 2 or not alone
    reports = ds.train(engine, [3], spoil={(3, 3)})
    after = ds.masters(engine)
    assert all(torch.equal(W, after[n]) for n, W in before.items()) == mine
    reports += ds.train(engine, range(4, 7))
    assert [engine.skipped_steps, *(r.skipped for r in reports)] == [0, mine, *[False] * 3]
    assert all(W.isfinite().all() for W in ds.masters(engine).values())


@pytest.mark.parametrize("name", ["0", "0 bf16", "2 offload"])
@distributed.on_ranks(4)
def test_gradients_are_clipped_by_one_norm_of_all_replicas(rank, name):
    engine = engine_of(name, PERIOD, gradient_clipping=10.0)
    expected = ds.Expected(0, 4, local_lr=0.005, clip=10.0, replicas=2)
    ds.train(engine, range(6))
    for step in range(6):
        expected.step(step, step in (2, 5))
    assert_within(worst(expected.distances(ds.masters(engine), rank).values()), ds.ROUNDING)
    norm = float(engine.get_global_grad_norm())
    assert norm > 10 and distributed.gathered(norm) == [norm] * 4


# The stage, the number of replicas, how the optimizer is made.
CLIENTS = [(0, 2, "in code"), (3, 4, "in code"), (0, None, "in code"), (3, None, "callable")]


@pytest.mark.parametrize(("stage", "replicas", "how"), CLIENTS)
@distributed.on_ranks(4)
def test_an_optimizer_made_in_code_may_have_replicas(rank, stage, replicas, how):
    """Where it has none, DeepSpeed averages the gradients."""
    of, configuration, given = ds.model(), ds.config(stage), {}
    del configuration["optimizer"]
    if replicas:
        grid = (replicas, 4 // replicas)
        mesh = init_device_mesh("cpu", grid, mesh_dim_names=("replicate", "shard"))
        given["replicas"] = mesh["replicate"]

    def build(parameters=None):
        groups = by_hand_groups(of)
        return CurvaDion(groups, ds.LR, gate=AlwaysOpen(), rank_fraction=ds.FRACTION, **given)

    engine = ds.engine_of(configuration, of, optimizer=build if how == "callable" else build())
    expected = ds.Expected(stage, 4, replicas=replicas or 1)
    ds.train(engine, range(4))
    for step in range(4):
        expected.step(step, True)
    assert_within(worst(expected.distances(ds.masters(engine), rank).values()), ds.ROUNDING)


@distributed.on_ranks(4)
def test_muon_takes_the_place_of_deepspeeds(rank):
    """Its state is kept, and ZeRO takes ours, built in code."""
    from deepspeed.runtime.zero.muon.original_muon import SingleDeviceMuonWithAuxAdam

    shapes = {"a": (6, 4), "b": (4, 6), "c": (5,)}
    X = {name: torch.nn.Parameter(weights(shape)) for name, shape in shapes.items()}
    theirs = SingleDeviceMuonWithAuxAdam(
        [
            {"params": [X["c"]], "use_muon": False},
            {"params": [X["a"], X["b"]], "use_muon": True},
        ]
    )
    sums = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
    for step in range(3):
        for name, x in X.items():
            x.grad = gradient(shapes[name], step, 0)
            sums[name] = 0.95 * sums[name] + x.grad.double()
        with torch.compiler.set_stance("force_eager"):  # compiling takes longer than all else
            theirs.step()
    muon = Muon([{"params": [X["c"]], "algorithm": "adamw"}, {"params": [X["a"], X["b"]]}])
    loaded = load_torch_state(muon, theirs.state_dict())
    assert loaded.fresh == [] and muon.progress.steps == 3
    for name in "ab":
        rounding = Rounding(torch.float32, terms=3)
        assert_close(muon.state[X[name]]["momentum"], sums[name], rounding, what=name)
    assert torch.equal(muon.state[X["c"]]["exp_avg_sq"], theirs.state[X["c"]]["exp_avg_sq"])

    of, configuration = ds.model(), ds.config(1)
    del configuration["optimizer"]
    engine = ds.engine_of(configuration, of, optimizer=Muon(by_hand_groups(of), lr=ds.LR))
    ds.train(engine, range(2))
    assert type(engine.basic_optimizer) is Muon
    assert engine.basic_optimizer.report.directions["polar"]
    assert engine.basic_optimizer.report.step == 2


@pytest.mark.parametrize("name", ["0", "0 bf16", "2 offload", "3 offload"])
@distributed.on_ranks(2)
def test_a_loaded_state_is_kept_or_refused(rank, name):
    """DeepSpeed puts its own parameters into the groups, but at stage 0 in float32."""
    configuration = ds.changed(name, {}, zero_force_ds_cpu_optimizer=False)
    del configuration["optimizer"]

    def build(state=None):
        of = ds.model(torch.bfloat16 if "bf16" in name else torch.float32)
        muon = Muon(by_hand_groups(of), lr=ds.LR)
        if state is not None:
            assert load_torch_state(muon, state).fresh == []
        return ds.engine_of(configuration, of, optimizer=muon)

    saved = states_of_torch()
    if name == "0":
        optimizer = build(saved).basic_optimizer
        assert optimizer.progress.steps == 1
        momentum = next(iter(optimizer.state.values()))["momentum"]
        assert_close(momentum * 0.05, saved[0]["state"][0]["momentum_buffer"], ds.ROUNDING)
        return
    with pytest.raises(ValueError, match="Muon has the state of 1 steps, which would be lost"):
        build(saved)
    if "offload" in name:
        with pytest.raises(ValueError, match="is a flat shard, of FSDP1 or ZeRO"):
            load_torch_state(build().basic_optimizer, saved)


def states_of_torch():
    """Of Muon and AdamW, after a step."""
    trained = [p for p in ds.model().parameters() if p.requires_grad]
    optimizers = [
        torch.optim.Muon([p for p in trained if p.dim() == 2]),
        torch.optim.AdamW([p for p in trained if p.dim() == 1]),
    ]
    for i, p in enumerate(trained):
        p.grad = gradient(p.shape, 0, i)
    for optimizer in optimizers:
        optimizer.step()
    return [optimizer.state_dict() for optimizer in optimizers]


class Applied(ds.Model):
    """Fills its weights as GPTs do, here from a generator that differs from rank to rank."""

    def __init__(self):
        super().__init__()
        self.apply(self.fill)

    @staticmethod
    def fill(module):
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.normal_(module.weight)


def gathered(of):
    import deepspeed

    with deepspeed.zero.GatheredParameters([*of.parameters()]):
        return {n: p.detach().clone() for n, p in of.named_parameters()}


@distributed.on_ranks(4)
def test_a_model_built_under_zero_init_has_the_same_weights_on_all_replicas(rank):
    """Though each rank draws other ones, single ranks load some and one changes some by hand."""
    import deepspeed

    settings = {"stage3_param_persistence_threshold": 0}
    configuration = ds.config(3, {"replica_size": SIZE}, zero=settings)
    ds.prepare()
    torch.manual_seed(rank)
    with deepspeed.zero.Init(config_dict_or_path=configuration):
        of = Applied()
    built = gathered(of)["tall.weight"]
    torch.manual_seed(0)
    assert torch.equal(built, Applied().tall.weight)
    assert torch.nn.Module.apply is torch.nn.Module._old_apply
    wanted = ds.model()
    for place, (p, value) in enumerate(zip(of.parameters(), wanted.parameters(), strict=True)):
        loader = place % 4
        with deepspeed.zero.GatheredParameters(p, modifier_rank=loader), torch.no_grad():
            if rank == loader:  # as Transformers loads weights on the first rank
                p.copy_(value)
    engine = deepspeed.initialize(model=of, config=configuration)[0]
    expected = ds.Expected(0, 4, replicas=2)
    ds.train(engine, range(4))
    for step in range(4):
        expected.step(step, True)
    assert_within(worst(expected.distances(ds.masters(engine), rank).values()), ds.ROUNDING)
    assert torch.equal(gathered(of)["frozen.weight"], wanted.frozen.weight)
    some = (of.frozen.weight, of.tall.weight)
    with deepspeed.zero.GatheredParameters((p for p in some), modifier_rank=3), torch.no_grad():
        if rank == 3:
            for p in some:
                p.fill_(0.5)
    assert gathered(of)["tall.weight"].eq(0.5).all()
    with deepspeed.zero.Init():  # without the configuration: over all ranks
        other = ds.Model()
    with pytest.raises(ValueError, match="config_dict_or_path") as told:
        deepspeed.initialize(model=other, config=configuration)
    assert "sharded over the ranks [0, 1, 2, 3]" in str(told.value)
