"""The compiled kernels, if they were built; for each of them there is an equivalent in torch.

The environment variable MURMURATE_NATIVE chooses which run: ``off`` (torch only), ``portable``, ``avx2`` or
``avx512`` (which includes AVX512_BF16 and AMX if the machine has them).
"""

from __future__ import annotations

import os
from types import ModuleType

from murmurate.errors import Refusal

_VARIABLE = "MURMURATE_NATIVE"


def _load() -> tuple[ModuleType | None, str]:
    """(the extension module or None, the instruction set in use or why none is)"""
    choice = os.environ.get(_VARIABLE, "")
    if choice == "off":
        return None, f"switched off by {_VARIABLE}"
    try:
        from murmurate.native import _kernels
    except ImportError as reason:
        if choice:
            raise Refusal(
                f"{_VARIABLE} is '{choice}', and the compiled kernels cannot be loaded ({reason}). Install "
                "murmurate where there is a C++ compiler, or leave the variable out."
            ) from None
        return None, f"not built: {reason}"
    if choice:
        try:
            _kernels.use(choice)
        except ValueError as reason:
            raise Refusal(
                f"{_VARIABLE}: {reason}. Use off, portable, avx2 or avx512, or leave it out for the fastest."
            ) from None
    return _kernels, str(_kernels.simd())


kernels, simd = _load()
