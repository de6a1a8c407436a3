"""Answers ``murmurate bench`` with the speed of torchrl's prioritized replay (see README.md)."""

from __future__ import annotations

import importlib.metadata
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import torch

try:
    from torchrl._torchrl import MinSegmentTreeFp32, SumSegmentTreeFp32
except ImportError as problem:
    raise SystemExit(f"torchrl's C++ trees do not load: run build.py first ({problem})") from problem

from tensordict import TensorDict
from torchrl import torchrl_logger
from torchrl.data import LazyTensorStorage, PrioritizedSampler, ReplayBuffer

try:
    from replay_windows import ALPHA, BETA, FRAMES, TRANSITION, Call, priorities, rounds, serve
except ImportError as problem:
    raise SystemExit("no replay_windows: set PYTHONPATH to src/murmurate/bench/_peer_protocols") from problem

CHUNK = 2**14


def smallest(count: int) -> TensorDict:
    return TensorDict({"x": torch.zeros(count)}, [count])


def rows(count: int) -> TensorDict:
    observation, action = TRANSITION
    return TensorDict(
        {
            "s": torch.randn(count, observation),
            "a": torch.randn(count, action),
            "reward": torch.randn(count),
            "done": torch.zeros(count),
            "next_s": torch.randn(count, observation),
        },
        [count],
    )


def frames(count: int) -> TensorDict:
    size = (count, *FRAMES)
    return TensorDict(
        {
            "s": torch.randint(256, size, dtype=torch.uint8),
            "a": torch.zeros(count, dtype=torch.int64),
            "reward": torch.randn(count),
            "done": torch.zeros(count),
            "next_s": torch.randint(256, size, dtype=torch.uint8),
        },
        [count],
    )


def full(content: TensorDict, capacity: int, batch: int) -> Any:
    """A full replay, of the content over and over, with the priorities of the protocol."""
    sampler = PrioritizedSampler(capacity, ALPHA, BETA)
    trees = sampler._sum_tree, sampler._min_tree
    if not (isinstance(trees[0], SumSegmentTreeFp32) and isinstance(trees[1], MinSegmentTreeFp32)):
        raise TypeError(f"not the compiled trees: {trees}")
    replay = ReplayBuffer(storage=LazyTensorStorage(capacity), sampler=sampler, batch_size=batch)
    for start in range(0, capacity, len(content)):
        replay.extend(content[: capacity - start])
    replay.update_priority(torch.arange(capacity), torch.from_numpy(priorities(capacity)))
    return replay


def make(task: str, capacity: int, batch: int) -> Call | None:
    chunk = min(CHUNK, capacity)
    if task == "sample":
        replay = full(smallest(chunk), capacity, batch)
        return partial(replay.sampler.sample, replay.storage, batch)
    if task == "update":
        return updates(full(smallest(chunk), capacity, batch), capacity, batch)
    if task == "find":
        return finds(capacity, batch)
    if task == "rows":
        return partial(full(rows(chunk), capacity, batch).sample, return_info=True)
    if task == "atari":
        return partial(full(frames(min(CHUNK // 16, capacity)), capacity, batch).sample, return_info=True)
    if task == "insert":
        replay = full(rows(chunk), capacity, batch)
        turn = cycle([rows(batch) for _ in range(16)])
        return lambda: replay.extend(next(turn))
    return None


def updates(replay: Any, capacity: int, batch: int) -> Call:
    indices, errors = (torch.from_numpy(part) for part in rounds(capacity, batch))
    turn, sampler = cycle(list(zip(indices, errors, strict=True))), replay.sampler
    return lambda: sampler.update_priority(*next(turn))


def finds(capacity: int, batch: int) -> Call:
    tree = SumSegmentTreeFp32(capacity)
    tree[torch.arange(capacity)] = torch.from_numpy(priorities(capacity)) ** ALPHA
    count = len(rounds(capacity, batch)[0])
    masses = np.random.default_rng(2).random((count, batch)) * tree.query(0, capacity)
    turn = cycle(list(torch.from_numpy(masses.astype(np.float32))))
    return lambda: tree.scan_lower_bound(next(turn))


if __name__ == "__main__":
    torch.set_num_threads(1)
    torchrl_logger.setLevel("WARNING")  # it tells of new storages on stdout
    serve("torchrl", importlib.metadata.version("torchrl"), make)
