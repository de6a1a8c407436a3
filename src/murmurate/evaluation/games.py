"""Evaluation by whole games on unseen seeds, and one game as a film."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from murmurate.agents.interface import Agent, Policy
from murmurate.errors import Refusal
from murmurate.evaluation.interface import EvalContext, Evaluation
from murmurate.spec import Episode, derive_generator, derive_seed
from murmurate.worlds.interface import Picture, Simulators, SimulatorWorld


@dataclass(frozen=True)
class EvalResult:
    """Unclipped returns and lengths (env steps) of whole games, by game."""

    returns: tuple[float, ...]
    lengths: tuple[int, ...]

    @property
    def mean(self) -> float:
        return float(np.mean(self.returns))

    @property
    def stderr(self) -> float:
        """Standard error of the mean: sd / sqrt(n) with n - 1 in the variance; nan for one game."""
        n = len(self.returns)
        return float(np.std(self.returns, ddof=1)) / math.sqrt(n) if n > 1 else math.nan


@dataclass(frozen=True)
class Games(Evaluation):
    """Whole games with the consensus parameters of the last checkpoint, and of the best one.

    eval_episodes: games played by the final (and the best) parameters.
    """

    eval_episodes: int = 10

    def check(self) -> None:
        if self.eval_episodes < 1:
            raise Refusal(f"eval_episodes is {self.eval_episodes}; it must be at least 1.")

    def evaluate(self, learner: Agent, context: EvalContext) -> dict[str, Any]:
        """eval_return_mean, eval_return_stderr (None for one game), episodes, returns; and where there
        is a best checkpoint, best_eval_return_mean, of the better of the two."""
        count = self.eval_episodes if context.count is None else context.count
        if count < 1:
            raise Refusal(f"episodes is {count}; play at least one. Use --episodes 10.")
        world = cast(SimulatorWorld, context.world)
        result = evaluate(world, learner, count, context.seed)
        best = context.best()
        figures = {
            "eval_return_mean": result.mean,
            "eval_return_stderr": None if len(result.returns) == 1 else result.stderr,
            "episodes": len(result.returns),
            "returns": list(result.returns),
            "best_eval_return_mean": result.mean,
        }
        if best is not None:
            figures["best_eval_return_mean"] = max(
                result.mean, evaluate(world, best, count, context.seed).mean
            )
        return figures

    def sentence(self, figures: Mapping[str, Any]) -> str:
        if figures.get("eval_return_mean") is None:
            return ""
        error = figures["eval_return_stderr"]
        spread = "" if error is None else f" ± {error:.2f} (standard error)"
        return f"Evaluation over {figures['episodes']} games: {figures['eval_return_mean']:.2f}{spread}"

    def film(self, learner: Agent, context: EvalContext) -> npt.NDArray[np.uint8]:
        frames, _ = record_game(cast(SimulatorWorld, context.world), learner, context.seed)
        return frames


@dataclass
class _Game:
    """One game in play."""

    number: int
    simulator: Simulators
    observation: Tensor  # [1, ...]
    memory: Tensor | None  # [1, M]
    first: bool = True


def evaluate(
    world: SimulatorWorld,
    policy: Policy,
    episodes: int,
    seed: int,
    simulators: int = 16,
    *,
    device: torch.device | str = "cpu",
    threads: int = 1,
) -> EvalResult:
    """Play ``episodes`` whole games greedily (Assran et al. 2019, section 4: 10 games, up to 30 no-ops).

    Game i is seeded from (seed, i) and always counted, however long: up to ``simulators`` games are in
    play at once, but taking the first to finish would favour short ones. ``threads`` games step at the
    same time. Rewards are unclipped and lives do not end games (``training=False``).

    Raises ``ValueError`` for fewer than one game or simulator.
    """
    if min(episodes, simulators, threads) < 1:
        raise ValueError(
            f"evaluation needs at least one game, simulator and thread, got {episodes}, {simulators} "
            f"and {threads}"
        )
    generator = derive_generator(seed, "evaluation", device=device)
    played: list[Episode | None] = [None] * episodes
    waiting = iter(range(episodes))
    games: list[_Game] = []
    try:
        while True:
            games += _begin(world, policy, seed, waiting, simulators - len(games))
            if not games:
                break
            action = _act(policy, games, generator, torch.device(device))
            for low in range(0, len(games), threads):
                _step(games[low : low + threads], action[low : low + threads], played)
            games = [game for game in games if played[game.number] is None]
    finally:
        for game in games:
            game.simulator.close()
    whole = [episode for episode in played if episode is not None]
    return EvalResult(tuple(e.episode_return for e in whole), tuple(e.length for e in whole))


def record_game(
    world: SimulatorWorld,
    policy: Policy,
    seed: int,
    max_steps: int = 4_500,
    *,
    device: torch.device | str = "cpu",
) -> tuple[npt.NDArray[np.uint8], float]:
    """Film one greedy game: (frames [n, H, W, 3] uint8, one per env step; return so far).

    It is game 0 of ``evaluate`` with this seed. Stops at its end, or after ``max_steps``: the frames are
    held in memory, 0.1 MB each for Atari. Raises ``MissingExtra`` where drawing needs a
    package that is not installed, ``ValueError`` for ``max_steps`` < 1.
    """
    if max_steps < 1:
        raise ValueError(f"a film needs at least one step, got {max_steps}")
    generator = derive_generator(seed, "evaluation", device=device)
    simulator = world.open(1, training=False, picture=True)
    frames: list[Picture] = []
    total = 0.0
    try:
        start = simulator.reset(derive_seed(seed, "evaluation"))
        game = _Game(0, simulator, start.observation, policy.initial_memory(1))
        for _ in range(max_steps):
            frames.append(simulator.picture())
            simulator.send(_act(policy, [game], generator, torch.device(device)))
            step = simulator.receive()
            total += float(step.reward)
            if step.episodes:
                break
            game.observation, game.first = step.observation, False
    finally:
        simulator.close()
    return np.stack(frames), total


def _begin(
    world: SimulatorWorld, policy: Policy, seed: int, waiting: Iterator[int], free: int
) -> list[_Game]:
    """Begin the next ``free`` games, or as many as are left."""
    games = []
    for _, number in zip(range(free), waiting, strict=False):
        simulator = world.open(1, training=False, first=number)
        observation = simulator.reset(derive_seed(seed, "evaluation")).observation
        games.append(_Game(number, simulator, observation, policy.initial_memory(1)))
    return games


def _act(policy: Policy, games: list[_Game], generator: torch.Generator, device: torch.device) -> Tensor:
    """Greedy actions [n] or [n, D], on the host; updates every game's memory."""
    memories = [game.memory for game in games if game.memory is not None]
    with torch.no_grad():
        chosen = policy.act(
            torch.cat([game.observation for game in games]).to(device),
            torch.cat(memories) if memories else None,
            torch.tensor([game.first for game in games], device=device),
            generator,
            greedy=True,
        )
    for i, game in enumerate(games):
        game.memory = None if chosen.memory is None else chosen.memory[i : i + 1]
    return chosen.action.cpu()


def _step(games: list[_Game], action: Tensor, played: list[Episode | None]) -> None:
    """Step these games at the same time; note the games that ended, and close theirs."""
    for i, game in enumerate(games):
        game.simulator.send(action[i : i + 1])
    for game in games:
        step = game.simulator.receive()
        game.observation, game.first = step.observation, False
        if step.episodes:
            played[game.number] = step.episodes[0]
            game.simulator.close()
