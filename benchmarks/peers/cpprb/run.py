"""Answers ``murmurate bench`` with the speed of cpprb's prioritized replay (see README.md)."""

from __future__ import annotations

import argparse
import importlib.metadata
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
from cpprb import PrioritizedReplayBuffer

try:
    from replay_windows import ALPHA, BETA, FRAMES, TRANSITION, Call, priorities, rounds, serve
except ImportError as problem:
    raise SystemExit("no replay_windows: set PYTHONPATH to src/murmurate/bench/_peer_protocols") from problem

CHUNK = 1024
Content = dict[str, np.ndarray]


def rows(count: int, seed: int = 2) -> Content:
    generator, (observation, action) = np.random.default_rng(seed), TRANSITION
    sizes = {"s": observation, "a": action, "reward": 1, "done": 1, "next_s": observation}
    return {name: generator.random((count, size), dtype=np.float32) for name, size in sizes.items()}


def frames(count: int, compress: bool) -> Content:
    """Stacks of consecutive frames: the last axis counts the frames of a stack if compressed, else the
    first."""
    stack, *picture = FRAMES
    film = np.random.default_rng(2).integers(256, size=(count + stack, *picture), dtype=np.uint8)
    stacks = np.lib.stride_tricks.sliding_window_view(film, stack, axis=0)
    if not compress:
        stacks = np.moveaxis(stacks, -1, 1)
    scalars = {name: np.zeros((count, 1), dtype=np.float32) for name in ("a", "reward", "done")}
    return {"s": stacks[:-1], **scalars, "next_s": stacks[1:]}


def full(content: Content, capacity: int, **options: Any) -> PrioritizedReplayBuffer:
    """A full replay, of the content repeated, with the priorities of the protocol."""
    fields = {name: {"shape": part.shape[1:], "dtype": part.dtype} for name, part in content.items()}
    for name in options.get("next_of", ()):
        del fields[f"next_{name}"]  # the replay derives it
    replay = PrioritizedReplayBuffer(capacity, fields, alpha=ALPHA, **options)
    errors, size = priorities(capacity), len(next(iter(content.values())))
    for start in range(0, capacity, size):
        stop = min(start + size, capacity)
        part = {name: values[: stop - start] for name, values in content.items()}
        replay.add(**part, priorities=errors[start:stop])
        replay.on_episode_end()
    return replay


def make(compress: bool, task: str, capacity: int, batch: int) -> Call | None:
    chunk = min(CHUNK, capacity)
    if task == "atari":
        options = {"next_of": ("s",), "stack_compress": ("s",)} if compress else {}
        return partial(full(frames(chunk, compress), capacity, **options).sample, batch, BETA)
    if compress:
        return None
    if task == "sample":
        return partial(smallest(capacity).sample, batch, BETA)
    if task == "update":
        return updates(smallest(capacity), capacity, batch)
    if task == "rows":
        return partial(full(rows(chunk), capacity).sample, batch, BETA)
    if task == "insert":
        replay = full(rows(chunk), capacity)
        turn = cycle([rows(batch, seed) for seed in range(16)])
        return lambda: replay.add(**next(turn))
    return None


def smallest(capacity: int) -> PrioritizedReplayBuffer:
    """One number a transition: the library has no call for indices and weights alone."""
    return full({"x": np.zeros((min(CHUNK, capacity), 1), dtype=np.float32)}, capacity)


def updates(replay: PrioritizedReplayBuffer, capacity: int, batch: int) -> Call:
    indices, errors = rounds(capacity, batch)
    turn = cycle(
        list(zip(indices.astype(np.uintp), errors, strict=True))
    )  # its own types, so that none is converted
    return lambda: replay.update_priorities(*next(turn))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compress", action="store_true", help="only atari, with every frame stored once")
    compressed = parser.parse_args().compress
    version = importlib.metadata.version("cpprb")
    serve("cpprb-compressed" if compressed else "cpprb", version, partial(make, compressed))
