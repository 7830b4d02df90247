"""The Track 3 run at toy size, on made-up shards: methods, bytes, resuming, and its rule."""

import json
import math
from contextlib import contextmanager
from dataclasses import asdict

import numpy as np
import pytest
import torch

import token_data
from benchmarks.losses import track3
from benchmarks.losses.track3_model import Track3GPT, half_rotations
from benchmarks.losses.track3_summary import summarised
from command_line import parse
from gpt import GPTConfig, rotate
from run_log import read
from support.references.tolerance import Rounding, assert_close
from support.runs import distributed

CPU = torch.device("cpu")
VOCABULARY = 64
TINY = (
    f"--layers 1 --heads 2 --dim 32 --vocab-size {VOCABULARY} --context 16 --micro-batch 4 "
    "--tokens-per-step 256 --validation-tokens 512 --validate-every 10 --validate-every-at-end 28 "
    "--steps 30 --embedding-lr 0.1 --checkpoint-every 0"
).split()
# What a start sends beside the method: DDP's order of buckets, the check of the replicas.
START_BYTES = 1500
# Bytes as a share of DDP's: at least, at most.
METHODS = {
    "muon": ("--method muon", 1.0, 1.0),
    "dion": ("--method dion", 0.1, 0.9),
    "10 %": ("--method curvadion --budget 0.1", 0.05, 0.1),
    "1 %": ("--method curvadion --budget 0.01 --overrun 0.06 --tail 0.6", 0.005, 0.01),
}


