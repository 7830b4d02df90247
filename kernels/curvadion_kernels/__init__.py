"""The operations of :mod:`curvadion.ops.operations` as Triton kernels: one launch for a whole list.

Tensors of a list may differ in size and alignment; those of one dtype share a launch. The
operations raise Unsupported for what only plain PyTorch takes.
"""

from curvadion_kernels.adamw import adamw_, coded_adamw_
from curvadion_kernels.ahead import (
    ahead_,
    coded_ahead_,
    coded_lengths,
    heeded,
    lengths,
    scale,
    verdict,
)
from curvadion_kernels.cholesky_qr import column_floors, complete_, first_factor, second_factor
from curvadion_kernels.codes import (
    average_codes_,
    decode_add_,
    encode_difference_,
)
from curvadion_kernels.columns import column_normalize, column_sum_of_squares
from curvadion_kernels.local_step import local_step_
from curvadion_kernels.low_rank import low_rank_update_
from curvadion_kernels.momentum import (
    accumulate_,
    momentum_norms,
    norms,
)
from curvadion_kernels.newton_schulz import drop_unusable_, grams, inverse_root
from curvadion_kernels.numbers import INTERPRETED
from curvadion_kernels.rows import (
    put_columns,
    rescaled_rows,
    row_sums,
    scale_rows_,
    second_moments_,
    take_columns,
)
from curvadion_kernels.state_codes import decode_states_, encode_states_
from curvadion_kernels.symmetric import symmetric_product

__all__ = [
    "INTERPRETED",
    "accumulate_",
    "adamw_",
    "ahead_",
    "average_codes_",
    "coded_adamw_",
    "coded_ahead_",
    "coded_lengths",
    "column_floors",
    "column_normalize",
    "column_sum_of_squares",
    "complete_",
    "decode_add_",
    "decode_states_",
    "drop_unusable_",
    "encode_difference_",
    "encode_states_",
    "first_factor",
    "grams",
    "heeded",
    "inverse_root",
    "lengths",
    "local_step_",
    "low_rank_update_",
    "momentum_norms",
    "norms",
    "put_columns",
    "rescaled_rows",
    "row_sums",
    "scale",
    "scale_rows_",
    "second_factor",
    "second_moments_",
    "symmetric_product",
    "take_columns",
    "verdict",
]
