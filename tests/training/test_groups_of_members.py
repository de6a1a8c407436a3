"""What the members of a run are built with."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from murmurate.fabric.interface import FabricError
from murmurate.fabric.processes.fabric import ProcessFabric
from murmurate.fabric.processes.run_state import RunState
from murmurate.fabric.processes.shared_memory import SharedMemoryFile
from murmurate.fabric.simulated.fabric import SimulatedFabric
from murmurate.recipes import recipe
from murmurate.training.members import group_opener


def test_the_parts_of_a_learner_share_one_group() -> None:
    """A second one would take the channels of the first, which a restarted replica could not join."""
    run = dataclasses.replace(recipe("cartpole-trpo"), replicas=2)
    member = SimulatedFabric(2, seed=0, keep_log=False).member(0)
    open_group = group_opener(run, member, range(2))
    assert open_group() is open_group()


def test_a_channel_of_the_same_name_is_refused() -> None:
    memory_file, run_state = SharedMemoryFile.create(), RunState(1)
    run_state.open()
    fabric = ProcessFabric(memory_file, run_state, 0)
    fabric.channel("one", torch.zeros(2))
    with pytest.raises(FabricError, match="a channel named 'one' exists already"):
        fabric.channel("one", torch.zeros(2))
    memory_file.close()
