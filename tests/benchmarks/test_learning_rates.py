"""Tokens of frequent pieces spell the text, and the best rate of a parabola is its minimum."""

import math

import pytest

from benchmarks.common.pieces import tokens_of, vocabulary_of
from benchmarks.losses.learning_rates import KINDS, Row, best_rate, draw

TEXT = b"def f(x):\n    return x + x\n\n" * 3 + "é = f(1)\n".encode()


def test_tokens_spell_the_text():
    vocabulary = vocabulary_of(TEXT, 256 + 4)
    spelling = {number: token for token, number in vocabulary.items()}
    assert set(range(256)) < set(spelling)
    # Frequent pieces of more than one byte; " x" occurs twice in a line.
    assert spelling[256] == b" x"
    tokens = tokens_of(TEXT, vocabulary)
    assert b"".join(spelling[number] for number in tokens.tolist()) == TEXT
    assert len(tokens) < len(TEXT)
    with pytest.raises(ValueError, match="size=9999 must lie between 256 and"):
        vocabulary_of(TEXT, 9999)


def test_the_best_rate_is_the_minimum_of_a_parabola_in_its_logarithm():
    best = 0.023
    losses = {rate: 1 + math.log(rate / best) ** 2 for rate in (0.01, 0.02, 0.04)}
    assert best_rate(losses) == pytest.approx(best)
    assert best_rate({0.01: 1.0, 0.02: 0.9, 0.04: 0.8}) is None
    assert best_rate({0.01: 0.7, 0.02: 0.9, 0.04: 0.8}) is None


def test_a_record_of_all_kinds_can_be_drawn(tmp_path):
    records = []
    for kind in KINDS:
        row = Row(kind, "spectral", "adamw", vocabulary=256, width=64, steps=200)
        for rate in (0.01, 0.02, 0.04):
            records.append(row._asdict() | {"rate": rate, "loss": 1 + rate})
    path = tmp_path / "picture.png"
    draw(records, path)
    assert path.stat().st_size > 0
