"""A training of one process, as the programs that compare settings of an optimizer need it."""

import torch
from torch import nn

from benchmarks.common.tasks import Batches
from curvadion import Dion
from token_data import TrainingBatches
from train_gpt import Config, learning_rates, lr_scale, set_learning_rates


def held_out_loss(
    model: nn.Module,
    optimizer: Dion,
    batches: TrainingBatches,
    held_out: Batches,
    schedule: Config,
) -> float:
    """Train a model and return its held-out loss, in nats per token.

    Args:
        model: returns the loss of inputs and targets.
        optimizer: of the model, at its highest learning rates.
        batches: the training data.
        held_out: inputs and targets.
        schedule: how many steps to take, and which share of these rates.
    """
    highest = learning_rates(optimizer)
    for step in range(schedule.steps):
        set_learning_rates(optimizer, highest, lr_scale(step, schedule))
        for inputs, targets in batches(step, 0):
            model(inputs, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        losses = [float(model(inputs, targets)) for inputs, targets in held_out]
    return sum(losses) / len(losses)
