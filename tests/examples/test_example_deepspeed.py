"""examples/train_gpt_deepspeed.py at every ZeRO stage, at a size that takes seconds."""

import importlib.util
import io
import json
from contextlib import redirect_stdout

import pytest
import torch

import deepspeed_engines as ds
import demo
import demo_deepspeed
import distributed
import train_gpt
import train_gpt_deepspeed
from example_runs import LOSSES, assert_same_losses, follow_in_workers
from tolerance import Rounding, assert_within

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"
)
TINY = (
    "--steps 4 --validate-every 2 --dim 16 --heads 2 --layers 1 --context 16 "
    "--data-bytes 50000 --validation-tokens 64 --warmup-steps 1 --no-progress"
).split()
# The gate of 1 % opens at the last step for the first time.
UNTIL_OPEN = [*TINY, "--steps", "14", "--dim", "64"]


def plain(rank, out):
    return train_gpt.main([*TINY, "--optimizer", "dion", "--batch-size", "8", "--out", out])


def with_deepspeed(rank, stage, out, *flags):
    ds.prepare()
    json_file = str(train_gpt_deepspeed.EXAMPLES / f"ds_config_zero{stage}.json")
    return train_gpt_deepspeed.main(
        [*TINY, "--deepspeed-config", json_file, "--local_rank=0", "--out", out, *flags]
    )


def test_every_stage_trains_as_plain_ddp(tmp_path):
    wanted = distributed.run(2, plain, str(tmp_path / "plain"))[0]
    sent = []
    for stage in range(4):
        out = tmp_path / str(stage)
        summary = distributed.run(2, with_deepspeed, stage, str(out), "--gate", "always")[0]
        assert json.loads((out / "summary.json").read_text("utf-8")) == summary
        assert_same_losses([summary["val_loss"]], [wanted["val_loss"]])
        assert summary["tokens"] == wanted["tokens"]
        assert (summary["open_gate_share"], summary["drift"]) == (1.0, 0.0)
        assert (summary["replicas"], summary["shards"]) == ((1, 2) if stage else (2, 1))
        assert 0 < summary["optimizer_bytes_per_step"] <= summary["wire_bytes_per_step"]
        sent.append(summary["wire_bytes"])
    assert sent[0] < min(sent[1:])


@pytest.fixture(scope="module")
def of_demo(tmp_path_factory):
    """The demo's runs with one stage: summaries, and what it printed."""
    out, printed = tmp_path_factory.mktemp("demo"), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        patch.setattr(demo, "follow", follow_in_workers)
        patch.setattr(demo_deepspeed, "STAGES", (2,))
        summaries = demo_deepspeed.main(["--out", str(out), *UNTIL_OPEN])
    assert json.loads((out / "summary.json").read_text("utf-8")) == summaries
    return summaries, printed.getvalue()


def with_replicas(rank, out):
    """Summaries of HSDP without an opening, and of the stages with replicas that the demo lacks."""
    ds.prepare()
    shared = [*UNTIL_OPEN, "--node-size", "2", "--out"]
    hsdp = "--optimizer curvadion --lr 0.03 --parallel hsdp --batch-size 8 --wire-budget 0.009"
    summaries = [train_gpt.main([*shared, f"{out}/drifted", *hsdp.split()])]
    for stage in (1, 3):
        json_file = str(train_gpt_deepspeed.EXAMPLES / f"ds_config_zero{stage}_replicas.json")
        flags = ["--deepspeed-config", json_file]
        summaries.append(train_gpt_deepspeed.main([*shared, f"{out}/{stage}", *flags]))
    return summaries


def test_replicas_train_as_those_of_hsdp(tmp_path, of_demo):
    (*_, hsdp, second), _ = of_demo
    drifted, first, third = distributed.run(4, with_replicas, str(tmp_path))[0]
    assert drifted["open_gate_share"] == 0 and drifted["drift"] > 1e-3
    # Shards of other shapes have other blocks, whose codes lose other numbers.
    assert drifted["val_loss"] != pytest.approx(hsdp["val_loss"], rel=0.02)
    for summary in (first, second, third):
        assert (summary["replicas"], summary["shards"], summary["steps"]) == (2, 2, 14)
        assert summary["val_loss"] == pytest.approx(hsdp["val_loss"], rel=0.02)
        assert summary["tokens"] == hsdp["tokens"]
        assert summary["open_gate_share"] == hsdp["open_gate_share"] == pytest.approx(1 / 14)
        assert summary["drift"] == hsdp["drift"] == 0.0
        crossing = summary["crossing_bytes_per_step"]
        assert 0 < crossing < 0.1 * summary["sent_bytes_per_step"]
    assert [summary["name"] for summary in (first, third)] == ["ZeRO 1, 2 x 2", "ZeRO 3, 2 x 2"]


def test_the_demo_starts_all_runs_and_shows_that_the_curves_overlay(of_demo):
    summaries, printed = of_demo
    names = [summary["name"] for summary in summaries]
    assert names == ["Dion, DDP", "Dion, ZeRO 2", "1 %, HSDP", "1 %, ZeRO 2"]
    for summary in summaries[:2]:
        assert_within(summary["largest_difference"], LOSSES, what=summary["name"])
    for summary in summaries[2:]:  # the last step is the first that sends codes
        rounding = Rounding(torch.float32, terms=256 * summary["steps"])
        assert_within(summary["largest_difference"], rounding, what=summary["name"])
    assert all(summary["drift"] == 0.0 for summary in summaries)
    assert [summary["open_gate_share"] for summary in summaries] == [1.0, 1.0, 1 / 14, 1 / 14]
    assert "no loss of any step is further from DDP's than" in printed
    assert "no loss of any step is further from HSDP's than" in printed
