"""Saves and restores the state of a gymnasium environment with its wrappers, bit for bit.

States are arrays and plain JSON values, nested in dicts and lists; ``array_trees.py`` converts the arrays to
tensors. Imports no torch, so that the game server (``_game_server.py``) can use it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import types
from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

import gymnasium
import numpy as np

from murmurate.errors import Refusal

# A step reads these derived quantities before it recomputes them. After a step they still hold their values
# from the beginning of that step's last substep, so they cannot be computed from the integration state (Ant
# and Humanoid measure their speed from them).
_LAGGING = ("xpos", "xipos", "site_xpos", "geom_xpos", "cinert", "cvel", "cfrc_ext", "qfrc_actuator")

# fields of MuJoCo's model that a reset changes in the Adroit hand's tasks
_CHANGED_BY_RESET = ("body_pos", "body_quat", "site_pos")

# attributes of every wrapper that no step changes (``_cached_spec`` is a cache)
_CONSTANT_ATTRIBUTES = frozenset({"env", "_metadata", "_saved_kwargs", "_cached_spec"})
# types whose objects no step changes
_CONSTANT_TYPES = (gymnasium.Space, type, types.ModuleType, types.BuiltinFunctionType, np.ufunc)
_SEQUENCES = {"list": list, "tuple": tuple, "deque": deque}


class Unsavable(Exception):
    """An environment or a wrapper holds something that cannot be saved."""


@contextlib.contextmanager
def silence_mujoco(entry_point: object) -> Iterator[None]:
    """Keep MuJoCo from writing warnings about gymnasium's models to a log file in the working folder.

    Does nothing for other environments, or without MuJoCo.
    """
    try:
        mujoco = importlib.import_module("mujoco") if "mujoco" in str(entry_point) else None
    except ImportError:
        mujoco = None
    except Exception as problem:  # of its type, where MUJOCO_GL names a library that is not there
        if "MUJOCO_GL" not in os.environ:
            raise
        raise Refusal(
            f"MuJoCo cannot be loaded with MUJOCO_GL={os.environ['MUJOCO_GL']} ({problem}). Unset "
            "the variable; to draw without a display set it to egl, or to osmesa (Debian: libosmesa6)."
        ) from problem
    if mujoco is None:
        yield
        return
    before = mujoco.get_mju_user_warning()
    mujoco.set_mju_user_warning(lambda message: None)
    try:
        yield
    finally:
        mujoco.set_mju_user_warning(before)


class Saver(Protocol):
    """Saves and restores one environment's state, as arrays and plain values."""

    def save(self) -> dict[str, Any]:
        """The present state. Raises ``Unsavable``."""
        ...

    def load(self, state: dict[str, Any]) -> None: ...


def saver(env: Any) -> Saver | None:
    """The saver for ``env``; None if its state cannot be saved."""
    if isinstance(env, gymnasium.Wrapper):
        inner = saver(env.unwrapped)
        return None if inner is None else WrappersSaver(env, inner)
    if callable(getattr(env, "save_state", None)) and callable(getattr(env, "load_state", None)):
        return OwnSaver(env)
    module = type(env).__module__
    if module.startswith("gymnasium.envs.classic_control."):
        return ClassicSaver(env)
    if module.startswith("gymnasium.envs.mujoco.") and module.endswith("_v5"):
        return MujocoSaver(env)
    if module.startswith("gymnasium_robotics.envs.adroit_hand."):
        lengths = ("pen_length", "tar_length") if hasattr(env, "pen_length") else ()
        return MujocoSaver(env, _CHANGED_BY_RESET, lengths)
    if module == "murmurate.worlds._dmc_env":
        dmc_saver: Saver | None = env.saver()
        return dmc_saver
    return None


class OwnSaver:
    """For an environment that offers ``save_state() -> state`` and ``load_state(state)``; its ``np_random``
    is saved by the caller. A state is made of numbers, strings, arrays, NumPy generators and containers of
    these."""

    def __init__(self, env: Any) -> None:
        self._env = env

    def save(self) -> dict[str, Any]:
        return {"own": _encode(self._env.save_state())}

    def load(self, state: dict[str, Any]) -> None:
        self._env.load_state(_decode(state["own"]))


class ClassicSaver:
    """For classic control: the state is one array, ``env.state``, whose dtype matters."""

    def __init__(self, env: Any) -> None:
        self._env = env

    def save(self) -> dict[str, Any]:
        return {"state": np.array(self._env.state)}

    def load(self, state: dict[str, Any]) -> None:
        saved = state["state"]
        if saved.ndim != 1 or not len(saved):
            raise ValueError(f"the saved state of an environment has shape {list(saved.shape)}")
        self._env.state = saved.copy()


