"""Figures that an environment gives at an episode's end: which are taken, and what is refused."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from murmurate.evaluation.games import EvalResult, Games
from murmurate.record.tensorboard import scalars
from murmurate.sources.shared_ring import EPISODE_NUMBERS, read_episodes, write_episodes
from murmurate.spec import Episode
from murmurate.training.episode_means import EpisodeMeans
from murmurate.worlds.figures import LONGEST_NAME, MOST_FIGURES, figures_of
from murmurate.worlds.vector_simulators import VectorSimulators


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        (3.0, "figures in its info is 3.0: it must be a dict"),
        ({"energy": "much"}, "the figure energy in its info is 'much': it must be a number"),
        ({"energy": [1.0, 2.0]}, "the figure energy"),
        ({"joint torque": 1.0}, "is called 'joint torque'"),
        ({1: 1.0}, "is called 1"),
        ({"x" * (LONGEST_NAME + 1): 1.0}, "a name has 1 to 31"),
        (
            {f"joint{j}": 1.0 for j in range(MOST_FIGURES + 1)},
            "has 9 figures: there can be at most 8",
        ),
    ],
)
def test_what_is_no_figure_is_refused(figures: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        figures_of({"figures": figures})


def test_numbers_of_any_kind_are_figures() -> None:
    given = {"hits": np.int64(3), "energy": np.array([1.5]), "fell": True}
    assert figures_of({"figures": given}) == {"hits": 3.0, "energy": 1.5, "fell": 1.0}
    assert figures_of({}) == {}
    assert figures_of({"figures": {"slip": np.nan, "hits": 1, "far": -np.inf}}) == {"hits": 1.0}


def test_actors_pass_on_figures_of_any_name_and_number() -> None:
    longest = {f"{j}" + "x" * (LONGEST_NAME - 1): j / 3 for j in range(MOST_FIGURES)}
    one = Episode(1, 2.0, 3, None, {"energy": 0.1})
    episodes = [Episode(0, 1.0, 2, True, longest), one, Episode(2, 3.0, 4)]
    rows = torch.zeros(4, EPISODE_NUMBERS, dtype=torch.float64)
    for written in (episodes, episodes[::-1]):  # also over what was there before
        write_episodes(written, rows)
        assert read_episodes(rows[:3]) == written
    assert [e.numbered_from(5).figures for e in episodes] == [e.figures for e in episodes]


class Walk(gymnasium.Env[Any, Any]):
    """Ends after three steps, or two where the action is 1."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.number = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.number += 1 + int(action)
        over = self.number >= 3
        told = {"figures": {"reached": float(self.number)}} if over else {}
        return np.zeros(1, np.float32), 1.0, over, False, told


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP])
def test_vector_environments_give_figures(mode: AutoresetMode) -> None:
    simulators = VectorSimulators("walk", lambda: SyncVectorEnv([Walk, Walk], autoreset_mode=mode), 2, 0)
    simulators.reset(0)
    episodes = []
    for actions in ([0, 1], [0, 1], [0, 0]):
        simulators.send(torch.tensor(actions))
        episodes += simulators.receive().episodes
    assert [(e.simulator, e.figures) for e in episodes] == [(1, {"reached": 4.0}), (0, {"reached": 3.0})]
    simulators.close()


def test_means_are_of_the_newest_episodes_that_have_the_figure_and_go_on_after_a_resume() -> None:
    means = EpisodeMeans()
    means.add(Episode(0, 0.0, 1, None, {"energy": float(j)}) for j in range(150))
    means.add([Episode(0, 0.0, 1), Episode(0, 0.0, 1, True, {"hits": 2.0})])
    expected = {"success_rate": 1.0, "figure_energy": pytest.approx(99.5), "figure_hits": 2.0}
    assert means.fields() == expected
    resumed = EpisodeMeans()
    resumed.load(means.state())
    assert resumed.fields() == expected
    resumed.load({})  # of a version without figures


def test_evaluations_and_tensorboard_name_them() -> None:
    result = EvalResult((1.0, 2.0), (3, 4), figures=({"energy": 1.0, "hits": 3.0}, {"energy": 2.0}))
    assert result.figure_means == {"energy": 1.5, "hits": 3.0}
    figures = {"eval_return_mean": 1.5, "eval_return_stderr": None, "episodes": 2, "eval_figure_energy": 1.5}
    assert Games().sentence(figures) == "Evaluation over 2 games: 1.50, energy 1.5"
    assert scalars({"figure_energy": 1.5}) == [("figures/figure_energy", 1.5)]
