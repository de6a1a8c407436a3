"""Why a test of the compiled kernels, or of those in Triton, does not run, and what to do about it."""

import pytest
import torch

from murmurate import native
from murmurate.native import gpu

NO_KERNELS = f"{native.simd}: install where there is a C++ compiler, and leave MURMURATE_NATIVE out"

# Triton's kernels run on a GPU if there is one, else in the interpreter (see conftest.py)
GPU = "cuda" if torch.cuda.is_available() else "cpu"
NO_TRITON = gpu.why_not(torch.device(GPU))
needs_triton = pytest.mark.skipif(bool(NO_TRITON), reason=NO_TRITON)
