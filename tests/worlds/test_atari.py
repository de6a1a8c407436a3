"""Atari worlds: raw scores, clipped rewards, lives, limits. A few hundred steps each."""

import itertools
import sys

import numpy as np
import pytest
import torch
from torch import Tensor

from filming import record_game
from murmurate.errors import MissingExtra, Refusal
from murmurate.evaluation.games import evaluate
from murmurate.sources.rollouts import RolloutSource
from murmurate.sources.simulator_groups import open_groups
from murmurate.spec import EnvSpec, TimeStep
from murmurate.worlds.atari import AtariSimulators, AtariWorld
from scripted import Always, Watcher

pytest.importorskip("ale_py")


def draw(spec: EnvSpec, size: int, seed: int) -> Tensor:
    return torch.randint(spec.actions, (3000, size), generator=torch.Generator().manual_seed(seed))


def play(simulators: AtariSimulators, action: Tensor) -> TimeStep:
    simulators.send(action)
    return simulators.receive()


def pair(world: AtariWorld, size: int, seed: int) -> tuple[AtariSimulators, AtariSimulators]:
    """The same games, as training and as evaluation see them."""
    both = world.open(size, training=True), world.open(size, training=False)
    starts = [each.reset(seed).observation for each in both]
    assert torch.equal(*starts)
    return both


def test_pong_return_is_the_sum_of_raw_scores() -> None:
    simulators = AtariWorld("pong").open(2, training=True)
    simulators.reset(0)
    scores, points = torch.zeros(2), 0
    for t in range(2000):
        step = play(simulators, torch.zeros(2, dtype=torch.int64))
        scores += step.reward
        points += int((step.reward != 0).sum())
        assert len(step.episodes) == int((step.terminated | step.truncated).sum())
        if step.episodes:
            (game, *_) = step.episodes
            assert game.length == t + 1
            assert game.episode_return == scores[game.simulator] == -21
            break
    else:
        pytest.fail("doing nothing loses a game of Pong within 2000 steps")
    assert points >= 21


def test_clipping_is_for_training_only_and_spares_returns() -> None:
    """Scores of Ms Pac-Man come in tens."""
    training, evaluation = pair(AtariWorld("ms_pacman"), 2, seed=1)
    raw = torch.zeros(2)
    for action in draw(training.spec, 2, seed=0):
        a, b = play(training, action), play(evaluation, action)
        assert torch.equal(a.observation, b.observation)
        assert torch.equal(a.reward, b.reward.clamp(-1, 1))
        raw += b.reward
        assert list(a.episodes) == list(b.episodes)
        if a.episodes:
            assert a.episodes[0].episode_return == raw[a.episodes[0].simulator]
            break
    assert raw.max() >= 100


def test_a_lost_life_ends_the_learners_episode_but_not_the_game() -> None:
    training, evaluation = pair(AtariWorld("breakout"), 1, seed=2)
    losses, total = 0, 0.0
    for t, action in enumerate(draw(training.spec, 1, seed=3)):
        a, b = play(training, action), play(evaluation, action)
        # Equal pictures all along: the game that reports its lives is not restarted by them.
        assert torch.equal(a.observation, b.observation)
        losses += int(a.terminated)
        total += float(b.reward)
        assert list(a.episodes) == list(b.episodes)
        if b.terminated:
            assert a.terminated
            assert (a.episodes[0].episode_return, a.episodes[0].length) == (total, t + 1)
            break
        assert not b.episodes
    assert losses == 5


@pytest.mark.parametrize("frames", [120, 122])
def test_a_limit_truncates_and_gives_the_last_picture(frames: int) -> None:
    world, endless = AtariWorld("pong", max_frames_per_episode=frames), AtariWorld("pong")
    cut, whole = world.open(2, training=True), endless.open(2, training=True)
    assert torch.equal(cut.reset(4).observation, whole.reset(4).observation)
    steps = -(-frames // 4)
    for t, action in enumerate(draw(cut.spec, 2, seed=5)[:steps]):
        a, b = play(cut, action), play(whole, action)
        last = t == steps - 1
        assert not a.terminated.any()
        assert bool(a.truncated.all()) == bool(a.truncated.any()) == last
        assert (a.final_observation is not None) == last
        if not last:
            assert torch.equal(a.observation, b.observation)
    assert a.final_observation is not None
    # The newest frame may be cut short within its four; the three before it are whole.
    assert torch.equal(a.final_observation[:, :3], b.observation[:, :3])
    assert not torch.equal(a.observation[:, :3], b.observation[:, :3])
    assert [(e.simulator, e.length) for e in a.episodes] == [(0, steps), (1, steps)]


def test_games_shorter_than_their_no_ops_are_counted() -> None:
    """The frame number of the next game may be past that of the one before: it need not drop."""
    simulators = AtariWorld("pong", max_frames_per_episode=4).open(4, training=True)
    simulators.reset(0)
    for _ in range(10):
        step = play(simulators, torch.zeros(4, dtype=torch.int64))
        assert [(e.simulator, e.length) for e in step.episodes] == [(b, 1) for b in range(4)]
        assert step.truncated.all()


def test_observations_are_never_written_to_again() -> None:
    simulators = AtariWorld("pong").open(2, training=True)
    kept = [simulators.reset(0).observation]
    copies = [kept[0].clone()]
    for action in draw(simulators.spec, 2, seed=0)[:40]:
        kept.append(play(simulators, action).observation)
        copies.append(kept[-1].clone())
    assert all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))
    # Each stack is the one before, moved on by a frame.
    assert all(torch.equal(a[:, 1:], b[:, :-1]) for a, b in itertools.pairwise(kept))


