"""Saves and restores the state of a gymnasium environment with its wrappers, bit for bit.

States are arrays and plain JSON values, nested in dicts and lists; ``array_trees.py`` converts the arrays to
tensors. Imports no torch, so that the game server (``_game_server.py``) can use it.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import types
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import gymnasium
import numpy as np

from murmurate.errors import Refusal
from murmurate.worlds._failures import noted

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
# numbers that torch and safetensors hold in the machine's byte order: not complex128 or longdouble, say
_SAVABLE_NUMBERS = frozenset("?bhilqBHILefdF")
_SEQUENCES = {"list": list, "tuple": tuple, "deque": deque}


class Unsavable(Exception):
    """An environment or a wrapper holds something that cannot be saved."""


@contextlib.contextmanager
def silence_mujoco(entry_point: object) -> Iterator[None]:
    """Keep MuJoCo from writing warnings about a package's models to a log file in the working folder, or to
    the terminal.

    Does nothing for other environments, or without MuJoCo. Raises ``Refusal`` if MuJoCo cannot be loaded with
    the value that the variable MUJOCO_GL has.
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
    if _takes(getattr(env, "save_state", None)) and _takes(getattr(env, "load_state", None), None):
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


def _takes(method: Any, *arguments: Any) -> bool:
    """Whether ``method`` can be called with these arguments alone."""
    if not callable(method):
        return False
    try:
        inspect.signature(method).bind(*arguments)
    except TypeError:
        return False
    except ValueError:
        pass  # compiled functions may not tell their parameters
    return True


class OwnSaver:
    """For an environment that offers ``save_state() -> state`` and ``load_state(state)``; its ``np_random``
    is saved by the caller. A state is made of numbers, strings, arrays, NumPy generators and containers of
    these."""

    def __init__(self, env: Any) -> None:
        self._env = env

    def save(self) -> dict[str, Any]:
        try:
            state = self._env.save_state()
        except Exception as problem:  # the run goes on; the traceback in the log says why it is not exact
            raise Unsavable(f"save_state raised {type(problem).__name__}{noted(problem)}") from problem
        met = {id(self._env.np_random): 0}
        return {"own": _encode(state, met), "spaces": _save_spaces([self._env])}

    def load(self, state: dict[str, Any]) -> None:
        self._env.load_state(_decode(state["own"], [self._env.np_random]))
        _load_spaces([self._env], state)


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

    Numbers, strings, arrays, generators and containers of these are saved, those that are met twice as one,
    and also the generators of spaces and the attributes of gymnasium's own helper objects (a
    ``RunningMeanStd``, say). The rest of a space, modules, classes, functions of gymnasium and those without
    a closure count as constants and are left out. Anything else (a file, an object of unknown kind) raises
    ``Unsavable``.
    """

    def __init__(self, env: Any, inner: Saver) -> None:
        self._inner, self._stack = inner, _stack(env)

    def save(self) -> dict[str, Any]:
        met = {id(self._stack[-1].np_random): 0}
        wrappers = [_attributes(wrapper, self._stack, met) for wrapper in self._stack[:-1]]
        return {"inner": self._inner.save(), "wrappers": wrappers, "spaces": _save_spaces(self._stack)}

    def load(self, state: dict[str, Any]) -> None:
        self._inner.load(state["inner"])
        met = [self._stack[-1].np_random]
        for wrapper, saved in zip(self._stack, state["wrappers"], strict=False):
            _restore(wrapper, saved, met)
        _load_spaces(self._stack, state)


def load(env: Any, env_saver: Saver, physics: dict[str, Any], generator: np.random.Generator) -> None:
    """Continue ``env`` from ``physics``, which its saver has saved, with ``generator``, its ``np_random`` as
    it was then."""
    env.reset()  # some environments create attributes only in reset
    state = generator.bit_generator.state
    env.unwrapped.np_random = generator  # before the wrappers, which may hold it too
    env_saver.load(physics)
    env.unwrapped.np_random.bit_generator.state = state  # load_state may have drawn from it


def seed_spaces(env: Any, seed: int) -> None:
    """Seed the spaces of an environment and its wrappers, which they may sample. Those that have a generator
    already keep it."""
    for number, space in enumerate(_spaces(_stack(env))):
        if space._np_random is None:
            own_seed = np.random.SeedSequence([seed, number]).generate_state(1)[0]
            gymnasium.Space.seed(space, int(own_seed))  # ``Dict.seed`` would seed its parts again


def _stack(env: Any) -> list[Any]:
    """``env``, and the environments in it."""
    stack = [env]
    while isinstance(stack[-1], gymnasium.Wrapper):
        stack.append(stack[-1].env)
    return stack


def _spaces(stack: list[Any]) -> list[Any]:
    """The spaces of these environments and the parts of them, each once."""
    found: dict[int, Any] = {}

    def add(values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, gymnasium.Space) and id(value) not in found:
                found[id(value)] = value
                for part in vars(value).values():
                    parts = part.values() if isinstance(part, dict) else part
                    add(parts if isinstance(part, dict | tuple | list) else [part])

    for layer in stack:
        add([layer.action_space, layer.observation_space, *vars(layer).values()])
    return list(found.values())


def _save_spaces(stack: list[Any]) -> list[Any]:
    """The states of the spaces' generators; None for a space that has none yet."""
    return [s._np_random and save_generators([s._np_random])[0] for s in _spaces(stack)]


