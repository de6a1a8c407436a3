"""Whether an episode terminates, as a function of the observation after a step.

Model-based agents apply it to the observations that their models predict.

A module of this folder, or one that joins it by an entry point of the group ``murmurate.worlds``, offers such
functions in ``TERMINATIONS``, by the name of their world. A function in a file of your own is named
``path/to/file.py:function``. It takes observations [B, ...] as the world gives them and returns [B] bool.

The functions here follow gymnasium's environments of MuJoCo, version 5, with their default arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from murmurate import plugins
from murmurate.errors import Refusal

Termination = Callable[[Tensor], Tensor]
AUTO = "auto"


def terminations() -> dict[str, Termination]:
    """All termination functions, by the names of their worlds."""
    known: dict[str, Termination] = {}
    for module in plugins.modules("murmurate.worlds"):
        known.update(getattr(module, "TERMINATIONS", {}))
    return known


def termination(world: str, name: str = AUTO) -> Termination:
    """The function that ``TERMINATIONS`` has for the world or, if ``name`` is not ``AUTO``, the function
    called ``name`` (``FILE.py:FUNCTION``).

    Raises Refusal for a world without such a function, ValueError for a function that does not exist.
    """
    if name != AUTO:
        return plugins.function_in_file(name, "termination function", "--agent.termination")
    known = terminations()
    if world not in known:
        raise Refusal(
            f"A model of {world} cannot tell where its episodes end: that is known for the worlds whose mbpo "
            "recipes 'murmurate list recipes --json' names. Write a function of observations "
            "[B, ...] to bool [B]: --agent.termination FILE.py:FUNCTION."
        )
    return known[world]


def check(terminated: Termination, name: str, shape: Sequence[int], device: torch.device) -> None:
    """Try the function called ``name`` on two observations of this shape. Raises Refusal if it fails, or
    returns anything but [2] bool."""
    try:
        ended = terminated(torch.zeros(2, *shape, device=device))
    except Exception as problem:
        raise Refusal(
            f"the termination function {name} raised {type(problem).__name__} for two observations: "
            f"{problem}. Correct it, or choose another: --agent.termination FILE.py:FUNCTION."
        ) from problem
    if not isinstance(ended, Tensor):
        found = type(ended).__name__
    elif ended.shape == (2,) and ended.dtype == torch.bool:
        return
    else:
        found = f"{str(ended.dtype).removeprefix('torch.')} {list(ended.shape)}"
    raise Refusal(
        f"the termination function {name} gives {found} for observations {[2, *shape]}, and must give bool "
        "[2]: whether an episode ends at each. Correct it, or choose another: --agent.termination "
        "FILE.py:FUNCTION."
    )


def never(observation: Tensor) -> Tensor:
    return torch.zeros(len(observation), dtype=torch.bool, device=observation.device)


def hopper(observation: Tensor) -> Tensor:
    """Too low, bent by 0.2 rad or more, or with another observed number outside (-100, 100)."""
    height, angle = observation[:, 0], observation[:, 1]
    within_bounds = (observation[:, 1:].abs() < 100).all(1)
    return ~((height > 0.7) & (angle.abs() < 0.2) & within_bounds)


def walker2d(observation: Tensor) -> Tensor:
    height, angle = observation[:, 0], observation[:, 1]
    return ~((height > 0.8) & (height < 2.0) & (angle.abs() < 1.0))


def ant(observation: Tensor) -> Tensor:
    height = observation[:, 0]
    return ~(observation.isfinite().all(1) & (height >= 0.2) & (height <= 1.0))


def humanoid(observation: Tensor) -> Tensor:
    height = observation[:, 0]
    return ~((height > 1.0) & (height < 2.0))


def inverted_pendulum(observation: Tensor) -> Tensor:
    return ~(observation.isfinite().all(1) & (observation[:, 1].abs() <= 0.2))


def inverted_double_pendulum(observation: Tensor) -> Tensor:
    """The tip of the two poles, of 0.6 m each, at or below 1 m; observations hold the sines and then the
    cosines of their two angles, of which the second is relative to the first."""
    sin, cos = observation[:, 1:3].unbind(1), observation[:, 3:5].unbind(1)
    height = 0.6 * (cos[0] + cos[0] * cos[1] - sin[0] * sin[1])
    return ~(height > 1.0)


TERMINATIONS: dict[str, Termination] = {
    "ant": ant,
    "halfcheetah": never,
    "hopper": hopper,
    "humanoid": humanoid,
    "humanoid-standup": never,
    "inverted-double-pendulum": inverted_double_pendulum,
    "inverted-pendulum": inverted_pendulum,
    "pendulum": never,
    "pusher": never,
    "reacher": never,
    "swimmer": never,
    "walker2d": walker2d,
}