class MujocoSaver:
    """For MuJoCo: saves the integration state, and the derived quantities of ``_LAGGING``.

    in_model: names of the model's arrays that a reset changes. in_env: names of the environment's numbers
    that a reset changes.
    """

    def __init__(self, env: Any, in_model: tuple[str, ...] = (), in_env: tuple[str, ...] = ()) -> None:
        self._env, self._in_model, self._in_env = env, in_model, in_env
        self._mujoco = importlib.import_module("mujoco")
        # MuJoCo's number of the parts of its state that make up the integration state
        self._signature = int(self._mujoco.mjtState.mjSTATE_INTEGRATION)

    def save(self) -> dict[str, Any]:
        model, data = self._env.model, self._env.data
        integration = np.empty(self._mujoco.mj_stateSize(model, self._signature), np.float64)
        self._mujoco.mj_getState(model, data, integration, self._signature)
        saved: dict[str, Any] = {name: np.array(getattr(data, name)) for name in _LAGGING}
        saved |= {f"model.{name}": np.array(getattr(model, name)) for name in self._in_model}
        saved |= {f"env.{name}": float(getattr(self._env, name)) for name in self._in_env}
        return {"integration": integration, **saved}

    def load(self, state: dict[str, Any]) -> None:
        model, data = self._env.model, self._env.data
        self._mujoco.mj_setState(model, data, state["integration"], self._signature)
        for name in self._in_model:
            getattr(model, name)[...] = state[f"model.{name}"]
        for name in self._in_env:
            setattr(self._env, name, state[f"env.{name}"])
        for name in _LAGGING:
            getattr(data, name)[...] = state[name]


class WrappersSaver:
    """For an environment with wrappers: saves its own state, and the attributes of each wrapper.

    Numbers, strings, arrays, generators and containers of these are saved. Spaces, classes and functions
    without a closure count as constants and are left out. Anything else (a file, an object of unknown kind)
    raises ``Unsavable``.
    """

    def __init__(self, env: Any, inner: Saver) -> None:
        self._inner = inner
        self._stack: list[Any] = [env]
        while isinstance(self._stack[-1], gymnasium.Wrapper):
            self._stack.append(self._stack[-1].env)

    def save(self) -> dict[str, Any]:
        wrappers = [_attributes(wrapper, self._stack) for wrapper in self._stack[:-1]]
        return {"inner": self._inner.save(), "wrappers": wrappers}

    def load(self, state: dict[str, Any]) -> None:
        self._inner.load(state["inner"])
        for wrapper, saved in zip(self._stack, state["wrappers"], strict=False):
            _restore(wrapper, saved)


def _attributes(holder: Any, stack: list[Any]) -> dict[str, Any]:
    """The attributes of ``holder``, except for the environments of ``stack``. Raises ``Unsavable``."""
    saved: dict[str, Any] = {}
    for name, value in vars(holder).items():
        if name in _CONSTANT_ATTRIBUTES or _is_constant(value) or any(value is env for env in stack):
            continue
        if type(value).__module__.startswith("gymnasium.wrappers."):  # such as a ``RunningMeanStd``
            saved[name] = {"object": _attributes(value, stack)}
        else:
            saved[name] = _encode(value)
    return saved


def _is_constant(value: Any) -> bool:
    if isinstance(value, types.FunctionType):
        # functions of gymnasium itself hold bounds in their closures, and do not change them
        return value.__closure__ is None or value.__module__.startswith("gymnasium.")
    return isinstance(value, _CONSTANT_TYPES)


def _encode(value: Any) -> Any:
    """``value`` as arrays and plain JSON values. Raises ``Unsavable``."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        return {"array": np.array(value), "scalar": isinstance(value, np.generic)}
    if isinstance(value, np.random.Generator):
        return {"generator": save_generators([value])[0]}
    for kind, sequence_type in _SEQUENCES.items():
        if type(value) is sequence_type:
            return {kind: [_encode(x) for x in value], "longest": getattr(value, "maxlen", None)}
    if type(value) is dict and all(type(key) is str for key in value):
        return {"dict": {key: _encode(x) for key, x in value.items()}}
    raise Unsavable(f"{type(value).__name__} cannot be saved")


def _decode(saved: Any) -> Any:
    """The inverse of ``_encode``."""
    if not isinstance(saved, dict):
        return saved
    kind, content = next(iter(saved.items()))
    if kind == "array":
        array = content.copy()
        return array[()] if saved["scalar"] else array
    if kind == "generator":
        return load_generators([content], 1)[0]
    if kind == "dict":
        return {key: _decode(x) for key, x in content.items()}
    items = [_decode(x) for x in content]
    return deque(items, saved["longest"]) if kind == "deque" else _SEQUENCES[kind](items)


def _restore(holder: Any, saved: dict[str, Any]) -> None:
    for name, value in saved.items():
        if isinstance(value, dict) and "object" in value:
            _restore(getattr(holder, name), value["object"])
        else:
            setattr(holder, name, _decode(value))


def save_generators(generators: list[np.random.Generator]) -> list[dict[str, Any]]:
    """The generators' states as plain JSON values (integers of up to 128 bits, which Python's json keeps).

    Raises ``Unsavable`` unless all are of PCG64, which ``load_generators`` makes.
    """
    for generator in generators:  # an environment may set another kind
        if type(getattr(generator, "bit_generator", None)) is not np.random.PCG64:
            raise Unsavable(f"{generator!r} cannot be saved")
    return [dict(generator.bit_generator.state) for generator in generators]


def load_generators(states: list[dict[str, Any]], size: int) -> list[np.random.Generator]:
    """The generators with these states. Raises ``ValueError`` unless they are ``size`` PCG64 states."""
    if len(states) != size:
        raise ValueError(f"there are {len(states)} saved generators for {size} simulators")
    loaded = [np.random.Generator(np.random.PCG64(0)) for _ in states]
    for generator, state in zip(loaded, states, strict=True):
        generator.bit_generator.state = state
    return loaded
