"""The conformance tests of the package, and what its own strategies must do besides."""

from __future__ import annotations

import functools

import pytest
import torch

from murmurate.conformance.problems import same
from murmurate.conformance.test_strategies import *  # noqa: F403 - the tests
from murmurate.conformance.test_strategies import KNOWN, MANY_UPDATES, UPDATES, fabrics, members, sizes
from murmurate.conformance.test_strategy_states import *  # noqa: F403
from murmurate.errors import Refusal
from murmurate.fabric.simulated.fabric import SimulatedFabric
from murmurate.strategies import strategy
from murmurate.strategies.dpsgd import DPSGD


def test_they_are_found_by_their_command_line_names():
    assert {
        "solo", "all-reduce", "local-sgd", "parameter-server", "elastic", "hogwild", "dpsgd", "pull-gossip",
        "push-gossip", "gala", "push-sum",
    } <= set(KNOWN)  # fmt: skip
    assert all(strategy(name) is kind for name, kind in KNOWN.items())


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(Refusal, match="'local-sgd'"):
        strategy("local-sdg")


def test_the_seed_of_a_schedule_fixes_every_bit(kind):
    """Asynchronous ones too: no strategy draws from torch's own generator, or in the order of a set."""
    roles = members(kind, sizes(kind)[-1], MANY_UPDATES // 4)

    def run(seed):
        torch.manual_seed(seed)  # which must not matter
        return SimulatedFabric(len(roles), seed=3, latency=(0.0, 1e-5)).run(roles)

    assert same(run(0), run(1))


def test_dpsgd_with_nodes_of_one_runs_between_hosts():
    """Nothing is shared then, so the network carries it."""
    kind = functools.partial(DPSGD, threads=1, local_updates=2)
    kind.centre, kind.name = True, DPSGD.name
    *found, centre = fabrics()["network"](4, members(kind, 3, UPDATES))
    assert centre["folds"] >= 3
    for one in found:
        assert one["clock"] == UPDATES
        torch.testing.assert_close(one["consensus"], centre["params"], rtol=0, atol=0)


def test_solo_refuses_company_and_says_what_to_do():
    with pytest.raises(Refusal, match=r"--replicas 1.*--strategy all-reduce"):
        SimulatedFabric(2, seed=0).run(members(KNOWN["solo"], 2, 1))
