"""Dion: low-rank orthonormal updates, synchronised over replicas at every step."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import Unpack

from curvadion.comm.replicas import ReplicasArgument
from curvadion.gates import AlwaysOpen
from curvadion.optim.dion_inner import DionInner
from curvadion.optim.group_keys import GroupOptions, Params, with_defaults
from curvadion.optim.replica_optimizer import ReplicaOptimizer
from curvadion.sync.low_rank import LowRank


class Dion(ReplicaOptimizer):
    """Dion optimizer (arXiv 2504.05295, algorithm 1): replicas synchronise at every step.

    Per matrix X (m x n), on every replica i:

        M_i <- M_i + G_i                                     G_i is the LOCAL gradient
        P = orth( mean_i(M_i Q) ),   R = mean_i( M_i^T P )   two low-rank all-reduces
        M_i <- M_i - (1 - mu) P R^T,   Q = column_normalize(R)
        X <- (1 - lr wd) X - lr sqrt(m / n) P Q^T            the same on every replica

    Parameters that are not matrices use AdamW or Lion with the mean gradient.

    Args:
        params: parameters, (name, parameter) pairs or groups, such as
            ``curvadion.param_groups(model)``. A group's ``algorithm`` is "dion" (the default),
            "adamw" or "lion". Its ``lr_ratio``, if it has one and no ``lr``, makes its ``lr``
            this multiple of the optimizer's.
        lr: learning rate, a number or a tensor of one element.
        replicas: the ranks with replicas of the weights, a ProcessGroup or a one-dimensional
            DeviceMesh. Their gradients must reach ``step`` unaveraged. None for one replica,
            "single" if processes train alone or something else averages.
        capture: on a CUDA device, whether steps are captured in a CUDA graph and replayed.
            None captures after three equal steps, where it can, and warns once otherwise;
            True raises ValueError where it cannot; False never captures. Gradients may be new
            tensors at each step, and all numbers of groups may change.

    ``lr`` and all keyword arguments below are defaults of group keys, as in torch: a group may
    have values of its own.

    Keyword Args:
        momentum: the factor mu by which momenta decay. Default 0.95.
        look_ahead: directions are computed from M + look_ahead G; 1 / mu is Nesterov's
            momentum. Default None, which is 0.
        betas, eps: of AdamW, Lion and NorMuon. Defaults (0.9, 0.95) and 1e-8.
        weight_decay: decoupled, X <- (1 - lr weight_decay) X. Default 0.01.
        direction: how the update of a matrix is computed. "low_rank": P Q^T as above.
            "polar": Muon's polar factor of the momentum, U = B (B^T B)^(-1/2), of full rank;
            between replicas it sends dense gradients. "normuon": U with rows divided by their
            second moments (arXiv 2510.05491). "dion2": U of the share rank_fraction of the
            rows of a wide matrix, columns of a tall one, that are largest (arXiv 2512.16928).
            "nordion2": both. Default None, which is "low_rank".
        rank_fraction: r as a fraction of min(m, n), in (0, 1]. For "low_rank" and "dion2".
            Default None, which is 0.25.
        rank_multiple_of: r is rounded up to a multiple of this, then capped by min(m, n); for
            GPUs, whose tensor cores like multiples of 8 or 16. Default 1.
        stack_dims: number of leading dimensions that enumerate matrices (1 for stacked
            experts). Rows come next, and all other dimensions are the columns. Default 0.
        row_blocks: number of blocks of rows, or their sizes, each its own matrix (3 for QKV).
            Default 1.
        column_blocks: the same for blocks of columns, as of the heads of an output projection.
            A group has one of both. Default 1.
        input_first: whether matrices are stored as (in, out); rows are outputs either way.
            Default False.
        momentum_rule: "error_feedback" (Dion) or "plain", ordinary momentum M <- mu M + G, for
            an ablation of the paper's error feedback in "low_rank" and "dion2" steps. "polar"
            and "normuon" use all of M, so that both rules are the same. Default
            "error_feedback".
        right_factor: "column_normalized" (Dion) or "qr" (arXiv 2605.16341). For "low_rank".
            Default None, which is "column_normalized".
        newton_schulz: the iteration for polar factors: "polar_express", the best
            coefficients for the number of steps (arXiv 2505.16932), or "muon", those of
            torch.optim.Muon, for a run that continues one (with newton_schulz_steps=5).
            Default "polar_express".
        newton_schulz_steps: the number of iterations, 1 to 20. Default 4.
        gather: how ranks with shards compute polar factors. "auto": a matrix is sent to one
            of them and back if that is cheaper than sums of Gram matrices. "never": it stays
            sharded. Default "auto".
        exchange_dtype: the dtype in which matrices are sent, "float32" or "bfloat16". Default
            None: bfloat16 if products run in half precision, and otherwise their own dtype.
        update_scale: the factor of lr for a matrix (m, n): "spectral" is sqrt(m / n) (Dion),
            "original" is sqrt(max(1, m / n)) (Muon), "match_rms_adamw" (arXiv 2502.16982) is
            0.2 sqrt(max(m, n)). Default "spectral".
        state_dtype: dtype of momenta, a torch.dtype or its name. "int8" stores momenta, and the
            moments of AdamW and Lion, in codes of 8 bits with a scale for each 256 elements; of
            matrices only those of "polar" and "normuon" (arXiv 2509.23106 reports no loss with
            Muon up to 2.7 billion parameters). A step rounds them, or the roots of second moments,
            at random but reproducibly, so that their means are exact; a root below 1/127 of its
            block's largest is stored as that, which makes AdamW's step smaller. ``state`` then
            holds codes; ``state_dict()`` returns float32 tensors, which other layouts can load.
            Other dtypes leave moments in X's. Default None: X's.
        q_dtype: the same for the right factors Q of "low_rank". With float32 weights
            "bfloat16" halves their memory, n r elements a matrix. Default None: X's.
        stochastic_rounding: round bfloat16 matrices up or down at random, identically on all
            replicas, so that tiny updates take effect on average. Default False.

    Attributes:
        report: the last step's :class:`curvadion.StepReport`.
        progress: counters of the run: ``steps``, ``local_steps`` and more.
            :class:`curvadion.ReplicaOptimizer` has all attributes.

    Raises:
        TypeError, ValueError: naming the argument or group key and the value.
    """

    inner: DionInner

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.02,
        *,
        replicas: ReplicasArgument = None,
        capture: bool | None = None,
        **options: Unpack[GroupOptions],
    ) -> None:
        gate = AlwaysOpen()
        sync = LowRank()
        keys = with_defaults(type(self), options)
        inner = DionInner(params, {"lr": lr, "local_lr": None, **keys}, gate, sync)
        super().__init__(inner, gate, sync, replicas=replicas, capture=capture)
