"""Hugging Face Accelerate with real process groups; skipped where it is not installed."""

from __future__ import annotations

import itertools
import warnings
import weakref
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import curvadion
import distributed
import hugging_face as hf
from curvadion.integrations.ddp import keep_gradients_local
from curvadion.metering.report import Summary
from tolerance import Rounding, assert_close

pytestmark = pytest.mark.usefixtures("own_workers")

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

STEPS, SAVED, BATCH, MAX_NORM = 30, 17, 2, 0.5
CODES = {"wire_budget": 0.04, "sync": curvadion.QuantizedAverage(bits=2, spectrum_decay=0.8)}


@dataclass
class Run:
    """What a training did."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    summary: curvadion.Summary = field(default_factory=Summary)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)
    drifts: list[float] = field(default_factory=list)
    whole_weights_are_gone: bool = False
    apart: tuple[bool, ...] = ()  # before the weights were gathered, and after
    gathered: dict[str, torch.Tensor] = field(default_factory=dict)


def model_and_optimizer(kind=curvadion.CurvaDion, **options):
    torch.manual_seed(5)
    model = hf.gpt(dropout=0.1)
    return model, kind(curvadion.param_groups(model), lr=0.02, **options)


def loader():
    return DataLoader(hf.Tokens(), batch_size=BATCH)


def whole(model):
    """Weights of any layout, as a copy."""
    each = getattr(model, "module", model).named_parameters()
    full = ((n, p.full_tensor() if hasattr(p, "full_tensor") else p) for n, p in each)
    return {name: p.detach().clone() for name, p in full}


def by_hand(rank, world):
    """A plain loop: DDP, this rank's batches, agreement at the step at which the others save."""
    torch.manual_seed(5)
    run = Run()
    with curvadion.WireMeter() as meter:
        model, optimizer = model_and_optimizer(replicas=dist.group.WORLD, **CODES)
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
    return ended(run, model, optimizer, meter)


def note(run, optimizer, loss, norm):
    run.losses.append(loss.item())
    run.norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
    run.summary.add(optimizer.report)
    if len(run.losses) > STEPS - 4:
        run.drifts.append(optimizer.drift())


def ended(run, model, optimizer, meter):
    run.sent = meter.bytes_by_collective
    run.weights = whole(model)
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
    ended(run, model, optimizer.optimizer, meter)
    if accelerator.is_fsdp2:
        before = optimizer.optimizer.apart
        run.gathered = accelerator.get_state_dict(model)  # on rank 0 only
        run.apart = before, optimizer.optimizer.apart
        run.weights = run.weights | {"agreed": whole(model)["transformer.wte.weight"]}
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


# -------------------------------------------------------------------- DDP


def ddp_runs(rank, folder):
    hf.launch()

    def made():
        hf.launch()
        return attached(cpu=True)

    def options(accelerator):
        return {"replicas": dist.group.WORLD, **CODES}

    plain = by_hand(rank, dist.get_world_size())
    run = with_accelerate(rank, made, folder, options=options)
    resumed = with_accelerate(rank, made, folder, first=SAVED, options=options)
    return plain, run, resumed


@pytest.fixture(scope="module")
def trained_ddp(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("state"))
    return distributed.run(2, ddp_runs, folder, timeout=120.0)


def test_ddp_takes_the_steps_of_a_plain_loop(trained_ddp):
    for plain, run, _ in trained_ddp:
        assert run.losses == plain.losses and run.norms == plain.norms
        assert max(run.norms) > MAX_NORM
        assert run.drifts == plain.drifts and max(run.drifts) > 0
        assert 3 < run.summary.open_steps == plain.summary.open_steps < STEPS / 2, run.summary
        for name, W in plain.weights.items():
            assert torch.equal(run.weights[name], W), name


def test_ddp_sends_no_more_than_a_plain_loop(trained_ddp):
    for plain, run, _ in trained_ddp:
        assert run.sent == plain.sent


def test_ddp_resumes_bitwise(trained_ddp):
    for _, run, resumed in trained_ddp:
        assert resumed.losses[SAVED:] == run.losses[SAVED:]
        assert resumed.drifts == run.drifts
        for name, W in run.weights.items():
            assert torch.equal(resumed.weights[name], W), name


