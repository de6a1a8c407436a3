"""Replays against a list of all that was put in."""

from __future__ import annotations

import pytest
import torch

from murmurate.replay.adder import Adder
from murmurate.replay.buffer import FrameReplay, RowReplay
from murmurate.replay.priorities import Prioritized, Uniform
from murmurate.replay.rows import Column

KINDS = {"prioritized": Prioritized, "uniform": Uniform}


def games(count, lengths, ends, generator):
    """Steps (observation number, action, reward, next number, terminated, truncated) of endless numbers."""
    number = 0
    for game in range(count):
        length = lengths[game % len(lengths)]
        for t in range(length):
            last = t == length - 1
            kind = ends[game % len(ends)]
            yield (
                number, int(torch.randint(4, (), generator=generator)),
                float(torch.randn((), generator=generator)), number + 1,
                last and kind == "terminated", last and kind == "truncated", t == 0,
            )  # fmt: skip
            number += 1
        number += 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [1, 3])
def test_rows_hold_the_newest_transitions(kind, steps):
    replay = RowReplay(
        KINDS[kind](100), Column((2,), torch.float32), Column((), torch.int64), steps=steps, discount=0.9
    )
    oracle, adder = [], Adder(steps, 0.9)
    for now, action, reward, after, terminated, truncated, _ in games(
        40, [1, 7, 12], ["terminated", "truncated"], torch.Generator().manual_seed(0)
    ):
        step = (torch.tensor(action), reward)
        oracle += adder.add(
            torch.tensor([now, -now]), *step, torch.tensor([after, -after]), terminated, truncated
        )
        replay.add(
            0,
            torch.tensor([now, -now]).float(),
            *step,
            torch.tensor([after, -after]).float(),
            terminated,
            truncated,
        )
    assert replay.inserted == len(oracle) > 100
    assert len(replay) == 100
    newest = {int(t.observation[0]): t for t in oracle[-100:]}
    sample = replay.sample(90, 0.4)
    for row in range(90):
        t = newest[int(sample.observation[row, 0])]
        assert sample.next_observation[row].tolist() == t.next_observation.tolist()
        assert sample.reward[row] == pytest.approx(t.reward, rel=1e-6)
        assert sample.discount[row] == pytest.approx(t.discount)
        assert sample.action[row] == t.action
        assert int(sample.observation[row, 0]) == int(oracle[int(sample.keys[row])].observation[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("simulators", [1, 2])
def test_frames_are_stacked_again_as_they_were(kind, steps, simulators):
    """Every transition that can be drawn has the stacks it was put in with; and most of the ring can."""
    stack, length = 4, 120
    replay = FrameReplay(
        KINDS[kind](length * simulators),
        (2, 2),
        simulators=simulators,
        stack=stack,
        steps=steps,
        discount=0.9,
    )

    def picture(simulator, number, first):
        """The last four numbers of the episode; before its first one there is its first one."""
        shown = [max(number - k, first) for k in reversed(range(stack))]
        # a byte tells stream and number apart well enough
        return torch.stack([torch.full((2, 2), (97 * simulator + n) % 256, dtype=torch.uint8) for n in shown])

    oracle = [{} for _ in range(simulators)]
    for simulator in range(simulators):
        adder, begun = Adder(steps, 0.9), 0
        for now, action, reward, after, terminated, truncated, first in games(
            40, [1, 7, 12, 30], ["terminated", "truncated"], torch.Generator().manual_seed(simulator)
        ):
            begun = now if first else begun
            seen, then = picture(simulator, now, begun), picture(simulator, after, begun)
            step = (torch.tensor(action), reward)
            for t in adder.add(seen, *step, then, terminated, truncated):
                oracle[simulator][round(t.reward, 5)] = t
            replay.add(simulator, seen, *step, then, terminated, truncated)
    assert len(replay) > 0.4 * length * simulators
    drawn = set()
    for _ in range(20):
        sample = replay.sample(50, 0.4)
        for row in range(50):
            stream = int(sample.keys[row]) >> 40
            t = oracle[stream][round(float(sample.reward[row]), 5)]
            assert torch.equal(sample.observation[row], t.observation)
            assert sample.action[row] == t.action
            assert sample.discount[row] == pytest.approx(t.discount)
            if t.discount > 0:
                assert torch.equal(sample.next_observation[row], t.next_observation)
            drawn.add(int(sample.keys[row]))
    assert len(drawn) > 0.7 * len(replay)


@pytest.mark.parametrize("make", [RowReplay, FrameReplay])
def test_a_late_error_about_what_is_gone_is_dropped(make):
    chances = Prioritized(64, alpha=1.0, epsilon=0.0)
    if make is RowReplay:
        replay = RowReplay(chances, Column((2, 2), torch.uint8), Column((), torch.int64))
    else:
        replay = FrameReplay(chances, (2, 2), simulators=1, stack=1)

    def play(count):
        for _ in range(count):
            image = torch.zeros(1, 2, 2, dtype=torch.uint8)
            shown = image if make is FrameReplay else image[0]
            replay.add(0, shown, torch.tensor(0), 0.0, shown, False, False)

    play(40)
    keys = replay.sample(10, 0.4).keys
    play(200)
    before = chances.tree.total
    replay.update(keys, torch.full((10,), 100.0))
    assert chances.tree.total == before
    keys = replay.sample(10, 0.4).keys
    replay.update(keys, torch.full((10,), 100.0))
    assert chances.tree.total > before


@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_on_from_its_state(kind):
    def make(seed):
        return RowReplay(KINDS[kind](50, seed=seed), Column((1,), torch.float32), Column((), torch.int64))

    one, other = make(0), make(1)
    for t in range(80):
        one.add(0, torch.tensor([float(t)]), torch.tensor(t), float(t), torch.tensor([t + 1.0]), False, False)
    one.update(one.sample(20, 0.4).keys, torch.rand(20))
    other.load(one.state())
    assert len(other) == 50
    assert other.inserted == one.inserted
    for _ in range(3):
        a, b = one.sample(30, 0.5), other.sample(30, 0.5)
        assert torch.equal(a.keys, b.keys)
        assert torch.equal(a.weights, b.weights)
        assert torch.equal(a.observation, b.observation)


@pytest.mark.parametrize("kind", KINDS)
def test_no_batch_is_drawn_that_is_not_there(kind):
    replay = RowReplay(KINDS[kind](50), Column((1,), torch.float32), Column((), torch.int64))
    with pytest.raises(ValueError, match="the replay is empty"):
        replay.sample(1, 0.4)
    for _ in range(5):
        replay.add(0, torch.zeros(1), torch.tensor(0), 0.0, torch.zeros(1), False, False)
    assert len(replay.sample(5, 0.4).keys) == 5
    with pytest.raises(ValueError, match="a batch of 6 cannot be drawn from the 5"):
        replay.sample(6, 0.4)


def test_new_ones_enter_at_the_highest_priority_or_their_own():
    chances = Prioritized(10, alpha=0.5, epsilon=0.0)
    chances.put(torch.tensor([0]))
    chances.update(torch.tensor([0]), torch.tensor([9.0]))
    chances.put(torch.tensor([1]))
    chances.put(torch.tensor([2]), torch.tensor([4.0]))
    torch.testing.assert_close(chances.tree.priorities[:4], torch.tensor([3.0, 3.0, 2.0, 0.0]))
    chances.take_out(torch.tensor([0, 0, 5]))
    assert chances.filled == 2
    assert set(chances.draw(2, 0.4).indices.tolist()) <= {1, 2}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_taken_out_is_not_drawn(kind):
    chances = KINDS[kind](100)
    chances.put(torch.arange(100))
    chances.take_out(torch.arange(0, 100, 3))
    chances.put(torch.tensor([3, 3, 4]))
    assert chances.filled == 67
    drawn = set(torch.cat([chances.draw(60, 0.4).indices for _ in range(60)]).tolist())
    assert drawn == {k for k in range(100) if k % 3 or k == 3}
