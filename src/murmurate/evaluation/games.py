"""Evaluation by whole games on seeds not used in training, and videos of games."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from murmurate.agents.interface import Agent, Policy
from murmurate.errors import Refusal, RunFailed
from murmurate.evaluation.interface import Curve, EvalContext, Evaluation, report, report_start
from murmurate.nets.torso import in_evaluation_mode
from murmurate.ranges import PositiveInt
from murmurate.replica.state_dict import tensors_of
from murmurate.spec import Episode, TimeStep, derive_generator, derive_seed
from murmurate.worlds.interface import Picture, Simulators, SimulatorWorld

_MOST_RESTARTS = 20  # of one game; one whose simulator always fails would go on until the limit of env steps
_MOST_FRAMES = 4_500  # of a video
_REPORT_SECONDS = 10.0  # least time between two lines about how far an evaluation is


@dataclass(frozen=True)
class EvalResult:
    """Unclipped returns and lengths (in env steps) of whole games, in the order of their numbers.

    successes: whether each reached the goal; None where the world does not say so. cut: number of games that
    were ended at the limit of env steps. restarted: how often a game began anew as its simulator had failed.
    figures: what else the world measured in each game, by name.
    """

    returns: tuple[float, ...]
    lengths: tuple[int, ...]
    successes: tuple[bool | None, ...] = ()
    cut: int = 0
    restarted: int = 0
    figures: tuple[Mapping[str, float], ...] = ()

    @property
    def mean(self) -> float:
        return float(np.mean(self.returns))

    @property
    def stderr(self) -> float:
        """Standard error of the mean: sd / sqrt(n) with n - 1 in the variance; nan for one game."""
        n = len(self.returns)
        return float(np.std(self.returns, ddof=1)) / math.sqrt(n) if n > 1 else math.nan

    @property
    def success_rate(self) -> float | None:
        """The share of games that reached the goal; None unless the world says for each that ended whether it
        did. A game that was cut did not reach it."""
        known = [success for success in self.successes if success is not None]
        return (
            sum(known) / len(self.returns) if known and len(known) + self.cut == len(self.returns) else None
        )

    @property
    def figure_means(self) -> dict[str, float]:
        """The mean of each figure over the games that have it."""
        names = dict.fromkeys(name for figures in self.figures for name in figures)
        return {name: float(np.mean([f[name] for f in self.figures if name in f])) for name in names}


@dataclass(frozen=True)
class Games(Evaluation):
    """Whole games with the consensus parameters of the last checkpoint, and of the best one.

    eval_episodes: number of games with the final parameters, and with the best.
    eval_max_env_steps: env steps after which a game of an evaluation is ended; its return so far counts.
    """

    eval_episodes: PositiveInt = 10
    eval_max_env_steps: PositiveInt = field(default=200_000, metadata={"since": 6})

    plays: ClassVar[bool] = True
    headline: ClassVar[Curve] = Curve(
        "eval_return_mean", "Evaluation return", "return of whole games", spread="eval_return_stderr"
    )

    def evaluate(self, learner: Agent, context: EvalContext) -> dict[str, Any]:
        """Figures: eval_return_mean, eval_return_stderr (None for one game), episodes, returns,
        eval_success_rate (where the world has goals), eval_figure_NAME (the mean of each of its figures),
        games_cut and games_restarted (if any were), and best_eval_return_mean: that of the final or the best
        checkpoint, whichever is higher. For sampled actions, the names begin with eval_sampled."""
        count = self.eval_episodes if context.count is None else context.count
        if count < 1:
            raise Refusal(f"episodes is {count}; play at least one. Use --episodes 10.")
        world = cast(SimulatorWorld, context.world)
        play = functools.partial(
            evaluate,
            world,
            episodes=count,
            seed=context.seed,
            greedy=not context.sample,
            max_steps=self.eval_max_env_steps,
        )
        report_start(f"evaluating {_games(count)}")
        result, name = play(policy=learner), _figure_name(context.sample)
        figures = {
            f"{name}_return_mean": result.mean,
            f"{name}_return_stderr": None if len(result.returns) == 1 else result.stderr,
            "episodes": len(result.returns),
            "returns": list(result.returns),
        }
        if result.success_rate is not None:
            figures[f"{name}_success_rate"] = result.success_rate
        figures |= {f"{name}_figure_{figure}": mean for figure, mean in result.figure_means.items()}
        if result.cut:
            figures["games_cut"] = result.cut
        if result.restarted:
            figures["games_restarted"] = result.restarted
        if not context.sample:
            best, best_mean = context.best(), result.mean
            if best is not None and not _are_equal(learner, best):
                report_start(f"evaluating {_games(count)} of the best checkpoint")
                best_mean = play(policy=best).mean
            figures["best_eval_return_mean"] = max(result.mean, best_mean)
        return figures

    def sentence(self, figures: Mapping[str, Any]) -> str:
        sample = figures.get("eval_sampled_return_mean") is not None
        name = _figure_name(sample)
        mean, error = figures.get(f"{name}_return_mean"), figures.get(f"{name}_return_stderr")
        if mean is None:
            return ""
        spread = "" if error is None else f" ± {error:.2f} (standard error)"
        rate, cut = figures.get(f"{name}_success_rate"), figures.get("games_cut")
        reached = "" if rate is None else f", {100 * rate:.0f}% of them successful"
        ended = f", {cut} of them ended at {self.eval_max_env_steps:,} env steps" if cut else ""
        restarted = figures.get("games_restarted")
        failed = ""
        if restarted:
            failed = f", with {restarted} restart{'s' * (restarted > 1)} after a simulator had failed"
        prefix = f"{name}_figure_"
        means = {k.removeprefix(prefix): v for k, v in figures.items() if k.startswith(prefix)}
        measured = "".join(f", {figure} {mean:g}" for figure, mean in means.items() if mean is not None)
        actions = ", with sampled actions" * sample
        games = f"{_games(figures['episodes'])}{actions}"
        return f"Evaluation over {games}: {mean:.2f}{spread}{reached}{measured}{ended}{failed}"

    def video(self, learner: Agent, context: EvalContext) -> Iterator[Picture | None]:
        return filmed_game(
            cast(SimulatorWorld, context.world),
            learner,
            context.seed,
            min(_MOST_FRAMES, self.eval_max_env_steps),
            greedy=not context.sample,
        )


def _games(count: int) -> str:
    return f"{count} game" + "s" * (count != 1)


def _are_equal(learner: Agent, other: Agent) -> bool:
    """Whether both have the same parameters and buffers, so that they would play the same games."""
    first, second = (
        {
            (name, key): values
            for name, replica in agent.replicas.items()
            for key, values in tensors_of(replica).items()
        }
        for agent in (learner, other)
    )
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def _figure_name(sample: bool) -> str:
    return "eval_sampled" if sample else "eval"


@dataclass
class _Game:
    """A game in progress."""

    number: int
    simulator: Simulators
    observation: Tensor  # [1, ...]
    memory: Tensor | None  # [1, M]
    first: bool = True
    return_so_far: float = 0.0
    length: int = 0
    env_steps: int = 0  # also of episodes that were lost
    restarted: int = 0

    def step(self, action: Tensor) -> TimeStep:
        """Take the action [1] or [1, D]. A game whose simulator fails, which truncates an episode that does
        not count, begins anew. Raises RunFailed if it has failed too often."""
        self.simulator.send(action)
        step = self.simulator.receive()
        self.observation, self.first = step.observation, False
        self.return_so_far += float(step.reward)
        self.length += 1
        self.env_steps += 1
        if step.truncated.any() and not step.episodes:
            self.first, self.return_so_far, self.length = True, 0.0, 0
            self.restarted += 1
            for message in step.restarts:
                report(message)
            if self.restarted > _MOST_RESTARTS:
                raise RunFailed(
                    f"game {self.number} of the evaluation began {self.restarted} times, and its simulator "
                    f"failed each time. The last failure: {' '.join(step.restarts)}"
                )
        return step

    def cut(self) -> Episode:
        """The episode, as if the game ended now."""
        return Episode(0, self.return_so_far, self.length)


def evaluate(
    world: SimulatorWorld,
    policy: Policy,
    episodes: int,
    seed: int,
    simulators: int = 16,
    *,
    greedy: bool = True,
    max_steps: int | None = None,
) -> EvalResult:
    """Play ``episodes`` whole games (Assran et al. 2019, section 4: 10 games, up to 30 no-ops, greedily).

    Game i is seeded from (seed, i) and always counts, however long it is: up to ``simulators`` games are
    played at once, but counting the games that end first would favour short ones. Rewards are unclipped, and
    the loss of a life does not end a game (``training=False``). The policy's nets are in evaluation mode
    meanwhile. greedy: take the most probable actions, instead of drawing them. max_steps: env steps after
    which a game ends with the return that it has.

    Raises ``ValueError`` for fewer than one game or simulator, ``RunFailed`` if the simulator of a game fails
    more than 20 times.
    """
    if min(episodes, simulators) < 1:
        raise ValueError(
            f"evaluation needs at least one game and one simulator, got {episodes} and {simulators}"
        )
    generator = derive_generator(seed, "evaluation")
    ended: dict[int, Episode] = {}
    numbers = iter(range(episodes))
    games: list[_Game] = []
    cut, restarted, env_steps, next_report = 0, 0, 0, time.monotonic() + _REPORT_SECONDS
    try:
        with in_evaluation_mode(*_modules(policy)):
            while len(ended) < episodes:
                for number in itertools.islice(numbers, simulators - len(games)):
                    games.append(_begin(world, policy, seed, number))
                actions = torch.split(_act(policy, games, generator, greedy), 1)
                for game, action in zip(games, actions, strict=True):
                    episode = next(iter(game.step(action).episodes), None)
                    if episode is None and game.env_steps == max_steps:
                        episode, cut = game.cut(), cut + 1
                    if episode is not None:
                        ended[game.number], restarted = episode, restarted + game.restarted
                        _close(game)
                env_steps += len(games)
                games = [game for game in games if game.number not in ended]
                if time.monotonic() >= next_report:
                    # an environment without a time limit seems to hang here
                    is_cut = not ended and max_steps is not None
                    limit = f"; a game is cut after {max_steps:,} (--eval-max-env-steps)" if is_cut else ""
                    report(
                        f"{len(ended)} of {episodes} games have ended, after {env_steps:,} env steps{limit}"
                    )
                    next_report = time.monotonic() + _REPORT_SECONDS
    finally:
        for game in games:
            _close(game)
    in_order = [ended[number] for number in range(episodes)]
    return EvalResult(
        tuple(e.episode_return for e in in_order),
        tuple(e.length for e in in_order),
        tuple(e.success for e in in_order),
        cut,
        restarted,
        tuple(e.figures for e in in_order),
    )


def filmed_game(
    world: SimulatorWorld, policy: Policy, seed: int, max_steps: int = _MOST_FRAMES, *, greedy: bool = True
) -> Generator[Picture | None, None, float]:
    """Play a game; yields a frame [H, W, 3] uint8 before each env step, and None where the frames so far do
    not count, as the simulator failed and the game begins anew. Returns the game's return.

    It is game 0 of ``evaluate`` with this seed and ``greedy``, up to its end or ``max_steps``. (Where actions
    are drawn, it only begins as that game, unless it is the only one: ``evaluate`` draws those of all games
    together.)

    Raises ``MissingExtra`` where drawing needs a package that is not installed, ``ValueError`` for
    ``max_steps`` < 1.
    """
    if max_steps < 1:
        raise ValueError(f"a video needs at least one step, got {max_steps}")
    generator = derive_generator(seed, "evaluation")
    game = _begin(world, policy, seed, 0, picture=True)
    try:
        with in_evaluation_mode(*_modules(policy)):
            for step in range(max_steps):
                if game.first and step:
                    yield None
                yield game.simulator.picture()
                if game.step(_act(policy, [game], generator, greedy)).episodes:
                    break
    finally:
        _close(game)
    return game.return_so_far


def _close(game: _Game) -> None:
    with contextlib.suppress(Exception):  # of an environment: the game has been played
        game.simulator.close()


def _modules(policy: Policy) -> list[nn.Module]:
    """The nets of a policy that is an agent; none of another."""
    return [replica.module for replica in getattr(policy, "replicas", {}).values()]


def _begin(world: SimulatorWorld, policy: Policy, seed: int, number: int, picture: bool = False) -> _Game:
    simulator = world.open(1, training=False, first=number, picture=picture)
    observation = simulator.reset(derive_seed(seed, "evaluation")).observation
    return _Game(number, simulator, observation, policy.initial_memory(1))


@torch.no_grad()
def _act(policy: Policy, games: list[_Game], generator: torch.Generator, greedy: bool = True) -> Tensor:
    """Actions [n] or [n, D]; updates every game's memory."""
    memories = [game.memory for game in games if game.memory is not None]
    action = policy.act(
        torch.cat([game.observation for game in games]),
        torch.cat(memories) if memories else None,
        torch.tensor([game.first for game in games]),
        generator,
        greedy=greedy,
    )
    for i, game in enumerate(games):
        game.memory = None if action.memory is None else action.memory[i : i + 1]
    return action.action
