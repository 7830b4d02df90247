"""The kernels of csrc/cuda on a CPU, compiled with cuda_runtime.h beside this file.

Two things of CUDA are not C++ and are rewritten: launches and inline PTX.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch

from curvadion.ops import backends, cuda, native
from support.devices.compiler import CXX

HERE = Path(__file__).parent
# The library checks that jumps stay on one stack if it is fortified.
FLAGS = ["-O1", "-std=c++17", "-fPIC", "-shared", "-U_FORTIFY_SOURCE"]
LAUNCH = re.compile(r"(\w+)<<<(.*?)>>>\(")
PTX = re.compile(r'asm\("([\w.]+) [^"]*" : "=\w"\((\w+)\) : ([^;]*)\);')


def build(folder: Path, *mutation: str) -> ctypes.CDLL:
    """Compile csrc/cuda for the CPU in a new folder; mutation: what to replace in it, by what."""
    assert CXX is not None
    folder.mkdir()
    files = [path for path in native.sources("cuda")[0].parent.iterdir() if path.is_file()]
    texts = {file.name: file.read_text("utf-8") for file in files}
    if mutation:
        assert sum(text.count(mutation[0]) for text in texts.values()) == 1, mutation
        texts = {name: text.replace(*mutation) for name, text in texts.items()}
    for name, text in texts.items():
        (folder / name).write_text(_translated(text), "utf-8")
    every = folder / "every.cpp"
    every.write_text("".join(f'#include "{f.name}"\n' for f in files if f.suffix != ".cuh"))
    library = folder / "library.so"
    command = [CXX, *FLAGS, f"-I{HERE}", str(every), "-o", str(library)]
    subprocess.run(command, check=True, timeout=100)
    return ctypes.CDLL(str(library))


def _translated(text: str) -> str:
    text = LAUNCH.sub(r"launch(\1, \2, ", text)
    text = PTX.sub(_call, text)
    assert "<<<" not in text and "asm(" not in text, "a form of launch or PTX that is new here"
    return text


def _call(ptx: re.Match[str]) -> str:
    name, result, operands = ptx.groups()
    arguments = ", ".join(re.findall(r'"\w"\((\w+)\)', operands))
    return f"{result} = {name.replace('.', '_')}({arguments});"


@contextmanager
def in_place_of_cuda(library: ctypes.CDLL) -> Iterator[None]:
    """Inside, the backend "cuda" is this library, for tensors on the CPU."""
    stream = SimpleNamespace(stream_id=0, cuda_stream=None)
    # A CPU has no index, which is None.
    signatures = {
        name: [ctypes.c_void_p if kind is ctypes.c_int else kind for kind in kinds]
        for name, kinds in cuda._SIGNATURES.items()
    }
    caches = (cuda.load, cuda._tickets)
    with (
        mock.patch.object(cuda, "_SIGNATURES", signatures),
        mock.patch.object(native, "library", lambda _: library),
        mock.patch.object(backends, "lacking", lambda _: None),
        mock.patch.object(cuda, "INTERPRETED", True, create=True),
        mock.patch.object(torch.cuda, "device", lambda _: nullcontext()),
        mock.patch.object(torch.cuda, "current_stream", lambda _: stream),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False),
    ):
        for cache in caches:
            cache.cache_clear()
        yield
    for cache in caches:
        cache.cache_clear()
