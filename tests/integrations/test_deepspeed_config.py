"""Configurations that cannot work give an error that names the key; importing costs nothing."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import curvadion
import deepspeed_engines as ds
import distributed
import fresh
from curvadion import CurvaDion
from curvadion.integrations.deepspeed.config import ROUTING

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"
)


ROOT = Path(__file__).resolve().parents[2]


def with_params(stage=0, kind="CurvaDion", **params):
    configuration = ds.config(stage, params, kind)
    if {"threshold", "wire_budget"} & params.keys() or kind == "Dion":
        del configuration["optimizer"]["params"]["gate"]
    return configuration


OFFLOAD = {"device": "nvme", "nvme_path": "/tmp"}
MALFORMED = {
    "misspelt type": (ds.config(kind="curvadion"), "optimizer.type='curvadion': did you mean"),
    "nearly the type": (ds.config(kind="CurvDion"), "optimizer.type='CurvDion': did you mean"),
    "misspelt params": (
        {**ds.config(), "optimizer": {"type": "Dion", "parms": {"lr": 0.1}}},
        "optimizer.parms={'lr': 0.1} is unknown",
    ),
    "misspelt key": (with_params(treshold=0.3), "optimizer.params.treshold=0.3 is unknown: did"),
    "foreign key": (with_params(amsgrad=True), "optimizer.params.amsgrad=True is unknown: known"),
    "gate key of Dion": (with_params(kind="Dion", max_local_steps=3), "params.max_local_steps=3"),
    "replicas": (with_params(replicas="world"), "optimizer.params.replicas: leave it out"),
    "lr of a wrong type": (with_params(lr="0.02"), "optimizer.params: lr='0.02'"),
    "negative lr": (with_params(lr=-1), "optimizer.params: lr=-1"),
    "rank_fraction": (with_params(rank_fraction=1.5), "optimizer.params: rank_fraction=1.5"),
    "betas": (with_params(betas=[0.9]), "optimizer.params: betas=[0.9]"),
    "momentum_dtype": (with_params(momentum_dtype="fp32"), "momentum_dtype='fp32'"),
    "gate of no type": (with_params(gate={"period": 3}), "optimizer.params.gate.type=None"),
    "gate as a string": (with_params(gate="always"), "optimizer.params.gate='always'"),
    "unknown gate": (with_params(gate={"type": "never"}), "optimizer.params.gate.type='never'"),
    "gate without its argument": (with_params(gate={"type": "period"}), "optimizer.params.gate="),
    "gate with a wrong argument": (
        with_params(gate={"type": "period", "period": 0}),
        "optimizer.params.gate.period=0",
    ),
    "gate and threshold": (
        ds.config(0, {"threshold": 0.3}),
        "optimizer.params: gate=AlwaysOpen() and threshold=0.3: each is a gate",
    ),
    "threshold": (with_params(threshold=-1), "optimizer.params: threshold=-1"),
    "local_step": (with_params(local_step="sgd"), "optimizer.params: local_step='sgd'"),
    "local Dion step of shards": (
        with_params(2, threshold=0.3, local_step="dion"),
        "local_step='dion' with zero_optimization.stage=2",
    ),
    "budget where nothing drifts": (
        with_params(stage=1, wire_budget=0.01),
        "polar_correction=True, "
        "residual_dtype='bfloat16', delay=0, spectrum_decay=0.8) "
        "with zero_optimization.stage=1: one replica is sharded",
    ),
    "sync where nothing drifts": (
        with_params(stage=3, sync={"type": "quantized_average"}),
        "sync=QuantizedAverage(bits=2, fragments=1, align_momentum=True, polar_correction=True, "
        "residual_dtype='bfloat16', delay=0, spectrum_decay=0.8) "
        "with zero_optimization.stage=3: one replica is sharded",
    ),
    "delay where nothing drifts": (
        with_params(stage=2, wire_budget=0.01, delay=1),
        "optimizer.params.delay=1 with zero_optimization.stage=2: one replica is sharded",
    ),
    "delay of no steps": (with_params(delay=-1, wire_budget=0.01), "params.delay=-1 must be >= 0"),
    "delay that is no integer": (
        with_params(delay=1.5, wire_budget=0.01), "TypeError: optimizer.params.delay=1.5",
    ),
    "delay inside the sync": (
        with_params(sync={"type": "quantized_average", "delay": -1}),
        "optimizer.params.sync.delay=-1",
    ),
    "delay without codes": (
        with_params(threshold=0.3, delay=1),
        "optimizer.params.delay=1 with sync=LowRank(average_weights=True): only coded means",
    ),
    "delay of another sync": (
        with_params(sync={"type": "low_rank"}, delay=1),
        "optimizer.params.delay=1 with sync=LowRank(average_weights=True): only coded means",
    ),
    "delay without codes, sharded": (
        with_params(stage=1, threshold=0.3, delay=1),
        "optimizer.params.delay=1 with zero_optimization.stage=1: one replica is sharded",
    ),
    "two delays": (
        with_params(sync={"type": "quantized_average", "delay": 2}, delay=1),
        "optimizer.params.delay=1, but optimizer.params.sync.delay=2",
    ),
    "a delay and explicitly none": (
        with_params(sync={"type": "quantized_average", "delay": 0}, delay=1),
        "optimizer.params.delay=1, but optimizer.params.sync.delay=0",
    ),
    "explicitly none and a delay": (
        with_params(sync={"type": "quantized_average", "delay": 1}, delay=0),
        "optimizer.params.delay=0, but optimizer.params.sync.delay=1",
    ),
    "delay of a gate that has none": (
        with_params(gate={"type": "period", "period": 3, "delay": 1}),
        "takes ['period']. For means that arrive later give optimizer.params.delay",
    ),
    "delay of a gate that is no number": (
        with_params(gate={"type": "rmmc", "threshold": 0.3, "delay": "1"}),
        "optimizer.params.gate.delay='1' must be 0 or 1",
    ),
    "delay of Dion": (with_params(kind="Dion", delay=1), "optimizer.params.delay=1 is unknown"),
    "sync of Dion": (with_params(kind="Dion", sync={"type": "low_rank"}), "optimizer.params.sync="),
    "sync of no type": (with_params(sync={"bits": 3}), "optimizer.params.sync.type=None"),
    "sync as a string": (with_params(sync="low_rank"), "optimizer.params.sync='low_rank'"),
    "sync's former name": (with_params(reconcile="average"), "params.reconcile='average' is unkn"),
    "unknown sync": (with_params(sync={"type": "average"}), "optimizer.params.sync.type='average'"),
    "sync with another's argument": (
        with_params(sync={"type": "low_rank", "bits": 2}),
        "optimizer.params.sync={'type': 'low_rank', 'bits': 2}: a sync of type 'low_rank' takes "
        "['average_weights']",
    ),
    "sync with a wrong argument": (
        with_params(sync={"type": "quantized_average", "bits": 5}),
        "optimizer.params.sync.bits=5",
    ),
    "sync that knows no costs": (
        with_params(sync={"type": "low_rank"}, wire_budget=0.1),
        "optimizer.params: sync=LowRank(average_weights=True) with gate=ByteBudget(share=0.1",
    ),
    "budget and threshold": (
        with_params(wire_budget=0.01, threshold=0.3),
        "threshold=0.3 and wire_budget=0.01",
    ),
    "elementwise": (with_params(elementwise="sgd"), "optimizer.params: elementwise='sgd'"),
    "kind in options": (with_params(options={"bias": {"lr": 1}}), "options names the kind 'bias'"),
    "key in options": (with_params(options={"matrix": {"lrr": 1}}), "Unknown key 'lrr'"),
    "option of a wrong type": (with_params(options={"head": 3}), "params: options['head']=3 must"),
    "gate's type as a list": (with_params(gate={"type": [1]}), "optimizer.params.gate.type=[1]"),
    "options of a wrong type": (with_params(options=3), "optimizer.params: options=3"),
    "kind in patterns": (with_params(patterns={"tall.*": "dion"}), "patterns names the kind"),
    "pattern without a match": (with_params(patterns={"x.*": "head"}), "patterns ['x.*'] match"),
    "stack that is none": (with_params(patterns={"tall.weight": "stack"}), "cannot be a 'stack'"),
    "pattern without a kind": (with_params(patterns={"*": {"lr": 1}}), "has no 'kind'"),
    "elementwise_lr": (with_params(elementwise_lr=-1), "optimizer.params: elementwise_lr=-1"),
    "matrix that is none": (with_params(patterns={"*.bias": "matrix"}), "tall.bias of shape (11,)"),
    "elastic checkpoint": (
        ds.config(1, zero={"elastic_checkpoint": True}), "zero_optimization.elastic_checkpoint",
    ),
    "universal checkpoint": (
        ds.config(2, checkpoint={"load_universal": True}), "checkpoint.load_universal",
    ),
    "fp16 of stage 0": (ds.config(0, fp16={"enabled": True}), "fp16.enabled"),
    "fp16 autocast": (
        ds.config(2, torch_autocast={"enabled": True, "dtype": "float16"}), "torch_autocast.dtype",
    ),
    "sums of gradients": (ds.config(0, gradient_allreduce_op="sum"), "gradient_allreduce_op"),
    "NVMe optimizer": (
        ds.config(3, zero={"offload_optimizer": OFFLOAD}),
        "zero_optimization.offload_optimizer.device='nvme'",
    ),
    "partial offload": (
        ds.config(3, zero={"offload_optimizer": {"device": "cpu", "ratio": 0.5}}),
        "zero_optimization.offload_optimizer.ratio=0.5",
    ),
}  # fmt: skip


def refuse(rank, configurations):
    """What each configuration raises, as text."""
    messages = {}
    for name, configuration in configurations.items():
        try:
            ds.engine_of(configuration)
            messages[name] = "nothing"
        except (TypeError, ValueError) as error:
            messages[name] = f"{type(error).__name__}: {error}"
        except Exception as error:
            messages[name] = f"no user error: {type(error).__name__}: {error}"
    return messages


def test_malformed_configurations_name_the_key():
    configurations = {name: configuration for name, (configuration, _) in MALFORMED.items()}
    (messages,) = distributed.run(1, refuse, configurations)
    wrong = {n: messages[n] for n, (_, part) in MALFORMED.items() if part not in messages[n]}
    assert not wrong
    assert not [m for m in messages.values() if m.startswith(("nothing", "no user error"))]


def test_float16_on_a_cpu_without_it_names_the_key():
    """oneDNN, which DeepSpeed asks, can be told to leave a CPU's newer instructions alone."""
    python(
        """
        import torch
        import torch.distributed as dist
        import deepspeed_engines as ds
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        if not ds.supports_fp16():  # a CPU of another kind may not listen
            for stage, complaint in ((2, "fp16.enabled=true: this cpu has no float16"),
                                     (0, "fp16.enabled does not work with CurvaDion and Dion")):
                try:
                    ds.engine_of(ds.config(stage, fp16={"enabled": True, "loss_scale": 8}))
                except ValueError as error:
                    assert str(error).startswith(complaint), error
                else:
                    raise AssertionError("nothing was raised")
        dist.destroy_process_group()
        """,
        ONEDNN_MAX_CPU_ISA="AVX2",
    )


