"""Our answers to the requests of ``bench replay`` (the protocol is in ``replay_windows``), in their own
process."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

import murmurate
from murmurate import native
from murmurate.bench._peer_protocols.replay_windows import (
    ALPHA,
    BETA,
    FRAMES,
    TRANSITION,
    Call,
    priorities,
    rounds,
    serve,
)
from murmurate.replay.frame_replay import FrameReplay
from murmurate.replay.interface import Replay, Steps
from murmurate.replay.priorities import Prioritized
from murmurate.replay.row_replay import RowReplay
from murmurate.replay.rows import Column
from murmurate.replay.tree import empty_draw

SIMULATORS = 16  # that fill the replay of frames
_LINE_BYTES = 64
BOUND_SEARCHES = 16_384  # in a call: so many that the call's overhead is negligible


def make(task: str, capacity: int, batch: int) -> Call | None:
    if task == "bound":
        return _bound(capacity)
    if task in ("rows", "rows_reused", "insert"):
        return _rows(task, capacity, batch)
    if task in ("atari", "atari_reused"):
        replay = _frames(capacity)
        return _batches(replay, batch, reused=task == "atari_reused")
    sampler = _full_sampler(capacity)
    if task == "sample":
        return partial(sampler.draw, batch, BETA)
    if task == "sample_reused":
        return partial(sampler.draw, batch, BETA, empty_draw(batch))
    if task == "update":
        updates = _updates(capacity, batch)
        return lambda: sampler.update(*next(updates))
    if task in ("find", "find_reused"):
        out = torch.empty(batch, dtype=torch.int64) if task == "find_reused" else None
        generator = np.random.default_rng(2)
        masses = generator.random((max(1, 2**20 // batch), batch)) * sampler.tree.total
        queries = itertools.cycle(torch.from_numpy(masses).unbind(0))
        return lambda: sampler.tree.find(next(queries), out)
    return None


def _full_sampler(capacity: int) -> Prioritized:
    sampler = Prioritized(capacity, alpha=ALPHA, epsilon=0.0)
    sampler.put(torch.arange(capacity), torch.from_numpy(priorities(capacity)))
    return sampler


def _updates(capacity: int, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    indices, errors = rounds(capacity, batch)
    pairs = zip(torch.from_numpy(indices).unbind(0), torch.from_numpy(errors).unbind(0), strict=True)
    return itertools.cycle(list(pairs))


def _rows(task: str, capacity: int, batch: int) -> Call:
    state, action = TRANSITION
    replay = RowReplay(
        Prioritized(capacity, alpha=ALPHA, epsilon=0.0),
        Column((state,), torch.float32),
        Column((action,), torch.float32),
    )

    def values(count: int) -> dict[str, Tensor]:
        return {
            "observation": torch.randn(count, state),
            "next_observation": torch.randn(count, state),
            "action": torch.randn(count, action),
            "reward": torch.randn(count),
            "discount": torch.full((count,), 0.99),
        }

    errors = torch.from_numpy(priorities(capacity))
    for part in torch.split(errors, 2**14):
        replay.insert(values(len(part)), len(part), part)
    if task == "insert":
        batches = itertools.cycle([values(batch) for _ in range(16)])
        return lambda: replay.insert(next(batches), batch)
    return _batches(replay, batch, reused=task == "rows_reused")


def _batches(replay: Replay, batch: int, reused: bool) -> Call:
    """reused: each batch is written into the same memory."""
    buffers, draw = (replay.buffers(batch), empty_draw(batch)) if reused else (None, None)
    return lambda: replay.gather(replay.choose(batch, BETA, draw), buffers)


def _frames(capacity: int) -> FrameReplay:
    """A full replay of frames, all different, from episodes that do not end."""
    stack, *shape = FRAMES
    replay = FrameReplay(
        Prioritized(capacity, alpha=ALPHA, epsilon=0.0), tuple(shape), simulators=SIMULATORS, stack=stack
    )
    all_false = torch.zeros(SIMULATORS, dtype=torch.bool)
    generator = torch.Generator().manual_seed(0)
    image = torch.zeros(SIMULATORS, stack, *shape, dtype=torch.uint8)
    action = torch.zeros(SIMULATORS, dtype=torch.int64)
    while not replay.full:
        after = torch.roll(image, -1, 1)
        after[:, -1] = torch.randint(256, (SIMULATORS, *shape), generator=generator, dtype=torch.uint8)
        reward = torch.randn(SIMULATORS, generator=generator)
        replay.observe(0, Steps(image, action, reward, after, all_false, all_false))
        image = after
    slots = torch.nonzero(replay.sampler.tree.priorities > 0)[:, 0]  # type: ignore[attr-defined]
    replay.sampler.update(slots, torch.from_numpy(priorities(capacity))[slots])
    return replay


def _bound(capacity: int) -> Call | None:
    """A lower bound of ``BOUND_SEARCHES`` searches: read the cache lines of so many random searches, at
    addresses known beforehand.

    A search reads one line of the leaves and one of each level above, except for the root.
    """
    kernels = native.kernels
    if kernels is None:
        return None
    generator = np.random.default_rng(3)
    reads: list[tuple[np.ndarray, list[np.ndarray]]] = []
    lines = -(-capacity // 16)  # a cache line holds 16 numbers, which one number of the level above sums up
    while lines > 1:
        memory = np.zeros(lines * _LINE_BYTES + _LINE_BYTES, np.uint8)
        memory += 1  # maps all its pages
        orders = [generator.integers(0, lines, BOUND_SEARCHES) for _ in range(16)]
        aligned = memory[-memory.ctypes.data % _LINE_BYTES :]
        reads.append((aligned, orders))
        lines = -(-lines // 16)
    turns = itertools.cycle(range(16))

    def call() -> None:
        turn = next(turns)
        for memory, orders in reads:
            kernels.touch(memory.ctypes.data, orders[turn].ctypes.data, BOUND_SEARCHES)

    return call


def main() -> None:
    torch.set_num_threads(1)
    serve(f"murmurate ({native.simd})", murmurate.__version__, make)


def exactness(capacity: int, draws: int) -> float:
    """Chi-square per degree of freedom of how often each leaf is drawn, against its priority."""
    sampler = _full_sampler(capacity)
    tree: Any = sampler.tree
    counts = torch.zeros(capacity, dtype=torch.float64)
    chunk = 2**22
    for start in range(0, draws, chunk):
        drawn = tree.sample(min(chunk, draws - start), 0.0).indices
        counts += torch.bincount(drawn, minlength=capacity)
    expected = tree.priorities.double() / tree.priorities.double().sum() * draws
    return float(((counts - expected).square() / expected).sum() / (capacity - 1))


def drift(capacity: int, updates: int) -> float:
    """Total variation distance between the tree's and the exact probabilities after ``updates`` updates.

    The priorities decay from 1 to 1e-4.
    """
    sampler = _full_sampler(capacity)
    tree: Any = sampler.tree
    generator = torch.Generator().manual_seed(0)
    batch = 2**14
    for start in range(0, updates, batch):
        scale = 10.0 ** (-4.0 * start / updates)
        index = torch.randint(capacity, (batch,), generator=generator)
        tree.set(index, scale * (torch.rand(batch, generator=generator) + 0.001))
    return realised_distance(tree)


def realised_distance(tree: Any) -> float:
    """Half the sum of |realised probability - exact probability| over the leaves.

    A leaf's realised probability is the length of its interval of masses over the total; bisection finds the
    interval's upper end.
    """
    exact = tree.priorities.double()
    low, high = torch.zeros_like(exact), torch.full_like(exact, tree.total)
    leaves = torch.arange(tree.capacity)
    # midpoints in the last leaf's interval may round up to the total
    largest_mass = math.nextafter(tree.total, 0.0)
    for _ in range(60):  # bisect for the least mass at which ``find`` returns a later leaf
        middle = ((low + high) / 2).clamp(max=largest_mass)
        beyond = torch.cat([tree.find(part) for part in torch.split(middle, 2**20)]) > leaves
        high, low = torch.where(beyond, middle, high), torch.where(beyond, low, middle)
    probability = torch.diff(high, prepend=high.new_zeros(1)) / tree.total
    return float(0.5 * (probability - exact / exact.sum()).abs().sum())


if __name__ == "__main__":
    main()
