"""What ``python -m curvadion.info`` says where something does not work, and what imports cost."""

from __future__ import annotations

import subprocess
import sys

import pytest

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


def test_a_backend_whose_codes_differ_is_told(monkeypatch, capsys):
    info.main()
    assert capsys.readouterr().out.endswith("Everything works.\n")
    encode = ops.encode_difference_

    def wrong(codes, *arguments, **more):
        encode(codes, *arguments, **more)
        if backends._forced is None:  # what plain PyTorch makes for comparison is right
            codes[0, 0] ^= 1

    monkeypatch.setattr(ops, "encode_difference_", wrong)
    with pytest.raises(RuntimeError, match="1-bit codes on cpu differ from those"):
        info.main()
    assert "Everything works." not in capsys.readouterr().out