def refuse_tensor_parallelism(rank):
    configuration = ds.config(1)
    cut = {"patterns": ["tall.weight"], "partition_type": "column"}
    configuration["tensor_parallel"] = {
        "autotp_size": 2,
        "partition_config": {"use_default_specs": False, "layer_specs": [cut]},
    }
    with pytest.raises(ValueError, match=r"tensor_parallel\.autotp_size does not work") as error:
        ds.engine_of(configuration)
    return str(error.value)


def test_tensor_parallelism_of_deepspeed_is_refused():
    distributed.run(2, refuse_tensor_parallelism)
    distributed.shutdown()  # DeepSpeed remembers its groups for tensor parallelism


def refuse_clients(rank):
    messages = []
    alone = [dist.new_group([each]) for each in range(2)][rank]
    for stage, replicas in ((2, alone), (0, dist.group.WORLD if rank else alone)):
        of = ds.model()
        configuration = ds.config(stage)
        del configuration["optimizer"]
        optimizer = CurvaDion(curvadion.param_groups(of), replicas=replicas)
        try:
            ds.engine_of(configuration, of, optimizer=optimizer)
            messages.append("nothing")
        except ValueError as error:
            messages.append(str(error))
    with pytest.raises(TypeError, match="CurvaDion or Dion"):
        curvadion.deepspeed.attach(object())
    return messages


