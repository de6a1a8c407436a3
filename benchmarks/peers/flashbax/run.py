"""Answers ``murmurate bench`` with the speed of flashbax's prioritized replay (see README.md)."""

from __future__ import annotations

import importlib.metadata
import os
from functools import partial
from itertools import cycle
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
os.environ["NPROC"] = os.environ["PJRT_NPROC"] = "1"  # read when jax starts: the size of its thread pools

import flashbax
import jax
import jax.numpy as jnp
import numpy as np

try:
    from replay_windows import ALPHA, BETA, FRAMES, TRANSITION, Call, priorities, rounds, serve
except ImportError as problem:
    raise SystemExit("no replay_windows: set PYTHONPATH to src/murmurate/bench/_peer_protocols") from problem

CHUNK = 1024
EPSILON = 1e-6
Content = dict[str, jax.Array]


def rows(count: int, seed: int = 2) -> Content:
    generator, (observation, action) = np.random.default_rng(seed), TRANSITION
    shapes = {"s": (observation,), "a": (action,), "reward": (), "done": (), "next_s": (observation,)}
    return {
        name: jnp.asarray(generator.random((count, *shape), dtype=np.float32))
        for name, shape in shapes.items()
    }


def frames(count: int) -> Content:
    pictures = np.random.default_rng(2).integers(256, size=(2, count, *FRAMES), dtype=np.uint8)
    scalars = {name: jnp.zeros(count) for name in ("a", "reward", "done")}
    return {"s": jnp.asarray(pictures[0]), **scalars, "next_s": jnp.asarray(pictures[1])}


def smallest(count: int) -> Content:
    return {"x": jnp.zeros(count)}


class Replay:
    """flashbax' compiled pure functions and their state."""

    def __init__(self, content: Content, capacity: int, batch: int) -> None:
        self.capacity = capacity
        self.buffer = flashbax.make_prioritised_item_buffer(
            capacity, min_length=1, sample_batch_size=batch, add_batches=True, priority_exponent=ALPHA
        )
        self.state: Any = self.buffer.init(jax.tree.map(lambda part: part[0], content))
        self.add = jax.jit(self.buffer.add, donate_argnums=0)
        self.update = jax.jit(self._updated, donate_argnums=0)
        self.key = jax.random.key(1)
        size = len(jax.tree.leaves(content)[0])
        for start in range(0, capacity, size):
            part = {name: values[: capacity - start] for name, values in content.items()}
            self.state = self.add(self.state, part)
        self.state = self.update(self.state, jnp.arange(capacity), jnp.asarray(priorities(capacity)))
        jax.block_until_ready(self.state)

    def _updated(self, state: Any, indices: jax.Array, errors: jax.Array) -> Any:
        return self.buffer.set_priorities(state, indices, jnp.abs(errors) + EPSILON)

    def _sampled(self, content: bool, state: Any, key: jax.Array) -> tuple[jax.Array, Any]:
        """flashbax returns probabilities; the weights are computed from them in the same program."""
        key, own = jax.random.split(key)
        drawn = self.buffer.sample(state, own)
        weights = (self.capacity * drawn.probabilities) ** -BETA
        result = (drawn.indices, weights / weights.max())
        return key, (*result, drawn.experience) if content else result

    def sampler(self, content: bool) -> Call:
        program = jax.jit(partial(self._sampled, content))

        def call() -> Any:
            self.key, drawn = program(self.state, self.key)
            return jax.block_until_ready(drawn)

        return call

    def changer(self, change: Any, turns: list[Any]) -> Call:
        turn = cycle(turns)

        def call() -> None:
            self.state = change(self.state, *next(turn))
            jax.block_until_ready(self.state)

        return call


def make(task: str, capacity: int, batch: int) -> Call | None:
    chunk = min(CHUNK, capacity)
    if task == "sample":
        return Replay(smallest(chunk), capacity, batch).sampler(content=False)
    if task == "update":
        replay = Replay(smallest(chunk), capacity, batch)
        indices, errors = rounds(capacity, batch)
        pairs = zip(jax.device_put(list(indices.astype(np.int32))), jax.device_put(list(errors)), strict=True)
        return replay.changer(replay.update, list(pairs))
    if task == "rows":
        return Replay(rows(chunk), capacity, batch).sampler(content=True)
    if task == "atari":
        return Replay(frames(chunk), capacity, batch).sampler(content=True)
    if task == "insert":
        replay = Replay(rows(chunk), capacity, batch)
        return replay.changer(replay.add, [(rows(batch, seed),) for seed in range(16)])
    return None


if __name__ == "__main__":
    serve("flashbax", importlib.metadata.version("flashbax"), make)
