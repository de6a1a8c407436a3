"""The named tensors of a module in which one replica's vector is replaced by what all replicas agree on."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor, nn

from murmurate.replica.vector import Replica


def agreed_tensors(
    replica: Replica, vector: Tensor, module: nn.Module, stepped: Collection[int]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(parameters in ``vector`` [N], under all their names, so also those of tied ones; all other tensors of
    the module's ``state_dict``).

    stepped: ids of the parameters of all replicas; those of other replicas are in neither. All are copies.
    """
    agreed = {name: view.clone() for name, view in replica.named_views(vector)}
    own = {id(p): part.name for p, part in zip(replica.own_parameters(), replica.slices, strict=True)}
    named = list(module.named_parameters(remove_duplicate=False))
    agreed |= {name: agreed[own[id(p)]] for name, p in named if id(p) in own}
    elsewhere = {name for name, p in named if id(p) in stepped}
    others = {
        name: value.detach().clone()
        for name, value in module.state_dict().items()
        if isinstance(value, Tensor) and name not in elsewhere
    }
    return agreed, others
