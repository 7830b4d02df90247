"""The means of the last openings, for members that missed them."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Mapping
from typing import Any

Record = Mapping[str, Any]  # what a sync's catch_up() takes, with the means as "codes"


class History:
    """Which means have been applied to this rank's anchors, and the last of them.

    Args:
        length: number of openings whose records are kept, on the CPU.

    Attributes:
        chain: a checksum of the anchors at the start and of all means since, an integer below
            2**32. If it is equal on two members, so are their anchors.
        records: (number of the opening, its record), oldest first. A record says under
            "before" which chain it applies to.
    """

    def __init__(self, length: int) -> None:
        self.chain = 0
        self.records: deque[tuple[int, Record]] = deque(maxlen=length)

    def restart(self, chain: int, records: Mapping[int, Record]) -> None:
        """Continue from other anchors, to which only these records lead."""
        self.chain = chain
        self.records.clear()
        self.records.extend(records.items())

    def append(self, number: int, record: Record, *, replays: bool) -> None:
        """Note that the means of an opening have been applied.

        Args:
            number: of the opening.
            record: with its means.
            replays: whether others can apply them later, so that the record is kept.
        """
        if replays:
            self.records.append((number, {**record, "before": self.chain}))
        for codes in record["codes"]:
            self.chain = zlib.crc32(codes.numpy().tobytes(), self.chain)
