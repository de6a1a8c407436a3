"""Replays against a list of all insertions."""

from __future__ import annotations

import pytest
import torch

from covering import pairwise
from murmurate.replay import frames
from murmurate.replay.frame_replay import FrameReplay
from murmurate.replay.interface import Steps
from murmurate.replay.priorities import Prioritized, Uniform
from murmurate.replay.row_replay import RowReplay
from murmurate.replay.rows import Column
from murmurate.replay.tree import Draw
from oracles.n_step_adder import Adder
from replay.small_steps import rows, step

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
        seen, then, ends = torch.tensor([now, -now]), torch.tensor([after, -after]), (terminated, truncated)
        oracle += adder.add(seen, torch.tensor(action), reward, then, *ends)
        replay.observe(0, step(seen.float(), action, reward, then.float(), *ends))
    assert replay.inserted == len(oracle) > 100
    assert len(replay) == 100
    assert replay.full
    by_number = {int(t.observation[0]): t for t in oracle}
    newest = {number: by_number[number] for number in sorted(by_number)[-100 - 2 * steps :]}
    sample = replay.sample(90, 0.4)
    for row in range(90):
        t = newest[int(sample.observation[row, 0])]
        assert sample.next_observation[row].tolist() == t.next_observation.tolist()
        assert sample.reward[row] == pytest.approx(t.reward, rel=1e-6)
        assert sample.discount[row] == pytest.approx(t.discount)
        assert sample.action[row] == t.action
    # an errand about a transition comes to the one it is about
    again = replay.rows.column("observation")[sample.keys % 100]
    assert torch.equal(again, sample.observation)


@pytest.mark.parametrize(
    ("kind", "steps", "simulators", "colours"),
    [(kind, steps, *of) for kind, steps, of in pairwise(KINDS, [1, 3], [(1, ()), (2, ()), (2, (3,))])],
)
def test_frames_are_stacked_again_as_they_were(kind, steps, simulators, colours):
    """Every transition that can be drawn has the stacks it was put in with; and most of the ring can."""
    stack, length = 4, 120
    replay = FrameReplay(
        KINDS[kind](length * simulators),
        (*colours, 2, 2),
        simulators=simulators,
        stack=stack,
        steps=steps,
        discount=0.9,
    )

    def picture(simulator, number, first):
        """The last four numbers of the episode; before its first one there is its first one."""
        shown = [max(number - k, first) for k in reversed(range(stack))]
        # a byte tells stream and number apart well enough
        grey = [torch.full((1, 2, 2), (97 * simulator + n) % 256, dtype=torch.uint8) for n in shown]
        return torch.cat([torch.cat([image + 50 * c for c in range(*(colours or (1,)))]) for image in grey])

    oracle = [{} for _ in range(simulators)]
    for simulator in range(simulators):
        adder, begun = Adder(steps, 0.9), 0
        for now, action, reward, after, terminated, truncated, first in games(
            40, [1, 7, 12, 30], ["terminated", "truncated"], torch.Generator().manual_seed(simulator)
        ):
            begun = now if first else begun
            seen, then = picture(simulator, now, begun), picture(simulator, after, begun)
            for t in adder.add(seen, torch.tensor(action), reward, then, terminated, truncated):
                oracle[simulator][round(t.reward, 5)] = t
            replay.observe(simulator, step(seen, action, reward, then, terminated, truncated))
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
    sampler = Prioritized(64, alpha=1.0, epsilon=0.0)
    if make is RowReplay:
        replay = RowReplay(sampler, Column((2, 2), torch.uint8), Column((), torch.int64))
    else:
        replay = FrameReplay(sampler, (2, 2), simulators=1, stack=1)

    def play(count):
        for _ in range(count):
            image = torch.zeros(1, 2, 2, dtype=torch.uint8)
            shown = image if make is FrameReplay else image[0]
            replay.observe(0, step(shown, 0, 0.0, shown))

    play(40)
    keys = replay.sample(10, 0.4).keys
    play(200)
    before = sampler.tree.total
    replay.update(keys, torch.full((10,), 100.0))
    assert sampler.tree.total == before
    keys = replay.sample(10, 0.4).keys
    replay.update(keys, torch.full((10,), 100.0))
    assert sampler.tree.total > before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("played", [40, 80])
def test_what_is_chosen_lies_where_it_was_asked_for_and_is_the_same(kind, played):
    def make():
        replay = RowReplay(KINDS[kind](50, seed=3), Column((1,), torch.float32), Column((), torch.int64))
        rows(replay, played)
        return replay

    one, other = make(), make()
    kept = []
    buffers, out = one.buffers(20), Draw(torch.empty(20, dtype=torch.int64), torch.empty(20))
    for _ in range(3):
        chosen = one.choose(20, 0.5, out)
        assert chosen.draw.indices is out.indices
        assert chosen.draw.weights is out.weights
        mine, new = one.gather(chosen, buffers), other.sample(20, 0.5)
        assert mine.weights is out.weights
        assert mine.observation is buffers["observation"]
        for field in ("keys", "weights", "observation", "next_observation", "action"):
            assert torch.equal(getattr(mine, field), getattr(new, field))
        kept.append((mine.keys, new.keys))
    assert all(torch.equal(*keys) for keys in kept)  # errors may come late


