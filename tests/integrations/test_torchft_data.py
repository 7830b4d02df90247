"""What replicas that come and go read."""

import itertools

import pytest
from torch.utils.data import DataLoader

pytest.importorskip("torchft")

from curvadion.integrations.torchft import ElasticBatchSampler

DATASET = list(range(100, 143))  # 43 examples: four steps of two readers, and three stay over
READERS = 2
PER_EPOCH = 4
EPOCHS = slice(PER_EPOCH), slice(PER_EPOCH, None)
PREFETCHED = 2  # batches that a worker of a DataLoader is ahead


def sampler(step, **given):
    return ElasticBatchSampler(DATASET, 5, step=step, **{"readers": READERS, "reader": 0, **given})


def first(batches, count):
    return list(itertools.islice(batches, count))


def test_an_epoch_reads_each_example_once_and_the_next_one_in_another_order():
    both = [first(sampler(lambda: 0, reader=reader), 2 * PER_EPOCH) for reader in range(READERS)]
    one, two = ([i for of in both for batch in of[part] for i in batch] for part in EPOCHS)
    assert len(set(one)) == len(set(two)) == len(one) == len(two) == 40
    assert one != two
    assert first(sampler(lambda: 0, seed=1), 4) != both[0][:4]


def test_one_that_comes_back_reads_what_it_would_have_read():
    undisturbed = first(sampler(lambda: 0, reader=1), 12)
    assert first(sampler(lambda: 6, reader=1), 6) == undisturbed[6:]


@pytest.mark.parametrize("workers", [0, 1])
def test_one_that_was_late_neither_reads_again_nor_falls_behind(workers):
    steps = 0
    loader = DataLoader(
        DATASET, batch_sampler=sampler(lambda: steps), num_workers=workers, collate_fn=list
    )
    batches = iter(loader)
    read = []
    for count in (0, 1, 2, 7, 8, 9, 10, 11):
        steps = count
        read.append(tuple(next(batches)))
    undisturbed = [tuple(DATASET[i] for i in b) for b in first(sampler(lambda: 0), 20)]
    at = [undisturbed.index(batch) for batch in read]
    assert at == sorted(set(at))
    assert steps - PREFETCHED * workers <= at[-1] <= steps + PREFETCHED * workers


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"reader": 2}, "reader=2 must be <= 1"),
        ({"readers": 11}, "exceeds the 43 examples"),
        ({"readers": 0}, "readers=0"),
    ],
)
def test_wrong_arguments_are_errors(given, says):
    with pytest.raises(ValueError, match=says):
        sampler(lambda: 0, **given)
