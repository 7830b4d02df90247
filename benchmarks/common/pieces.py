"""Vocabularies of a chosen size: all bytes, and the most frequent words and other pieces of a text.

No language model ships this tokenizer, but its frequencies fall off in the same way: most tokens
of a large vocabulary are rare, which is what learning rates of embeddings and heads depend on.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

import numpy as np

from token_data import BYTE_VOCABULARY

# A word with the space before it; white space; signs.
PIECE = re.compile(rb" ?[A-Za-z0-9_]+|\s+|[^\sA-Za-z0-9_]+")


def vocabulary_of(text: bytes, size: int) -> dict[bytes, int]:
    """The numbers of tokens: 0 to 255 are the bytes, the rest the most frequent pieces.

    Raises:
        ValueError: the text has too few different pieces.
    """
    counts = Counter(piece for piece in PIECE.findall(text) if len(piece) > 1)
    wanted = size - BYTE_VOCABULARY
    if not 0 <= wanted <= len(counts):
        most = BYTE_VOCABULARY + len(counts)
        raise ValueError(f"size={size} must lie between {BYTE_VOCABULARY} and {most}")
    tokens = [bytes([byte]) for byte in range(BYTE_VOCABULARY)]
    tokens += [piece for piece, _ in counts.most_common(wanted)]
    return {token: number for number, token in enumerate(tokens)}


def tokens_of(text: bytes, vocabulary: Mapping[bytes, int]) -> np.ndarray:
    """The tokens of a text, int32; a piece that has no number becomes its bytes."""
    tokens: list[int] = []
    for piece in PIECE.findall(text):
        number = vocabulary.get(piece)
        if number is None:
            tokens.extend(piece)
        else:
            tokens.append(number)
    return np.array(tokens, dtype=np.int32)
