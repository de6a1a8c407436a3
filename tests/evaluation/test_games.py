"""Evaluation counts exactly the given number of whole games."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from filming import record_game
from murmurate.agents.interface import Action
from murmurate.cli.main import main
from murmurate.errors import RunFailed
from murmurate.evaluation import games
from murmurate.evaluation.games import EvalResult, Games, evaluate
from murmurate.evaluation.interface import EvalContext, reporting
from murmurate.replica.vector import Replica
from murmurate.worlds.gym import GymWorld
from murmurate.worlds.gym_simulators import GymSimulators
from murmurate.worlds.interface import Simulators
from scripted import Always, Counter, Roulette, ScriptedSimulators
from short_runs import SHORT


@dataclass(frozen=True)
class ScriptedWorld:
    """Game i lasts lengths[i] steps, each worth i + 1; remembers what it opened."""

    lengths: tuple[int, ...]
    opened: list[ScriptedSimulators] = field(default_factory=list)
    name: str = "scripted"

    def open(
        self, simulators: int, *, training: bool, threads: int = 1, first: int = 0, picture: bool = False
    ) -> Simulators:
        assert simulators == 1
        assert not training
        n = self.lengths[first]
        game = ScriptedSimulators(
            [[(first + 1.0, "")] * (min(n, 100) - 1) + [(first + 1.0, "terminated")]], first
        )
        self.opened.append(game)
        return game


@pytest.mark.parametrize("simulators", [1, 2, 3, 16])
def test_each_game_counts_once_however_long(simulators: int) -> None:
    """The first to finish are the short ones: whoever counts those gets a mean of nothing but ones."""
    world = ScriptedWorld((1, 40, 2, 1, 30, 3, 1))
    result = evaluate(world, Counter(), 7, seed=0, simulators=simulators)
    assert result.lengths == (1, 40, 2, 1, 30, 3, 1)
    assert result.returns == (1, 80, 6, 4, 150, 18, 7)
    assert all(game.closed for game in world.opened)
    assert len(world.opened) == 7
    # The counting actor adds its memory to what it sees: forgotten at each start, kept per game.
    for game in world.opened:
        n = world.lengths[game.first]
        assert game.sent == [[(1000 * game.first + 2 * t) % 100] for t in range(n)]


def test_a_game_without_an_end_is_cut_with_what_it_has_returned() -> None:
    world = ScriptedWorld((2, 10**9, 5, 6))
    result = evaluate(world, Counter(), 4, seed=0, max_steps=5)
    assert (result.lengths, result.returns, result.cut) == ((2, 5, 5, 5), (2, 10, 15, 20), 2)
    assert all(game.closed for game in world.opened)


def test_nets_are_in_evaluation_mode_and_then_as_they_were() -> None:
    net = nn.Sequential(nn.Dropout(), nn.Dropout())
    net[1].eval()
    modes = []

    class Dropping(Always):
        replicas: ClassVar[dict[str, Any]] = {"net": SimpleNamespace(module=net)}

        def act(self, observation: Tensor, *rest: Any, **options: Any) -> Action:
            modes.append([part.training for part in net.modules()])
            return super().act(observation, *rest, **options)

    evaluate(ScriptedWorld((2,)), Dropping(0), 1, seed=0)
    record_game(ScriptedWorld((2,)), Dropping(0), seed=0)
    assert modes == [[False, False, False]] * 4
    assert [part.training for part in net.modules()] == [True, True, False]


@pytest.mark.parametrize(("weight", "played"), [(1.0, 2), (2.0, 4)])
def test_the_best_checkpoint_is_not_played_again_if_it_is_the_last(weight: float, played: int) -> None:
    def player(weight: float) -> Any:
        net = nn.Linear(1, 1, bias=False)
        nn.init.constant_(net.weight, weight)
        made: Any = Always(0)
        made.replicas = {"net": Replica("net", net, lambda p: torch.optim.SGD(p, lr=0.1))}
        return made

    world: Any = ScriptedWorld((2, 3))
    context = EvalContext(world, Path(), seed=0, best=lambda: player(weight))
    figures = Games(eval_episodes=2).evaluate(player(1.0), context)
    assert figures["best_eval_return_mean"] == figures["eval_return_mean"] == 4.0
    assert len(world.opened) == played


def test_a_long_evaluation_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    with reporting(lines.append):
        evaluate(ScriptedWorld((1, 3)), Counter(), 2, seed=0)
        assert lines == []
        monkeypatch.setattr(games, "_REPORT_SECONDS", 0.0)
        evaluate(ScriptedWorld((2, 3)), Counter(), 2, seed=0, max_steps=1_000)
        cut = lines.pop(0)
        lines.clear()
        evaluate(ScriptedWorld((1, 3)), Counter(), 2, seed=0, max_steps=1_000)
    assert cut == (
        "0 of 2 games have ended, after 2 env steps; a game is cut after 1,000 (--eval-max-env-steps)"
    )
    assert lines[0] == "1 of 2 games have ended, after 2 env steps"
    assert lines[-1] == "2 of 2 games have ended, after 4 env steps"


def test_mean_and_standard_error_by_hand() -> None:
    result = EvalResult((1.0, 2.0, 4.0, 5.0), (1, 1, 1, 1))
    assert result.mean == 3.0
    # deviations 2, 1, 1, 2: variance 10 / 3; over 4 games
    assert result.stderr == pytest.approx(math.sqrt(10 / 3 / 4))
    assert math.isnan(EvalResult((1.0,), (1,)).stderr)


def test_games_that_were_cut_did_not_reach_the_goal() -> None:
    def rate(*successes: bool | None, cut: int) -> float | None:
        return EvalResult((1.0,) * 4, (1,) * 4, successes, cut).success_rate

    assert rate(True, True, None, False, cut=1) == 0.5
    assert rate(True, True, None, False, cut=0) is None, "the world does not say"
    assert rate(None, None, None, None, cut=4) is None


def test_cartpole_by_a_known_policy_is_the_same_for_any_number_of_simulators() -> None:
    class Balance(Roulette):
        """Push to where the pole falls: keeps it up for some dozens of steps or more."""

        def act(
            self,
            observation: Tensor,
            memory: Tensor | None,
            first: Tensor,
            generator: torch.Generator,
            greedy: bool = False,
        ) -> Action:
            assert greedy
            return Action((observation[:, 2] + observation[:, 3] > 0).long(), None)

    world = GymWorld("CartPole-v1", 200)
    results = [evaluate(world, Balance(2), 6, seed=4, simulators=s) for s in (1, 4, 6)]
    assert results[0] == results[1] == results[2]
    assert results[0].returns == tuple(map(float, results[0].lengths))
    assert results[0].mean > 100
    left = evaluate(world, Always(0), 6, seed=4)
    assert all(length < 15 for length in left.lengths)
    assert len(set(left.lengths)) > 1


def test_film_of_a_scripted_game() -> None:
    frames, total = record_game(ScriptedWorld((4,)), Counter(), seed=0)
    assert frames.shape == (4, 2, 2, 3)
    assert frames[:, 0, 0, 0].tolist() == [0, 1, 2, 3]
    assert total == 4.0
    frames, total = record_game(ScriptedWorld((4,)), Counter(), seed=0, max_steps=3)
    assert len(frames) == 3
    assert total == 3.0


def test_refusals() -> None:
    with pytest.raises(ValueError, match="at least one game"):
        evaluate(ScriptedWorld((1,)), Counter(), 0, seed=0)
    with pytest.raises(ValueError, match="at least one step"):
        record_game(ScriptedWorld((1,)), Counter(), seed=0, max_steps=0)


def test_sampled_returns_have_names_of_their_own_and_repeat(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def figures(*options: str) -> dict[str, Any]:
        arguments = ["eval", str(run_folder), "--episodes", "6", "--json", *options]
        assert main(arguments) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
        return found

    greedy, sampled, again = figures(), figures("--sample"), figures("--sample")
    assert sampled == again
    assert sampled["returns"] != greedy["returns"]
    assert sampled["eval_sampled_return_mean"] == pytest.approx(sum(sampled["returns"]) / 6)
    assert "eval_return_mean" not in sampled
    assert "eval_sampled_return_mean" not in greedy
    assert main(["eval", str(run_folder), "--episodes", "6", "--sample"]) == 0
    assert "6 games, with sampled actions: " in capsys.readouterr().out


def test_eval_cuts_games_at_the_run_s_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limit = ["--eval-max-env-steps", "3", "--eval-episodes", "2"]
    assert main(["train", "cartpole-a2c", *SHORT, *limit, "--out", str(tmp_path / "run")]) == 0
    assert "Evaluation over 2 games: 3.00 ± 0.00 (standard error), 2 of them ended at 3 env steps" in (
        capsys.readouterr().out
    )
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["games_cut"] == 2


class Failing(gymnasium.Env[Any, Any]):
    """Episodes of 20 steps, in which the first environment made fails at the 15th; or all, if ``always``."""

    made, always = 0, False
    observation_space = gymnasium.spaces.Box(0, 100, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(100)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        Failing.made += 1
        self.number = Failing.made

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        if self.t == 15 and (self.number == 1 or self.always):
            raise OSError("no licence")
        return np.full(1, self.t, np.float32), 1.0, self.t == 20, False, {}

    def render(self) -> Any:
        return np.full((2, 2, 3), self.t, np.uint8)


class FailingWorld:
    name = "failing"

    def open(self, simulators: int, *, first: int = 0, picture: bool = False, **options: Any) -> Simulators:
        def make(b: int) -> tuple[Any, int]:
            return Failing("rgb_array" if picture else None), 10**6

        return GymSimulators(self.name, make, simulators, first)


def test_a_game_whose_simulator_fails_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    firsts: list[int] = []

    class Noting(Counter):
        def act(self, observation: Tensor, memory: Any, first: Tensor, *rest: Any, **options: Any) -> Action:
            firsts.extend(observation[first].flatten().int().tolist())
            return super().act(observation, memory, first, *rest, **options)

    world: Any = FailingWorld()
    monkeypatch.setattr(Failing, "made", 0)
    lines: list[str] = []
    with reporting(lines.append):
        result = evaluate(world, Noting(), 2, seed=0, simulators=1)
    assert (result.returns, result.lengths, result.restarted) == ((20.0, 20.0), (20, 20), 1)
    assert firsts == [0, 0, 0]
    assert "no licence" in lines[0]
    monkeypatch.setattr(Failing, "made", 0)
    result = evaluate(world, Counter(), 1, seed=0, max_steps=18)
    assert (result.returns, result.lengths, result.cut) == ((3.0,), (3,), 1), "all steps count for the limit"
    monkeypatch.setattr(Failing, "made", 0)
    figures = Games(eval_episodes=1).evaluate(Noting(), EvalContext(world, Path(), seed=0, best=lambda: None))
    assert figures["games_restarted"] == 1
    assert Games().sentence(figures).endswith(": 20.00, with 1 restart after a simulator had failed")
    monkeypatch.setattr(Failing, "made", 0)
    frames, total = record_game(world, Counter(), seed=0)
    assert (frames[:, 0, 0, 0].tolist(), total) == (list(range(20)), 20.0)


def test_a_game_whose_simulator_always_fails_ends_the_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not only after the greatest number of env steps."""
    world: Any = FailingWorld()
    monkeypatch.setattr(Failing, "always", True)
    with pytest.raises(RunFailed, match=r"game 0 of the evaluation began 21 times.*no licence"):
        evaluate(world, Counter(), 1, seed=0, max_steps=100_000)
