"""The replay of a run: refused configs, its memory, and the store for each kind of world."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from murmurate.cli.options import change
from murmurate.errors import Refusal
from murmurate.recipes import recipe
from murmurate.replay import memory
from murmurate.replay.config import ReplayConfig, open_replay, replay_bytes
from murmurate.replay.frame_replay import FrameReplay
from murmurate.replay.priorities import Prioritized
from murmurate.replay.row_replay import RowReplay
from murmurate.replay.segments import Segmented
from murmurate.spec import EnvSpec
from murmurate.worlds.own import world_of
from short_runs import altered, preflight

PONG = EnvSpec("pong", (4, 84, 84), torch.uint8, actions=6, stacked=True)
CARTPOLE = EnvSpec("cartpole", (4,), torch.float32, actions=2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--replay.alpha 1.5", "replay.alpha is 1.5"),
        ("--replay.alpha-end -0.5", "replay.alpha-end is -0.5"),
        ("--replay.samples-per-insert 0", "it must be from 0.001"),
        ("--replay.samples-per-insert inf", "samples-per-insert is inf; it must be from"),
        ("--replay.fit-every 1001", "no whole number of batches of 64. Use --replay.fit-every 1000"),
        ("--replay.fit-every 100 --replay.samples-per-insert 0.5", "Use --replay.fit-every 128"),
        ("--replay.fit-every 512 --env-steps 1500", "begins to learn after 1,512. .* --replay.fit-every"),
        ("--replay.fit-every 6400000", "before the fit"),
        ("--replay.ahead -1", "replay.ahead is -1"),
        ("--replay.capacity 10", "none could be drawn"),
        ("--replay.learning-starts 60000", "more than the 50000 that are kept"),
        ("--replay.segments 0", "replay.segments is 0; it must be at least 1"),
        ("--replay.segments 1000", "too few for a batch of 64 in each segment"),
        ("--replay.segments 7", "Use --replay.capacity 49994"),
        ("--replay.segments 4 --replay.weights all", "several segments has priorities of its own"),
        ("--env-steps 1000", "begins to learn after 1,000"),
        ("--replay.folder /dev/null", "/dev/null is not a folder that can be written to"),
        ("--replay.folder /dev/null/inside", "/dev/null is not a folder that can be written to"),
        ("--agent.n-step 1000000000000", "it must be from 1 to 1000"),
        ("--simulators 1000000000", "sources take"),
        ("--agent.batch 0", "agent.batch is 0"),
        ("--actors 9", "9 actors share 8 simulators"),
        ("--actors 1 --launcher inline", "actors are processes"),
        ("--actors 1 --double-buffer", "Leave one out"),
        ("--replay.capacity 1000000000000", "Use smaller values of these options, or give the"),
        ("--replay.capacity 1000000000000 --replay.folder there", "the replays need .*there has"),
    ],
)
def test_what_makes_no_sense_is_refused(options: str, words: str) -> None:
    with pytest.raises(Refusal, match=words):
        preflight(change(recipe("cartpole-dqn"), options.split(), "murmurate train cartpole-dqn"))


def test_too_little_memory_is_told_by_the_options_that_the_run_has() -> None:
    run = change(recipe("pendulum-mbpo"), ["--capacity", "1000000000000"], "murmurate train pendulum-mbpo")
    words = "--simulators 1, --capacity 1000000000000, --rollouts.starts 100000, --agent.policy.batch 256"
    with pytest.raises(Refusal, match=rf"of it: {words}\) needs .*of memory"):
        preflight(run)


class Pictured(gymnasium.Env[Any, Any]):
    observation_space = gymnasium.spaces.Dict(
        {
            "camera": gymnasium.spaces.Box(0, 255, (84, 84, 3), np.uint8),
            "goal": gymnasium.spaces.Box(-1, 1, (2,), np.float32),
        }
    )
    action_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)


def test_what_the_agent_cannot_read_is_refused_before_its_memory_is_counted() -> None:
    run = dataclasses.replace(recipe("pendulum-mbpo"), world=world_of(Pictured))
    far = dataclasses.replace(run.source, capacity=10**12)
    with pytest.raises(Refusal, match=r"reads vectors, and the observations of .* hold the image 'camera'"):
        preflight(dataclasses.replace(run, source=far))


def test_files_that_the_disk_has_no_room_for_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory.psutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
    run = recipe("cartpole-dqn")
    there = dataclasses.replace(run.source.replay, folder=str(tmp_path / "not" / "there"))
    with pytest.raises(Refusal, match=r"the replays need .*there has 0.0 GiB left"):
        preflight(altered(run, replay=there))


def test_an_agent_and_a_source_that_do_not_fit_are_refused() -> None:
    rollouts, replayed = recipe("cartpole-a2c"), recipe("cartpole-dqn")
    with pytest.raises(Refusal, match="a2c learns from rollouts, and the run's source gives transitions"):
        dataclasses.replace(rollouts, source=replayed.source).validate()
    with pytest.raises(Refusal, match="dqn learns from transitions, and the run's source gives rollouts"):
        dataclasses.replace(replayed, source=rollouts.source).validate()
    with pytest.raises(Refusal, match="There is no field called 'actors'"):
        change(rollouts, ["--actors", "2"], "murmurate train cartpole-a2c")


@pytest.mark.parametrize(("capacity", "batch"), [(100, 4), (160, 128)])
def test_rings_that_never_hold_a_batch_are_refused(capacity: int, batch: int) -> None:
    config = ReplayConfig(capacity=capacity, learning_starts=0)
    with pytest.raises(Refusal, match="too few for a batch"):
        replay_bytes(config, PONG, simulators=8, steps=3, batch=batch)


def test_segments_are_of_rows() -> None:
    config = ReplayConfig(capacity=800, learning_starts=0, segments=4)
    with pytest.raises(Refusal, match="images are stored in one ring for each simulator"):
        replay_bytes(config, PONG, simulators=2, steps=1, batch=8)
    more = {"simulators": 2, "steps": 1, "discount": 0.9, "seed": 0}
    colours = EnvSpec("colours", (3, 84, 84), torch.uint8, actions=6)
    for draws in ("each", "one"):
        sampler = open_replay(dataclasses.replace(config, segment_draws=draws), colours, **more).sampler
        assert isinstance(sampler, Segmented)
        assert [segment.capacity for segment in sampler.segments] == [200] * 4
        assert sampler.whole == (draws == "one")


def test_a_million_frames_take_what_they_say() -> None:
    needed = replay_bytes(ReplayConfig(), PONG, simulators=8, steps=3, batch=32)
    assert 84 * 84 * 1_000_000 < needed < 1.05 * 84 * 84 * 1_000_000


def test_only_stacks_of_images_are_kept_once() -> None:
    config = ReplayConfig(capacity=800, learning_starts=0)
    more = {"simulators": 2, "steps": 1, "discount": 0.9, "seed": 0}
    assert isinstance(open_replay(config, PONG, **more), FrameReplay)
    colours = EnvSpec("colours", (3, 84, 84), torch.uint8, actions=6)
    assert isinstance(open_replay(config, colours, **more), RowReplay)


def test_a_subclass_draws_in_its_own_way():
    class Doubled(Prioritized):
        def update(self, slots, error):
            super().update(slots, 2 * error)

    class DoubledConfig(ReplayConfig):
        def new_sampler(self, slots, seed, threads=1):
            return Doubled(slots, alpha=1.0, epsilon=0.0, seed=seed, threads=threads)

    def sampler(**settings):
        config = DoubledConfig(capacity=10, **settings)
        return open_replay(config, CARTPOLE, simulators=1, steps=1, discount=1.0, seed=0).sampler

    whole = sampler()
    whole.put(torch.tensor([0, 9]), torch.tensor([1.0, 2.0]))
    assert whole.mass == (6.0, 2.0)
    assert [type(segment) for segment in sampler(segments=2).segments] == [Doubled, Doubled]
