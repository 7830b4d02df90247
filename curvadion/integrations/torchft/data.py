"""Which data a replica reads, however often it comes and goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from typing import Any, cast

from torch.utils.data import Dataset, Sampler
from torch.utils.data.distributed import DistributedSampler

from curvadion import checks


class ElasticBatchSampler(Sampler[list[int]]):
    """The batches of one of several readers, from the run's present step on, without an end.

    A batch follows from the seed, the reader and the step alone. A replica that comes back thus
    reads what it would have read had it not been away, and replicas share no example within an
    epoch. What it has missed is left out of that epoch. Pass it as ``batch_sampler=`` of a
    DataLoader, and begin to iterate after ``replicas.start``::

        sampler = ElasticBatchSampler(
            dataset, 64, reader=0, readers=4, step=lambda: optimizer.progress.steps
        )
        batches = iter(DataLoader(dataset, batch_sampler=sampler))

    Args:
        dataset: whose length counts; at least one batch for each reader.
        batch_size: examples of one reader in a step.
        reader: the number of this replica, or of this rank if several read for one replica.
        readers: the most that ever read at once.
        step: returns how many steps the run has taken, ``optimizer.progress.steps``; with
            gradient accumulation k times that, as each takes k batches.
        seed: of the permutations, one an epoch; the same on all readers.
    """

    def __init__(
        self,
        dataset: Sized,
        batch_size: int,
        *,
        reader: int,
        readers: int,
        step: Callable[[], int],
        seed: int = 0,
    ) -> None:
        checks.integer("batch_size", batch_size, 1)
        checks.integer("readers", readers, 1)
        checks.integer("reader", reader, 0, readers - 1)
        self._batch_size = batch_size
        self._step = step
        # It only reads the length.
        self._shuffled: DistributedSampler[Any] = DistributedSampler(
            cast(Dataset[Any], dataset), readers, reader, seed=seed, drop_last=True
        )
        self._steps_per_epoch = len(self._shuffled) // batch_size
        if self._steps_per_epoch == 0:
            raise ValueError(
                f"batch_size={batch_size!r} of readers={readers!r} exceeds the {len(dataset)} "
                f"examples of the dataset: lower one of them."
            )

    def __iter__(self) -> Iterator[list[int]]:
        step = self._step()
        read_epoch = -1
        indices: list[int] = []
        while True:
            epoch, position = divmod(step, self._steps_per_epoch)
            if epoch != read_epoch:
                self._shuffled.set_epoch(epoch)
                indices = list(self._shuffled)
                read_epoch = epoch
            start = position * self._batch_size
            yield indices[start : start + self._batch_size]
            # A replica that was late counts the steps that it has missed. Workers of a
            # DataLoader are ahead of the run.
            step = max(step + 1, self._step())