def test_replicas_must_be_those_of_the_engine():
    first, second = distributed.run(2, refuse_clients)
    assert "replicas must be None with zero_optimization.stage=2" in first[0]
    assert "replicas must be None with zero_optimization.stage=2" in second[0]
    assert "replicas holds the ranks [0], but" in first[1]


def groups(rank, parameters):
    of = ds.model()
    configuration = ds.config(1)
    if parameters == "groups":
        del configuration["optimizer"]["params"]["options"]
        given = [{"params": [of.tall.weight], "algorithm": "dion"}]
    else:
        given = [of.tall.weight, of.tall.bias]
    engine = ds.engine_of(configuration, of, model_parameters=given)
    ds.train(engine, range(2))
    state = engine.basic_optimizer.state_dict()
    return [group["param_names"] for group in state["param_groups"]]


def test_model_parameters_may_be_few_or_grouped():
    assert distributed.run(2, groups, "few") == [[["tall.weight"], ["tall.bias"]]] * 2
    assert distributed.run(2, groups, "groups") == [[["tall.weight"]]] * 2


def choices(rank, gate, sync):
    """The gate and the sync of an engine at stage 0, and whether it trains."""
    engine = ds.engine_of(ds.config(0, {"gate": gate, "sync": sync}))
    reports = ds.train(engine, range(3))
    optimizer = engine.basic_optimizer
    return repr(optimizer.gate), repr(optimizer.sync), [report.gate_open for report in reports]


