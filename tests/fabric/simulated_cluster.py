"""A simulated cluster, and the channel of a member, whose vectors take a known time to send."""

from __future__ import annotations

import torch

from murmurate.fabric.simulated.fabric import SimulatedFabric

N = 1000  # a vector of 4000 bytes
BYTES = 4 * N


def fill(value):
    return torch.full((N,), float(value))


def cluster(size, network=None, seed=0, **options):
    return SimulatedFabric(size, seed, network=network, own_clocks=True, call_seconds=1e-12, **options)


def door_to(member):
    return member.channel("model", torch.zeros(N))