# -------------------------------------------------------------------- FSDP2 and HSDP


def fsdp_runs(rank, folder, replicas, state_dict_type):
    """Runs in shards; replicas: how many there are."""
    from accelerate import FullyShardedDataParallelPlugin, ParallelismConfig

    def made():
        hf.launch("gpu")
        shards = dist.get_world_size() // replicas
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["GPT2Block"], state_dict_type=state_dict_type,
            cpu_ram_efficient_loading=False,
        )  # fmt: skip
        mesh = ParallelismConfig(dp_replicate_size=replicas, dp_shard_size=shards)
        return attached(fsdp_plugin=plugin, parallelism_config=mesh)

    def options(accelerator):
        if replicas == 1:
            return {"kind": curvadion.Dion}
        return {"replicas": accelerator.torch_device_mesh["dp_replicate"], **CODES}

    run = with_accelerate(rank, made, folder, options=options)
    return run, with_accelerate(rank, made, folder, first=SAVED, options=options)


@pytest.mark.parametrize(
    ("replicas", "shards", "kind"),
    [(1, 2, "SHARDED_STATE_DICT"), (1, 2, "FULL_STATE_DICT"), (2, 2, "SHARDED_STATE_DICT")],
    ids=["fsdp sharded", "fsdp full", "hsdp"],
)
def test_shards_resume_bitwise(tmp_path, replicas, shards, kind):
    results = distributed.run(
        replicas * shards, fsdp_runs, str(tmp_path), replicas, kind, timeout=120.0
    )
    gathered = results[0][0].gathered
    for run, resumed in results:
        assert run.whole_weights_are_gone
        assert run.apart == (replicas > 1, False)
        assert torch.equal(run.weights["agreed"], gathered["transformer.wte.weight"])
        assert resumed.losses[SAVED:] == run.losses[SAVED:]
        assert len(run.losses) == STEPS and max(run.norms) > MAX_NORM
        assert (max(run.drifts) > 0) == (replicas > 1) and resumed.drifts == run.drifts
        for name, W in run.weights.items():
            assert torch.equal(resumed.weights[name], W), name


# -------------------------------------------------------------------- what goes wrong


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


def step(accelerator, model, optimizer, rank):
    accelerator.backward(model(torch.randn(4, 8) * (rank + 1)))
    optimizer.step()
    optimizer.zero_grad()


