"""Evaluation by whole games on unseen seeds, and one game as a film."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from murmurate.spec import Episode, derive_generator, derive_seed
from murmurate.worlds.interface import Actor, Picture, Simulators, World


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


@dataclass
class _Seat:
    """One game in play."""

    game: int
    simulator: Simulators
    observation: Tensor  # [1, ...]
    memory: Tensor | None  # [1, M]
    first: bool = True


def evaluate(
    world: World,
    actor: Actor,
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
    seats: list[_Seat] = []
    try:
        while True:
            seats += _seated(world, actor, seed, waiting, simulators - len(seats))
            if not seats:
                break
            action = _act(actor, seats, generator, torch.device(device))
            for low in range(0, len(seats), threads):
                _step(seats[low : low + threads], action[low : low + threads], played)
            seats = [seat for seat in seats if played[seat.game] is None]
    finally:
        for seat in seats:
            seat.simulator.close()
    whole = [episode for episode in played if episode is not None]
    return EvalResult(tuple(e.episode_return for e in whole), tuple(e.length for e in whole))


def record_game(
    world: World, actor: Actor, seed: int, max_steps: int = 4_500, *, device: torch.device | str = "cpu"
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
        seat = _Seat(0, simulator, start.observation, actor.initial_memory(1))
        for _ in range(max_steps):
            frames.append(simulator.picture())
            simulator.send(_act(actor, [seat], generator, torch.device(device)))
            step = simulator.receive()
            total += float(step.reward)
            if step.episodes:
                break
            seat.observation, seat.first = step.observation, False
    finally:
        simulator.close()
    return np.stack(frames), total


def _seated(world: World, actor: Actor, seed: int, waiting: Iterator[int], free: int) -> list[_Seat]:
    """Begin the next games, as many as there are free seats."""
    seats = []
    for _, game in zip(range(free), waiting, strict=False):
        simulator = world.open(1, training=False, first=game)
        observation = simulator.reset(derive_seed(seed, "evaluation")).observation
        seats.append(_Seat(game, simulator, observation, actor.initial_memory(1)))
    return seats


def _act(actor: Actor, seats: list[_Seat], generator: torch.Generator, device: torch.device) -> Tensor:
    """Greedy actions [n] or [n, D], on the host; every seat's memory moves on."""
    memories = [seat.memory for seat in seats if seat.memory is not None]
    with torch.no_grad():
        chosen = actor.act(
            torch.cat([seat.observation for seat in seats]).to(device),
            torch.cat(memories) if memories else None,
            torch.tensor([seat.first for seat in seats], device=device),
            generator,
            greedy=True,
        )
    for i, seat in enumerate(seats):
        seat.memory = None if chosen.memory is None else chosen.memory[i : i + 1]
    return chosen.action.cpu()


def _step(seats: list[_Seat], action: Tensor, played: list[Episode | None]) -> None:
    """Step these seats at the same time; note the games that ended, and close theirs."""
    for i, seat in enumerate(seats):
        seat.simulator.send(action[i : i + 1])
    for seat in seats:
        step = seat.simulator.receive()
        seat.observation, seat.first = step.observation, False
        if step.episodes:
            played[seat.game] = step.episodes[0]
            seat.simulator.close()
