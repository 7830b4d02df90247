"""CUDA C++ without a GPU: it compiles for every target, and says so where no device is."""

from __future__ import annotations

import ctypes
import re
import subprocess
from array import array

import pytest
import torch

import nvcc_ahead_of_time
from compiler import needs_compiler
from curvadion import ops
from curvadion.ops import cuda, native


def unavailable():
    try:
        native.library("cuda")
    except native.Unavailable as reason:
        return str(reason)
    return None


pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

# Four blocks of 256 threads then share the registers of a multiprocessor.
MOST_REGISTERS = 64


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return nvcc_ahead_of_time.compiled(tmp_path_factory.mktemp("cuda"))


@pytest.mark.parametrize(
    ("knows", "machines", "ptx"),
    [("70 80 90", ["sm_80", "sm_90"], "compute_90"), ("80 90 100", ["sm_80", "sm_90", "sm_100"],
     "compute_100")],
)  # fmt: skip
def test_an_older_nvcc_compiles_for_what_it_knows(knows, machines, ptx, tmp_path, monkeypatch):
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    lines = "".join(f"echo compute_{target}; " for target in knows.split())
    nvcc.write_text(f"#!/bin/sh\n{lines}\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("PATH", str(nvcc.parent), prepend=":")
    command = native.build_steps("cuda", tmp_path)[0].command
    codes = [flag.rpartition("code=")[2] for flag in command if flag.startswith("-gencode")]
    assert codes == [*machines, ptx]
    nvcc.write_text("#!/bin/sh\necho compute_70\n")
    with pytest.raises(native.Unavailable, match="none of sm_80, sm_90, sm_100"):
        native.build_steps("cuda", tmp_path)


@needs_compiler  # nvcc asks it for the host's code
def test_registers_suffice_and_leave_room_for_four_blocks(compiled):
    assert len(compiled) == 6
    assert [r for r in compiled if r["spilled_bytes"] or r["stack_bytes"]] == []
    assert [r for r in compiled if r["registers"] > MOST_REGISTERS] == []


@needs_compiler  # nvcc asks it for the host's code
def test_bulk_data_moves_in_128_bits_to_and_from_global_memory(compiled):
    nvidia = pytest.importorskip("triton.backends.nvidia")
    disassembler = f"{nvidia.__path__[0]}/bin/cuobjdump"
    for record in compiled:
        code = subprocess.run(
            [disassembler, "-sass", record["cubin"]], capture_output=True, text=True, check=True
        ).stdout
        assert "LDG.E.128" in code and "STG.E.128" in code
        # Generic accesses would mean that the compiler does not know where the tensors are.
        assert not re.search(r"\b(LD|ST)\.E", code)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_the_library_loads_without_a_driver_and_says_so():
    library = native.library("cuda")
    assert library.curvadion_cuda_devices() == 0
    with pytest.raises(native.Unavailable, match="no CUDA device"):
        cuda.load()
    with pytest.raises(RuntimeError, match="'cuda' is forced but not available.*no CUDA device"):
        ops.use_backend("cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_a_launch_without_a_device_is_an_error_code():
    library = cuda.declare(native.library("cuda"), cuda._SIGNATURES, ctypes.c_int)
    one, address, code, number = array("q", [4]), array("Q", [64]), array("B", [0]), array("f", [1])
    given = [a.buffer_info()[0] for a in (one, address, code, address, code)]
    factor = number.buffer_info()[0]
    result = library.curvadion_cuda_local_step(
        1, *given, None, None, factor, factor, None, None, 0, None
    )
    assert result != 0
    library.curvadion_cuda_error.restype = ctypes.c_char_p
    assert b"CUDA" in library.curvadion_cuda_error(result)
