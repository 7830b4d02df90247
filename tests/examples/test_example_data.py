"""examples/token_data.py: what is read, in which order, and what is held out."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from token_data import (
    BYTE_VOCABULARY,
    GPT2_VOCABULARY,
    Tokens,
    TrainingBatches,
    load,
    split,
    validation_batches,
)

CONTEXT = 8
# Each token is its own position, so that a batch shows where it was read.
POSITIONS = Tokens([np.arange(700), np.arange(700, 1000)], vocab_size=1000)


def batches(replicas=2, accumulation=1, batch_size=3, seed=0, of=POSITIONS):
    training, _ = split(of, 0.1)
    return TrainingBatches(training, CONTEXT, batch_size, replicas, accumulation, seed)


def windows_of_step(these, step):
    """First token of every window that the replicas read in a step."""
    return sorted(
        int(row[0])
        for rank in range(these.replicas)
        for inputs, _ in these(step, rank)
        for row in inputs
    )


@given(
    lengths=st.lists(st.integers(0, 5), max_size=6), start=st.integers(0, 30), n=st.integers(1, 30)
)
def test_parts_read_like_one_sequence(lengths, start, n):
    whole = np.arange(sum(lengths))
    tokens = Tokens(np.split(whole, np.cumsum(lengths)[:-1]) if lengths else [], 30)
    assert len(tokens) == len(whole)
    if start + n <= len(whole):
        np.testing.assert_array_equal(tokens.read(start, n), whole[start : start + n])
    else:
        with pytest.raises(IndexError, match=f"sequence of {len(whole)}"):
            tokens.read(start, n)


def test_targets_are_the_next_tokens():
    for inputs, targets in batches(accumulation=2)(step=5, rank=1):
        assert inputs.dtype == targets.dtype == torch.int64
        assert inputs.shape == (3, CONTEXT)
        assert torch.equal(inputs + 1, targets)
        assert torch.equal(inputs.diff(dim=1), torch.ones(3, CONTEXT - 1, dtype=torch.int64))


def test_order_depends_on_seed_step_and_rank_only():
    first, second = batches(), batches()
    for step in (40, 3, 0, 3):  # another order of asking, and another object
        for rank in range(2):
            for one, other in zip(first(step, rank), second(step, rank), strict=True):
                assert torch.equal(one[0], other[0])
        second(17, 0)
    assert windows_of_step(batches(seed=0), 0) != windows_of_step(batches(seed=1), 0)
    assert windows_of_step(first, 0) != windows_of_step(first, 1)


def test_an_epoch_reads_every_window_once():
    these = batches(replicas=2, batch_size=3)
    steps = these.windows_per_epoch // these.windows_per_step
    read = [start for step in range(steps) for start in windows_of_step(these, step)]
    assert len(read) == len(set(read)) == steps * 6
    assert len({start % CONTEXT for start in read}) == 1
    assert these.windows_per_epoch - len(read) < these.windows_per_step


def test_replicas_and_accumulation_share_out_the_same_step():
    expected = windows_of_step(batches(replicas=4), 9)
    assert windows_of_step(batches(replicas=2, accumulation=2), 9) == expected
    assert windows_of_step(batches(replicas=1, accumulation=4), 9) == expected


def test_training_never_reads_what_is_held_out():
    _, held_out = split(POSITIONS, 0.1)
    judged = {
        int(token)
        for inputs, targets in validation_batches(held_out, CONTEXT, 4, tokens=1000)
        for token in (*inputs.flatten(), *targets.flatten())
    }
    these = batches()
    trained = {
        int(token)
        for step in range(3 * these.windows_per_epoch // these.windows_per_step)
        for rank in range(2)
        for inputs, targets in these(step, rank)
        for token in (*inputs.flatten(), *targets.flatten())
    }
    assert min(judged) == 900
    assert max(trained) < 900
    assert len(trained) > 850  # nearly all of the training split, over three epochs


def test_validation_batches_are_fixed_and_spread():
    _, held_out = split(POSITIONS, 0.5)
    fixed = validation_batches(held_out, CONTEXT, batch_size=4, tokens=10 * CONTEXT)
    again = validation_batches(held_out, CONTEXT, batch_size=4, tokens=10 * CONTEXT)
    assert [len(inputs) for inputs, _ in fixed] == [4, 4, 2]
    starts = [int(row[0]) for inputs, _ in fixed for row in inputs]
    assert starts == [int(row[0]) for inputs, _ in again for row in inputs]
    assert starts[0] == 500 and starts[-1] > 900
    assert min(np.diff(starts)) >= CONTEXT


def test_text_is_read_in_an_order_of_its_own_up_to_the_limit(tmp_path):
    for name in ("z.py", "sub/a.py", "test/t.py", "site-packages/s.py", "picture.png", "m.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(name[-4:].encode() * 10)
    tokens = load([str(tmp_path)], limit=10**6)
    text = tokens.read(0, len(tokens)).astype(np.uint8).tobytes()
    assert tokens.vocab_size == BYTE_VOCABULARY
    assert sorted(text[i : i + 40] for i in range(0, len(text), 40)) == sorted(
        tail * 10 for tail in (b"z.py", b"a.py", b".txt")
    )
    capped = load([str(tmp_path)], limit=50)
    assert capped.read(0, len(capped)).astype(np.uint8).tobytes() == text[:50]


def test_the_standard_library_is_the_default_text():
    tokens = load([], limit=200_000)
    again = load([], limit=200_000)
    assert tokens.vocab_size == BYTE_VOCABULARY
    assert len(tokens) == 200_000
    np.testing.assert_array_equal(tokens.read(0, 200_000), again.read(0, 200_000))
    assert b"def " in tokens.read(0, 200_000).astype(np.uint8).tobytes()


def shard(path, tokens, *, version=1, count=None):
    header = np.zeros(256, dtype=np.int32)
    header[:3] = 20240520, version, len(tokens) if count is None else count
    path.write_bytes(header.tobytes() + np.asarray(tokens, dtype=np.uint16).tobytes())
    return str(path)


def test_both_token_formats_are_read(tmp_path):
    bare = np.arange(2000, dtype=np.uint16)
    bare.tofile(tmp_path / "nanogpt.bin")
    modded = shard(tmp_path / "modded.bin", [50256, 7, 8])
    tokens = load([str(tmp_path / "nanogpt.bin"), modded], limit=1)
    assert tokens.vocab_size == GPT2_VOCABULARY
    assert len(tokens) == 2003  # the limit is one of text
    assert tokens.read(1998, 5).tolist() == [1998, 1999, 50256, 7, 8]


def test_a_token_outside_the_vocabulary_is_an_error(tmp_path):
    tokens = load([shard(tmp_path / "a.bin", [3, 9, 4])], 1, vocab_size=9)
    assert tokens.read(0, 1).tolist() == [3]
    with pytest.raises(ValueError, match="vocab_size=9 is too small for token 9"):
        tokens.read(0, 3)


@pytest.mark.parametrize(
    ("lengths", "fraction", "cut"),
    [
        ([60, 30, 10], 0.1, 90),  # at a file's end
        ([60, 25, 15], 0.1, 85),  # at the end before, with a longer tail
        ([60, 40], 0.1, 90),  # a tail of 40 would be more than twice as long
        ([0, 100], 0.5, 50),
        ([30, 70], 0.6, 40),
        ([1, 99], 0.5, 50),
        ([100, 0], 0.1, 90),
        ([100, 0], 0.001, 100),
    ],
)
def test_a_split_falls_between_files_where_both_parts_keep_some(lengths, fraction, cut):
    parts = np.split(np.zeros(sum(lengths), np.uint8), np.cumsum(lengths)[:-1])
    training, held_out = split(Tokens(parts, 256), fraction)
    assert (training.start, training.stop) == (0, cut)
    assert (held_out.start, held_out.stop) == (cut, sum(lengths))


def test_errors_say_what_is_wrong_with_the_data(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("short")
    with pytest.raises(ValueError, match=r"nowhere.*no such file"):
        load([str(tmp_path / "nowhere")], 10)
    with pytest.raises(ValueError, match="mixes token files"):
        load([shard(tmp_path / "a.bin", [1]), str(text)], 10)
    with pytest.raises(ValueError, match="version 2, expected 1"):
        load([shard(tmp_path / "b.bin", [1], version=2)], 10)
    with pytest.raises(ValueError, match="holds 2 tokens, its header says 3"):
        load([shard(tmp_path / "c.bin", [1, 2], count=3)], 10)
    with pytest.raises(ValueError, match=r"validation_fraction=1\.5"):
        split(POSITIONS, 1.5)
    tiny = load([str(text)], 10)
    with pytest.raises(ValueError, match="use more data or smaller batches"):
        batches(of=tiny)
    with pytest.raises(ValueError, match="fewer than one window"):
        validation_batches(split(tiny, 0.5)[1], CONTEXT, 4, 100)
