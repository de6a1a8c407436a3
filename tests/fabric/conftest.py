"""Fixtures of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from fabric.hosts import Host


@pytest.fixture
def host() -> Iterator[Callable[[int], Host]]:
    made: list[Host] = []

    def make(size: int) -> Host:
        made.append(Host(size))
        return made[-1]

    yield make
    for one in made:
        one.close()
