"""The fused operations of an optimizer step and their backends.

``operations``, ``coding`` for codes of a few bits and ``state_codes`` for states in 8 bits
define each one in plain PyTorch, the reference of all backends: ``cpu`` and ``cuda`` call C++
(csrc/), and curvadion_kernels is Triton.
"""

from curvadion.ops.adamw import adamw_
from curvadion.ops.ahead import ahead_, exponents, lengths, scale
from curvadion.ops.backends import BACKENDS, backend_for, lacking, use_backend
from curvadion.ops.cholesky_qr import (
    FirstFactor,
    column_floors,
    complete_,
    first_factor,
    second_factor,
)
from curvadion.ops.coding import average_codes_, decode_add_, encode_difference_
from curvadion.ops.newton_schulz import Bound, Root, drop_unusable_, grams, inverse_root
from curvadion.ops.operations import (
    accumulate_,
    column_normalize,
    column_sum_of_squares,
    copy_,
    if_moving,
    local_step_,
    low_rank_update_,
    momentum_norms,
    norms,
    put_back,
    symmetric_product,
)
from curvadion.ops.rows import (
    Moments,
    put_columns,
    rescaled_rows,
    row_sums,
    scale_rows_,
    second_moments_,
    take_columns,
)
from curvadion.ops.state_codes import (
    Opened,
    code_bytes,
    code_places,
    decode_states,
    encode_states_,
    is_coded,
    runs_to_open,
)
from curvadion.ops.verdict import heeded, verdict
