"""Torsos by name: the parts of nets that read observations.

A Python module of this folder, or one that an entry point of the group ``murmurate.nets`` names, offers
torsos in a dictionary ``TORSOS`` of functions by name::

    def wide(spec: EnvSpec, hidden: Sequence[int]) -> nn.Module: ...

    TORSOS = {"wide": wide}

Any other function or class of these arguments needs no entry point: its name as a torso is
``path/to/file.py:NAME`` or ``module:NAME``.

``hidden`` are the widths from the agent's field of that name. The torso that the function returns takes
observations [B, *spec.observation_shape] of the world's dtype, casts them to the dtype of its own parameters
(bfloat16 if ``precision`` says so), and returns features [B, ``out_features``]. Its linear layers and 2-D
convolutions are initialised orthogonally afterwards; other parameters keep their values. If its attribute
``shared`` is False, an actor-critic has one torso for the policy and another for the values. A function whose
torso cannot read these observations raises ``ValueError``. A torso that is named by file or module is tried
on two observations when it is made.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from murmurate import plugins
from murmurate.nets.parts import PartsTorso, image_shapes
from murmurate.spec import EnvSpec

Torso = Callable[[EnvSpec, Sequence[int]], nn.Module]
AUTO = "auto"
SMALLEST_SIDE = 20  # least height and width in pixels that nature2013 can read


def torsos() -> dict[str, Torso]:
    """All torsos by name, except those named ``FILE.py:NAME`` or ``module:NAME``. Raises Refusal where two
    have one name."""
    by_name: dict[str, Torso] = {}
    for module in plugins.modules("murmurate.nets"):
        for name, torso in getattr(module, "TORSOS", {}).items():
            plugins.refuse_clash("torsos", name, by_name.setdefault(name, torso), torso)
    return by_name


def checked_torso(name: str) -> str:
    """``name``, with an absolute path for a file, so that a run can be resumed from other folders.

    Raises:
        ValueError: for an unknown name.
    """
    if ":" in name:
        return plugins.resumable_name(name)
    known = [AUTO, *sorted(torsos())]
    if name in known:
        return name
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f" (did you mean '{near[0]}'?)" if near else ""
    raise ValueError(
        f"there is no torso called '{name}'{hint}: use {', '.join(known)}, FILE.py:NAME or module:NAME"
    )


def usual_torso(spec: EnvSpec) -> str:
    """nature2013 for images that are large enough for it, else mlp."""
    shapes = [spec.observation_shape] if spec.images else image_shapes(spec)
    large = any(min(height, width) >= SMALLEST_SIDE for _, height, width in shapes)
    return "nature2013" if large else "mlp"


def build_torso(spec: EnvSpec, name: str, hidden: Sequence[int]) -> nn.Module:
    """The torso called ``name``, with its ``out_features``. Weights are drawn from the global generator.

    Where observations are flattened and hold images, a named torso other than mlp reads each of these
    (``PartsTorso``), and mlp and torsos of the user's own read the whole vector.

    Raises:
        ValueError: for an unknown torso, or one that cannot read these observations.
    """
    name = checked_torso(name)
    if name == AUTO:
        name = usual_torso(spec)
    known = torsos()
    if name in known and name != "mlp" and image_shapes(spec):
        torso: nn.Module = PartsTorso(spec, known[name], hidden, SMALLEST_SIDE)
    elif name in known:
        torso = known[name](spec, hidden)
    else:
        torso = plugins.call_named(name, "torso", "--agent.torso", spec, hidden)
    if not isinstance(getattr(torso, "out_features", None), int):
        raise ValueError(f"the torso {name} has no number of features: set its out_features")
    if name not in known:
        features = trial_result(f"the torso {name}", torso, spec)
        if getattr(features, "shape", None) != (2, torso.out_features):
            raise ValueError(
                f"the torso {name} must return features [B, {torso.out_features}], as its out_features says, "
                f"and for 2 observations it returns {described(features)}"
            )
    return torso


def trial_result(what: str, module: nn.Module, spec: EnvSpec, *memory: Tensor) -> Any:
    """What ``module`` returns for two observations of zeros (and ``memory``), in evaluation mode.

    what: the module's name in the message.

    Raises:
        ValueError: if it raises anything.
    """
    observation = torch.zeros(2, *spec.observation_shape, dtype=spec.observation_dtype)
    try:
        with in_evaluation_mode(module), torch.no_grad():
            return module(observation, *memory)
    except Exception as error:
        dtype = str(spec.observation_dtype).removeprefix("torch.")
        raise ValueError(
            f"{what} raised {type(error).__name__} on observations {list(observation.shape)} of {dtype}: "
            f"{str(error).rstrip('.')}"
        ) from error


def described(result: object) -> str:
    """The shape of a tensor, or of each tensor in a tuple, for messages; else the type's name."""
    if isinstance(result, Tensor):
        return str(list(result.shape))
    if isinstance(result, tuple):
        return f"({', '.join(map(described, result))})"
    return type(result).__name__


@contextmanager
def in_evaluation_mode(*modules: nn.Module) -> Iterator[None]:
    """Within this context the modules are in evaluation mode: they drop no features (``Dropout``), and use
    running statistics without changing them (``BatchNorm``). Afterwards each part has its earlier mode."""
    modes = [(part, part.training) for module in modules for part in module.modules()]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


@contextmanager
def seeded_by(generator: torch.Generator) -> Iterator[None]:
    """Within this context the global generator, from which layers draw initial weights, begins with the seed
    of ``generator``. ``generator`` is not advanced, and the global generator's state is restored."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(generator.initial_seed())
        yield
