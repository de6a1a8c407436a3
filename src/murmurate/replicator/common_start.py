"""Makes the replicas equal at the start in what no optimizer steps: frozen parameters, and buffers."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from murmurate.buffers import as_bytes
from murmurate.errors import Refusal
from murmurate.replicator.gather import TensorExchange


def not_stepped(module: nn.Module, stepped: Collection[int]) -> list[Tensor]:
    """The module's parameters whose ids are not in ``stepped``, and its buffers."""
    tensors = [p for p in module.parameters() if id(p) not in stepped] + list(module.buffers())
    return [
        x.detach()
        for x in tensors
        if not nn.parameter.is_lazy(x) and x.layout == torch.strided and not x.is_meta
    ]


def copy_from_lowest(exchange: TensorExchange, name: str, tensors: Sequence[Tensor]) -> None:
    """Overwrite ``tensors`` by those of the lowest rank, unless they are equal on all members.

    All members must call it for tensors of the same shapes. Raises Refusal if their numbers differ, and
    FabricError if their shapes do.
    """
    digest = hashlib.blake2b(digest_size=16)
    for x in tensors:
        digest.update(repr((x.dtype, tuple(x.shape))).encode())
        digest.update(as_bytes(x).numpy().tobytes())
    own = torch.tensor([*digest.digest(), len(tensors)], dtype=torch.int64)
    found = [m.tensors[0] for m in exchange.gather(f"start of '{name}'", [own]).values()]
    if len({int(one[-1]) for one in found}) > 1:
        raise Refusal(f"the modules of '{name}' have different numbers of parameters or buffers")
    if all(torch.equal(one, own) for one in found):
        return
    for x in tensors:
        contributions = exchange.gather(f"start of '{name}'", [x])
        x.copy_(contributions[min(contributions)].tensors[0])
