"""Why a test of the compiled kernels does not run, and what to do about it."""

from murmurate import native

NO_KERNELS = f"{native.simd}: install where there is a C++ compiler, and leave MURMURATE_NATIVE out"
