"""CUDA C++ without a GPU: what it compiles to for every target."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

import nvcc_ahead_of_time
from compiler import needs_compiler

pytestmark = [
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc was found"),
    needs_compiler,  # nvcc asks it for the host's code
]

# Four blocks of 256 threads then share the registers of a multiprocessor.
MOST_REGISTERS = 64


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return nvcc_ahead_of_time.compiled(tmp_path_factory.mktemp("cuda"))


def test_registers_suffice_and_leave_room_for_four_blocks(compiled):
    assert len(compiled) == 6
    assert [r for r in compiled if r["spilled_bytes"] or r["stack_bytes"]] == []
    assert [r for r in compiled if r["registers"] > MOST_REGISTERS] == []


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
