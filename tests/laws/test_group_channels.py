"""In a group of members, every strategy does what it does on a whole fabric of the size of the group."""

from __future__ import annotations

import functools

import pytest
import torch

from murmurate.conformance.problems import same
from murmurate.conformance.test_strategies import KNOWN, UPDATES, members, sgd, sizes
from murmurate.fabric.group import GroupFabric
from murmurate.fabric.simulated.fabric import SimulatedFabric

every_strategy = pytest.mark.parametrize("kind", KNOWN.values(), ids=KNOWN)


def in_group(group, role, fabric):
    return role(GroupFabric(fabric, group))


def roles_of(kind, make_optimizer=sgd):
    return members(kind, sizes(kind)[-1], UPDATES, make_optimizer)


def at_once(groups, seed, absent=()):
    """What each member of these groups does, by group. groups: of ranks, each with its members' roles."""
    by_rank = {
        rank: functools.partial(in_group, group, role)
        for group, roles in groups.items()
        for rank, role in zip(group, roles, strict=True)
    }
    size = len(by_rank) + len(absent)
    fabric = SimulatedFabric(size, seed=seed, absent=absent)
    results = fabric.run([by_rank.get(rank, lambda _: None) for rank in range(size)])
    return {group: [results[rank] for rank in group] for group in groups}


@every_strategy
def test_a_group_is_a_fabric_of_its_size(kind):
    """Bit for bit, under the same schedule: all others are absent."""
    roles = roles_of(kind)
    whole = SimulatedFabric(len(roles), seed=7).run(roles)
    group = tuple(range(1, 2 * len(roles), 2))
    found = at_once({group: roles}, seed=7, absent=range(0, 2 * len(roles), 2))
    assert same(found[group], whole)


@every_strategy
def test_what_another_group_learns_makes_no_difference(kind):
    """The members of two groups alternate. Under the same schedule the others learn something else."""
    even, odd = (tuple(range(first, 2 * len(roles_of(kind)), 2)) for first in (0, 1))
    one, other = (
        at_once({even: roles_of(kind), odd: roles_of(kind, make)}, seed=8)
        for make in (sgd, lambda parameters: torch.optim.SGD(parameters, lr=0.01))
    )
    assert same(one[even], other[even])
    assert not same(one[odd], other[odd])
    if kind.synchronous:
        assert same(one[even], SimulatedFabric(len(roles_of(kind)), seed=0).run(roles_of(kind)))