def raised(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def mistakes(rank):
    from accelerate import Accelerator

    from curvadion.integrations.accelerate import attach

    def fresh(attaching=True):
        hf.launch()
        accelerator = Accelerator(cpu=True)
        return attach(accelerator) if attaching else accelerator

    def another_optimizer():
        model = Plain()
        groups = [{"params": [model.matrix.weight]}]
        ours = curvadion.Dion(groups, replicas=dist.group.WORLD)
        fresh().prepare(model, ours, torch.optim.SGD(model.other.parameters()))

    def mixed():
        model = Plain()
        ours = curvadion.Dion([{"params": [model.matrix.weight]}], replicas=dist.group.WORLD)
        single = curvadion.Dion(
            [{"params": [*model.other.parameters()], "algorithm": "adamw"}], replicas="single"
        )
        fresh().prepare(model, ours, single)

    def some_parameters():
        accelerator = fresh()
        model, _ = prepared(accelerator)
        accelerator.clip_grad_norm_(model.module.matrix.parameters(), 1.0)

    def late():
        accelerator = fresh(attaching=False)
        prepared(accelerator)
        attach(accelerator)

    def uneven():
        accelerator = fresh()
        model, _ = prepared(accelerator)
        accelerator.join_uneven_inputs([model])

    def not_told_of_processors():
        hf.launch("none")
        attach(Accelerator())

    unattached = fresh(attaching=False)
    return {
        "not attached": raised(step, unattached, *prepared(unattached), rank),
        "attached late": raised(late),
        "no replicas": raised(prepared, fresh(), replicas=None),
        "another optimizer": raised(another_optimizer),
        "mixed": raised(mixed),
        "some parameters": raised(some_parameters),
        "uneven inputs": raised(uneven),
        "not told": raised(not_told_of_processors),
        "no accelerator": raised(attach, torch.nn.Linear(1, 1)),
    }


MISTAKES = {
    "not attached": (
        "RuntimeError",
        "gradients of the matrices are identical",
        "with accelerate call curvadion.integrations.accelerate.attach(accelerator)",
    ),
    "attached late": ("RuntimeError", "call attach right after Accelerator(...)"),
    "not told": ("ValueError", "num_processes=1, but WORLD_SIZE=2", "use_cpu=True", "cpu=True"),
    "no replicas": ("ValueError", "replicas=None in CurvaDion", "dist.group.WORLD", "'single'"),
    "another optimizer": ("ValueError", "SGD and Dion hold parameters of one model"),
    "mixed": ("ValueError", "two optimizers hold parameters of one model", "same replicas="),
    "some parameters": ("ValueError", "one norm over all of an optimizer"),
    "uneven inputs": ("RuntimeError", "replicas step together", "even_batches=True"),
    "no accelerator": ("TypeError", "accelerate.Accelerator", "Linear"),
}


def test_mistakes_are_errors_on_all_ranks():
    for messages in distributed.run(2, mistakes):
        for name, parts in MISTAKES.items():
            assert all(part in messages[name] for part in parts), (name, messages[name])


# -------------------------------------------------------------------- saving while apart


def read_while_apart(rank):
    hf.launch()
    accelerator = attached(cpu=True)
    model, optimizer = prepared(accelerator)
    found = []
    for _ in range(2):
        step(accelerator, model, optimizer, rank)
    assert optimizer.optimizer.apart and optimizer.drift() > 0
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            held = accelerator.get_state_dict(model)
        found.append((sorted({str(w.message) for w in caught}), held["matrix.weight"].clone()))
        optimizer.eval()
    return found


def test_weights_read_while_apart_are_told_of():
    (apart, together), (apart_there, together_there) = distributed.run(2, read_while_apart)
    assert "optimizer.eval() on all ranks before" in apart[0][0]
    assert not torch.equal(apart[1], apart_there[1])
    assert together[0] == [] and torch.equal(together[1], together_there[1])


# -------------------------------------------------------------------- accumulation, precision


def accumulated(rank, precision):
    """Steps of two backwards each, and the same steps with the optimizer alone."""
    hf.launch()
    accelerator = attached(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
    if precision == "fp16":  # where Accelerate has a scaler on GPUs only
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    torch.manual_seed(3)
    model, optimizer = prepared(accelerator)
    accelerator.native_amp = accelerator.native_amp or precision == "fp16"
    torch.manual_seed(3)
    alone = Plain()
    groups = curvadion.param_groups(alone)
    gate = curvadion.FixedPeriod(3)
    by_hand = curvadion.CurvaDion(groups, replicas=dist.group.WORLD, gate=gate)
    kind = torch.bfloat16 if precision == "bf16" else torch.float32
    torch.manual_seed(rank)
    for _ in range(10):
        x = torch.randn(4, 8)
        with accelerator.accumulate(model):
            accelerator.backward(model(x))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        with torch.autocast("cpu", kind, enabled=precision == "bf16"):
            loss = alone(x) / 2
        loss.backward()
        if accelerator.sync_gradients:
            curvadion.clip_grad_norm_(by_hand, 0.1)
            by_hand.step()
            by_hand.zero_grad()
    return by_hand.progress.steps, optimizer.optimizer.progress.steps, whole(model), whole(alone)


@pytest.mark.numeric
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_accumulates_like_a_plain_loop(precision):
    for steps, counted, model, alone in distributed.run(2, accumulated, precision):
        assert steps == counted == 5
        for name, W in alone.items():
            assert_close(model[name], W, Rounding(torch.float32), what=name)


def alone_in_one_process(rank):
    hf.launch()
    accelerator = attached(cpu=True)
    torch.manual_seed(1)
    model, optimizer = prepared(accelerator)
    other = torch.optim.SGD(torch.nn.Linear(2, 2).parameters())
    accelerator.prepare(other)
    step(accelerator, model, optimizer, rank)
    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
    return type(model).__name__, float(norm)


def test_one_process_needs_nothing():
    assert distributed.run(1, alone_in_one_process) == [("Plain", 0.0)]
