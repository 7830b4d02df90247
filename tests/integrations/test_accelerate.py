"""Hugging Face Accelerate with real process groups; skipped where it is not installed."""

import functools
import itertools
import os
import weakref
from dataclasses import dataclass, field
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import curvadion
from curvadion.integrations.ddp import keep_gradients_local
from curvadion.metering.report import Summary
from support.references.tolerance import Rounding, assert_close
from support.runs import distributed
from support.runs import hugging_face as hf
from support.runs.drifts import drift

pytestmark = pytest.mark.usefixtures("own_workers")

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

STEPS, SAVED, BATCH, MAX_NORM = 12, 6, 2, 0.5
CODES = {"wire_budget": 0.08, "sync": curvadion.QuantizedAverage(bits=2, spectrum_decay=0.8)}


# ---------------------------------------------------------------- by hand, and through Accelerate


@dataclass
class Run:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    summary: curvadion.Summary = field(default_factory=Summary)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)
    drifts: list[float] = field(default_factory=list)
    whole_weights_are_gone: bool = False
    drifted: tuple[bool, ...] = ()  # before the weights were gathered, and after
    gathered: dict[str, torch.Tensor] = field(default_factory=dict)


def model_and_optimizer(kind=curvadion.CurvaDion, **options):
    torch.manual_seed(5)
    model = hf.gpt(dropout=0.1)
    return model, kind(curvadion.param_groups(model), lr=0.02, **options)


def two_inside(groups, lr, **options):
    """Two of torch's optimizers in one, with parameters that FSDP2 replaces."""
    matrices, *others = [[p for _, p in group["params"]] for group in groups]
    inner = [
        torch.optim.SGD(matrices, lr=lr, momentum=0.9),
        torch.optim.AdamW([p for each in others for p in each], lr=lr),
    ]
    return curvadion.Replicated(inner, **options)


def loader():
    return DataLoader(hf.Tokens(), batch_size=BATCH)


def by_hand(rank, world, kind):
    """A plain loop: DDP, this rank's batches, agreement at the step at which the others save."""
    torch.manual_seed(5)
    run = Run()
    with curvadion.WireMeter() as meter:
        model, optimizer = model_and_optimizer(kind, replicas=dist.group.WORLD, **CODES)
        model = keep_gradients_local(DistributedDataParallel(model))
        torch.manual_seed(rank)
        while len(run.losses) < STEPS:
            for place, batch in enumerate(loader()):
                if place % world != rank or len(run.losses) == STEPS:
                    continue
                loss = model(**batch).loss
                loss.backward()
                norm = curvadion.clip_grad_norm_(optimizer, MAX_NORM)
                optimizer.step()
                optimizer.zero_grad()
                note(run, optimizer, loss, norm)
                if len(run.losses) == SAVED:
                    optimizer.synchronize(exact=True)
    return ended(run, model, meter)


def note(run, optimizer, loss, norm):
    run.losses.append(loss.item())
    run.norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
    run.summary.add(optimizer.report)
    if len(run.losses) > STEPS - 4:
        run.drifts.append(drift(optimizer))


def ended(run, model, meter):
    run.sent = meter.by_collective
    run.weights = hf.whole(model)
    return run


def with_accelerate(rank, made, folder, *, first=0, options=None):
    """The same through ``made()``, an attached Accelerator; from a checkpoint if ``first``."""
    run = Run(losses=[0.0] * first)
    with curvadion.WireMeter() as meter:
        accelerator = made()
        options = {} if options is None else options(accelerator)
        model, optimizer = model_and_optimizer(**options)
        first_weight = weakref.ref(next(model.parameters()))
        model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
        run.whole_weights_are_gone = first_weight() is None
        torch.manual_seed(rank)
        each = endless(accelerator, batches, first)
        for batch in itertools.islice(each, STEPS - first):
            if first and len(run.losses) == first:
                accelerator.load_state(folder)  # with the state of the random numbers
            loss = model(**batch).loss
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
            note(run, optimizer.optimizer, loss, norm)
            if len(run.losses) == SAVED and not first:
                accelerator.save_state(folder)
    ended(run, model, meter)
    if accelerator.is_fsdp2:
        before = optimizer.optimizer.drifted
        run.gathered = accelerator.get_state_dict(model)  # on rank 0 only
        run.drifted = before, optimizer.optimizer.drifted
        run.weights = run.weights | {"agreed": hf.whole(model)["transformer.wte.weight"]}
    return run


