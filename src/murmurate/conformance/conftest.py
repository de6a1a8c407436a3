"""Registers the marker of the conformance tests, for pytest runs without this package's configuration."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: covers what other tests cover less thoroughly")