def test_the_json_names_a_gate_and_a_sync():
    sync = {"type": "quantized_average", "bits": 3, "fragments": 2, "align_momentum": False}
    for gate, kind, opened in distributed.run(2, choices, {"type": "period", "period": 2}, sync):
        assert gate == "FixedPeriod(period=2)"
        assert kind == (
            "QuantizedAverage(bits=3, fragments=2, align_momentum=False, polar_correction=True, "
            "residual_dtype='bfloat16', delay=0, spectrum_decay=0.8)"
        )
        assert opened == [False, True, False]
    coded = {"type": "coded_gradients", "residual_dtype": "float32"}
    for gate, kind, opened in distributed.run(2, choices, {"type": "always"}, coded):
        assert (gate, kind) == (
            "AlwaysOpen()", "CodedGradients(bits=3, residual_dtype='float32')"
        )  # fmt: skip
        assert all(opened)
    unaveraged = {"type": "low_rank", "average_weights": False}
    for gate, kind, opened in distributed.run(2, choices, {"type": "always"}, unaveraged):
        assert (gate, kind) == ("AlwaysOpen()", "LowRank(average_weights=False)")
        assert all(opened)


def test_a_small_budget_of_the_json_takes_codes_of_one_bit():
    for budget, bits in ((0.01, 2), (0.0025, 1)):
        for kind in distributed.run(2, sync_of_budget, budget):
            assert kind.startswith(f"QuantizedAverage(bits={bits}, "), budget


def sync_of_budget(rank, share):
    engine = ds.engine_of(with_params(wire_budget=share))
    return repr(engine.basic_optimizer.sync)


def no_delay(rank):
    """The syncs of engines whose JSON says that there is no delay."""
    chosen = (
        with_params(threshold=0.3, delay=0),
        with_params(sync={"type": "low_rank"}, delay=0),
        with_params(stage=1, threshold=0.3, delay=0),
        with_params(wire_budget=0.8, delay=0),
        with_params(sync={"type": "quantized_average", "delay": 0}, delay=0),
    )
    return [repr(ds.engine_of(configuration).basic_optimizer.sync) for configuration in chosen]


def test_a_delay_of_no_steps_is_none():
    for first, *others in distributed.run(2, no_delay):
        assert first == "LowRank(average_weights=True)"
        assert others[:2] == [first] * 2
        assert all("delay=0, " in other for other in others[2:])


def apart(rank):
    """Whether replicas count as apart after a local step, at stages 0 and 1."""
    gate, found = {"type": "period", "period": 3}, []
    for stage in (0, 1):
        engine = ds.engine_of(ds.config(stage, {"gate": gate}))
        ds.train(engine, range(1))
        assert engine.basic_optimizer.progress.local_steps == 1
        found.append(engine.basic_optimizer.apart)
    return found


def test_one_replica_is_never_apart():
    assert distributed.run(2, apart) == [[True, False]] * 2


