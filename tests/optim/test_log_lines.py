"""What a run logs: a line at its beginning and one at each synchronisation, on the first rank."""

import logging

import torch
import torch.distributed as dist

from curvadion import RMMC, CurvaDion, Dion, FixedPeriod, QuantizedAverage, Replicated
from support.runs import distributed, toy

BUDGET = 0.02


class Kept(logging.Handler):
    """Keeps what is logged."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append((record.levelname, record.getMessage()))


def lines_of(model, optimizer, steps, rank=0):
    """What is logged at INFO during steps and a synchronisation."""
    logger = logging.getLogger("curvadion")
    kept = Kept()
    disabled = logging.root.manager.disable
    logging.disable(logging.NOTSET)  # tests of frameworks turn logging off in the whole process
    logger.addHandler(kept)
    logger.setLevel(logging.INFO)
    try:
        toy.train(model, optimizer, steps, rank)
        optimizer.synchronize()
    finally:
        logger.removeHandler(kept)
        logger.setLevel(logging.NOTSET)
        logging.disable(disabled)
    return kept.lines


@distributed.on_ranks(2)
def test_the_first_rank_tells_how_a_run_begins_and_what_it_has_sent(rank):
    model = toy.model()
    options = {"replicas": dist.group.WORLD, "wire_budget": BUDGET, "max_local_steps": None}
    optimizer = CurvaDion(toy.groups(model), **options)
    first = optimizer.next_opening
    lines = lines_of(model, optimizer, range(40), rank)
    if rank:
        assert lines == []
        return
    (level, beginning), (_, end) = lines
    assert level == "INFO"
    elements = sum(p.numel() for p in model.parameters())
    assert beginning == (
        f"CurvaDion, 2 replicas of 1 rank: 2 matrices polar, 4 embeddings, heads or vectors adamw; "
        f"QuantizedAverage in 2 bits, first at step {first}, then every "
        f"{optimizer.gate.expected_period():.3g} steps; budget 2 % of DDP's bytes, "
        f"{BUDGET * 4 * elements:,.0f} bytes a step from each replica"
    )
    share = 100 * optimizer.progress.sent / 40
    assert end.startswith(
        f"Step 40: {share:.3g} % of DDP's bytes sent; in 40 steps since start or load"
    )
    assert end.endswith(" s waited for other replicas")


@distributed.on_ranks(2)
def test_a_run_that_goes_on_says_where_and_a_run_of_unknown_bytes_says_so(rank):
    model = toy.model()
    group = {"replicas": dist.group.WORLD}
    adamw = torch.optim.AdamW(model.parameters())
    optimizer = Replicated(adamw, gate=FixedPeriod(3), **group)
    toy.train(model, optimizer, range(4), rank)
    optimizer.load_state_dict(optimizer.state_dict())
    lines = lines_of(model, optimizer, range(4, 5), rank)
    assert rank or "Replicated (AdamW), 2 replicas of 1 rank: 6 parameters; " in lines[0][1]
    assert rank or ", first at step 6, then every 3 steps" in lines[0][1]
    assert rank or "; in 1 steps since start or load 0 openings, 0 skipped" in lines[1][1]
    optimizer = CurvaDion(toy.groups(model), gate=RMMC(0.3), **group)
    lines = lines_of(model, optimizer, range(2), rank)
    assert rank or "LowRank, first at step 1" in lines[0][1]
    assert rank or lines[1][1].startswith("Step 2: bytes unknown; in 2 steps")


@distributed.on_ranks(2)
def test_steps_of_unknown_bytes_do_not_make_a_share_smaller(rank):
    model = toy.model()
    options = {"direction": "polar", "gate": FixedPeriod(2), "replicas": dist.group.WORLD}
    low_rank = CurvaDion(toy.groups(model), **options)
    reports = toy.train(model, low_rank, range(6), rank)
    assert reports[-1].share is None
    in_codes = CurvaDion(toy.groups(model), sync=QuantizedAverage(), **options)
    in_codes.load_state_dict(low_rank.state_dict())
    reports = toy.train(model, in_codes, range(6, 10), rank)
    assert reports[-1].share == 2 * in_codes.gate.open_cost / 4


def test_one_replica_has_nothing_to_say_of_others():
    model = toy.model()
    [(_, line)] = lines_of(model, Dion(toy.groups(model)), range(2))
    assert line == (
        "Dion, 1 replica of 1 rank: 2 matrices low_rank, 4 embeddings, heads or vectors adamw"
    )


def test_a_program_without_logging_sees_nothing(capfd):
    model = toy.model()
    toy.train(model, Dion(toy.groups(model)), range(2))
    assert capfd.readouterr() == ("", "")
