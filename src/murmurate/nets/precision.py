"""Matrix products of float32 tensors in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def products_in(precision: str) -> Iterator[None]:
    """Within this context a CPU's products of float32 matrices round their factors to bfloat16, if
    ``precision`` is "bfloat16"; sums and results are float32. Without hardware for it nothing changes.

    The setting is that of the whole process: do not exchange with other replicas inside.
    """
    setting: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = setting.fp32_precision
    setting.fp32_precision = "bf16" if precision == "bfloat16" else "ieee"
    try:
        yield
    finally:
        setting.fp32_precision = before
