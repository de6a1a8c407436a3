"""Runs of agents for vector actions in MuJoCo that are stopped: resumed, they are the uninterrupted ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import murmurate
from laws.problems import same
from murmurate.training import checkpoint

pytest.importorskip("mujoco")
_NETS = {"batch": 16, "hidden": 16}
_NORMALIZED = {"agent": _NETS | {"normalize_observations": True}, "random_env_steps": 20}
# overwritten before the end
_REPLAY = {"capacity": 100, "learning_starts": 30, "samples_per_insert": 16.0, "alpha": 0.6}
_MODEL = {"hidden": 16, "batch": 16, "patience": 1, "improvement": 0.9}
_ROLLOUTS = {"every": 10, "starts": 64, "kept": 3}
_IMAGINED = {
    "agent": {"policy": _NETS, "model": _MODEL},
    "learning_starts": 40,
    "updates_per_step": 1.0,
    "fit_every": 50,
    "capacity": 100,
}
_SPO = _NORMALIZED | {"replay": _REPLAY, "replicas": 2, "actors": 0}
_GROWING = _ROLLOUTS | {"length_end": 3, "grows_after": 20, "grows_until": 60}


class _Stop:
    def on_checkpoint(self, folder: Path) -> str:
        return murmurate.STOP


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        pytest.param("td3", _NORMALIZED | {"replay": _REPLAY}, id="td3"),
        *(
            pytest.param(name, settings, id=name, marks=pytest.mark.slow)
            for name, settings in {
                "ddpg": _NORMALIZED | {"replay": _REPLAY},
                "sac": _NORMALIZED | {"replay": _REPLAY},
                "d4pg": _NORMALIZED | {"replay": _REPLAY},
                "spo-td3": _SPO,
                "mbpo": _IMAGINED | {"rollouts": _GROWING},
                "memr": _IMAGINED | {"rollouts": _ROLLOUTS},
            }.items()
        ),
    ],
)
def test_resumed_equals_uninterrupted(algorithm: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """With the statistics of observations, the replay, and the model's replay beside it."""
    options: dict[str, Any] = {
        "launcher": "inline", "env_steps": 160, "checkpoint_every_env_steps": 80, "eval_episodes": 1,
        "eval_max_env_steps": 5, "quiet": True,
    }  # fmt: skip
    options |= settings
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    murmurate.train(f"hopper-{algorithm}", out=whole, **options)
    murmurate.train(f"hopper-{algorithm}", out=stopped, callbacks=[_Stop()], **options)
    one, other = (folder / "checkpoints" / "last" for folder in (whole, stopped))
    assert 0 < checkpoint.updates(other, 0) < checkpoint.updates(one, 0)
    murmurate.resume(stopped, quiet=True)
    assert json.loads((stopped / "summary.json").read_text())["resume_exact"]
    assert checkpoint.parts(one) == list(range(options.get("replicas", 1)))
    for rank in checkpoint.parts(one):
        first, again = (checkpoint.read_part(folder, rank) for folder in (one, other))
        for key in ("replicas", "consensus", "source", "learner", "env_steps", "updates", "returns"):
            assert same(first[key], again[key]), f"replica {rank}: {key}"
        replays = checkpoint.read_replays(one, rank)
        assert set(replays) == ({"replay", "model_replay"} if "rollouts" in settings else {"replay"})
        assert same(replays, checkpoint.read_replays(other, rank))
        if settings["agent"].get("normalize_observations"):
            count = first["replicas"]["policy"]["replica"]["buffers"]["normalizer.moments.count"]
            assert count == options.get("replicas", 1) * 16 * first["updates"]
            assert isinstance(count, torch.Tensor)