def endless(accelerator, batches, skip):
    """Batches of as many epochs as are asked for, without the first ones."""
    skip %= len(batches)
    yield from accelerator.skip_first_batches(batches, skip) if skip else batches
    while True:
        yield from batches


def attached(**settings):
    from accelerate import Accelerator

    from curvadion.integrations.accelerate import attach

    return attach(Accelerator(**settings))


def assert_resumed(run, resumed):
    assert resumed.losses[SAVED:] == run.losses[SAVED:]
    assert resumed.drifts == run.drifts
    for name, W in run.weights.items():
        assert torch.equal(resumed.weights[name], W), name


# ---------------------------------------------------------------- DDP


@pytest.mark.parametrize("kind", [curvadion.CurvaDion, two_inside])
@distributed.on_ranks(2, timeout=120.0)
def test_ddp_takes_the_steps_of_a_plain_loop_and_resumes_bitwise(rank, tmp_path, kind):
    hf.launch()

    def made():
        hf.launch()
        return attached(cpu=True)

    def options(accelerator):
        return {"kind": kind, "replicas": dist.group.WORLD, **CODES}

    plain = by_hand(rank, dist.get_world_size(), kind)
    run = with_accelerate(rank, made, str(tmp_path), options=options)
    assert run.losses == plain.losses and run.norms == plain.norms
    assert max(run.norms) > MAX_NORM
    assert run.drifts == plain.drifts and max(run.drifts) > 0
    assert 3 < run.summary.open_steps == plain.summary.open_steps < STEPS / 2, run.summary
    assert run.sent == plain.sent
    for name, W in plain.weights.items():
        assert torch.equal(run.weights[name], W), name
    assert_resumed(run, with_accelerate(rank, made, str(tmp_path), first=SAVED, options=options))


@distributed.on_ranks(1)
def test_one_process_of_torchrun_needs_no_replicas(rank):
    """DDP wraps the model there too; its mean over one process is the gradient."""
    launched = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    for replicas in (None, dist.group.WORLD):
        trained = []
        for through_accelerate in (False, True):
            hf.launch()
            torch.manual_seed(3)
            model = Plain()
            optimizer = curvadion.Dion(curvadion.param_groups(model), replicas=replicas)
            with mock.patch.dict(os.environ, launched):
                accelerator = attached(cpu=True)
                if through_accelerate:
                    model, optimizer = accelerator.prepare(model, optimizer)
                    assert isinstance(model, DistributedDataParallel)
            for _ in range(3):
                step(accelerator, model, optimizer, rank)
            trained.append(hf.whole(model))
        plain, prepared_by_accelerate = trained
        for name, W in plain.items():
            assert torch.equal(prepared_by_accelerate[name], W), name


# ---------------------------------------------------------------- shards


def sharding(replicas, state_dict_type, wrapped="GPT2Block"):
    """An attached Accelerator; replicas: how many there are, the other ranks being shards."""
    from accelerate import FullyShardedDataParallelPlugin, ParallelismConfig

    hf.launch("gpu")
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[wrapped],
        state_dict_type=state_dict_type,
        cpu_ram_efficient_loading=False,
    )
    shards = dist.get_world_size() // replicas
    mesh = ParallelismConfig(dp_replicate_size=replicas, dp_shard_size=shards)
    return attached(fsdp_plugin=plugin, parallelism_config=mesh)


@pytest.mark.parametrize(
    ("replicas", "shards", "state_dict_type", "kind"),
    [
        (1, 2, "FULL_STATE_DICT", curvadion.Dion),
        (2, 2, "SHARDED_STATE_DICT", curvadion.CurvaDion),
        (2, 2, "SHARDED_STATE_DICT", two_inside),
    ],
    ids=["fsdp", "hsdp", "hsdp, two inside"],
)
def test_shards_resume_bitwise(tmp_path, replicas, shards, state_dict_type, kind):
    how = (str(tmp_path), replicas, state_dict_type, kind)
    distributed.run(replicas * shards, fsdp_runs, *how, timeout=120.0)


