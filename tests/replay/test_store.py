"""Row stores and frames by brute force: reads return the inserted values."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from torch import Tensor

from compiled import NO_KERNELS
from murmurate import native
from murmurate.errors import Refusal
from murmurate.replay import frames, memory
from murmurate.replay.frames import Frames
from murmurate.replay.returns import NStepReturns
from murmurate.replay.rows import Column, RowStore


@pytest.fixture(params=["native", "torch"])
def kernels(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(native, "kernels", None)
    elif native.kernels is None:
        pytest.skip(NO_KERNELS)
    return request.param


COLUMNS = {
    "observation": Column((17,), torch.float32),
    "action": Column((6,), torch.float32),
    "reward": Column((), torch.float32),
    "flag": Column((), torch.bool),
    "count": Column((2,), torch.int64),
    "image": Column((3, 5), torch.uint8),
}


def write(store, slots, values):
    store.put(slots.numpy(), store.checked(values, len(slots)))


def random_values(count, generator):
    return {
        "observation": torch.randn(count, 17, generator=generator),
        "action": torch.randn(count, 6, generator=generator),
        "reward": torch.randn(count, generator=generator),
        "flag": torch.rand(count, generator=generator) < 0.5,
        "count": torch.randint(-(2**60), 2**60, (count, 2), generator=generator),
        "image": torch.randint(256, (count, 3, 5), generator=generator, dtype=torch.uint8),
    }


def test_rows_come_back_as_they_were(kernels, tmp_path):
    generator = torch.Generator().manual_seed(0)
    for take in (memory.private, memory.in_folder(tmp_path / "replay")):
        store = RowStore(500, COLUMNS, take)
        assert store.row_bytes % 64 == 0
        kept = random_values(500, generator)
        write(store, torch.arange(500), kept)
        slots = torch.randint(500, (200,), generator=generator)
        changed = random_values(30, generator)
        places = torch.randperm(500, generator=generator)[:30]
        write(store, places, changed)
        for name, value in changed.items():
            kept[name][places] = value
        result = store.read(slots)
        again = store.read(slots, out=store.buffers(200))
        for name in COLUMNS:
            assert torch.equal(result[name], kept[name][slots])
            assert torch.equal(again[name], result[name])
            assert torch.equal(store.column(name), kept[name])


def test_a_single_row_may_be_of_a_larger_tensor(kernels):
    """A column of predictions [1, 12] is contiguous, with a stride of 12: the reward where one rollout of a
    round is left."""
    store = RowStore(4, {"reward": Column((), torch.float32), "count": Column((1,), torch.int64)})
    predicted = torch.arange(12.0)[None]
    counts = torch.arange(6).view(1, 3, 2)[:, :, 1][:, 1:2]
    write(store, torch.tensor([2]), {"reward": predicted[:, 5], "count": counts})
    read = store.read(torch.tensor([2]))
    assert read["reward"].tolist() == [5.0]
    assert read["count"].tolist() == [[3]]


def test_files_that_a_replay_lives_in_are_no_other_replays(tmp_path):
    take = memory.in_folder(tmp_path)
    first = RowStore(10, COLUMNS, take)
    kept = random_values(10, torch.Generator().manual_seed(0))
    write(first, torch.arange(10), kept)
    with pytest.raises(Refusal, match="in use by another replay"):
        RowStore(10, COLUMNS, take)
    assert torch.equal(first.read(torch.arange(10))["image"], kept["image"])
    del first
    gc.collect()
    assert not RowStore(10, COLUMNS, take).save(10).any()


def test_small_rows_take_no_whole_line(kernels):
    store = RowStore(10, {"action": Column((), torch.int64), "reward": Column((), torch.float32)})
    assert store.row_bytes == 16
    write(store, torch.tensor([3]), {"action": torch.tensor([7]), "reward": torch.tensor([0.5])})
    assert store.read(torch.tensor([3]))["action"].item() == 7


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"observation": None}, "no 'observation'"),
        ({"observation": torch.zeros(2, 16)}, r"'observation' is torch.float32 \[2, 16\]"),
        ({"reward": torch.zeros(2, dtype=torch.float64)}, "'reward' is torch.float64"),
        ({"count": torch.zeros(3, 2, dtype=torch.int64)}, r"\[3, 2\], but this replay stores"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_written(wrong, words):
    store = RowStore(10, COLUMNS)
    values = {**random_values(2, torch.Generator().manual_seed(1)), **wrong}
    values = {name: value for name, value in values.items() if value is not None}
    with pytest.raises(ValueError, match=words):
        write(store, torch.arange(2), values)
    assert not store.save(10).any()


def test_too_large_is_refused_with_what_is_there():
    with pytest.raises(Refusal, match=r"transitions need .* GiB"):
        RowStore(2**40, COLUMNS)


@pytest.mark.parametrize(("stack", "steps"), [(4, 1), (4, 3), (1, 1), (2, 5)])
def test_windows_are_stacks_of_the_stream_also_across_the_rings_end(kernels, stack, steps):
    length, streams = 37, 3
    store = Frames(length, (2, 3), streams=streams, stack=stack, steps=steps)
    heads = [100, 41, 90]
    for stream, head in enumerate(heads):
        for number in range(head):
            image = torch.full((1, 2, 3), (50 * stream + number) % 251, dtype=torch.uint8)
            store.append(np.array([stream]), np.array([number]), image)
    for stream, head in enumerate(heads):
        numbers = range(head - length + stack - 1, head - steps)
        slots = torch.tensor([stream * length + number % length for number in numbers])
        window = store.read(slots)
        for row, number in enumerate(numbers):
            there = [(50 * stream + k) % 251 for k in range(number - stack + 1, number + steps + 1)]
            assert window.frames[row, :, 0, 0].tolist() == there
            assert window.observation[row, :, 1, 2].tolist() == there[:stack]
            assert window.next_observation[row, :, 0, 1].tolist() == there[-stack:]
    assert torch.equal(store.read(slots, out=store.buffers(len(slots))).frames, window.frames)


def test_a_ring_shorter_than_its_windows_is_refused():
    with pytest.raises(ValueError, match="at least 10"):
        Frames(9, (2, 2))


# -- n-step returns -------------------------------------------------------------------------------------


def by_definition(rewards, start, steps, discount, ends, terminated):
    """(return, discount of what follows, length) of the step ``start`` in one episode of ``ends`` steps."""
    length = min(steps, ends - start)
    total = sum(discount**k * rewards[start + k] for k in range(length))
    closed = terminated and start + length == ends
    return total, 0.0 if closed else discount**length, length


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("how", ["terminated", "truncated"])
@pytest.mark.parametrize("ends", [1, 2, 5, 9])
def test_returns_are_as_defined(steps, how, ends):
    returns, discount = NStepReturns(3, steps, 0.9), 0.9
    rewards = [float(3 * k % 7 - 2) for k in range(ends)]
    made = {}
    for t in range(ends):
        last = np.array([t == ends - 1])
        closed = returns.step(1, [rewards[t]], last & (how == "terminated"), last & (how == "truncated"))
        for row in range(len(closed)):
            assert closed.simulator[row] == 1
            made[t + 1 - int(closed.age[row])] = (closed.reward[row], closed.discount[row], closed.age[row])
    assert sorted(made) == list(range(ends))
    for start, result in made.items():
        expected = by_definition(rewards, start, steps, discount, ends, how == "terminated")
        assert result == pytest.approx(expected, rel=1e-6)
    # the next episode begins with nothing open
    no = np.array([False])
    assert len(returns.step(1, [1.0], no, no)) == (steps == 1)


def test_chunks_keep_their_names_while_their_frames_stay(monkeypatch):
    """Against a copy of the ring: one name, the same frames; no more new names than chunks were written."""
    monkeypatch.setattr(frames, "_CHUNK_BYTES", 7 * 6)
    seen: dict[str, Tensor] = {}
    store, heads, image = Frames(30, (2, 3), streams=2), [0, 0], 0
    for turn in range(60):
        if turn == 35:  # another process goes on from here
            fresh = Frames(30, (2, 3), streams=2)
            fresh.load(store.save(heads))
            store = fresh
        for _ in range(turn % 4):
            for stream in range(1 + turn % 2):
                image += 1
                store.append(
                    np.array([stream]),
                    np.array([heads[stream]]),
                    torch.full((1, 2, 3), image % 256, dtype=torch.uint8),
                )
                heads[stream] += 1
        saved = store.save(heads)
        assert [sum(len(c.values) for c in chunks) for chunks in saved] == [min(h, 30) for h in heads]
        new = [c for chunks in saved for c in chunks if c.name not in seen]
        assert len(new) <= 2 * (1 + turn % 2)
        for chunk in (c for chunks in saved for c in chunks):
            assert torch.equal(seen.setdefault(chunk.name, chunk.values.clone()), chunk.values)
    assert len(seen) > 20


def test_another_writer_names_what_it_writes_otherwise():
    one, other = Frames(30, (2, 3)), Frames(30, (2, 3))
    for k in range(5):
        one.append(np.array([0]), np.array([k]), torch.zeros(1, 2, 3, dtype=torch.uint8))
    saved = one.save([5])
    other.load(saved)
    assert other.save([5])[0][0].name == one.save([5])[0][0].name
    for store in (one, other):
        store.append(np.array([0]), np.array([5]), torch.zeros(1, 2, 3, dtype=torch.uint8))
    assert other.save([6])[0][0].name != one.save([6])[0][0].name
    # and one that goes back to a state is another writer too
    former = one.save([6])[0][0].name
    one.load(saved)
    one.append(np.array([0]), np.array([5]), torch.ones(1, 2, 3, dtype=torch.uint8))
    assert one.save([6])[0][0].name != former


def test_frames_that_were_saved_in_one_piece_are_taken():
    one = Frames(30, (2, 3))
    one.load([torch.arange(20 * 6).view(20, 2, 3).to(torch.uint8)])
    (chunks,) = one.save([20])
    assert torch.equal(torch.cat([c.values for c in chunks]).flatten(), torch.arange(120).to(torch.uint8))
