"""Tokens to train on: text as bytes, or token files, cut into windows in a reproducible order.

The windows that a replica reads are a pure function of (seed, step, rank), so the data order need
not be saved: a resumed run reads the same windows as an uninterrupted one.
"""

import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

BYTE_VOCABULARY = 256
GPT2_VOCABULARY = 50_304  # 50257 rounded up to a multiple of 128

# Token files: uint16 tokens, either bare (nanoGPT's prepare.py) or after a header of 256 int32
# that begins with this number, a version and the number of tokens (modded-nanogpt's shards).
SHARD_MAGIC, SHARD_VERSION, SHARD_HEADER_BYTES = 20240520, 1, 1024

NOT_TEXT_TO_LEARN = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
TEXT_SUFFIXES = {".py", ".txt", ".md", ".rst", ".c", ".h", ".cpp", ".cu", ".json", ".html"}


class Tokens:
    """Several arrays of tokens below ``vocab_size`` read as one long sequence, without copies."""

    def __init__(self, parts: Sequence[np.ndarray], vocab_size: int):
        self.parts, self.vocab_size = parts, vocab_size
        self.ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def read(self, start: int, length: int) -> np.ndarray:
        """Return tokens ``start`` to ``start + length`` as int64.

        Raises:
            IndexError: if there are fewer tokens. ValueError: for a token outside the vocabulary.
        """
        if start < 0 or start + length > len(self):
            raise IndexError(f"tokens {start} to {start + length} of a sequence of {len(self)}")
        pieces, part = [], int(np.searchsorted(self.ends, start, side="right"))
        while length > 0:
            offset = start - (int(self.ends[part]) - len(self.parts[part]))
            piece = self.parts[part][offset : offset + length]
            pieces.append(piece.astype(np.int64))
            start, length, part = start + len(piece), length - len(piece), part + 1
        tokens = np.concatenate(pieces)
        if tokens.max() >= self.vocab_size:
            raise ValueError(
                f"vocab_size={self.vocab_size} is too small for token {tokens.max()} in the data"
            )
        return tokens


