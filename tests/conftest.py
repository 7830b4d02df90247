"""One thread per process, if `make headroom` asks for no more: ranks of a test share few cores."""

import gc
import importlib.util
import os

# For the workers, and before torch is imported.
os.environ["OMP_NUM_THREADS"] = os.environ.get("CURVADION_TEST_THREADS", "1")

# Frameworks would take a GPU where a test means the CPU; `make test-gpu` tests what runs on one.
if "CURVADION_TEST_GPU" not in os.environ:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import pytest
import torch

from support.runs import distributed, seeded

# Until tests are collected all that is made stays; the collector would walk it again and again.
gc.disable()

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
seeded.shift_seeds()
if importlib.util.find_spec("hypothesis"):  # a machine that tests kernels alone may lack it
    import hypothesis

    # The same examples in every run, but for `make headroom`; slow ranks are no failure.
    hypothesis.settings.register_profile(
        "suite",
        derandomize=seeded.OFFSET not in os.environ,
        deadline=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("suite")
if os.environ.get("TRITON_INTERPRET") == "1":
    from support.devices import interpreter

    interpreter.speed_up()


# Files of long tests, which run first: the many short ones then keep all workers busy to the end.
LONG = (
    "ops/test_triton",
    "optim/test_capture.py",
    "integrations/",
    "examples/",
    "benchmarks/",
    "test_packaging",
)


GPT2 = "transformers.models.gpt2.modeling_gpt2"
# What the workers of a framework's files import, by a part of the files' names.
FRAMEWORKS = {
    "test_accelerate": {"accelerate", "transformers.trainer", GPT2},
    "test_huggingface": {"accelerate", "transformers.trainer", GPT2},
    "test_lightning": {"lightning"},
    "deepspeed": {"deepspeed", "torch._inductor.compile_fx"},  # it decorates with torch.compile
    "test_deepspeed_trainer": {"transformers.trainer"},
    "test_minimal": {"curvadion.integrations.torchft"},
    "test_torchft": {"curvadion.integrations.torchft"},
    # Which torchtitan imports: it itself looks for a device when it is imported.
    "test_torchtitan": {"datasets"},
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not any(name in item.path.as_posix() for name in LONG))
    names = {item.path.stem for item in items}
    chosen = [modules for part, modules in FRAMEWORKS.items() if any(part in n for n in names)]
    distributed.preload(set().union(*chosen))


def pytest_collection_finish() -> None:
    gc.enable()
    gc.collect()
    gc.freeze()  # thousands of tests, which every later collection would walk again


def pytest_sessionfinish() -> None:
    distributed.shutdown()


@pytest.fixture(scope="module")
def own_workers():
    """New workers for a file: frameworks keep state in their modules, which other tests change."""
    with distributed.own_workers():
        yield
