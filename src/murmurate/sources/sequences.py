"""Batch mode: the policy is fixed while env steps are collected, then short sequences of them are drawn.

This is what ARM learns from (Jin 2018, Algorithm 1 and section 2.6), on-policy or from a memory of earlier
batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import torch

from murmurate.agents.interface import Agent
from murmurate.errors import Refusal
from murmurate.ranges import PositiveInt
from murmurate.replay.interface import Steps
from murmurate.replay.sequences import Trajectories, trajectory_bytes
from murmurate.sources.interface import BatchShape, RunView, Source, SourceConfig, SourceContext
from murmurate.sources.replay_sampler import on_device
from murmurate.sources.replay_source import ReplaySource
from murmurate.sources.simulator_groups import (
    SIMULATOR_BYTES,
    check_saved_simulators,
    check_simulators,
    open_groups,
    step_bytes,
)
from murmurate.spec import Batch, Episode, derive_generator, derive_seed
from murmurate.worlds.interface import SimulatorWorld


@dataclass(frozen=True)
class SequenceSourceConfig(SourceConfig):
    """Sequences of the learner's own latest env steps.

    simulators: number of simulators of each learner. double_buffer: act for one half of the simulators while
        the other half steps in native threads or another process; useless where the learner waits
        while they step, as for gymnasium's unless ``served``.
    collect_env_steps: env steps that a learner collects with one policy (one batch of env steps), rounded up
        to a multiple of ``simulators``.
    minibatches: number of minibatches drawn after each batch of env steps.
    keep_batches: number of latest batches of env steps that minibatches are drawn from; 1 is on-policy, and
        more are for agents with importance weights.
    saved: whether checkpoints contain these steps; otherwise a resumed run begins with a new batch.
        ``resume`` may change it.
    """

    simulators: PositiveInt = 16
    double_buffer: bool = False
    collect_env_steps: PositiveInt = 12_500
    minibatches: PositiveInt = 3_000
    keep_batches: PositiveInt = 1
    saved: bool = field(default=True, metadata={"place": True})

    gives: ClassVar[str] = "sequences"

    @property
    def steps(self) -> int:
        """Steps of each simulator in a batch of env steps."""
        return math.ceil(self.collect_env_steps / self.simulators)

    def check(self, run: RunView) -> None:
        check_simulators(self.simulators, self.double_buffer)
        requires: Any = run.learner.requires
        if self.keep_batches > 1 and "probability" not in requires.behaviour:
            raise Refusal(
                f"the agent {run.learner.name} learns on-policy, from the latest batch of env steps alone. "
                "Leave --keep-batches at 1, or have it weigh older steps by importance, as ARM does with "
                "--agent.importance-clip 1."
            )
        if run.env_steps is None:
            return
        least = self.steps * self.simulators
        if run.env_steps // run.replicas < least:
            raise Refusal(
                f"each learner makes {run.env_steps // run.replicas:,} env steps, and its first batch takes "
                f"{least:,}. Use more --env-steps, or a smaller --collect-env-steps."
            )

    def batch_shape(self, run: RunView) -> BatchShape:
        steps = self.steps / self.minibatches
        return BatchShape(self.simulators, 1 + self.double_buffer, steps, run.learner.requires.batch)

    def cost_settings(self) -> dict[str, Any]:
        return {}

    def batches(self, run: RunView) -> int | None:
        if run.env_steps is None:
            return None
        return run.env_steps // (run.replicas * self.steps * self.simulators) * self.minibatches

    def batches_at_once(self, run: RunView) -> int:
        return self.minibatches

    def memory_bytes(self, run: RunView) -> int:
        requires, step = run.learner.requires, step_bytes(run)
        drawn = 2 * requires.batch * step * (requires.steps if requires.every else 2)
        return int(self._store_bytes(run) + drawn + self.simulators * (SIMULATOR_BYTES + step))

    def saved_bytes(self, run: RunView) -> int:
        return self._store_bytes(run) if self.saved else 0

    def _store_bytes(self, run: RunView) -> int:
        behaviour = run.learner.requires.behaviour
        return trajectory_bytes(run.world.spec(), self.keep_batches * self.steps, self.simulators, behaviour)

    def check_state(self, state: dict[str, Any]) -> None:
        check_saved_simulators(state, self.simulators)

    def open(self, context: SourceContext) -> Source:
        run, learner = context.run, cast(Agent, context.learner)
        world, seed = cast(SimulatorWorld, run.world), derive_seed(run.seed, "source", context.rank)
        first, total = context.rank * self.simulators, run.replicas * self.simulators
        return ReplaySource(
            open_groups(world, self.simulators, training=True, double_buffer=self.double_buffer),
            learner,
            SequenceSampler(self, run.learner.requires, world.spec(), seed, context.device),
            seed=seed,
            assign=lambda index: learner.assign_simulators(first + index, total),
        )


class SequenceSampler:
    """Stores env steps, and draws ``minibatches`` minibatches after each batch of them (a ``Sampler``)."""

    banks = None

    def __init__(
        self, config: SequenceSourceConfig, requires: Any, spec: Any, seed: int, device: torch.device
    ) -> None:
        self.config, self.device, self.exact = config, device, config.saved
        self.replay = Trajectories(
            spec, config.keep_batches * config.steps, config.simulators, requires.behaviour
        )
        self.batches = self.played = 0
        self._requires, self._seed = requires, seed
        self._generator = derive_generator(seed, "minibatches")
        self._collected = self._left = 0  # env steps of the batch being collected; minibatches still to draw

    @property
    def due(self) -> bool:
        """Whether a minibatch is to be drawn before further env steps."""
        return self._left > 0

    def before_steps(self) -> None:
        """Do nothing: no minibatch is drawn in advance."""

    def insert(self, first_simulator: int, steps: Steps) -> None:
        self.replay.observe(first_simulator, steps)
        self.played += len(steps.reward)
        self._collected += len(steps.reward)
        minibatches = self.config.minibatches
        if self._collected == self.config.steps * self.config.simulators:
            # a replica that began anew in the middle of its peers' minibatches ends with them
            self._collected, self._left = 0, minibatches - self.batches % minibatches

    def next(self, env_steps: int, episodes: Sequence[Episode]) -> Batch:
        """Draw a minibatch. env_steps, episodes: env steps made, and episodes ended, since the last one."""
        self.batches += 1
        self._left -= 1
        requires = self._requires
        sample = self.replay.draw(requires.batch, requires.steps, self._generator, requires.every)
        return Batch(on_device(sample, self.device), env_steps, episodes)

    def fields(self) -> dict[str, Any]:
        return {"replay_transitions": len(self.replay)}

    def state(self) -> dict[str, Any]:
        counters = {
            "batches": self.batches,
            "played": self.played,
            "collected": self._collected,
            "left": self._left,
            "minibatches": self._generator.get_state(),
        }
        return {**counters, "replays": {"replay": self.replay.state()} if self.config.saved else {}}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from ``state``, with a new batch of env steps if it lacks the steps."""
        contents = state["replays"].get("replay")
        if contents is None:
            return self.fresh_start(int(state["batches"]))
        self.replay.load(contents)
        self.batches, self.played = int(state["batches"]), int(state["played"])
        self._collected, self._left = int(state["collected"]), int(state["left"])
        self._generator.set_state(state["minibatches"])

    def fresh_start(self, batches: int) -> None:
        """Begin in the middle of a run, with a new batch of env steps."""
        self.batches = batches
        self._collected = self._left = 0
        self._generator = derive_generator(self._seed, f"minibatches after {batches}")
        self.replay.forget()
        self.exact = False

    def close(self) -> None:
        pass
