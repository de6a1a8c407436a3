"""Tensors of several modules under names that are unique."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn


def by_unique_names(
    tensors: Mapping[str, Mapping[str, Tensor]], modules: Mapping[str, nn.Module]
) -> dict[str, Tensor]:
    """The tensors of several replicas under their own names, or, if two modules have the same names, with the
    name of the replica in front ("net.weight").

    tensors: by the replica's name. modules: the module of each; the parts of a module over several devices
    have the same buffers.
    """
    owners: dict[str, nn.Module] = {}
    for label, named in tensors.items():
        for name in named:
            if owners.setdefault(name, modules[label]) is not modules[label]:
                return {f"{replica}.{k}": v for replica, own in tensors.items() for k, v in own.items()}
    return {k: v for own in tensors.values() for k, v in own.items()}