def write_shard(file, tokens):
    header = np.zeros(token_data.SHARD_HEADER_BYTES // 4, dtype=np.int32)
    header[:3] = token_data.SHARD_MAGIC, token_data.SHARD_VERSION, len(tokens)
    file.write_bytes(header.tobytes() + tokens.astype(np.uint16).tobytes())


def made_up(count, seed):
    """Tokens each of which leaves two choices for the next."""
    choices = np.random.default_rng(seed).integers(2, size=count).tolist()
    tokens = [0]
    for choice in choices[1:]:
        tokens.append((5 * tokens[-1] + 1 + 7 * choice) % VOCABULARY)
    return np.array(tokens)


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fineweb")
    for number in (1, 2):
        write_shard(folder / f"fineweb_train_{number:06}.bin", made_up(6000, seed=number))
    write_shard(folder / "fineweb_val_000000.bin", made_up(900, seed=0))
    return folder


def trained(rank, *arguments):
    return track3.main(arguments)


@pytest.mark.parametrize(("flags", "least", "most"), METHODS.values(), ids=METHODS)
def test_methods_lower_the_loss_within_their_bytes(flags, least, most, shards, tmp_path):
    out = tmp_path / "run"
    arguments = [*TINY, *flags.split(), "--data", str(shards), "--out", str(out)]
    result, other = distributed.run(2, trained, *arguments)
    assert {**result, "seconds": 0} == {**other, "seconds": 0}

    evaluations = read(out / "log.jsonl", "evaluation")
    losses = [record["val_loss"] for record in evaluations]
    assert [record["step"] for record in evaluations] == [10, 20, 28, 30]
    # The first weights tell no token from another. At 1 % an opening comes after step 10.
    assert losses[0] < math.log(VOCABULARY) + 0.01
    assert losses[-1] < losses[0] - 0.5
    assert result["val_loss"] == losses[-1]
    assert result["first_step_at_target"] == next(
        record["step"] for record in evaluations if record["val_loss"] <= 3.28
    )

    weights = torch.load(out / "checkpoints" / "step-00000030" / "rank-0.pt")["model"]
    ddp_bytes = 30 * 4 * sum(W.numel() for W in weights.values())  # of two ranks
    assert least * ddp_bytes <= result["sent_bytes"] <= most * ddp_bytes + START_BYTES
    assert result["share"] == pytest.approx(result["sent_bytes"] / ddp_bytes)
    [run] = read(out / "log.jsonl", "run")
    assert run["settings"]["data"] == str(shards)
    assert "def held_out_loss" in run["sources"]["track3.py"]
    assert run["environment"]["torch"] == torch.__version__


class Killed(Exception):
    """In the place of what ends a run from outside."""


@contextmanager
def killed_at(step):
    take_step = track3.Run.step

    def taking(run, number):
        if number == step:
            raise Killed
        return take_step(run, number)

    track3.Run.step = taking
    try:
        yield
    finally:
        track3.Run.step = take_step


def interrupted(rank, step, *arguments):
    with killed_at(step), pytest.raises(Killed):
        track3.main(arguments)


def saved(out, step):
    folder = out / "checkpoints" / f"step-{step:08d}"
    return [torch.load(folder / f"rank-{rank}.pt") for rank in (0, 1)]


@pytest.mark.parametrize("flags", ["--method curvadion --budget 0.03 --tail 0.6", "--method dion"])
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(flags, shards, tmp_path):
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    arguments = [*TINY, *flags.split(), "--data", str(shards), "--checkpoint-every", "26", "--out"]
    distributed.run(2, trained, *arguments, str(straight))
    # Between the checkpoint and the end of the process lies an evaluation, at step 28.
    distributed.run(2, interrupted, 29, *arguments, str(resumed))
    first, second = saved(resumed, 26)
    drifted = not torch.equal(first["model"]["head.weight"], second["model"]["head.weight"])
    assert drifted == ("curvadion" in flags)
    assert bool(first["tail"]["averages"]) == ("tail" in flags)
    distributed.run(2, trained, *arguments, str(resumed), "--resume")

    for one, other in zip(saved(straight, 30), saved(resumed, 30), strict=True):
        for part in ("model", "optimizer", "tail"):
            assert_same(one[part], other[part])
        assert one["progress"]["losses"] == other["progress"]["losses"]
    one, other = (read(out / "log.jsonl", "evaluation") for out in (straight, resumed))
    assert [each["val_loss"] for each in one] == [each["val_loss"] for each in other]
    assert [each["train_loss"] for each in one] == [each["train_loss"] for each in other]
    assert 0 <= other[-1]["sent_bytes"] - one[-1]["sent_bytes"] <= START_BYTES


def assert_same(one, other):
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    else:
        assert one == other


def refuses(rank, arguments, message):
    with pytest.raises(ValueError, match=message):
        track3.main(arguments)


def test_what_cannot_run_names_the_argument(shards, tmp_path):
    data = ["--data", str(shards), "--out", str(tmp_path / "run")]
    # A run's folder is not overwritten, and its settings do not change on the way.
    distributed.run(2, trained, *TINY, "--steps", "2", *data)
    wrong = {
        r"out='.*run' holds a run: pass --resume": [],
        r"holds a run with lr=0\.025, not lr=0\.1": ["--resume", "--lr", "0.1"],
        r"data='.*empty' has no file fineweb_train_\*\.bin": ["--data", str(tmp_path / "empty")],
        r"validation_tokens=1024 needs 1025 tokens, .* has 900": ["--validation-tokens", "1024"],
        r"tokens_per_step=200 must be a multiple of 128: 2 ranks x micro_batch=4": [
            *("--tokens-per-step", "200")
        ],
        r"cooldown=0\.0 must be in": ["--cooldown", "0"],
    }
    for message, flags in wrong.items():
        distributed.run(2, refuses, [*TINY, "--steps", "2", *data, *flags], message)
    alone = [*TINY, *data, "--method", "curvadion"]
    distributed.run(1, refuses, alone, r"method='curvadion' needs two ranks")


def test_a_step_has_as_many_tokens_on_any_number_of_gpus():
    options = track3.Options()
    assert [options.accumulation(ranks) for ranks in (1, 2, 4, 8)] == [8, 4, 2, 1]
    with pytest.raises(ValueError, match="tokens_per_step=524288 must be a multiple of 196608"):
        options.accumulation(3)


def test_ranks_share_the_first_validation_tokens(shards):
    options = parse(track3.Options, [*TINY, "--data", str(shards)])
    parts = [track3.held_out_batches(options, rank, 2) for rank in (0, 1)]
    assert [len(part) for part in parts] == [4, 4]
    pairs = [pair for both in zip(*parts, strict=True) for pair in both]
    inputs, targets = (torch.cat(each).flatten() for each in zip(*pairs, strict=True))
    expected = torch.from_numpy(made_up(900, seed=0))
    assert torch.equal(inputs, expected[:512])
    assert torch.equal(targets, expected[1:513])


def test_rates_fall_as_in_track_3_and_as_in_the_recipe():
    options = track3.Options(elementwise_cooldown=0.4, overrun=0.0, steps=1000)
    for step in (0, 299, 300, 301, 650, 999):
        shares = options.rate_shares(step)
        assert shares["dion"] == pytest.approx(min(1, (1 - step / 1000) / 0.7))
        assert shares["adamw"] == pytest.approx(min(1, (1 - step / 1000) / 0.4))
    options = track3.Options(cooldown=0.4, overrun=0.06, steps=1000)
    for step in (0, 599, 600, 601, 999):
        expected = min(1, (1060 - step) / 460)
        assert options.rate_shares(step)["dion"] == pytest.approx(expected)


@pytest.mark.numeric
def test_attention_and_logits_are_scaled_as_in_track_3():
    cos, sin = half_rotations(time=5, head_dim=8, device=CPU)
    q, k = torch.randn(2, 1, 1, 5, 8)
    turned_q, turned_k = rotate(q, (cos, sin)), rotate(k, (cos, sin))
    # Where positions are equal, rotations cancel; SDPA divides by sqrt(8).
    products = (turned_q * turned_k).sum(dim=-1) / 8**0.5
    rounding = Rounding(torch.float32, terms=16)
    assert_close(products, 0.12 * (q.double() * k.double()).sum(dim=-1), rounding)
    # The first channel turns by a radian a position, the second by 1 / 1024, two rest.
    angles = torch.atan2(sin, cos).double()
    expected = torch.outer(torch.arange(5.0), torch.tensor([1, 1 / 1024, 0, 0])).double()
    assert_close(angles.cos(), expected.cos(), rounding)
    assert_close(angles.sin(), expected.sin(), rounding)

    model = Track3GPT(GPTConfig(vocab_size=11, layers=1, heads=2, dim=16))
    tokens = torch.arange(6).reshape(2, 3)
    with torch.no_grad():
        assert_close(model(tokens, tokens), torch.tensor(11.0).double().log(), rounding)
        model.head.bias[:6] = 30.0
        bounded = 15 * 30 / (30**2 + 15**2) ** 0.5
        wrong = torch.full((11,), 0.0).double()
        wrong[:6] = bounded
        loss = wrong.logsumexp(dim=0) - bounded
        assert_close(model(tokens, tokens), loss, rounding)


def write_log(file, seed, losses, **settings):
    """A log of a run of 40 steps with these losses, by step."""
    options = asdict(track3.Options(seed=seed, steps=40, **settings))
    lines = [{"kind": "run", "step": 0, "settings": options, "ranks": 8}]
    for step, loss in losses.items():
        numbers = {"val_loss": loss, "share": 0.25 * (seed + 1), "seconds": 10.0}
        lines.append({"kind": "evaluation", "step": step, **numbers})
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_a_summary_judges_the_mean_of_all_seeds(tmp_path, capsys):
    # (3.28 - 3.2785) sqrt(4) = 0.003 at step 30, (3.28 - 3.2775) sqrt(4) = 0.005 at step 40.
    spread = (-0.002, -0.001, 0.001, 0.002)
    four = [
        write_log(tmp_path / f"{i}.jsonl", i, {30: 3.2785 + x, 35: 3.2779 + x, 40: 3.2775 + x})
        for i, x in enumerate(spread)
    ]
    # One run as good is not enough, and one that has passed the target alone is not either.
    alone = write_log(tmp_path / "alone.jsonl", 0, {30: 3.29, 40: 3.2775}, lr=0.03)
    several, one = summarised([*four, alone])
    assert (several["runs"], several["ranks"], several["first_significant_step"]) == (4, 8, 35)
    assert several["mean"] == pytest.approx(3.2775)
    assert several["margin"] == pytest.approx(0.005)
    assert several["share"] == pytest.approx(0.25 * 2.5)
    assert (one["runs"], one["first_significant_step"]) == (1, None)
    assert one["margin"] == pytest.approx(0.0025)

    track3.main(["--summary", *map(str, four), str(alone)])
    heads, first, second = capsys.readouterr().out.splitlines()
    assert heads.split()[-4:] == ["reached", "at", "first", "log"]
    assert "0.0050" in first and " 35 " in first
    assert "not significant" in second


def test_a_summary_leaves_out_no_run(tmp_path):
    ended = write_log(tmp_path / "ended.jsonl", 0, {40: 3.2})
    again = write_log(tmp_path / "again.jsonl", 0, {40: 3.1}, out="elsewhere")
    halfway = write_log(tmp_path / "halfway.jsonl", 1, {30: 3.4})
    for paths, message in (
        ([ended, again], r"again.jsonl' is a second log of seed=0"),
        ([ended, halfway], r"halfway.jsonl' has come to step 30 of 40: continue it"),
        ([tmp_path / "none.jsonl"], r"none.jsonl' is no log"),
    ):
        with pytest.raises(ValueError, match=message):
            summarised(paths)
