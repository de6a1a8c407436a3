"""Checks of the arguments of ``murmurate.run`` that would otherwise fail later, and elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from typing import Any

import torch

from murmurate.errors import Refusal
from murmurate.native.cores import usable_cores
from murmurate.strategies.interface import Strategy
from murmurate.training.threads import threads_of_environment


def checked_devices(devices: str | Sequence[str | Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    """The devices of each member in turn. Raises Refusal if there is none, or a name that torch does not
    know."""
    given = (devices,) if isinstance(devices, str) else devices
    checked = tuple((d,) if isinstance(d, str) else tuple(d) for d in given)
    if not checked or not all(checked):
        raise Refusal(f"devices is {devices!r}: name at least one for a replica, such as 'cpu'")
    for name in (name for names in checked for name in names):
        try:
            torch.device(name)
        except (RuntimeError, TypeError) as error:
            reason = str(error).splitlines()[0]
            raise Refusal(f"devices has {name!r}, which is no device of torch ({reason})") from error
    return checked


def gpus_here() -> tuple[tuple[str, ...], ...]:
    """The GPUs of this host; the CPU if it has none."""
    return tuple((f"cuda:{number}",) for number in range(torch.cuda.device_count())) or (("cpu",),)


def refuse_missing_gpus(devices: Iterable[Sequence[str]]) -> None:
    """Raises Refusal if one of ``devices`` is a CUDA device that this host does not have."""
    for device in (torch.device(name) for names in devices for name in names):
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise Refusal(
                f"devices has '{device}', and torch sees {torch.cuda.device_count()} GPUs here. Leave "
                "devices out for the CPU, or name those that there are."
            )


def whole_number(name: str, value: Any, least: int = 1) -> int:
    """``value``, an argument called ``name``, as an ``int``: states with NumPy's numbers could not be loaded.

    Raises Refusal unless it is a whole number of at least ``least``.
    """
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise Refusal(f"{name} is {value!r}: give a whole number")
    if value < least:
        raise Refusal(f"{name} is {value}: use at least {least}")
    return int(value)


def seconds(name: str, value: Any) -> float:
    """``value``, an argument called ``name``. Raises Refusal unless it is a number above 0."""
    if not isinstance(value, Real) or not float(value) > 0:
        raise Refusal(f"{name} is {value!r}: give a number of seconds above 0")
    return float(value)


def default_threads(members: int) -> int:
    """Torch threads for each of ``members`` on this host: as OMP_NUM_THREADS says, else an equal share of the
    cores."""
    return threads_of_environment() or max(1, usable_cores() // members)


def refuse_replicas_that_cannot_agree(strategy: Strategy, replicas: int) -> None:
    """Raise Refusal if there are several, and the strategy, without any need, cannot exchange. The strategy's
    own ``check`` names options of the command line."""
    if replicas > 1 and not strategy.needs:
        raise Refusal(
            f"{strategy.name} trains one replica, and the run has {replicas}. Use replicas=1, or let them "
            "agree: strategy='all-reduce'."
        )
