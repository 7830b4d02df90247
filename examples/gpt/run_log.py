"""The log of a run: one JSON object per line in log.jsonl, and TensorBoard on request."""

import json
from pathlib import Path
from typing import Any, TextIO

from optional import need


class RunLog:
    """Writes records to ``folder/log.jsonl``; a resumed run drops those after its checkpoint.

    With ``active=False``, as on every rank but the first, it writes nothing.
    """

    def __init__(self, folder: Path, *, after_step: int, tensorboard: bool, active: bool):
        self.file: TextIO | None = None
        self.board: Any = None
        if not active:
            return
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "log.jsonl"
        kept = [record for record in read(path) if record["step"] <= after_step]
        rewritten = path.with_suffix(".tmp")
        rewritten.write_text("".join(json.dumps(record) + "\n" for record in kept))
        rewritten.replace(path)
        self.file = path.open("a", buffering=1)
        if tensorboard:
            board = need("torch.utils.tensorboard", "--tensorboard")
            self.board = board.SummaryWriter(str(folder), purge_step=after_step + 1)

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Record values, with ``kind`` and ``step``; TensorBoard gets those that are numbers."""
        if self.file:
            print(json.dumps({"kind": kind, "step": step, **values}), file=self.file)
        for name, value in values.items() if self.board else ():
            if isinstance(value, (int, float)):
                self.board.add_scalar(f"{kind}/{name}", value, step)

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, *_: object) -> None:
        for sink in (self.file, self.board):
            if sink:
                sink.close()


def read(path: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """Return the records of a log file, all or those of a kind; none if there is no file.

    Ignores a last line that a crash cut short.
    """
    lines = path.read_text("utf-8").splitlines(keepends=True) if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return [record for record in records if kind in (None, record["kind"])]
