"""examples/gpt/train_gpt_deepspeed.py, as the demo runs it, at a size that takes seconds."""

import importlib.util
import json

import pytest
import torch

import demo
import demo_deepspeed
from support.documents.example_runs import LOSSES, follow_in_workers
from support.references.tolerance import Rounding, assert_within

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"
)
# The gate of 1 % opens at the last step for the first time: in both, as blocks are full enough.
STEPS = 10
UNTIL_OPEN = (
    f"--steps {STEPS} --validate-every {STEPS // 2} --dim 128 --heads 2 --layers 1 --context 16 "
    "--data-bytes 50000 --validation-tokens 64 --warmup-steps 1 --no-progress"
).split()


@pytest.mark.numeric
def test_stages_train_as_plain_ddp_and_their_replicas_as_those_of_hsdp(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(demo, "follow", follow_in_workers)
    monkeypatch.setattr(demo_deepspeed, "STAGES", (3,))
    summaries = demo_deepspeed.main(["--out", str(tmp_path), *UNTIL_OPEN])
    assert json.loads((tmp_path / "summary.json").read_text("utf-8")) == summaries
    dense, sparing = summaries[:2], summaries[2:]
    assert [each["name"] for each in dense] == ["Dion, DDP", "Dion, ZeRO 3"]
    assert [each["name"] for each in sparing] == ["1 %, HSDP", "1 %, ZeRO 3"]
    for summary in dense:
        assert_within(summary["largest_difference"], LOSSES, what=summary["name"])
        assert summary["open_gate_share"] == 1.0
        assert 0 < summary["optimizer_bytes_per_step"] <= summary["wire_bytes_per_step"]
    assert dense[0]["wire_bytes"] < dense[1]["wire_bytes"]
    for summary in sparing:
        # Shards of other shapes have other blocks, whose codes lose other numbers.
        assert summary["val_loss"] == pytest.approx(sparing[0]["val_loss"], rel=0.02)
        assert (summary["replicas"], summary["shards"]) == (2, 2)
        assert summary["open_gate_share"] == pytest.approx(1 / STEPS)
        assert 0 < summary["crossing_bytes_per_step"] < 0.1 * summary["sent_bytes_per_step"]
        # The last step is the first that sends codes; each takes directions of its gradients.
        rounding = Rounding(torch.float32, terms=256, condition=2, steps=STEPS)
        assert_within(summary["largest_difference"], rounding, what=summary["name"])
    assert all(summary["drift"] == 0.0 for summary in summaries)
    assert len({summary["tokens"] for summary in summaries}) == 1
    printed = capsys.readouterr().out
    assert "no loss of any step is further from DDP's than" in printed
    assert "no loss of any step is further from HSDP's than" in printed
