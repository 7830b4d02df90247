"""QK-clip: heads with large attention logits have queries and keys scaled (MuonClip, Kimi K2).

With S_h the largest logit of head h in this step's forward pass,

    gamma = min(1, tau / max of S_h over the heads h that share a key head)
    rows of W_q and W_k of these heads <- sqrt(gamma) rows,   after the step

so that their logits are gamma times as large (arXiv 2507.20534, section 2.1, with alpha = 1/2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from curvadion import checks
from curvadion.layout.placements import global_shape
from curvadion.update.update_hooks import MatrixUpdate, UpdateBatch


@dataclass(frozen=True)
class Attention:
    """Where the queries and keys of an attention are.

    Args:
        query: the name of the parameter whose rows are the queries, as in the groups.
        key: the same for keys; the same name for a fused projection.
        heads: of queries.
        head_dim: rows of each head.
        key_heads: of keys; None: as many as of queries. Consecutive heads of queries share one.
        query_row: the row at which queries begin, those of all heads one after another.
        key_row: the same for keys; of a fused projection heads * head_dim, for example.
    """

    query: str
    key: str
    heads: int
    head_dim: int
    key_heads: int | None = None
    query_row: int = 0
    key_row: int = 0

    def __post_init__(self) -> None:
        for name in ("heads", "head_dim"):
            checks.integer(name, getattr(self, name), 1)
        for name in ("query_row", "key_row"):
            checks.integer(name, getattr(self, name), 0)
        if self.key_heads is not None:
            checks.integer("key_heads", self.key_heads, 1)
        if self.heads % self.groups:
            raise ValueError(
                f"key_heads={self.key_heads} does not divide heads={self.heads}: equally many "
                f"heads of queries share each head of keys"
            )

    @property
    def groups(self) -> int:
        """The number of heads of keys."""
        return self.heads if self.key_heads is None else self.key_heads


class _Rows(NamedTuple):
    """The queries or the keys of an attention, as rows of a parameter."""

    name: str
    first: int
    length: int
    groups: int  # which share the rows equally, in order


class QKClip:
    """Scale the queries and keys of heads whose largest logit exceeds a threshold.

    Section 2.1 of Kimi K2 (arXiv 2507.20534). Query heads that share a key head are clipped
    together, by the largest logit of any. Before each step, tell it the logits::

        clip = QKClip(optimizer, [Attention(f"blocks.{i}.q.weight", f"blocks.{i}.k.weight", 12, 64)
                                  for i in range(12)])
        optimizer.register_update_hook(clip)
        ...
        for i, maxima in enumerate(largest_logits):  # (12,) each
            clip.observe(i, maxima)
        optimizer.step()

    Queries and keys must be matrices of the optimizer that have gradients. What has been observed
    counts for one step, and a step that is skipped leaves it for the next one.

    Args:
        optimizer: whose groups name the parameters, as ``curvadion.param_groups(model)`` does.
        attentions: the attentions to clip.
        threshold: tau, the largest logit that is not clipped. Default 100, the paper's.

    Raises:
        ValueError: naming a parameter that is no matrix of the optimizer, or has fewer rows, or
            the argument.
    """

    capturable = True

    def __init__(
        self, optimizer: Optimizer, attentions: Sequence[Attention], threshold: float = 100.0
    ) -> None:
        checks.number("threshold", threshold, least=1e-6)
        self.attentions = tuple(attentions)
        self.threshold = threshold
        lengths: dict[str, int] = {}  # rows of matrices
        for group in optimizer.param_groups:
            if group.get("algorithm") == "dion":
                for name, X in zip(group.get("param_names", ()), group["params"], strict=False):
                    place = -1 if group["input_first"] else group["stack_dims"]
                    lengths[name] = global_shape(X)[place]
        self._rows_of: dict[str, list[_Rows]] = {}
        for attention in self.attentions:
            for rows in _rows(attention):
                if rows.name not in lengths:
                    raise ValueError(
                        f"attentions: {rows.name!r} is not the name of a matrix in the "
                        f"optimizer's groups: take names from curvadion.param_groups(model)"
                    )
                if rows.first + rows.length > lengths[rows.name]:
                    raise ValueError(
                        f"attentions: {attention!r} asks for rows up to "
                        f"{rows.first + rows.length} of {rows.name!r}, which has "
                        f"{lengths[rows.name]}: mend heads, head_dim, key_heads or the first row"
                    )
                self._rows_of.setdefault(rows.name, []).append(rows)
        # The largest logits so far, (groups,). Queries and keys of an attention may move in
        # different batches, and each batch forgets its own.
        self._observed: dict[_Rows, Tensor] = {}

    def observe(self, attention: int, maxima: Tensor) -> None:
        """Note logits of the next step; several calls, as of micro-batches, count together.

        On shards all ranks with parts of a matrix need the same maxima, and so do replicas that
        take equal steps (those of Dion or CodedGradients): all-reduce them with
        ``op=dist.ReduceOp.MAX``. The host does not wait.

        Args:
            attention: its place in ``attentions``.
            maxima: the largest logit of each head, (heads,), as the softmax gets it, on the
                device of the weights. Those that are not finite are left out.

        Raises:
            ValueError: if the shape does not fit.
        """
        spec = self.attentions[attention]
        if maxima.shape != (spec.heads,):
            raise ValueError(
                f"maxima of shape {tuple(maxima.shape)} must have shape ({spec.heads},): pass "
                f"the largest logit of each head"
            )
        finite = maxima.detach().float().nan_to_num(nan=0.0, posinf=0.0)
        of_groups = finite.view(spec.groups, -1).amax(1)
        for rows in _rows(spec):
            known = self._known(rows, maxima.device)
            torch.maximum(known, of_groups, out=known)

    def __call__(self, batch: UpdateBatch) -> None:
        """Scale rows before the step, and rows of U, which scales them after it."""
        for m in batch:
            for rows in self._rows_of.get(m.name, ()):
                self._clip(batch, m, rows)
        for rows in {rows for m in batch for rows in self._rows_of.get(m.name, ())}:
            known = self._observed[rows]
            batch.write_(known, torch.zeros_like(known))

    def _clip(self, batch: UpdateBatch, m: MatrixUpdate, rows: _Rows) -> None:
        """Scale the rows that are on this rank.

        s ((1 - lr wd) X - lr scale U) is a step of s X along s U.

        Args:
            batch: of the matrix.
            m: a matrix of the parameter.
            rows: of the parameter, perhaps none of this matrix.
        """
        # gamma = min(1, tau / S)
        S = self._known(rows, m.U.device).to(m.U.dtype)
        gamma = (self.threshold / S).clamp_max(1.0)
        start = max(m.rows.start, rows.first)
        stop = min(m.rows.stop, rows.first + rows.length)
        if start >= stop:
            return
        factors = gamma.sqrt()[:, None].expand(-1, rows.length // rows.groups).reshape(-1, 1)
        factors = factors[start - rows.first : stop - rows.first]
        here = slice(start - m.rows.start, stop - m.rows.start)
        # X <- s X,   U <- s U
        batch.write_(m.X[here], m.X[here] * factors)
        m.U[here] *= factors

    def _known(self, rows: _Rows, device: torch.device) -> Tensor:
        """The largest logits so far of each group; zeros if there are none."""
        if rows not in self._observed:
            self._observed[rows] = torch.zeros(rows.groups, device=device)
        return self._observed[rows]

    def __repr__(self) -> str:
        return f"QKClip({len(self.attentions)} attentions, threshold={self.threshold})"


def _rows(attention: Attention) -> list[_Rows]:
    """The rows of queries and of keys."""
    dim = attention.head_dim
    groups = attention.groups
    return [
        _Rows(attention.query, attention.query_row, attention.heads * dim, groups),
        _Rows(attention.key, attention.key_row, groups * dim, groups),
    ]