def test_simulators_differ_by_no_ops_and_halves_equal_the_whole() -> None:
    world = AtariWorld("space_invaders")
    whole = world.open(4, training=True)
    halves = [world.open(2, training=True, first=first) for first in (0, 2)]
    start = whole.reset(8).observation
    assert torch.equal(start, torch.cat([half.reset(8).observation for half in halves]))
    for action in draw(whole.spec, 4, seed=1)[:30]:
        step = play(whole, action)
        parts = [play(half, its) for half, its in zip(halves, action.split(2), strict=True)]
        assert torch.equal(step.observation, torch.cat([part.observation for part in parts]))
    # Two may draw the same number of no-ops, and the game ignores what is pressed so early on.
    assert len({row.numpy().tobytes() for row in step.observation}) >= 3


def test_spec_and_unsavable_state() -> None:
    simulators = AtariWorld("pong", stack=2).open(1, training=True)
    assert simulators.spec == EnvSpec(
        "pong", (2, 84, 84), torch.uint8, actions=6, frames_per_step=4, stacked=True
    )
    simulators.reset(0)
    assert simulators.state() is None
    rollouts = RolloutSource(open_groups(AtariWorld("pong"), 2, training=True), Always(0), 30, seed=0)
    assert not rollouts.exact
    a = next(rollouts).data.last_observation.clone()
    resumed = RolloutSource(open_groups(AtariWorld("pong"), 2, training=True), Always(0), 30, seed=0)
    resumed.load(rollouts.state())
    b = next(resumed).data
    assert b.first[0].all()
    # Other numbers of no-ops: the ball is elsewhere.
    assert not torch.equal(a, b.last_observation)


@pytest.mark.parametrize("bad", [-1, 6])
def test_an_impossible_action_is_refused_instead_of_hanging(bad: int) -> None:
    simulators = AtariWorld("pong").open(2, training=True)
    simulators.reset(0)
    with pytest.raises(ValueError, match="actions 0 to 5"):
        simulators.send(torch.tensor([0, bad]))
    assert play(simulators, torch.tensor([0, 1])).observation.shape == (2, 4, 84, 84)


def test_the_film_shows_the_game_that_is_played() -> None:
    """Its coloured frames, turned grey and small, are what the actor sees."""
    cv2 = pytest.importorskip("cv2")
    simulators = AtariWorld("breakout").open(1, training=False, picture=True)
    simulators.reset(6)
    moved = 0
    for action in draw(simulators.spec, 1, seed=7)[:150]:
        seen = play(simulators, action).observation[0, -1].numpy().astype(int)
        grey = cv2.cvtColor(simulators.picture(), cv2.COLOR_RGB2GRAY)
        small = cv2.resize(grey, (84, 84), interpolation=cv2.INTER_AREA).astype(int)
        assert np.abs(small - seen).max() <= 2
        moved += int(not np.array_equal(grey, grey[:, ::-1]))
    assert moved > 100


def test_film_and_evaluation_agree_on_a_whole_game() -> None:
    world, actor = AtariWorld("breakout", max_frames_per_episode=1200), Watcher(4)
    result = evaluate(world, actor, 2, seed=9)
    frames, total = record_game(world, actor, seed=9)
    assert total == result.returns[0]
    assert frames.shape == (result.lengths[0], 210, 160, 3)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(Refusal, match="frame_skip is 0; it must be from 1 to 1000"):
        AtariWorld("pong", frame_skip=0)
    with pytest.raises(Refusal, match=r"sticky is 1\.5; it must be from 0 to 1"):
        AtariWorld("pong", sticky=1.5)
    with pytest.raises(Refusal, match="Did you mean 'pong'"):
        AtariWorld("pongo").open(1, training=True)
    with pytest.raises(ValueError, match="picture=True"):
        AtariWorld("pong").open(1, training=True).picture()


def test_missing_ale_py_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [m for m in sys.modules if m.startswith("ale_py")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "ale_py", None)
    with pytest.raises(MissingExtra, match=r"Atari needs the package ale-py.*murmurate\[atari\]"):
        AtariWorld("pong").open(1, training=True)
