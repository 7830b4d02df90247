"""examples/gpt/token_data.py: what is read, in which order, and what is held out."""

import numpy as np

from token_data import Tokens, TrainingBatches, split, validation_batches

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


def test_an_epoch_reads_every_window_once():
    these = batches(replicas=2, batch_size=3)
    steps = these.windows_per_epoch // these.windows_per_step
    read = [start for step in range(steps) for start in windows_of_step(these, step)]
    assert len(read) == len(set(read)) == steps * 6
    assert len({start % CONTEXT for start in read}) == 1
    assert these.windows_per_epoch - len(read) < these.windows_per_step


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