def fsdp_runs(rank, folder, replicas, state_dict_type, kind):
    made = functools.partial(sharding, replicas, state_dict_type)

    def options(accelerator):
        if replicas == 1:
            return {"kind": kind}
        mesh = accelerator.torch_device_mesh["dp_replicate"]
        return {"kind": kind, "replicas": mesh, **CODES}

    run = with_accelerate(rank, made, folder, options=options)
    assert run.whole_weights_are_gone
    assert run.drifted == (replicas > 1, False)
    gathered = distributed.gathered(run.gathered)[0]
    assert torch.equal(run.weights["agreed"], gathered["transformer.wte.weight"])
    assert len(run.losses) == STEPS and max(run.norms) > MAX_NORM
    assert (max(run.drifts) > 0) == (replicas > 1)
    assert_resumed(run, with_accelerate(rank, made, folder, first=SAVED, options=options))


# ---------------------------------------------------------------- scaled gradients


class Plain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.matrix = torch.nn.Linear(8, 8, bias=False)
        self.other = torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.other(self.matrix(x)).square().mean()


def prepared(accelerator, **options):
    options = {"replicas": dist.group.WORLD, "gate": curvadion.FixedPeriod(3), **options}
    model = Plain()
    optimizer = curvadion.CurvaDion(curvadion.param_groups(model), **options)
    return accelerator.prepare(model, optimizer)


@pytest.mark.numeric
@distributed.on_ranks(2)
def test_a_scaler_changes_nothing_where_gradients_accumulate(rank):
    """Over steps of two backwards each."""
    found = []
    for scaled in (False, True):
        hf.launch()
        precision = "fp16" if scaled else "no"
        accelerator = attached(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
        if scaled:  # where Accelerate has a scaler on GPUs only
            accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        torch.manual_seed(3)
        model, optimizer = prepared(accelerator)
        accelerator.native_amp = scaled  # so late that the model still computes in float32
        torch.manual_seed(rank)
        for _ in range(10):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.randn(4, 8)))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
        assert optimizer.optimizer.progress.steps == 5
        found.append(hf.whole(model))
    for name, W in found[0].items():
        assert_close(found[1][name], W, Rounding(torch.float32), what=name)


# ---------------------------------------------------------------- errors


def step(accelerator, model, optimizer, rank):
    accelerator.backward(model(torch.randn(4, 8) * (rank + 1)))
    optimizer.step()
    optimizer.zero_grad()


@distributed.on_ranks(2)
def test_mistakes_are_errors_on_all_ranks(rank):
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    from curvadion.integrations.accelerate import attach

    def fresh(attaching=True):
        hf.launch()
        accelerator = Accelerator(cpu=True)
        return attach(accelerator) if attaching else accelerator

    unattached = fresh(attaching=False)
    model_and_optimizer = prepared(unattached)
    with pytest.raises(RuntimeError, match="gradients of the matrices are identical") as told:
        step(unattached, *model_and_optimizer, rank)
    assert "the module of curvadion.integrations for your framework" in str(told.value)
    with pytest.raises(ValueError, match=r"replicas=None in CurvaDion.*\.group\.WORLD.*'single'"):
        prepared(fresh(), replicas=None)
    model, each = Plain(), (dist.group.WORLD, "single")
    both = [curvadion.Dion([model.matrix.weight], replicas=replicas) for replicas in each]
    with pytest.raises(ValueError, match="Dion and Dion share a model"):
        fresh().prepare(model, *both)
    accelerator = fresh()
    model, _ = prepared(accelerator)
    with pytest.raises(ValueError, match="one norm over all parameters of an optimizer"):
        accelerator.clip_grad_norm_(model.module.matrix.parameters(), 1.0)
    hf.launch("gpu")
    plugin = FullyShardedDataParallelPlugin(fsdp_version=1, cpu_ram_efficient_loading=False)
    with pytest.raises(ValueError, match=r"only DDP and FSDP2 \(fsdp_version=2\), not FSDP"):
        attach(Accelerator(cpu=True, fsdp_plugin=plugin))
    hf.launch("none")
    with pytest.raises(ValueError, match=r"num_processes=1, but WORLD_SIZE=2.*cpu=True"):
        attach(Accelerator())


@distributed.on_ranks(2)
def test_an_optimizer_that_has_stepped_before_it_is_sharded_is_an_error(rank):
    accelerator, model = sharding(1, "FULL_STATE_DICT", "Linear"), Plain()
    optimizer = curvadion.Dion(curvadion.param_groups(model))
    model(torch.ones(4, 8)).backward()
    optimizer.step()
    with pytest.raises(ValueError, match="^Dion had stepped or loaded a state before FSDP2"):
        accelerator.prepare(model, optimizer)
