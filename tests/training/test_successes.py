"""The share of training episodes that reached the goal of their world, and means of the figures that it
gives, from every kind of source."""

import json
from pathlib import Path

import pytest

from murmurate.cli.main import main
from murmurate.record.groups import RunGroup
from murmurate.record.report import report
from murmurate.record.runs import open_run
from murmurate.record.sections import success_rate
from murmurate.training import episode_means
from short_runs import SHORT

ENVIRONMENT = '''
import gymnasium
import numpy as np


class Coin(gymnasium.Env):
    """Episodes of one step; an episode is a success, if action 1 was chosen and a coin fell right."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        right = bool(action == 1 and self.np_random.random() < 0.9)
        told = {"success": right, "figures": {"energy": 2.0 * right, "hits": np.int64(3)}}
        return np.zeros(2, np.float32), float(right), True, False, told
'''
_REPLAY = ("--replay.learning-starts", "50", "--agent.batch", "16")


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("a2c", ("--launcher", "inline")),
        ("a2c", ("--launcher", "inline", "--world.served", "true")),
        ("dqn", ("--launcher", "inline", *_REPLAY)),
        ("impala", ("--actors", "1", "--simulators", "4")),
        ("apex-dqn", ("--actors", "1", "--simulators", "4", *_REPLAY)),
        ("service-dqn", ("--replicas", "1", "--actors", "1", "--simulators", "4", *_REPLAY)),
    ],
)
def test_every_source_tells_which_episodes_were_successes(
    tmp_path: Path, algorithm: str, options: tuple[str, ...]
) -> None:
    (tmp_path / "coin.py").write_text(ENVIRONMENT)
    run = tmp_path / "run"
    words = ["train", f"env:{tmp_path / 'coin.py'}:Coin-{algorithm}", "--env-steps", "800", *options]
    words += ["--record-every-seconds", "0.01", "--eval-episodes", "1", "--seed", "0"]
    assert main([*words, "--out", str(run)]) == 0
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rates = [record["success_rate"] for record in records if "success_rate" in record]
    assert rates
    for record in records:
        if "success_rate" in record:  # the reward is 1 for a success, else 0
            assert record["success_rate"] == pytest.approx(record["return_mean"])
            assert record["figure_energy"] == pytest.approx(2 * record["return_mean"])
            assert record["figure_hits"] == 3
    summary = json.loads((run / "summary.json").read_text())
    assert summary["eval_figure_energy"] == pytest.approx(2 * summary["eval_return_mean"])
    assert summary["eval_figure_hits"] == 3
    assert success_rate([RunGroup("", 0, (open_run(run),))])


def test_simulated_replicas_tell_which_episodes_were_successes(tmp_path: Path) -> None:
    (tmp_path / "coin.py").write_text(ENVIRONMENT)
    run = tmp_path / "run"
    words = ["simulate", f"env:{tmp_path / 'coin.py'}:Coin-a2c", "--replicas", "2", "--env-steps", "800"]
    assert main([*words, "--eval-episodes", "1", "--seed", "0", "--out", str(run)]) == 0
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    names = ("success_rate", "return_mean", "figure_energy")
    rates = [[record[name] for name in names] for record in records if "success_rate" in record]
    assert rates
    for rate, return_mean, energy in rates:
        assert rate == pytest.approx(return_mean)
        assert energy == pytest.approx(2 * return_mean)
    assert "Success rate in training" in Path(report([run], tmp_path / "report.html")).read_text()


def test_a_world_without_a_goal_has_no_success_rate(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["train", "cartpole-a2c", "--env-steps", "600", "--launcher", "inline", "--eval-episodes", "1"]
    assert main([*words, "--out", str(run)]) == 0
    assert "success_rate" not in (run / "metrics.jsonl").read_text()
    assert "Success rate" not in Path(report([run], tmp_path / "report.html")).read_text()


def test_a_run_of_which_no_episode_ends_is_warned_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pendulum has no end but its limit."""
    monkeypatch.setattr(episode_means, "_LONGEST", 20)
    words = ["train", "gym:Pendulum-v1-a2c", *SHORT, "--updates", "20", "--record-every-seconds", "1e-9"]
    warned = []
    for limit in ("1000", "10"):
        folder = tmp_path / limit
        assert main([*words, "--world.max-episode-steps", limit, "--out", str(folder)]) == 0
        events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        warned.append([e["message"] for e in events if e.get("event") == "warning"])
    ((message,), none) = warned
    assert "no episode has ended in 20 env steps of each simulator" in message
    assert "--world.max-episode-steps" in message
    assert none == []
