"""Where episodes end, against the environments on random play."""

from pathlib import Path
from typing import Any

import pytest
import torch

from murmurate.errors import Refusal
from murmurate.worlds import adroit, dm_control
from murmurate.worlds.registry import world, world_names
from murmurate.worlds.terminations import TERMINATIONS, check, termination, terminations

ENDING = {"ant", "hopper", "humanoid", "inverted-double-pendulum", "inverted-pendulum", "walker2d"}


def _cases() -> list[Any]:
    """Two tasks of the suites by default: with many numbers, and with few."""
    suites = sorted({*adroit.TERMINATIONS, *dm_control.TERMINATIONS} - {"adroit-pen", "dmc-cartpole-balance"})
    slow = [pytest.param(name, marks=pytest.mark.slow) for name in suites]
    return [*sorted(TERMINATIONS), "adroit-pen", "dmc-cartpole-balance", *slow]


@pytest.mark.parametrize("name", _cases())
def test_it_is_where_the_environments_episodes_end(name: str) -> None:
    pytest.importorskip("mujoco")
    if name not in world_names():
        pytest.skip(f"the package of {name} is not installed")
    simulators = world(name).open(8, training=True)
    environments, size = simulators._envs, simulators.size  # type: ignore[attr-defined]
    spec, generator = simulators.spec, torch.Generator().manual_seed(0)
    low, high = torch.tensor(spec.action_low), torch.tensor(spec.action_high)
    simulators.reset(0)
    ended = 0
    for _ in range(150 if name in ENDING else 15):
        share = torch.rand(size, *spec.action_shape, generator=generator)
        raw = []
        for environment, action in zip(environments, low + share * (high - low), strict=True):
            observation, _, terminated, _, _ = environment.step(action.numpy())
            raw.append((torch.as_tensor(observation, dtype=torch.float32), terminated))
            if terminated:
                environment.reset()
        found = termination(name)(torch.stack([observation for observation, _ in raw]))
        assert found.tolist() == [bool(terminated) for _, terminated in raw]
        ended += int(found.sum())
    simulators.close()
    assert (ended > 0) == (name in ENDING)


@pytest.mark.slow
def test_no_listed_task_of_the_suite_ends_early() -> None:
    suite = pytest.importorskip("dm_control.suite")
    for domain, tasks in dm_control._TASKS.items():
        for task in tasks:
            own = type(suite.load(domain, task).task).get_termination
            assert own is suite.base.Task.get_termination, (domain, task)


def test_states_beyond_the_bounds() -> None:
    hopper = termination("hopper")
    upright = torch.zeros(5, 11)
    upright[:, 0] = 1.25
    upright[1, 1], upright[2, 0], upright[3, 5], upright[4, 7] = 0.21, 0.69, 150.0, float("nan")
    assert hopper(upright).tolist() == [False, True, True, True, True]
    lost = torch.full((1, 105), float("nan"))
    for name in ("ant", "humanoid", "walker2d", "inverted-double-pendulum"):
        assert termination(name)(lost).tolist() == [True], "what is no number has ended"


def test_a_world_without_one_is_refused_with_the_remedy() -> None:
    suites = {*adroit.TERMINATIONS, *dm_control.TERMINATIONS}  # their worlds need other packages
    assert set(terminations()) - suites <= set(world_names())
    with pytest.raises(Refusal, match=r"mountain-car-continuous .* --agent.termination FILE.py:FUNCTION"):
        termination("mountain-car-continuous")


def test_a_function_of_your_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def far(observation):\n    return observation[:, 0] > 2\n")
    assert termination("anything", f"{file}:far")(torch.tensor([[1.0], [3.0]])).tolist() == [False, True]
    with pytest.raises(ValueError, match="no class or function 'near'"):
        termination("anything", f"{file}:near")
    with pytest.raises(ValueError, match=r"there is no file .* with a termination function"):
        termination("anything", f"{tmp_path}/yours.py:far")


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ("observation > 2", r"gives bool \[2, 3\] for observations \[2, 3\], and must give bool \[2\]"),
        ("observation[:, 0]", r"gives float32 \[2\]"),
        ("False", "gives bool for"),
        ("observation[:, 7] > 2", "raised IndexError"),
    ],
)
def test_a_function_of_your_own_is_tried(returned: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"def far(observation):\n    return {returned}\n")
    name = f"{file}:far"
    with pytest.raises(Refusal, match=f"{name} {words}.* --agent.termination FILE.py:FUNCTION"):
        check(termination("anything", name), name, (3,), torch.device("cpu"))
