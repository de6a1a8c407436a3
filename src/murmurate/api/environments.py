"""Environments of the user's own, where ``murmurate.train`` and ``load`` take them."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any, cast

from murmurate.worlds.interface import SimulatorWorld


def world_of(env: str | Callable[..., Any]) -> SimulatorWorld:
    own = importlib.import_module("murmurate.worlds.own")
    return cast(SimulatorWorld, own.world_of(env))


@contextlib.contextmanager
def instead(env: str | Callable[..., Any] | None) -> Iterator[None]:
    if env is None:
        yield
        return
    own = importlib.import_module("murmurate.worlds.own")
    with own.instead(env):
        yield
