"""CUDA C++ without a GPU: what it compiles to for every target."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from curvadion.ops import native
from support.devices.compiler import needs_compiler

pytestmark = [
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc was found"),
    needs_compiler,  # nvcc asks it for the host's code
]

# Four blocks of 256 threads then share the registers of a multiprocessor.
MOST_REGISTERS = 64


@pytest.mark.parametrize("target", [80, 90, 100])
@pytest.mark.parametrize("kernel", ["momentum", "local_step"])
def test_registers_suffice_and_bulk_data_moves_in_128_bits(kernel, target, tmp_path):
    (source,) = [path for path in native.sources("cuda") if path.stem == kernel]
    flags = [*native.CUDA_FLAGS, "-std=c++20", f"-arch=sm_{target}", "-Xptxas=-v"]
    cubin = tmp_path / "kernel.cubin"
    said = run("nvcc", *flags, "-cubin", source, "-o", cubin).stderr
    assert int(re.search(r"Used (\d+) registers", said)[1]) <= MOST_REGISTERS
    kept = re.findall(r"(\d+) bytes (?:spill|stack frame)", said)
    assert kept and {*kept} == {"0"}
    nvidia = pytest.importorskip("triton.backends.nvidia")
    code = run(f"{nvidia.__path__[0]}/bin/cuobjdump", "-sass", cubin).stdout
    assert "LDG.E.128" in code and "STG.E.128" in code
    # Generic accesses would mean that the compiler does not know where the tensors are.
    assert not re.search(r"\b(LD|ST)\.E", code)


def run(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