@dataclass(frozen=True)
class Split:
    """The tokens from ``start`` to ``stop``, which training or validation may read."""

    tokens: Tokens
    start: int
    stop: int

    def windows(self, length: int) -> int:
        """Count the disjoint windows of ``length`` tokens and one target that fit."""
        return max(0, (self.stop - self.start - 1) // length)

    def batch(self, starts: Sequence[int], length: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, both (len(starts), length) int64; starts count from 0."""
        rows = np.stack([self.tokens.read(self.start + start, length + 1) for start in starts])
        window = torch.from_numpy(rows)
        return window[:, :-1], window[:, 1:]


@dataclass(frozen=True)
class TrainingBatches:
    """Disjoint windows in a new random order each epoch, dealt out over steps and replicas."""

    split: Split
    context: int
    batch_size: int
    replicas: int
    accumulation: int
    seed: int

    def __post_init__(self) -> None:
        """Raise ValueError if a step needs more windows than an epoch has."""
        if self.windows_per_epoch < self.windows_per_step:
            raise ValueError(
                f"the training split has {self.windows_per_epoch} windows of "
                f"context={self.context} tokens and a step reads {self.windows_per_step}: "
                "use more data or smaller batches"
            )

    @property
    def windows_per_step(self) -> int:
        """Windows that all replicas together read in one step."""
        return self.batch_size * self.replicas * self.accumulation

    @property
    def windows_per_epoch(self) -> int:
        """Windows of one pass over the split; one is left out so that each epoch can shift them."""
        return self.split.windows(self.context) - 1

    def starts(self, step: int, rank: int) -> np.ndarray:
        """Return the starts of this replica's windows at a step, (accumulation, batch_size)."""
        first = step * self.windows_per_step
        index = np.arange(first, first + self.windows_per_step)
        mine = index.reshape(self.accumulation, self.replicas, self.batch_size)[:, rank]
        return np.array([[self._start(i) for i in micro_batch] for micro_batch in mine.tolist()])

    def _start(self, index: int) -> int:
        epoch, window = divmod(index, self.windows_per_epoch)
        shift, order = _epoch_order(self.seed, epoch, self.windows_per_epoch, self.context)
        return shift + int(order[window]) * self.context

    def __call__(self, step: int, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the micro-batches, each inputs and targets (batch_size, context), of a step."""
        for starts in self.starts(step, rank):
            yield self.split.batch(starts.tolist(), self.context)


@lru_cache(maxsize=2)
def _epoch_order(seed: int, epoch: int, windows: int, context: int) -> tuple[int, np.ndarray]:
    """Return an epoch's offset below ``context`` and its permutation of the windows.

    Args:
        seed: of the data order.
        epoch: its number.
        windows: of an epoch.
        context: tokens of a window.
    """
    generator = np.random.default_rng([seed, epoch])
    return int(generator.integers(context)), generator.permutation(windows)


def validation_batches(
    split: Split, context: int, batch_size: int, tokens: int
) -> list[tuple[Tensor, Tensor]]:
    """Return fixed batches, about ``tokens`` in all, spread evenly over the split.

    Args:
        split: the held-out text.
        context: tokens of a sequence.
        batch_size: sequences of a batch.
        tokens: about how many in all.

    Raises:
        ValueError: the split is shorter than one window.
    """
    available = split.windows(context)
    count = min(available, max(1, tokens // context))
    if count == 0:
        raise ValueError(
            f"the validation split has {split.stop - split.start} tokens, fewer than one window "
            f"of context={context}: use more data or a larger validation_fraction"
        )
    starts = [context * (i * available // count) for i in range(count)]
    return [split.batch(starts[i : i + batch_size], context) for i in range(0, count, batch_size)]


def standard_library() -> list[Path]:
    """Return the Python standard library's own sources on this machine."""
    return text_files(Path(sysconfig.get_path("stdlib")), {".py"})


def text_files(root: Path, suffixes: set[str]) -> list[Path]:
    """Return files below root with one of the suffixes, in a reproducible order.

    They are sorted by a hash of their relative path, so that any part of the sequence, such as
    the head under a byte limit or the held-out tail, is a fair sample.
    """
    relative = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in NOT_TEXT_TO_LEARN]
        files = [Path(folder, name) for name in names]
        found = [file for file in files if file.suffix in suffixes and file.is_file()]
        relative += [file.relative_to(root) for file in found]
    relative.sort(key=lambda path: sha256(path.as_posix().encode()).digest())
    return [root / path for path in relative]


def read_text(files: Sequence[Path], limit: int) -> list[np.ndarray]:
    """Return at most ``limit`` bytes of the files in order, one token per byte."""
    parts, total = [], 0
    for file in files:
        if total >= limit:
            break
        parts.append(np.frombuffer(file.read_bytes()[: limit - total], dtype=np.uint8))
        total += len(parts[-1])
    return parts


def read_token_file(file: Path) -> np.ndarray:
    """Map a ``.bin`` file of uint16 tokens, with modded-nanogpt's header or without one."""
    header = np.fromfile(file, dtype=np.int32, count=SHARD_HEADER_BYTES // 4)
    if len(header) < 3 or header[0] != SHARD_MAGIC:
        return np.memmap(file, dtype=np.uint16, mode="r")
    if header[1] != SHARD_VERSION:
        raise ValueError(f"{file} has version {header[1]}, expected {SHARD_VERSION}")
    tokens = np.memmap(file, dtype=np.uint16, mode="r", offset=SHARD_HEADER_BYTES)
    if len(tokens) != header[2]:
        raise ValueError(f"{file} holds {len(tokens)} tokens, its header says {header[2]}")
    return tokens


def load(sources: Sequence[str], limit: int, vocab_size: int | None = None) -> Tokens:
    """Return the tokens of files and folders.

    Without sources it is the standard library's text. ``.bin`` files hold tokens and keep the given
    order; everything else is text, and a folder stands for the text files below it. ``limit`` is a
    number of bytes and applies to text only. ``vocab_size`` defaults to that of bytes or of GPT-2.
    """
    paths = [Path(source) for source in sources]
    missing = [str(path) for path in paths if not path.exists()]
    if missing:
        raise ValueError(f"data={missing}: no such file or folder")
    binary = [path for path in paths if path.suffix == ".bin"]
    if binary and len(binary) < len(paths):
        raise ValueError(f"data={list(sources)} mixes token files (.bin) with text: use one kind")
    if binary:
        return Tokens([read_token_file(path) for path in binary], vocab_size or GPT2_VOCABULARY)
    files = [
        file
        for path in paths
        for file in (text_files(path, TEXT_SUFFIXES) if path.is_dir() else [path])
    ]
    parts = read_text(files if paths else standard_library(), limit)
    return Tokens(parts, vocab_size or BYTE_VOCABULARY)


def split(tokens: Tokens, validation_fraction: float) -> tuple[Split, Split]:
    """Return the training split, the head of the tokens, and the held-out tail.

    With several files none is in both splits, if the tail has room for at least one.
    """
    if not 0 < validation_fraction < 1:
        raise ValueError(f"validation_fraction={validation_fraction} must lie between 0 and 1")
    wanted = round(len(tokens) * (1 - validation_fraction))
    ends = [int(end) for end in tokens.ends if 0 < end <= min(wanted, len(tokens) - 1)]
    # To end at a file's end, the tail may at most double, and never take all tokens.
    room = len(tokens) - 2 * (len(tokens) - wanted)
    cut = ends[-1] if ends and ends[-1] >= room > 0 else wanted
    return Split(tokens, 0, cut), Split(tokens, cut, len(tokens))
