"""CartPole learned in the arithmetic of the FPGA learner's pipeline (``fpga/learner.py``)."""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from collections.abc import Sequence
from typing import Annotated, Any

import gymnasium
import numpy as np
import torch
from torch import Tensor

from murmurate.bench._result import Log, spread
from murmurate.errors import Refusal
from murmurate.fpga.learner import EmulatedLearner
from murmurate.fpga.learner_area import slowest_unit
from murmurate.fpga.learner_model import Unit, choose
from murmurate.fpga.pipeline_simulation import SimulatedPipeline
from murmurate.ranges import NonNegativeInt, PositiveInt, Range

NAME = "fpga-learner"
SUMMARY = "evaluation return of CartPole learned in fixed point, as the FPGA pipeline computes it"
_GOAL = 475.0
_LAYERS = (4, 8, 8, 2)
_SCALE = torch.tensor([1.0, 1.0, 8.0, 1.0])  # factors of an observation: the pole's angle is below 0.21 rad
# per step; an endless episode has the value 100 / 16, and the format of activations is for +-16
_REWARD = 1 / 16
_DISCOUNT = 0.99
_BATCH = 64
_LEARNING_STARTS = 1_000
_EXPLORE_STEPS = 10_000
_TARGET_EVERY = 200
_CHECK_EVERY = 2_500
# seeds of environments: training, evaluations for stopping, and the final evaluation share none
_STOPPING_SEED, _FINAL_SEED = 1_000_000, 2_000_000


@dataclasses.dataclass(frozen=True)
class FpgaLearnerPlan:
    """seeds: number of seeds (0, 1, ...). env_steps: greatest number of env steps of a run. rate_shift: -log2
    of the learning rate. episodes: number of episodes of the final evaluation.

    stochastic: whether updates of weights are rounded stochastically, without bias. Otherwise they are
        rounded to the nearest, as all other numbers always are.
    hardware_steps: number of the first seed's gradient steps that the simulated hardware makes, too (one or
        two a second), and whose weights and TD errors are compared.
    """

    seeds: PositiveInt = 2
    env_steps: PositiveInt = 100_000
    rate_shift: Annotated[int, Range(0, 31)] = 2
    episodes: PositiveInt = 100
    stochastic: bool = True
    hardware_steps: NonNegativeInt = 20


QUICK, FULL = FpgaLearnerPlan(), FpgaLearnerPlan(seeds=10, hardware_steps=500)


def measure(plan: FpgaLearnerPlan, log: Log) -> dict[str, Any]:
    """Double DQN with uniform replay; from env step 1,000 on, one gradient step per env step.

    Every 2,500 env steps, 30 episodes are played greedily. A run stops when their mean return is at least
    490, or after ``env_steps``. The weights with the best mean play the final episodes, in environments with
    other seeds.
    """
    runs = []
    for seed in range(plan.seeds):
        runs.append(run := train(plan, seed))
        log(f"seed {seed}: {run['return']:.1f} after {run['env_steps']:,} env steps, {run['seconds']:.0f} s")
    returns = [run["return"] for run in runs]
    return {
        "goal": _GOAL,
        "reached": sum(r >= _GOAL for r in returns),
        "return": spread(returns),
        "return_std": statistics.stdev(returns) if len(returns) > 1 else None,
        "env_steps": spread([float(run["env_steps"]) for run in runs]),
        "runs": runs,
        "modelled": modelled(_BATCH),
    }


class _Hardware:
    """The pipelines of ``modelled``, simulated, and compared with ``learner`` in its first ``steps`` gradient
    steps. ``mismatches``: in how many the weights or TD errors differed. ``cycles``: of each gradient
    step."""

    def __init__(self, learner: EmulatedLearner, units: Sequence[Unit], steps: int) -> None:
        self.mismatches, self.cycles = 0, list[int]()
        self._learner, self._steps = learner, steps
        if steps:
            try:
                self._simulated = SimulatedPipeline(learner, units, _BATCH)
            except Refusal as refusal:
                raise Refusal(f"{refusal} Without it, use --hardware-steps 0.") from refusal

    def step(self, *transitions: Tensor) -> None:
        """A gradient step of the learner."""
        found = self._learner.step(*transitions)
        if len(self.cycles) < self._steps:
            simulated = self._simulated.step(*transitions)
            same = simulated.td_error.equal(found.td_error)
            self.mismatches += not (
                same and all(map(torch.equal, self._simulated.masters, self._learner.masters))
            )
            self.cycles.append(simulated.cycles)


