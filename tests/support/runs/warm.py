"""What each process computes once, at its first steps: the fork server does, for all workers."""

import torch

from curvadion.ops.code_format import BITS, constants
from curvadion.optim.group_keys import DEFAULTS
from curvadion.update.newton_schulz import polar_express

polar_express(DEFAULTS["newton_schulz_steps"])
for bits in BITS:
    constants(bits, torch.device("cpu"))
