r"""Model the bytes and seconds of Muon steps on shards inside a replica, on up to 512 ranks.

    python -m benchmarks.bytes.inside_replica --document \
        --output benchmarks/results/scaling/inside.json

Bytes follow from the shapes, with the optimizer's own batches and choice of exchange; a test
compares them with the wire meter's on two ranks. Microsoft's Muon (microsoft/dion at 0a059a4) also
sends shards to owners, in bfloat16, as many matrices of a shape at once as there are ranks, padding
with zeros if there are fewer.

Seconds are modelled, not measured: sent bytes divided by a rank's bandwidth, plus the products of
the busiest rank at 40 % of an H100's 989 TFLOP/s. Nothing overlaps.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.common.model_shapes import MODELS
from benchmarks.common.records import RESULTS, between_markers, write
from curvadion.layout.matrix import MatrixLayout
from curvadion.layout.owners import matrix_cost, owners_cost_less
from curvadion.plan.plan import batches_of_sizes, most_in_a_batch

Shape = tuple[int, int]
SPEED = 0.4 * 989e12
BANDWIDTHS = {8: 450e9, 64: 50e9, 512: 50e9}  # bytes per second and rank: NVLink; 400 Gb/s
HALF, FLOAT, DOUBLE = 2, 4, 8
DOCUMENT = RESULTS / "scaling" / "README.md"
BEGIN, END = "<!-- inside: made by benchmarks/bytes/inside_replica.py -->", "<!-- inside: end -->"


def _mixture() -> list[Shape]:
    """Attention of a 30B-parameter mixture of experts, whose experts are unsharded."""
    width, queries, keys, blocks = 2048, 4096, 512, 48
    return [(queries, width), (keys, width), (keys, width), (width, queries)] * blocks


def _llama_70b() -> list[Shape]:
    width, keys, hidden, blocks = 8192, 1024, 28672, 80
    attention = [(width, width), (keys, width), (keys, width), (width, width)]
    return [*attention, (hidden, width), (hidden, width), (width, hidden)] * blocks


SHAPES: dict[str, Sequence[Shape]] = {
    "llama-1.3b": MODELS["llama-1.3b"].matrices(),
    "llama-8b": MODELS["llama-8b"].matrices(),
    "llama-70b": _llama_70b(),
    "experts-30b": _mixture(),
}


@dataclass(frozen=True)
class Cost:
    """Cost of a step: bytes sent by the average rank, products of the busiest one.

    Attributes:
        sent: bytes.
        operations: of products.
        owners: the share of elements in matrices that go to owners.
    """

    sent: float
    operations: float
    owners: float = 0.0

    def seconds(self, bandwidth: float) -> float:
        """Seconds of the exchanges, then the products."""
        return self.sent / bandwidth + self.operations / SPEED


@contextmanager
def ranks(count: int) -> Iterator[Any]:
    """A fake process group of ``count`` ranks in this one process."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def batched(shapes: Sequence[Shape], count: int, device: torch.device) -> list[tuple[Shape, int]]:
    """Return each batch's shape and number of matrices on ``count`` ranks."""
    ordered = sorted(shapes)
    sizes = [math.prod(shape) // count for shape in ordered]
    most = most_in_a_batch(sum(sizes), device)
    batches = batches_of_sizes([(size, None, count) for size in sizes], most)
    stacks = Counter(zip(batches, ordered, strict=True))
    return [(shape, k) for (_, shape), k in stacks.items()]


def in_rows(shape: Shape) -> MatrixLayout:
    """Return the layout of a matrix (out, in) sharded by rows over all ranks, longer side first."""
    layout = replace(MatrixLayout.whole(shape), shards=dist.group.WORLD)
    side = "columns" if layout.transposed else "rows"
    return replace(layout, **{side: replace(getattr(layout, side), group=dist.group.WORLD)})


def polar(
    shapes: Sequence[Shape],
    count: int,
    *,
    sent: torch.dtype = torch.bfloat16,
    summed: torch.dtype = torch.float16,
    device: str = "cuda",
    kept: float = 1.0,
    gather: bool = True,
) -> Cost:
    """Return the cost of ours, sharded by rows over ``count`` ranks.

    Args:
        shapes: of the matrices, (out, in).
        count: the number of ranks.
        sent: wire dtype of shards that go to owners.
        summed: wire dtype of Gram matrices.
        device: of the batches.
        kept: the share of the shorter side that Dion2 keeps.
        gather: whether matrices may go to owners.
    """
    bytes_, operations, owned = 0.0, [0.0] * count, 0.0
    others = (count - 1) / count
    for shape, k in batched(shapes, count, torch.device(device)):
        layout, m, n = in_rows(shape), max(shape), min(shape)
        if kept < 1:
            bytes_ += k * FLOAT * n * 2 * others
            n = math.ceil(kept * n)
            layout = replace(layout, shape=(m, n))
        iterations = matrix_cost(layout) - 4 * m * n * n
        if gather and owners_cost_less(layout, k, sent, summed):
            bytes_ += k * others * (2 * m * n / count * sent.itemsize + FLOAT)
            owned += k * m * n
            busiest = sorted(range(count), key=operations.__getitem__)
            for i in range(k):
                operations[busiest[i % count]] += matrix_cost(layout)
        else:
            triangle = n * (n + 1) // 2
            passes = 2 if summed.itemsize == HALF else 1
            each = triangle * (2 * summed.itemsize + (summed.itemsize + FLOAT) / count)
            bytes_ += k * others * (FLOAT * 2 + passes * (each + FLOAT * (1 + 1 / count)))
            if layout.columns.group is not None:  # shards are exchanged for whole rows, and back
                bytes_ += k * others * 2 * FLOAT * m * n / count
            for rank in range(count):
                operations[rank] += k * (4 * m * n * n * passes + iterations) / count
    return Cost(bytes_, max(operations), owned / sum(math.prod(shape) for shape in shapes))


def microsoft(shapes: Sequence[Shape], count: int) -> Cost:
    """Return the cost of Microsoft's Muon: five iterations of two products with X and a square."""
    sent, operations = 0.0, 0.0
    for (m, n), k in Counter(shapes).items():
        slots = -(-k // count) * count
        shard = -(-m // count) * n
        sent += 2 * slots * shard * HALF * (count - 1) / count
        side, other = min(m, n), max(m, n)
        operations += slots / count * 5 * (4 * other * side**2 + 2 * side**3)
    return Cost(sent, operations)


def low_rank(shapes: Sequence[Shape], count: int, fraction: float) -> Cost:
    """Return the cost of Dion: sends R and two triangles of P^T P, or P and column norms."""
    sent, operations = 0.0, 0.0
    for shape in shapes:
        m, n = max(shape), min(shape)
        r = math.ceil(fraction * n)
        in_columns = in_rows(shape).transposed
        payload = FLOAT * m * r + DOUBLE * r if in_columns else FLOAT * n * r + DOUBLE * r * (r + 1)
        sent += 2 * (count - 1) / count * payload
        # M Q, M^T P and the update, and P^T P twice with its inverse
        operations += (6 * m * n * r + 4 * m * r * r) / count + 2 * r**3
    return Cost(sent, operations)


METHODS: dict[str, Callable[[Sequence[Shape], int], Cost]] = {
    "Dion, polar": polar,
    "Dion, polar, gather=never": lambda shapes, count: polar(shapes, count, gather=False),
    "Dion2, 1/4": lambda shapes, count: polar(shapes, count, kept=0.25),
    "Dion, rank 1/4": lambda shapes, count: low_rank(shapes, count, 1 / 4),
    "Dion, rank 1/16": lambda shapes, count: low_rank(shapes, count, 1 / 16),
    "Microsoft's Muon": microsoft,
}


def records() -> list[dict[str, Any]]:
    """Return one record for each model, number of ranks and method."""
    found = []
    for count, bandwidth in BANDWIDTHS.items():
        with ranks(count):
            for model, shapes in SHAPES.items():
                for name, method in METHODS.items():
                    cost = method(shapes, count)
                    found.append(
                        {
                            "model": model,
                            "ranks": count,
                            "method": name,
                            "bytes": cost.sent,
                            "operations": cost.operations,
                            "owners": cost.owners,
                            "seconds": cost.seconds(bandwidth),
                        }
                    )
    return found


def table(found: Sequence[dict[str, Any]]) -> str:
    """Return a table of MB and milliseconds, one line per model and method."""
    heads = [f"{count} ranks: MB | ms" for count in BANDWIDTHS]
    lines = [f"| model | method | {' | '.join(heads)} |", "|---|---|" + "---|---|" * len(heads)]
    for model in SHAPES:
        for method in METHODS:
            here = [r for r in found if (r["model"], r["method"]) == (model, method)]
            cells = [f"{r['bytes'] / 1e6:,.0f} | {1e3 * r['seconds']:.3g}" for r in here]
            lines.append(f"| {model} | {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Model what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="JSON file")
    parser.add_argument("--document", action="store_true", help=f"rewrite {DOCUMENT.name}'s table")
    options = parser.parse_args()
    found = records()
    print(table(found))
    if options.output is not None:
        write(options.output, torch.device("cpu"), found)
    if options.document:
        text = between_markers(DOCUMENT.read_text("utf-8"), BEGIN, END, table(found))
        DOCUMENT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
