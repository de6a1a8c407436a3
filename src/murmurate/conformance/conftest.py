"""A marker of the conformance tests, where pytest knows nothing of this package."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: covers what other tests cover less thoroughly")
