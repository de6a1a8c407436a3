"""Which runs resume exactly, with which replay, and with which masks of dropout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import murmurate
from murmurate.cli.main import main
from murmurate.training import checkpoint
from murmurate.training.coordinator import Coordinator
from murmurate.training.worker_context import FINAL, staging
from short_runs import SHORT, refused

REPLAY = (
    *(
        "--replay.capacity",
        "500",
        "--replay.learning-starts",
        "50",
        "--simulators",
        "2",
        "--agent.batch",
        "8",
    ),
    *("--env-steps", "none", "--launcher", "inline", "--eval-episodes", "1"),
    *("--record-every-seconds", "1e-9"),
)


@pytest.mark.parametrize(
    ("strategy", "replicas", "exact"), [("gala", 2, False), ("gala", 1, True), ("all-reduce", 2, True)]
)
def test_asynchronous_members_do_not_resume_exactly(
    tmp_path: Path, strategy: str, replicas: int, exact: bool
) -> None:
    words = ["--strategy", strategy, "--replicas", str(replicas), "--updates", "2", "--launcher", "inline"]
    words += ["--simulators", "1", "--eval-episodes", "1", "--out", str(tmp_path / "run")]
    assert main(["train", "cartpole-gala", *words]) == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["resume_exact"] == exact


def test_a_replica_that_is_dead_at_the_end_does_not_resume_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = Coordinator.commit_final

    def without_a_part(self: Coordinator) -> None:
        (staging(self.folder, FINAL) / "replica-1.safetensors").unlink()
        commit(self)

    monkeypatch.setattr(Coordinator, "commit_final", without_a_part)
    words = ["--strategy", "all-reduce", "--replicas", "2", *SHORT, "--out", str(tmp_path / "run")]
    assert main(["train", "cartpole-gala", *words]) == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["resume_exact"] is False


@pytest.mark.parametrize("saved", [True, False])
def test_resume_may_say_again_whether_the_replay_is_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], saved: bool
) -> None:
    """What the last checkpoint holds is gone on from; what the next one holds follows the new word. Nobody
    claims that a run that went on with an empty replay is what it would have been."""

    def held() -> bool:
        return (folder / "checkpoints" / "last" / "replay-0.safetensors").exists()

    def summary() -> dict[str, Any]:
        read: dict[str, Any] = json.loads((folder / "summary.json").read_text())
        return read

    folder = tmp_path / "run"
    begin = ["train", "cartpole-dqn", *REPLAY, "--updates", "20", "--replay.saved", str(saved)]
    assert main([*begin, "--out", str(folder)]) == 0
    assert held() == saved
    capsys.readouterr()
    said = refused(capsys, "resume", folder, "--replay.saved", str(not saved), "--replay.alpha", "0.5")
    assert said.startswith("--replay.alpha cannot change on resume")
    assert held() == saved
    assert main(["resume", str(folder), "--replay.saved", str(not saved), "--updates", "40"]) == 0
    assert held() == (not saved)
    assert json.loads((folder / "run.json").read_text())["replay"]["saved"] is (not saved)
    assert not summary()["resume_exact"]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    count = {line["updates"]: line["replay_transitions"] for line in lines if "replay_transitions" in line}
    assert (count[21] >= count[20]) == saved  # with what was there, or from nothing
    assert main(["resume", str(folder), "--updates", "50"]) == 0
    assert held() == (not saved)
    assert summary()["resume_exact"] == (not saved)


def test_a_replay_in_files_is_the_one_in_memory_and_may_move(tmp_path: Path) -> None:
    def losses(name: str) -> dict[int, float]:
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        return {line["updates"]: line["loss"] for line in lines if "loss" in line}

    ways = {"memory": ([], []), "files": (["--replay.folder", str(tmp_path / "one")], ["--replay.folder"])}
    for name, (begin, move) in ways.items():
        words = ["train", "cartpole-dqn", *REPLAY, *begin, "--updates", "20", "--out", str(tmp_path / name)]
        assert main(words) == 0
        moved = [*move, str(tmp_path / "other")] if move else []
        assert main(["resume", str(tmp_path / name), "--updates", "40", *moved]) == 0
    assert losses("memory") == losses("files")
    assert len(losses("files")) == 40
    for folder in ("one", "other"):
        assert (tmp_path / folder / "replica-0" / "transitions.bin").stat().st_size >= 500 * 32


_DROPS = """
import torch
from torch import nn

class Drops(nn.Sequential):
    out_features = 8

    def __init__(self, spec, hidden):
        super().__init__(nn.Linear(spec.observation_shape[0], 8), nn.Dropout(0.5))

    def forward(self, observation):
        if torch.is_grad_enabled():
            open(__file__ + ".seeds", "a").write(f"{torch.initial_seed()}\\n")
        return super().forward(observation)
"""


class _Stop:
    def on_checkpoint(self, folder: Path) -> str:
        return murmurate.STOP


def test_the_masks_of_dropout_are_the_replicas_own_and_a_resumed_run_goes_on_with_them(
    tmp_path: Path,
) -> None:
    net = tmp_path / "drops.py"
    net.write_text(_DROPS)

    def run(name: str, **options: Any) -> Path:
        settings: dict[str, Any] = {
            "launcher": "inline", "updates": 8, "simulators": 2, "eval_episodes": 1, "quiet": True,
            "agent": {"torso": f"{net}:Drops"}, "checkpoint_every_env_steps": 40,
        }  # fmt: skip
        murmurate.train("cartpole-a2c", out=tmp_path / name, **settings | options)
        return tmp_path / name

    def parameters(folder: Path) -> dict[str, torch.Tensor]:
        state = checkpoint.read_part(folder / "checkpoints" / "last", 0)
        assert state["updates"] == 8
        return state["replicas"]["a2c"]["replica"]["params"]

    state_before = torch.get_rng_state()
    whole = parameters(run("whole"))
    assert torch.equal(torch.get_rng_state(), state_before)
    stopped = run("stopped", callbacks=[_Stop()])
    assert checkpoint.updates(stopped / "checkpoints" / "last", 0) < 8
    torch.rand(3)
    murmurate.resume(stopped, quiet=True)
    resumed = parameters(stopped)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    seeds = net.with_name("drops.py.seeds")
    seeds.unlink()
    run("two", replicas=2, strategy="all-reduce")
    run("other", replicas=2, strategy="all-reduce", seed=1)
    assert len(set(seeds.read_text().split())) == 2 * 2 * 8
