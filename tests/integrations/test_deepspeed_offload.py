"""The comparison under CPU offload tells what is right from what is not."""

import importlib.util

import pytest
import torch

from benchmarks.losses.offload import LAYOUTS, OPTIMIZERS, TRAININGS, Run, distances, train
from support.references.tolerance import worst
from support.runs import deepspeed_engines as ds
from support.runs import distributed

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"
)
STEPS = 3
FAR = 0.05  # ten times what rounding makes in so few steps, and less than any other step makes


@distributed.on_ranks(2)
def test_both_optimizers_end_where_they_end_without_shards(rank):
    """They also end together, so their settings are equal; DeepSpeed's clips its updates."""
    ds.launch()
    layouts = {layout.name: layout for layout in LAYOUTS}
    trainings = {training.name: training for training in TRAININGS}

    def weights(optimizer, layout, training="plain"):
        run = Run(optimizer, layouts[layout], trainings[training], STEPS)
        with torch.compiler.set_stance("force_eager"):  # compiling takes longer than all else
            return train(run)[1]

    def far(X, Y):
        return worst(distances(X, Y).values())

    ours, theirs = OPTIMIZERS
    assert far(weights(ours, "1, offload"), weights(theirs, "0")) < FAR
    whole = weights(ours, "0")
    assert far(weights(ours, "3, offload"), whole) < FAR
    assert far(weights(theirs, "2, offload"), whole) < FAR
    assert far(weights(theirs, "2, offload", "clipping"), whole) > 10 * FAR
