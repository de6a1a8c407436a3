"""The part of a net that reads observations, found by name.

A module of this folder, or one that joins it by an entry point of the group ``murmurate.nets``, offers torsos
as functions by name; a file of your own is named ``path/to/file.py:function`` and needs no entry point::

    def wide(spec: EnvSpec, hidden: Sequence[int]) -> nn.Module: ...

    TORSOS = {"wide": wide}

``hidden`` are the widths that the agent's field of that name gives. The module takes observations
[B, *spec.observation_shape] of the world's dtype, casts them to that of its own parameters (which is bfloat16
under ``precision``), and gives features [B, ``out_features``]. Its linear layers and 2-D convolutions get
orthogonal weights afterwards, and other parameters keep what they were made with. An attribute
``shared = False`` has an actor-critic make one torso for the policy and another for the values. A torso that
cannot read these observations raises ``ValueError``.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from murmurate import plugins
from murmurate.spec import EnvSpec

Torso = Callable[[EnvSpec, Sequence[int]], nn.Module]
AUTO = "auto"
_SMALLEST_SIDE = 20  # pixels, of an image that nature2013 can read


def torsos() -> dict[str, Torso]:
    """All that have a name."""
    found: dict[str, Torso] = {}
    for module in plugins.modules("murmurate.nets"):
        found.update(getattr(module, "TORSOS", {}))
    return found


def checked_torso(name: str) -> str:
    """``name``; that of a file with its absolute path, so that a run goes on from other folders too.

    Raises:
        ValueError: for a name of no torso.
    """
    file, _, function = name.rpartition(":")
    if file.endswith(".py"):
        return f"{os.path.abspath(file)}:{function}"
    known = [AUTO, *sorted(torsos())]
    if name in known:
        return name
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f" (did you mean '{near[0]}'?)" if near else ""
    raise ValueError(f"there is no torso called '{name}'{hint}: use {', '.join(known)} or FILE.py:FUNCTION")


def usual_torso(spec: EnvSpec) -> str:
    """nature2013 for images that are large enough for it, else mlp."""
    large = spec.images and min(spec.observation_shape[1:]) >= _SMALLEST_SIDE
    return "nature2013" if large else "mlp"


def build_torso(spec: EnvSpec, name: str, hidden: Sequence[int]) -> nn.Module:
    """The torso called ``name``, with its ``out_features``. Weights are drawn from the global generator.

    Raises:
        ValueError: for an unknown torso, or one that cannot read these observations.
    """
    name = checked_torso(name)
    if name == AUTO:
        name = usual_torso(spec)
    known = torsos()
    made = (known[name] if name in known else _in_file(name))(spec, hidden)
    if not isinstance(getattr(made, "out_features", None), int):
        raise ValueError(f"the torso {name} does not say how many features it gives: set its out_features")
    return made


@contextmanager
def drawn_from(generator: torch.Generator) -> Iterator[None]:
    """Layers draw from the global generator when they are made. In here what they draw follows from the seed
    of ``generator``, which is not advanced; afterwards the global one is where it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(generator.initial_seed())
        yield


def _in_file(name: str) -> Torso:
    file, _, function = name.rpartition(":")
    spec = importlib.util.spec_from_file_location(f"murmurate_torso_{Path(file).stem}", file)
    if spec is None or spec.loader is None or not Path(file).is_file():
        raise ValueError(f"there is no file {file} with a torso in it: say --agent.torso FILE.py:FUNCTION")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where dataclasses look for it
    spec.loader.exec_module(module)
    found: Any = getattr(module, function, None)
    if not callable(found):
        raise ValueError(f"there is no function '{function}' in {file}")
    torso: Torso = found
    return torso
