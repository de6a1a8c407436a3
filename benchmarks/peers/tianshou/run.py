"""Answers ``murmurate bench`` with the speed of Tianshou's prioritized replay (see README.md)."""

from __future__ import annotations

import importlib.metadata
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import torch
from tianshou.data import PrioritizedReplayBuffer, ReplayBuffer, SegmentTree

try:
    from replay_windows import ALPHA, BETA, FRAMES, TRANSITION, Call, priorities, rounds, serve
except ImportError as problem:
    raise SystemExit("no replay_windows: set PYTHONPATH to src/murmurate/bench/_peer_protocols") from problem

EPISODE = 1000


def source(capacity: int, observation: np.ndarray, action: np.ndarray, after: np.ndarray) -> ReplayBuffer:
    """Tianshou's plain buffer with these arrays, in episodes of fixed length."""
    ends = np.arange(1, capacity + 1) % EPISODE == 0
    return ReplayBuffer.from_data(
        obs=observation,
        act=action,
        rew=np.zeros(capacity, dtype=np.float32),
        terminated=ends,
        truncated=np.zeros(capacity, dtype=bool),
        done=ends,
        obs_next=after,
    )


def rows(count: int, seed: int = 2) -> ReplayBuffer:
    generator, (observation, action) = np.random.default_rng(seed), TRANSITION
    sizes = (observation, action, observation)
    return source(count, *(generator.random((count, size), dtype=np.float32) for size in sizes))


def frames(count: int) -> ReplayBuffer:
    """One frame a transition, which the buffer stacks; s' is s of the next one and is not stored."""
    film = np.random.default_rng(2).integers(256, size=(count, *FRAMES[1:]), dtype=np.uint8)
    return source(count, film, np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.uint8))


def smallest(count: int) -> ReplayBuffer:
    return source(count, *(np.zeros(count, dtype=np.float32) for _ in range(3)))


def full(content: ReplayBuffer, capacity: int, **options: Any) -> PrioritizedReplayBuffer:
    replay = PrioritizedReplayBuffer(capacity, alpha=ALPHA, beta=BETA, **options)
    replay.update(content)
    replay.update_weight(np.arange(capacity), priorities(capacity))
    return replay


def make(task: str, capacity: int, batch: int) -> Call | None:
    if task == "sample":
        return samples(full(smallest(capacity), capacity), batch)
    if task == "update":
        return updates(full(smallest(capacity), capacity), capacity, batch)
    if task == "find":
        return finds(capacity, batch)
    if task == "rows":
        return partial(full(rows(capacity), capacity).sample, batch)
    if task == "atari":
        options = {"stack_num": FRAMES[0], "ignore_obs_next": True, "save_only_last_obs": True}
        return partial(full(frames(capacity), capacity, **options).sample, batch)
    if task == "insert":
        replay = full(rows(capacity), capacity)
        turn = cycle([rows(batch, seed) for seed in range(16)])
        return lambda: replay.update(next(turn))
    return None


def samples(replay: PrioritizedReplayBuffer, batch: int) -> Call:
    def call() -> tuple[np.ndarray, np.ndarray]:
        indices = replay.sample_indices(batch)
        weights = replay.get_weight(indices)
        return indices, weights / np.max(weights)  # as the buffer's own sampling does

    return call


def updates(replay: PrioritizedReplayBuffer, capacity: int, batch: int) -> Call:
    turn = cycle(list(zip(*rounds(capacity, batch), strict=True)))
    return lambda: replay.update_weight(*next(turn))


def finds(capacity: int, batch: int) -> Call:
    tree = SegmentTree(capacity)
    tree[np.arange(capacity)] = priorities(capacity) ** ALPHA
    count = len(rounds(capacity, batch)[0])
    turn = cycle(list(np.random.default_rng(2).random((count, batch)) * tree.reduce()))
    return lambda: tree.get_prefix_sum_idx(next(turn).copy())  # the call overwrites its argument


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve("tianshou", importlib.metadata.version("tianshou"), make)
