"""What ``python -m curvadion.info`` says where something does not work, and what imports cost."""

from __future__ import annotations

import subprocess
import sys

from curvadion import info, ops
from curvadion.ops import backends

# What takes long to import, or may be missing: a program that needs none of it does not wait.
HEAVY = (
    *("accelerate", "deepspeed", "lightning", "matplotlib", "pandas", "sympy", "tensorboard"),
    *("torchtitan", "transformers", "triton", "wandb"),
    *("torch._dynamo", "torch._inductor", "torch.distributed.checkpoint"),
    *("torch.distributed.fsdp", "torch.distributed.tensor", "torch.utils.tensorboard"),
    *("curvadion.info", "curvadion.integrations", "curvadion_kernels"),
)


def test_import_is_light():
    code = f"import sys, curvadion; print(*({set(HEAVY)!r} & sys.modules.keys()))"
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert said.stdout.strip() == ""


def test_a_backend_that_is_not_there_is_told(monkeypatch, capsys):
    monkeypatch.setenv("CURVADION_BACKEND", "nonsense")
    assert info.main() == 1
    said = capsys.readouterr().out
    assert said.count("FAILED: ValueError: backend 'nonsense' must be one of") == 2
    assert "Something above does not work." in said


def test_a_backend_whose_codes_differ_is_told(monkeypatch, capsys):
    assert info.main() == 0
    encode = ops.encode_difference_

    def wrong(codes, *arguments, **more):
        encode(codes, *arguments, **more)
        if backends._forced is None:  # what plain PyTorch makes for comparison is right
            codes[0, 0] ^= 1

    monkeypatch.setattr(ops, "encode_difference_", wrong)
    assert info.main() == 1
    assert "codes of 1 bits on cpu differ from those of plain PyTorch" in capsys.readouterr().out