@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_on_from_its_state(kind):
    def make(seed):
        return RowReplay(KINDS[kind](50, seed=seed), Column((1,), torch.float32), Column((), torch.int64))

    one, other = make(0), make(1)
    rows(one, 80)
    errors = torch.rand(20, generator=torch.Generator().manual_seed(0))
    one.update(one.sample(20, 0.4).keys, 3 * errors)  # some above 1, at which priorities begin
    other.load(one.state())
    assert len(other) == 50
    assert other.inserted == one.inserted
    for _ in range(3):
        rows(one, 3)
        rows(other, 3)
        a, b = one.sample(30, 0.5), other.sample(30, 0.5)
        assert torch.equal(a.keys, b.keys)
        assert torch.equal(a.weights, b.weights)
        assert torch.equal(a.observation, b.observation)


@pytest.mark.parametrize("kind", KINDS)
def test_no_batch_is_drawn_that_is_not_there(kind):
    replay = RowReplay(KINDS[kind](50), Column((1,), torch.float32), Column((), torch.int64))
    with pytest.raises(ValueError, match="the replay is empty"):
        replay.sample(1, 0.4)
    rows(replay, 5)
    assert len(replay.sample(5, 0.4).keys) == 5
    with pytest.raises(ValueError, match="a batch of 6 cannot be drawn from 5"):
        replay.sample(6, 0.4)


def test_new_ones_enter_at_the_highest_priority_or_their_own():
    sampler = Prioritized(10, alpha=0.5, epsilon=0.0)
    sampler.put(torch.tensor([0]))
    sampler.update(torch.tensor([0]), torch.tensor([9.0]))
    sampler.put(torch.tensor([1]))
    sampler.put(torch.tensor([2]), torch.tensor([4.0]))
    torch.testing.assert_close(sampler.tree.priorities[:4], torch.tensor([3.0, 3.0, 2.0, 0.0]))
    sampler.remove(torch.tensor([0, 0, 5]))
    assert sampler.filled == 2
    assert set(sampler.draw(2, 0.4).indices.tolist()) <= {1, 2}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_taken_out_is_not_drawn(kind):
    sampler = KINDS[kind](100)
    sampler.put(torch.arange(100))
    sampler.remove(torch.arange(0, 100, 3))
    sampler.put(torch.tensor([3, 3, 4]))
    assert sampler.filled == 67
    drawn = set(torch.cat([sampler.draw(60, 0.4).indices for _ in range(60)]).tolist())
    assert drawn == {k for k in range(100) if k % 3 or k == 3}


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_many_simulators_at_once_are_as_many_one_by_one(steps):
    """Rows of a few simulators that end at different times, in two groups, against an adder for each."""
    generator = torch.Generator().manual_seed(0)
    count = 5
    replay = RowReplay(
        Uniform(10_000),
        Column((), torch.int64),
        Column((), torch.int64),
        steps=steps,
        discount=0.9,
        simulators=count,
    )
    adders = [Adder(steps, 0.9) for _ in range(count)]
    oracle = []
    for t in range(200):
        seen = torch.arange(count) + 10 * t
        after = torch.arange(count) + 10 * (t + 1)
        action = torch.randint(4, (count,), generator=generator)
        reward = torch.randn(count, generator=generator)
        ends = torch.randint(12, (count,), generator=generator)
        terminated, truncated = ends == 0, ends == 1
        for low, high in ((0, 2), (2, count)):
            here = slice(low, high)
            part = (x[here] for x in (seen, action, reward, after, terminated, truncated))
            replay.observe(low, Steps(*part))
        for b in range(count):
            oracle += adders[b].add(
                seen[b], action[b], float(reward[b]), after[b], bool(terminated[b]), bool(truncated[b])
            )
        if t == 100:  # somebody restarts a simulator
            replay.restart(1, 1)
            adders[1].forget()
    assert replay.inserted == len(oracle)
    kept = {int(x): row for row, x in enumerate(replay.rows.column("observation")[: len(oracle)])}
    for t in oracle:
        row = kept.pop(int(t.observation))
        assert replay.rows.column("action")[row] == t.action
        assert replay.rows.column("reward")[row] == pytest.approx(t.reward, abs=1e-5)
        assert replay.rows.column("discount")[row] == pytest.approx(t.discount)
        if t.discount:
            assert replay.rows.column("next_observation")[row] == t.next_observation
    assert not kept


@pytest.mark.parametrize("played", [30, 200])
@pytest.mark.parametrize("chunk_bytes", [28, 10_000])
def test_frames_go_on_from_their_state(played, chunk_bytes, monkeypatch):
    """In the middle of episodes and of returns; before and after the ring has come round."""
    monkeypatch.setattr(frames, "_CHUNK_BYTES", chunk_bytes)

    def make(seed):
        return FrameReplay(Prioritized(120, seed=seed), (2, 2), simulators=2, stack=2, steps=3, discount=0.9)

    def play(replay, start, count):
        for t in range(start, start + count):
            shown = torch.tensor([[t - 1, t], [t + 99, t + 100]])[..., None, None].expand(2, 2, 2, 2)
            flags = torch.tensor([t % 7 == 0, t % 11 == 0])
            reward = torch.tensor([float(t), -float(t)])
            image = (shown % 251).to(torch.uint8)
            replay.observe(
                0, Steps(image, torch.tensor([t, t]), reward, image, flags, ~flags & (t % 13 == 0))
            )

    one, other = make(0), make(1)
    play(one, 0, played)
    other.load(one.state())
    assert other.inserted == one.inserted > 0
    for replay in (one, other):
        play(replay, played, 40)
    for _ in range(5):
        a, b = one.sample(20, 0.5), other.sample(20, 0.5)
        for name in ("keys", "weights", "observation", "action", "reward", "discount", "next_observation"):
            assert torch.equal(getattr(a, name), getattr(b, name)), name
