"""GPTs of several sizes on bytes or characters, and their data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from benchmarks.common import sent_elements
from benchmarks.common.character_gpt import CharacterGPT, CharacterGPTConfig
from benchmarks.common.corpora import VALIDATION_FRACTION, text
from gpt import GPT, GPTConfig
from token_data import BYTE_VOCABULARY, Split, validation_batches

Batches = list[tuple[Tensor, Tensor]]
VALIDATION_BATCH_SIZE = 64


@dataclass(frozen=True)
class Task:
    """A GPT's shape and its data.

    Attributes:
        layers, dim, heads: of the model.
        context: tokens of a sequence.
        batch_size: the number of sequences that one replica reads in a step.
        data_bytes: the most bytes of a text that ships with Python or PyTorch.
        validation_tokens: about how many held-out tokens are read.
        validation_fraction: the share of the text that is held out.
        corpus: a name of :mod:`benchmarks.common.corpora`.
        characters: whether the model is a :class:`CharacterGPT` on the characters that occur;
            otherwise a :class:`GPT` on bytes.
        dropout: of a :class:`CharacterGPT`.
    """

    layers: int
    dim: int
    heads: int = 4
    context: int = 64
    batch_size: int = 8
    data_bytes: int = 10_000_000
    validation_tokens: int = 32_768
    validation_fraction: float = VALIDATION_FRACTION
    corpus: str = "python"
    characters: bool = False
    dropout: float = 0.0

    def model(self) -> nn.Module:
        """Return the model, its weights drawn from torch's generator."""
        if not self.characters:
            return GPT(GPTConfig(BYTE_VOCABULARY, self.layers, self.heads, self.dim))
        training, _ = data(self)
        vocabulary = training.tokens.vocab_size
        shape = (vocabulary, self.layers, self.heads, self.dim, self.context)
        return CharacterGPT(CharacterGPTConfig(*shape, dropout=self.dropout))

    def steps(self, tokens_per_parameter: float, replicas: int) -> int:
        """Return how many steps read so many tokens for each parameter, to two digits."""
        tokens_of_step = replicas * self.batch_size * self.context
        exact = tokens_per_parameter * self.shapes().parameters / tokens_of_step
        return int(float(f"{exact:.2g}"))

    def shapes(self) -> sent_elements.Shapes:
        """Return the shapes that cross the wire."""
        with torch.device("meta"):
            return sent_elements.Shapes.of(self.model())


SIZES = {
    "small": Task(layers=2, dim=64),  # 0.13 million parameters
    "medium": Task(layers=4, dim=96),  # 0.5 million
    "large": Task(layers=6, dim=160),  # 2 million
    "10M": Task(
        layers=6, dim=384, heads=6, context=256, batch_size=32, validation_tokens=2**20
    ),
    "30M": Task(
        layers=10, dim=512, heads=8, context=256, batch_size=32, validation_tokens=2**20
    ),
    # The two recipes of nanoGPT's README for shakespeare_char, by the sequences of a step.
    "characters-12": Task(
        layers=4, dim=128, batch_size=2, validation_tokens=2**20, validation_fraction=0.1,
        corpus="shakespeare", characters=True,
    ),
    "characters-64": Task(
        layers=6, dim=384, heads=6, context=256, batch_size=8, validation_tokens=2**20,
        validation_fraction=0.1, corpus="shakespeare", characters=True, dropout=0.2,
    ),
}  # fmt: skip


@lru_cache(maxsize=2)
def data(task: Task) -> tuple[Split, Batches]:
    """Return the training split and the fixed held-out batches."""
    training, held_out = text(
        task.corpus, task.data_bytes, task.validation_fraction, characters=task.characters
    )
    fixed = validation_batches(
        held_out, task.context, VALIDATION_BATCH_SIZE, task.validation_tokens
    )
    return training, fixed
