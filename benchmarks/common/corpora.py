"""Texts: two that ship with Python and PyTorch, and files that the user provides."""

from __future__ import annotations

import lzma
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch

from token_data import BYTE_VOCABULARY, Split, Tokens, load, split

VALIDATION_FRACTION = 0.05
SHIPPED = ("python", "cpp")
FOLDER = Path("runs/texts")  # of files that the user provides


def check_corpus(corpus: str) -> None:
    """Raise ValueError unless there is a text of this name."""
    if corpus not in SHIPPED:
        file_of(corpus)


def file_of(corpus: str) -> Path:
    """Return the file of a text that does not ship with Python or PyTorch.

    Raises:
        ValueError: there is none, or there are several.
    """
    files = sorted(FOLDER.glob(f"{corpus}.*"))
    if len(files) != 1:
        raise ValueError(
            f"corpus={corpus!r}: the texts are {', '.join(SHIPPED)} and files of {FOLDER}, where "
            f"{len(files)} files are called {corpus}.*: put one there, as text or packed with xz"
        )
    return files[0]


@lru_cache(maxsize=2)
def text(
    corpus: str,
    limit: int,
    fraction: float = VALIDATION_FRACTION,
    *,
    characters: bool = False,
) -> tuple[Split, Split]:
    """Return the training split and the held-out tail of a text.

    No file is in both, but for a text that is one file itself, which is split anywhere.

    Args:
        corpus: "python", the sources of Python's standard library; "cpp", the C++ headers that
            ship with PyTorch; or the name of a file in ``runs/texts``, without its ending.
        limit: the most bytes of a text that ships with others; a file is taken whole.
        fraction: the held-out share.
        characters: whether tokens number the bytes that occur, in their order; otherwise a token
            is a byte.

    Raises:
        ValueError: for another corpus.
    """
    check_corpus(corpus)
    if corpus in SHIPPED:
        headers = Path(torch.__file__).parent / "include"
        tokens = load(() if corpus == "python" else (str(headers),), limit)
    else:
        content = np.frombuffer(_content(file_of(corpus)), dtype=np.uint8)
        tokens = Tokens([content], BYTE_VOCABULARY)
    if characters:
        values = np.unique(np.concatenate(tokens.parts))
        parts = [np.searchsorted(values, part).astype(np.uint8) for part in tokens.parts]
        tokens = Tokens(parts, len(values))
    return split(tokens, fraction)


def hash_of(corpus: str) -> str | None:
    """Return the SHA-256 of a provided text, unpacked; None for one that ships with others."""
    return None if corpus in SHIPPED else sha256(_content(file_of(corpus))).hexdigest()


@lru_cache(maxsize=1)
def _content(file: Path) -> bytes:
    content = file.read_bytes()
    return lzma.decompress(content) if file.suffix == ".xz" else content