def python(program, **environment):
    """Run a program in a fresh process."""
    paths = {"DS_ACCELERATOR": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    environment = {**os.environ, **paths, **environment}
    said = fresh.python("-c", textwrap.dedent(program), environment=environment, cwd=ROOT)
    assert said.returncode == 0, said.stderr


def test_importing_curvadion_imports_no_deepspeed():
    python(
        """
        import sys
        finders = list(sys.meta_path)
        import curvadion
        import curvadion.integrations.deepspeed  # without register()
        assert not any(name.split(".")[0] == "deepspeed" for name in sys.modules)
        assert sys.meta_path == finders
        import deepspeed
        from deepspeed.runtime.engine import DeepSpeedEngine as Engine
        assert not Engine._is_supported_optimizer(None, "CurvaDion")
        import curvadion.deepspeed
        assert sys.meta_path == finders
        assert Engine._is_supported_optimizer(None, "CurvaDion")
        assert Engine._is_supported_optimizer(None, "Dion")
        assert not Engine._is_supported_optimizer(None, "NoSuchOptimizer")
        """
    )


def test_importing_curvadion_deepspeed_before_deepspeed():
    python(
        """
        import curvadion.deepspeed
        import curvadion.integrations.deepspeed
        curvadion.integrations.deepspeed.register()  # again is harmless
        import deepspeed
        from deepspeed.runtime.engine import DeepSpeedEngine as Engine
        from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS
        assert Engine._is_supported_optimizer(None, "CurvaDion")
        assert not Engine._is_supported_optimizer(None, "NoSuchOptimizer")
        assert ZERO_SUPPORTED_OPTIMIZERS.count(curvadion.CurvaDion) == 1
        """
    )


def test_the_document_quotes_the_error_of_a_forgotten_import():
    python(
        """
        import pathlib, sys, torch
        import torch.distributed as dist
        import deepspeed
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        optimizer = {"type": "CurvaDion", "params": {"lr": 0.02}}
        settings = {"train_micro_batch_size_per_gpu": 1, "optimizer": optimizer}
        try:
            deepspeed.initialize(model=torch.nn.Linear(3, 3), config=settings)
        except AssertionError as error:
            said = f"AssertionError: {error}"
        dist.destroy_process_group()
        document = pathlib.Path("docs/deepspeed.md").read_text("utf-8")
        assert f"```\\n{said}\\n```" in document, said
        assert 'deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False' in document
        assert "curvadion" not in sys.modules
        """,
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1",
    )  # fmt: skip


def test_an_import_of_deepspeed_may_fail_and_be_tried_again():
    python(
        """
        import sys, curvadion
        sys.modules["deepspeed.runtime.config"] = None  # what the engine's module imports
        for _ in range(2):
            try:
                import curvadion.deepspeed
            except ImportError as error:
                assert "curvadion.deepspeed needs DeepSpeed" in str(error), error
                assert "deepspeed.runtime.config" in str(error), error
                continue
            raise AssertionError("DeepSpeed was imported")
        del sys.modules["deepspeed.runtime.config"]
        import curvadion.deepspeed
        from deepspeed.runtime.engine import DeepSpeedEngine as Engine
        assert Engine._is_supported_optimizer(None, "CurvaDion")
        """
    )


def test_without_deepspeed_the_error_says_so():
    python(
        """
        import sys, curvadion
        sys.modules["deepspeed"] = None  # as if it were not installed
        from curvadion.integrations import deepspeed as integration
        def importing():
            import curvadion.deepspeed
        for call in (importing, integration.register, integration.initialize):
            try:
                call()
            except ImportError as error:
                assert "needs DeepSpeed" in str(error), (call, error)
                assert "pip install deepspeed" in str(error), (call, error)
            else:
                raise AssertionError(call)
        """
    )


def test_of_several_imports_of_curvadion_the_last_one_counts():
    python(
        """
        import sys, torch, curvadion.deepspeed
        def purge():
            for name in [n for n in sys.modules if n.split(".")[0].startswith("curvadion")]:
                del sys.modules[name]
        first = curvadion
        purge()
        import curvadion
        assert curvadion is not first
        from curvadion import ops
        from curvadion.ops import reference as plain
        plain.norms = lambda X: torch.full((len(X),), 7.0)
        X = torch.nn.Parameter(torch.ones(4, 3))
        X.grad = torch.ones(4, 3)
        curvadion.Dion([X]).step()
        with ops.use_backend("torch"):
            assert torch.ops.curvadion.norms([torch.ones(4)]).item() == 7.0
        from deepspeed.runtime.engine import DeepSpeedEngine as Engine
        from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS
        purge()
        import curvadion.deepspeed
        assert curvadion.CurvaDion in ZERO_SUPPORTED_OPTIMIZERS
        hooks = sys.modules["curvadion.integrations.deepspeed.hooks"]
        assert Engine._configure_optimizer.__globals__ is vars(hooks)
        """
    )


def test_an_engine_does_not_change_torch_optim():
    assert not hasattr(torch.optim, "CurvaDion")


def test_every_key_of_the_json_is_described():
    described = (Path(__file__).parents[2] / "docs" / "deepspeed.md").read_text("utf-8")
    keys = {*list(inspect.signature(CurvaDion).parameters)[1:], *ROUTING} - {"replicas"}
    assert [key for key in sorted(keys) if f"`{key}`" not in described] == []