def _load_spaces(stack: list[Any], state: dict[str, Any]) -> None:
    # states that were saved earlier do not have these
    for space, saved in zip(_spaces(stack), state.get("spaces", []), strict=False):
        if saved is not None:
            space.np_random.bit_generator.state = saved


def _attributes(holder: Any, stack: list[Any], met: dict[int, int]) -> dict[str, Any]:
    """The attributes of ``holder``, except for the environments of ``stack``. met: see ``_encode``. Raises
    ``Unsavable``."""
    saved: dict[str, Any] = {}
    for name, value in vars(holder).items():
        if name in _CONSTANT_ATTRIBUTES or _is_constant(value) or any(value is env for env in stack):
            continue
        if type(value).__module__.startswith("gymnasium.wrappers."):  # such as a ``RunningMeanStd``
            saved[name] = {"object": _attributes(value, stack, met)}
        else:
            saved[name] = _encode(value, met)
    return saved


def _is_constant(value: Any) -> bool:
    if isinstance(value, types.FunctionType):
        # functions of gymnasium itself hold bounds in their closures, and do not change them
        return value.__closure__ is None or value.__module__.startswith("gymnasium.")
    return isinstance(value, _CONSTANT_TYPES)


def _encode(value: Any, met: dict[int, int]) -> Any:
    """``value`` as arrays and plain JSON values. met: the number of each mutable object so far, by its id;
    one that is met again is saved as its number. Raises ``Unsavable``."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if id(value) in met:
        return {"same": met[id(value)]}
    if not isinstance(value, np.generic | tuple):
        met[id(value)] = len(met)
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.char not in _SAVABLE_NUMBERS or not value.dtype.isnative:
            raise Unsavable(f"an array of {value.dtype} cannot be saved")
        return {"array": np.array(value), "scalar": isinstance(value, np.generic)}
    if isinstance(value, np.random.Generator):
        return {"generator": save_generators([value])[0]}
    for kind, sequence_type in _SEQUENCES.items():
        if type(value) is sequence_type:
            return {kind: [_encode(x, met) for x in value], "longest": getattr(value, "maxlen", None)}
    if type(value) is dict and all(type(key) is str for key in value):
        return {"dict": {key: _encode(x, met) for key, x in value.items()}}
    raise Unsavable(f"{type(value).__name__} cannot be saved")


def _decode(saved: Any, met: list[Any]) -> Any:
    """The inverse of ``_encode``. met: the mutable objects so far, by their numbers."""
    if not isinstance(saved, dict):
        return saved
    kind, content = next(iter(saved.items()))
    if kind == "same":
        return met[content]
    if kind == "array" and saved["scalar"]:
        return content.copy()[()]
    if kind == "tuple":
        return tuple([_decode(x, met) for x in content])
    made: Any
    if kind == "array":
        made = content.copy()
    elif kind == "generator":
        made = load_generators([content], 1)[0]
    else:
        made = deque(maxlen=saved["longest"]) if kind == "deque" else {"list": list, "dict": dict}[kind]()
    met.append(made)  # before its content, which is numbered after it
    if kind == "dict":
        made.update((key, _decode(x, met)) for key, x in content.items())
    elif kind in ("list", "deque"):
        made.extend(_decode(x, met) for x in content)
    return made


def _restore(holder: Any, saved: dict[str, Any], met: list[Any]) -> None:
    for name, value in saved.items():
        if isinstance(value, dict) and "object" in value:
            _restore(getattr(holder, name), value["object"], met)
        else:
            setattr(holder, name, _decode(value, met))


def save_generators(generators: list[np.random.Generator]) -> list[dict[str, Any]]:
    """The generators' states as plain JSON values (integers of up to 128 bits, which Python's json keeps).

    Raises ``Unsavable`` unless all are of PCG64, which ``load_generators`` makes.
    """
    for generator in generators:  # an environment may set another kind
        if type(getattr(generator, "bit_generator", None)) is not np.random.PCG64:
            raise Unsavable(f"{generator!r} cannot be saved")
    return [dict(generator.bit_generator.state) for generator in generators]


def load_generators(states: list[dict[str, Any]], size: int) -> list[np.random.Generator]:
    """The generators with these states. Raises ``ValueError``, ``KeyError`` or ``TypeError`` unless they are
    ``size`` PCG64 states."""
    if len(states) != size:
        raise ValueError(f"there are {len(states)} saved generators for {size} simulators")
    loaded = [np.random.Generator(np.random.PCG64(0)) for _ in states]
    for generator, state in zip(loaded, states, strict=True):
        generator.bit_generator.state = state
    return loaded
