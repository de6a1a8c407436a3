"""Fixtures of this folder."""

from __future__ import annotations

import pytest
from torch.distributed import TCPStore


@pytest.fixture
def server() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
