"""Compares plain values of all replicas, such as the hyper-parameters of their optimizers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from murmurate.errors import Refusal
from murmurate.replica.optimizer_state import IMPLEMENTATION
from murmurate.replica.vector import Replica
from murmurate.replicator.gather import TensorExchange


def require_equal(
    exchange: TensorExchange, what: str, own: Mapping[str, str], beginning: str, remedy: str
) -> None:
    """Raise Refusal on all members, naming the first difference, if ``own`` is not the same on all.

    All members must call it at the same point. The message is ``beginning``, the difference, ``remedy``.
    """
    encoded = torch.frombuffer(bytearray(json.dumps(dict(own)).encode()), dtype=torch.uint8)
    gathered = exchange.gather(f"gather of {what}", [encoded])
    found = {rank: json.loads(bytes(one.tensors[0].tolist())) for rank, one in sorted(gathered.items())}
    lowest = min(found)
    for rank, values in found.items():
        for key in found[lowest] | values:
            expected, value = found[lowest].get(key, "missing"), values.get(key, "missing")
            if value != expected:
                raise Refusal(
                    f"{beginning}: {key} is {expected} on replica {lowest} and {value} on replica {rank}. "
                    f"{remedy}"
                )


def require_equal_optimizers(exchange: TensorExchange, replica: Replica, strategy: str) -> None:
    """Raise Refusal if the members' optimizers of ``replica`` differ in class or hyper-parameters."""
    own = {"the class": type(replica.optimizer).__name__, "clip": repr(replica.clip)}
    for number, group in enumerate(replica.optimizer.param_groups):
        settings = {k: v for k, v in group.items() if k not in ("params", *IMPLEMENTATION)}
        own |= {f"{k} of group {number}": _in_words(v) for k, v in settings.items()}
    require_equal(
        exchange,
        f"the optimizers of '{replica.name}'",
        own,
        f"the replicas have different optimizers for '{replica.name}'",
        f"Under {strategy} each makes the same update itself, so give all the same optimizer. For rates of "
        "their own use local-sgd or gala.",
    )


def _in_words(value: Any) -> str:
    if isinstance(value, Tensor):
        return str(value.tolist())
    # the repr of any other object may have its address
    return repr(value) if isinstance(value, str | int | float | tuple | list | None) else type(value).__name__
