"""benchmarks/no_sync.py prints what DDP does."""

import contextlib
import io

import torch.distributed as dist

import distributed
import no_sync


def printed(rank, store):
    dist.destroy_process_group()  # the script makes its own
    with contextlib.redirect_stdout(io.StringIO()) as said:
        no_sync.show(rank, store)
    return said.getvalue()


def test_a_backward_alone_in_no_sync_is_still_reduced(tmp_path):
    first, other = distributed.run(2, printed, str(tmp_path / "store"))
    assert first.splitlines() == [
        "forward outside no_sync: [3.0, 3.0]",
        "forward inside no_sync: [2.0, 4.0]",
    ]
    assert other == ""
