"""Batches that are drawn ahead: the errors they know, and that they hold what their keys name."""

from __future__ import annotations

import pytest
import torch

from compiled import NO_KERNELS
from murmurate import native
from murmurate.replay import async_copy, prefetch
from murmurate.replay.async_copy import AsyncCopy
from murmurate.replay.config import ReplayConfig
from murmurate.replay.frame_replay import FrameReplay
from murmurate.replay.interface import Selection, Steps
from murmurate.replay.prefetch import Prefetcher
from murmurate.replay.priorities import Prioritized
from murmurate.replay.row_replay import RowReplay
from murmurate.replay.rows import Column
from murmurate.replay.tree import Draw
from murmurate.sources.replay_sampler import ReplaySampler
from replay.small_steps import rows


class Late(AsyncCopy):
    """Does nothing before it is waited for: who does not wait, or waits too late, finds something else."""

    def __init__(self):
        super().__init__()
        self._late = []

    def gather(self, *what):
        self._later(super().gather, what)

    def split(self, *what):
        self._later(super().split, what)

    def _later(self, do, what):
        self.number += 1
        self._late.append((self.number, do, what))

    def wait(self, number):
        while self._late and self._late[0][0] <= number:
            _, do, what = self._late.pop(0)
            do(*what)
        super().wait(number)


@pytest.fixture(params=["by the caller", "at once, as small", "by a thread", "not before it is waited for"])
def copied(request, monkeypatch):
    """How batches that are drawn ahead get there. Whether a copier is asked, and may take its time."""
    if request.param == "by the caller":
        monkeypatch.setattr(native, "kernels", None)
        return False
    if native.kernels is None:
        pytest.skip(NO_KERNELS)
    if request.param == "by a thread":
        monkeypatch.setattr(async_copy, "_SMALL_BYTES", 0)
    elif request.param == "not before it is waited for":
        monkeypatch.setattr(prefetch, "AsyncCopy", Late)
    return "small" not in request.param


@pytest.mark.usefixtures("copied")
def test_batches_ahead_know_the_errors_of_so_many_before():
    """With D ahead the first 1 + D batches are drawn without errors, as from a strict loop that has none."""

    def make():
        replay = RowReplay(
            Prioritized(500, alpha=1.0, seed=3), Column((1,), torch.float32), Column((), torch.int64)
        )
        rows(replay, 300)
        return replay

    def drawn(depth, reported, batches=9):
        replay = make()
        ahead = Prefetcher(replay, 32, depth)
        out, weights = [], []
        for t in range(batches):
            sample = ahead.next(0.4)
            out.append(sample.keys.clone())
            assert torch.equal(sample.observation[:, 0].long(), sample.keys)
            weights.append(sample.weights.clone())
            if t < reported:
                replay.update(sample.keys, torch.full((32,), 1000.0))
        ahead.close()
        if not reported:  # as one draw after the other has them
            fresh = make()
            assert all(torch.equal(w, fresh.sample(32, 0.4).weights) for w in weights)
        return out

    for depth in (0, 1, 3):
        with_errors, without = drawn(depth, reported=9), drawn(depth, reported=0)
        same = [torch.equal(a, b) for a, b in zip(with_errors, without, strict=True)]
        assert same == [t <= depth for t in range(9)]
    assert all(torch.equal(a, b) for a, b in zip(drawn(3, reported=9), drawn(3, reported=9), strict=True))


@pytest.mark.parametrize("depth", [0, 1, 50])
def test_batches_ahead_hold_what_their_keys_name_though_the_replay_goes_on(depth, copied):
    """What is learned from is what a look into the replay by its keys finds then, if it is still there."""
    generator = torch.Generator().manual_seed(0)
    replay = FrameReplay(Prioritized(800), (2, 2), simulators=4, stack=4, steps=3)
    shown = torch.zeros(4, 4, 2, 2, dtype=torch.uint8)
    ahead, number, compared = Prefetcher(replay, 8, depth), 0, 0
    for update in range(330):
        if update < 30 or update % 2:
            number += 1
            after = torch.cat([shown[:, 1:], torch.full((4, 1, 2, 2), number % 251, dtype=torch.uint8)], 1)
            reward, action = torch.randn(4, generator=generator), torch.arange(4)
            ends = torch.rand(2, 4, generator=generator) < 0.03
            if replay.full:
                ahead.drain()
            replay.observe(0, Steps(shown, action, reward, after, *ends))
            shown = torch.where(ends.any(0)[:, None, None, None], after + 100, after)
        if update < 30:
            continue
        sample = ahead.next(0.4)
        newest = torch.from_numpy(replay._heads)[sample.keys >> 40]
        kept = (sample.keys & (2**40 - 1)) >= newest - replay.frames.length + replay.frames.stack - 1
        keys = sample.keys[kept]
        length = replay.frames.length
        slots = (keys >> 40) * length + (keys & (2**40 - 1)) % length
        there = replay.gather(Selection(keys, Draw(slots, sample.weights[kept])))
        for name in ("observation", "action", "reward", "discount"):
            assert torch.equal(getattr(sample, name)[kept], getattr(there, name))
        goes_on = sample.discount[kept] > 0
        assert torch.equal(sample.next_observation[kept][goes_on], there.next_observation[goes_on])
        replay.update(sample.keys, torch.rand(8, generator=generator))
        compared += int(goes_on.sum())
    assert compared > 1500
    assert (ahead._copier is not None and ahead._copier.number > 500) == (copied and depth > 0)
    ahead.close()


@pytest.mark.usefixtures("copied")
def test_batches_that_are_ahead_are_saved_as_they_were_drawn():
    replay = RowReplay(Prioritized(100), Column((1,), torch.float32), Column((), torch.int64))
    rows(replay, 100)
    ahead = Prefetcher(replay, 16, 4)
    ahead.next(0.4)
    saved = ahead.state()
    rows(replay, 100, start=100)  # all that was drawn is overwritten
    other = Prefetcher(replay, 16, 4)
    other.load(saved)
    for _ in range(4):
        assert torch.equal(ahead.next(0.4).keys, (sample := other.next(0.4)).keys)
        assert torch.equal(sample.observation[:, 0].long(), sample.keys)
        assert (sample.keys < 100).all()
    ahead.close()
    other.close()


@pytest.mark.usefixtures("copied")
def test_steps_wait_for_what_is_still_to_be_copied_from_where_they_go():
    """The replay is full from the sixth step on, and each later one overwrites some of what was drawn."""
    replay = RowReplay(Prioritized(100), Column((1,), torch.float32), Column((), torch.int64), simulators=20)
    config = ReplayConfig(capacity=100, learning_starts=40, samples_per_insert=4.0, ahead=3)
    drawing = ReplaySampler(replay, config, 16, torch.device("cpu"), lambda: 0.0)
    no, number, seen = torch.zeros(20, dtype=torch.bool), 0, 0
    while seen < 200:
        while not drawing.due:
            drawing.before_steps()
            here = torch.arange(number, number + 20).float()
            drawing.insert(0, Steps(here[:, None], here.long(), here, here[:, None] + 1, no, no))
            number += 20
        batch = drawing.next(0, [])
        assert torch.equal(batch.data.observation[:, 0].long(), batch.keys)
        assert torch.equal(batch.data.action, batch.keys)
        batch.feedback(torch.rand(16))
        seen += 1
    assert number > 500
    drawing.close()
