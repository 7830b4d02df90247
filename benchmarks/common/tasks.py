"""Byte-level GPTs of several sizes, and their data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from benchmarks.common import sent_elements
from benchmarks.common.corpora import text
from gpt import GPT, GPTConfig
from token_data import BYTE_VOCABULARY, Split, validation_batches

Batches = list[tuple[Tensor, Tensor]]
VALIDATION_BATCH_SIZE = 64


@dataclass(frozen=True)
class Task:
    """A byte-level GPT's shape and its data.

    ``batch_size`` is the number of sequences that one replica reads in a step, and ``corpus`` one
    of ``corpora.CORPORA``.
    """

    layers: int
    dim: int
    heads: int = 4
    context: int = 64
    batch_size: int = 8
    data_bytes: int = 10_000_000
    validation_tokens: int = 32_768
    corpus: str = "python"

    def model(self) -> GPT:
        """Return the model, its weights drawn from torch's generator."""
        return GPT(GPTConfig(BYTE_VOCABULARY, self.layers, self.heads, self.dim))

    def shapes(self) -> sent_elements.Shapes:
        """Return the shapes that cross the wire."""
        with torch.device("meta"):
            return sent_elements.Shapes.of(self.model())


SIZES = {
    "small": Task(layers=2, dim=64),  # 0.13 million parameters
    "medium": Task(layers=4, dim=96),  # 0.5 million
    "large": Task(layers=6, dim=160),  # 2 million
    "largest": Task(layers=8, dim=320),  # 10 million
}


@lru_cache(maxsize=2)
def data(task: Task) -> tuple[Split, Batches]:
    """Return the training split and the fixed held-out batches."""
    training, held_out = text(task.corpus, task.data_bytes)
    fixed = validation_batches(
        held_out, task.context, VALIDATION_BATCH_SIZE, task.validation_tokens
    )
    return training, fixed
