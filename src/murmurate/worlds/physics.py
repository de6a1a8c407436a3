"""Saving and restoring the inside of one gymnasium environment, bit for bit."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch

# Read by a step before it computes them anew: MuJoCo leaves them where the last substep began, so
# they do not follow from the integration state (Ant and Humanoid measure their speed from them).
_LAGGING = ("xpos", "xipos", "site_xpos", "geom_xpos", "cinert", "cvel", "cfrc_ext", "qfrc_actuator")


@contextlib.contextmanager
def quiet_models(entry_point: object) -> Iterator[None]:
    """Keep MuJoCo from writing a log file into the working folder about how gymnasium spells its models.

    Does nothing for environments that are not MuJoCo's, or without it.
    """
    try:
        mujoco = importlib.import_module("mujoco") if "mujoco" in str(entry_point) else None
    except ImportError:
        mujoco = None
    if mujoco is None:
        yield
        return
    before = mujoco.get_mju_user_warning()
    mujoco.set_mju_user_warning(lambda message: None)
    try:
        yield
    finally:
        mujoco.set_mju_user_warning(before)


class Keeper(Protocol):
    """Saves one environment. What comes out holds tensors and plain values only."""

    def save(self) -> dict[str, Any]: ...
    def load(self, state: dict[str, Any]) -> None: ...


def keeper(env: Any) -> Keeper | None:
    """Who can save ``env`` (unwrapped); None where nobody can."""
    module = type(env).__module__
    if module.startswith("gymnasium.envs.classic_control."):
        return ClassicKeeper(env)
    if module.startswith("gymnasium.envs.mujoco.") and module.endswith("_v5"):
        return MujocoKeeper(env)
    return None


class ClassicKeeper:
    """Classic control: all that moves is one array, ``env.state``, whose dtype matters."""

    def __init__(self, env: Any) -> None:
        self._env = env

    def save(self) -> dict[str, Any]:
        return {"state": torch.from_numpy(np.array(self._env.state))}

    def load(self, state: dict[str, Any]) -> None:
        self._env.state = state["state"].numpy().copy()


class MujocoKeeper:
    """MuJoCo: the integration state, and the derived quantities that lag a substep behind it."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self._mujoco = importlib.import_module("mujoco")
        self._parts = int(self._mujoco.mjtState.mjSTATE_INTEGRATION)

    def save(self) -> dict[str, Any]:
        model, data = self._env.model, self._env.data
        integration = np.empty(self._mujoco.mj_stateSize(model, self._parts), np.float64)
        self._mujoco.mj_getState(model, data, integration, self._parts)
        saved = {name: torch.from_numpy(np.array(getattr(data, name))) for name in _LAGGING}
        return {"integration": torch.from_numpy(integration), **saved}

    def load(self, state: dict[str, Any]) -> None:
        model, data = self._env.model, self._env.data
        self._mujoco.mj_setState(model, data, state["integration"].numpy(), self._parts)
        for name in _LAGGING:
            getattr(data, name)[...] = state[name].numpy()
