"""Texts that ship with Python and PyTorch."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Literal, get_args

import torch

from token_data import Split, load, split

VALIDATION_FRACTION = 0.05
Corpus = Literal["python", "cpp"]
CORPORA: tuple[Corpus, ...] = get_args(Corpus)


@lru_cache(maxsize=2)
def text(corpus: str, limit: int) -> tuple[Split, Split]:
    """Return the training and held-out splits of at most ``limit`` bytes; no file is in both.

    corpus: "python", the sources of Python's standard library; "cpp", the C++ headers that ship
    with PyTorch.

    Raises:
        ValueError: for another corpus.
    """
    if corpus not in CORPORA:
        raise ValueError(f"corpus={corpus!r}: the corpora are {CORPORA}")
    headers = Path(torch.__file__).parent / "include"
    return split(load(() if corpus == "python" else (str(headers),), limit), VALIDATION_FRACTION)
