"""What ``python -m curvadion.info`` says where something does not work, and what imports cost."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import torch

from curvadion import info, ops

# What takes long to import, or may be missing: a program that needs none of it does not wait.
HEAVY = (
    *("accelerate", "deepspeed", "lightning", "matplotlib", "pandas", "sympy", "tensorboard"),
    *("torchtitan", "transformers", "triton", "wandb"),
    *("torch._dynamo", "torch._inductor", "torch.distributed.checkpoint"),
    *("torch.distributed.fsdp", "torch.distributed.tensor", "torch.utils.tensorboard"),
    *(
        "curvadion.info",
        "curvadion.integrations",
        "curvadion.metering.picture",
        "curvadion_kernels",
    ),
)


def test_import_is_light():
    code = f"import sys, curvadion; print(*({set(HEAVY)!r} & sys.modules.keys()))"
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert said.stdout.strip() == ""


def test_a_backend_that_is_not_there_is_told(monkeypatch, capsys):
    monkeypatch.setenv("CURVADION_BACKEND", "nonsense")
    monkeypatch.setattr(info, "_two_processes", lambda: iter(["left out"]))
    assert info.main([]) == 1
    said = capsys.readouterr().out
    assert said.count("FAILED: ValueError: backend 'nonsense' must be one of") == 2
    assert "Something above does not work." in said


def test_a_backend_whose_codes_differ_is_told(monkeypatch, capsys):
    monkeypatch.setattr(info, "_two_processes", lambda: iter(["left out"]))
    assert info.main([]) == 0
    encode = ops.encode_difference_

    def wrong(codes, *arguments, **more):
        encode(codes, *arguments, **more)
        codes[0, 0] ^= 1

    monkeypatch.setattr(ops, "encode_difference_", wrong)
    assert info.main([]) == 1
    assert "codes of 1 bits on cpu differ from those of plain PyTorch" in capsys.readouterr().out


def test_processes_that_hang_are_ended(monkeypatch, tmp_path):
    monkeypatch.setattr(info, "SECONDS", 0.2)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="process 0 took too long"):
        info._run_ranks(tmp_path)
    assert time.monotonic() - begin < 30


def test_processes_that_fail_are_told(monkeypatch, tmp_path):
    monkeypatch.setenv("CURVADION_BACKEND", "nonsense")
    with pytest.raises(RuntimeError, match=r"(?s)process \d failed: .*'nonsense' must be one of"):
        info._run_ranks(tmp_path)


def test_devices_are_those_of_this_machine():
    assert torch.device("cpu") in info._devices()
    assert (torch.device("cuda") in info._devices()) == torch.cuda.is_available()
