"""Choosing the backend of a fused operation, by device or by the user."""

from __future__ import annotations

import importlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from curvadion.ops.tensors import Tensors, Unsupported

# The modules of backends; plain PyTorch runs the operations that one lacks.
BACKENDS = {
    "torch": "curvadion.ops.operations",
    "cpu": "curvadion.ops.cpu",
    "cuda": "curvadion.ops.cuda",
    "triton": "curvadion_kernels",
}

logger = logging.getLogger("curvadion")
refused: Counter[str] = Counter()
"""How often a backend has refused an operation that it has, by the operation's name.

Plain PyTorch ran instead, in far more launches than one. Only tests read this, and clear it
first: what a step does on a GPU must not be refused.
"""
_forced: str | None = None  # by use_backend; None: the environment or the device decides


class use_backend:
    """Force a backend from now on or, as in ``with use_backend("cpu"):``, in a block.

    Args:
        name: "torch", "cpu", "cuda" or "triton"; None lets the device decide again.

    Raises:
        ValueError: there is no backend of this name.
        RuntimeError: the backend is not available on this machine.
    """

    def __init__(self, name: str | None) -> None:
        global _forced
        if name is not None:
            _check_available(name)
        self._previous = _forced
        _forced = name

    def __enter__(self) -> use_backend:
        return self

    def __exit__(self, *_: object) -> None:
        global _forced
        _forced = self._previous


def backend_for(device: torch.device) -> str:
    """The name of the backend that runs operations on tensors of a device.

    Raises:
        ValueError: the environment forces a backend whose name does not exist.
        RuntimeError: a backend is forced that is not available, or not for this device.
    """
    name = _forced or os.environ.get("CURVADION_BACKEND")
    if not name:
        return _automatic(device.type)
    _check_available(name)
    if name == "torch":
        return name
    devices = ["cpu" if name == "cpu" else "cuda"]
    # Triton's interpreter runs kernels for a GPU on the CPU.
    if getattr(importlib.import_module(BACKENDS[name]), "INTERPRETED", False):
        devices.append("cpu")
    if device.type not in devices:
        raise RuntimeError(
            f"backend {name!r} is forced, but not for tensors on {device}: unset "
            f"CURVADION_BACKEND, or call use_backend(None)"
        )
    return name


def _check_available(name: str) -> None:
    """Raise ValueError for an unknown backend, RuntimeError for one that cannot run."""
    if name not in BACKENDS:
        raise ValueError(f"backend {name!r} must be one of {tuple(BACKENDS)}")
    lacks = lacking(name)
    if lacks is not None:
        raise RuntimeError(
            f"backend {name!r} is forced but not available: {lacks}; force another, or none"
        )


@lru_cache
def lacking(name: str) -> str | None:
    """What a backend lacks to run on this machine; None if it can run."""
    gpu = torch.cuda.is_available()
    if name == "cuda" and not gpu:
        return "there is no CUDA device"
    try:
        module = importlib.import_module(BACKENDS[name])
        if name in ("cpu", "cuda"):
            module.load()
    except ImportError as error:
        return f"{error}: install triton"
    except RuntimeError as error:  # or no home directory for the cache
        return str(error)
    if name == "triton" and not (gpu or module.INTERPRETED):
        return "there is no CUDA device (TRITON_INTERPRET=1 runs the kernels on the CPU)"
    return None


@lru_cache
def _automatic(device_type: str) -> str:
    """The first available backend for a type of device; warns if only PyTorch is left."""
    candidates: list[str] = []
    if device_type == "cpu":
        candidates = ["cpu"]
    elif device_type == "cuda" and not torch.version.hip:  # kernels are for NVIDIA GPUs
        candidates = ["triton", "cuda"]
    reasons = []
    for name in candidates:
        lacks = lacking(name)
        if lacks is None:
            return name
        reasons.append(f"{name}: {lacks}")
    if reasons:
        logger.warning(
            "curvadion runs in plain PyTorch on the %s (%s)", device_type, "; ".join(reasons)
        )
    return "torch"


def fused(name: str, *args: Any, writes: Iterable[Tensor | Tensors] = ()) -> Any:
    """Run a backend's version of an operation, if there is one that takes these tensors.

    Args:
        name: of the operation, which is that of the backend's function.
        args: the operation's arguments. The first is a tensor or a list of tensors, whose
            device chooses the backend.
        writes: the tensors among the arguments that the operation changes.

    Returns:
        The backend's result, or True if it returns nothing. None if plain PyTorch must run
        the operation: the list is empty, the call is compiled, a tensor has no memory, or the
        backend lacks or refuses the operation.

    Raises:
        ValueError: see :func:`backend_for`.
        RuntimeError: see :func:`backend_for`.
    """
    first = args[0] if isinstance(args[0], Tensor) else next(iter(args[0]), None)
    if first is None or torch.compiler.is_compiling():
        return None
    if _has_no_memory(first):
        return None
    function = _operation(backend_for(first.device), name)
    if function is None:
        return None
    try:
        result = function(*args)
    except Unsupported:
        refused[name] += 1
        return None
    # Tensors of inference mode have no versions.
    if not first.is_inference():
        for written in writes:
            # Autograd must notice if a weight changes between forward and backward.
            torch.autograd.graph.increment_version(written)
    return True if result is None else result


def _has_no_memory(tensor: Tensor) -> bool:
    """Whether this is a tracer's tensor, or another subclass that has no address."""
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


@lru_cache
def _operation(backend: str, name: str) -> Callable[..., Any] | None:
    """A backend's version of an operation; None if plain PyTorch runs it."""
    if backend == "torch":
        return None
    return getattr(importlib.import_module(BACKENDS[backend]), name, None)
