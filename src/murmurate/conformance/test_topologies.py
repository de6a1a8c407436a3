"""What every graph for gossip must do."""

from __future__ import annotations

import pytest

from murmurate.topology import topologies, topology


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("name", topologies())
def test_in_peers_and_out_peers_are_the_ends_of_the_same_edges(name: str, size: int) -> None:
    graph = topology(name)
    for clock in range(9):
        heard = [graph.in_peers(i, size, clock) for i in range(size)]
        for i, peers in enumerate(heard):
            assert list(peers) == sorted(set(peers) & set(range(size)) - {i}), (
                f"{name}: the in-peers of {i} are {peers}: give ascending positions of 0..{size - 1}, "
                f"each once, and not {i} itself"
            )
            hearing = tuple(j for j in range(size) if i in heard[j])
            assert tuple(graph.out_peers(i, size, clock)) == hearing, (
                f"{name}: the out-peers of {i} must be {hearing}, the members whose in-peers include it"
            )
