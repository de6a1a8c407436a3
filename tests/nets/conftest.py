"""Fixtures of tests of the compiled torso."""

import pytest

from murmurate import native
from murmurate.nets import _conv_kernels

BUILDS = ["amx", "avx512_bf16"]
HERE = _conv_kernels._kernel_names()


@pytest.fixture(params=BUILDS)
def compiled_for(request, monkeypatch):
    """Each of the builds that run here, in its turn."""
    if request.param not in HERE:
        pytest.skip(f"no {request.param} here, or no kernels for it: {native.simd}")
    monkeypatch.setattr(_conv_kernels, "_kernel_names", lambda: [request.param])
