"""Whether this machine can build what tests want built."""

from __future__ import annotations

import os
import shutil

import pytest

CXX = shutil.which(os.environ.get("CXX", "c++"))
needs_compiler = pytest.mark.skipif(CXX is None, reason="no C++ compiler was found")
