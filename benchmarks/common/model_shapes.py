"""Parameter shapes of models, as an optimizer sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Model:
    """Shapes of a model's parameters.

    Attributes:
        block: matrices (m, n) of one transformer block; blocks: how many there are.
        vectors: shapes of a block's norms and biases.
        rest: embeddings and output head.
    """

    block: Sequence[tuple[int, int]]
    vectors: Sequence[Shape]
    rest: Sequence[Shape]
    blocks: int

    def matrices(self, blocks: int | None = None) -> list[tuple[int, int]]:
        """Matrices of the first ``blocks`` blocks, or of all."""
        return list(self.block) * (self.blocks if blocks is None else min(blocks, self.blocks))

    def others(self, blocks: int | None = None) -> list[Shape]:
        """Shapes of the parameters that take AdamW or Lion, in as many blocks."""
        count = self.blocks if blocks is None else min(blocks, self.blocks)
        return [*self.rest, *list(self.vectors) * count]


def _llama(width: int, key_width: int, hidden: int, vocabulary: int, blocks: int) -> Model:
    """Return a model with Llama's blocks.

    Args:
        width: of the residual stream.
        key_width: of keys and of values, of all their heads together.
        hidden: width of the feed-forward layers.
        vocabulary: tokens.
        blocks: how many.
    """
    attention = [(width, width), (key_width, width), (key_width, width), (width, width)]
    feed_forward = [(hidden, width), (hidden, width), (width, hidden)]
    return Model(
        attention + feed_forward, [(width,)] * 2, [(vocabulary, width)] * 2 + [(width,)], blocks
    )


MODELS = {
    "gpt2-160m": Model(
        [(2304, 768), (768, 768), (3072, 768), (768, 3072)],
        [(768,)] * 2,
        [(50257, 768), (50257, 768), (1024, 768)],
        12,
    ),
    "llama-1.3b": _llama(2048, 2048, 5504, 32000, 24),
    "llama-8b": _llama(4096, 1024, 14336, 128256, 32),
    # Synthetic: one where launches and Python dominate, one where memory does.
    "500x2000": Model([(40, 50)], [], [], 500),
    "500x2025": Model([(45, 45)], [], [], 500),
    "5000x64": Model([(8, 8)], [], [], 5000),
    "100x500000": Model([(500, 1000)], [], [], 100),
}