def modelled(batch: int) -> dict[str, Any]:
    """The modelled gradient step on an LFE5U-85F. The whole design was not placed and routed: it is assumed
    to have the clock of the slowest unit that was."""
    unit = slowest_unit()
    model = choose(_LAYERS, batch, clock_hz=unit["mhz"] * 1e6)
    return {
        "batch": batch,
        "cycles": model.gradient_step_cycles(batch),
        "seconds": model.gradient_step_seconds(batch),
        "dsps": model.dsps,
        "pipelines": model.dp,
        "clock_of_one_unit_mhz": unit["mhz"],
        "clock_of_one_unit_provenance": unit["provenance"],
        "clock_provenance": model.clock_provenance,
    }


def train(plan: FpgaLearnerPlan, seed: int) -> dict[str, Any]:
    """One run: final ``return`` (mean of the episodes), ``env_steps``, ``seconds`` (without the final
    evaluation), ``hardware`` (gradient steps in which its numbers differed from the emulation's, and the
    cycles of each that it made), and ``saturated``, the share of numbers that did not fit their format in
    gradient steps, by stage."""
    generator, explorer = torch.Generator().manual_seed(seed), random.Random(seed)
    model = choose(_LAYERS, _BATCH, clock_hz=1.0)
    learner = EmulatedLearner(
        _LAYERS,
        rate_shift=plan.rate_shift,
        generator=generator,
        pipelines=model.dp,  # whatever their number, the results are the same
        stochastic=plan.stochastic,
    )
    hardware = _Hardware(learner, model.units, 0 if seed else plan.hardware_steps)
    size = plan.env_steps
    observations, next_observations = torch.zeros(size, 4), torch.zeros(size, 4)
    actions, discounts = torch.zeros(size, dtype=torch.int64), torch.zeros(size)
    env = gymnasium.make("CartPole-v1")
    features = _features(env.reset(seed=seed)[0])
    began, step, target = time.perf_counter(), 0, learner.weights
    best_return, best_masters = -1.0, learner.masters
    while step < size and best_return < 490:
        epsilon = max(0.02, 1 - step / _EXPLORE_STEPS)
        explores = explorer.random() < epsilon
        action = explorer.randrange(2) if explores else int(learner.values(features[None]).argmax())
        observation, _, terminated, truncated, _ = env.step(action)
        next_features = _features(observation)
        observations[step], next_observations[step], actions[step] = features, next_features, action
        discounts[step] = 0.0 if terminated else _DISCOUNT
        features = _features(env.reset()[0]) if terminated or truncated else next_features
        step += 1
        if step < _LEARNING_STARTS:
            continue
        drawn = torch.randint(step, (_BATCH,), generator=generator)
        best_action = learner.values(next_observations[drawn]).argmax(1, keepdim=True)
        next_value = learner.values(next_observations[drawn], target).gather(1, best_action)[:, 0]
        target_value = _REWARD + discounts[drawn] * next_value
        hardware.step(observations[drawn], actions[drawn], target_value)
        if step % _TARGET_EVERY == 0:
            target = learner.weights
        if step % _CHECK_EVERY == 0:
            mean_return = evaluate(learner, 30, _STOPPING_SEED + seed * 1_000)
            if mean_return > best_return:
                best_return, best_masters = mean_return, [master.clone() for master in learner.masters]
    learner.masters = best_masters
    seconds = time.perf_counter() - began
    return {
        "return": evaluate(learner, plan.episodes, _FINAL_SEED + seed * 1_000),
        "env_steps": step,
        "seconds": seconds,
        "hardware": {"mismatches": hardware.mismatches, "cycles": hardware.cycles},
        "saturated": {k: v.saturated / max(v.numbers, 1) for k, v in learner.saturations.items()},
    }


def evaluate(learner: EmulatedLearner, episodes: int, seed: int) -> float:
    """Mean return of greedy episodes in environments with the seeds ``seed``, ``seed`` + 1, ..."""
    envs = gymnasium.make_vec("CartPole-v1", num_envs=episodes, vectorization_mode="sync")
    observation, weights = envs.reset(seed=seed)[0], learner.weights
    running, returns = np.ones(episodes, bool), np.zeros(episodes)
    while running.any():
        action = learner.values(_features(observation), weights).argmax(1).numpy()
        observation, _, terminated, truncated, _ = envs.step(action)
        returns += running
        running &= ~(terminated | truncated)
    return float(returns.mean())


def _features(observation: Any) -> Tensor:
    return torch.from_numpy(np.asarray(observation, np.float32)) * _SCALE
