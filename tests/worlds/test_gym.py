"""Gymnasium worlds against gymnasium itself, including wrappers, one environment at a time."""

import pickle
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from murmurate.conformance.simulators import play
from murmurate.errors import MissingExtra, Refusal
from murmurate.spec import EnvSpec, TimeStep
from murmurate.worlds._gym_env import without_checks
from murmurate.worlds.generators import simulator_seed
from murmurate.worlds.gym import CLASSIC, MUJOCO, GymWorld
from murmurate.worlds.gym_simulators import GymSimulators
from murmurate.worlds.interface import Simulators

# The models whose steps read quantities that lag behind the integration state come first.
MODELS = ["Ant-v5", "Humanoid-v5", "HalfCheetah-v5", "Hopper-v5", "Reacher-v5", "InvertedDoublePendulum-v5"]


def actions(spec: EnvSpec, steps: int, size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if spec.actions:
        return torch.randint(spec.actions, (steps, size), generator=generator)
    # Beyond the bounds now and then: clipping is part of the contract.
    return torch.randn(steps, size, *spec.action_shape, generator=generator) * torch.tensor(spec.action_high)


def assert_equals_gymnasium(ident: str, limit: int | None, steps: int, size: int = 3) -> tuple[int, int]:
    simulators = GymWorld(ident, limit).open(size, training=True, first=5)
    now = simulators.reset(seed=11).observation
    chosen = actions(simulators.spec, steps, size, seed=0)
    alone = [gymnasium.make(ident, max_episode_steps=limit) for _ in range(size)]
    starts = [env.reset(seed=simulator_seed(11, 5 + b))[0] for b, env in enumerate(alone)]
    assert np.array_equal(now.numpy(), np.array(starts, np.float32))
    returns, lengths = [0.0] * size, [0] * size
    ends = [0, 0]
    for t in range(steps):
        simulators.send(chosen[t])
        step = simulators.receive()
        finished = {e.simulator: e for e in step.episodes}
        for b, env in enumerate(alone):
            action = chosen[t, b].numpy()
            if not simulators.spec.actions:
                action = np.clip(action, env.action_space.low, env.action_space.high)
            seen, reward, terminated, truncated, _ = env.step(action)
            returns[b] += float(reward)
            lengths[b] += 1
            assert step.reward[b] == np.float32(reward)
            assert step.terminated[b] == terminated
            assert step.truncated[b] == (truncated and not terminated)
            assert (b in finished) == (terminated or truncated)
            if terminated or truncated:
                ends[0 if terminated else 1] += 1
                assert step.final_observation is not None
                assert np.array_equal(step.final_observation[b].numpy(), seen.astype(np.float32))
                assert (finished[b].episode_return, finished[b].length) == (returns[b], lengths[b])
                returns[b], lengths[b] = 0.0, 0
                seen, _ = env.reset()
            assert np.array_equal(step.observation[b].numpy(), seen.astype(np.float32))
    return ends[0], ends[1]


@pytest.mark.parametrize(
    ("ident", "limit", "steps"),
    [
        ("CartPole-v1", None, 1500),
        ("CartPole-v1", 17, 300),
        ("Acrobot-v1", 40, 100),
        ("MountainCar-v0", 50, 120),
        ("MountainCarContinuous-v0", 50, 120),
        ("Pendulum-v1", None, 420),
    ],
)
def test_classic_control_equals_gymnasium_bit_for_bit(ident: str, limit: int | None, steps: int) -> None:
    terminated, truncated = assert_equals_gymnasium(ident, limit, steps)
    assert terminated + truncated >= 3
    if limit == 17:
        assert terminated >= 3
        assert truncated >= 3


@pytest.mark.parametrize("fast", [True, False])
def test_an_end_on_the_very_step_of_the_limit_is_no_truncation(fast: bool) -> None:
    """Always pushed left, this cart falls after n steps; limits around n tell the three cases apart."""

    def first_end(limit: int) -> tuple[int, bool, bool]:
        carts = (
            GymWorld("CartPole-v1", limit).open(1, training=True)
            if fast
            else GymSimulators("cartpole", lambda b: (gymnasium.make("CartPole-v1").unwrapped, limit), 1, 0)
        )
        carts.reset(0)
        while True:
            carts.send(torch.tensor([0]))
            step = carts.receive()
            if step.episodes:
                return step.episodes[0].length, bool(step.terminated), bool(step.truncated)

    n, *_ = first_end(500)
    assert n < 20
    assert first_end(n + 1) == (n, True, False)
    assert first_end(n) == (n, True, False)
    assert first_end(n - 1) == (n - 1, False, True)


@pytest.mark.parametrize("ident", MODELS)
def test_mujoco_equals_gymnasium_bit_for_bit(
    ident: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mujoco")
    monkeypatch.chdir(tmp_path)  # gymnasium.make leaves MuJoCo's log file where it is called
    terminated, truncated = assert_equals_gymnasium(ident, 15, 40, size=2)
    assert terminated + truncated >= 4


def test_each_environment_has_its_own_time_limit() -> None:
    limits = iter((3, 5, 2))
    made = []

    def make(b: int) -> tuple[Any, int]:
        env, limit = without_checks(gymnasium.make("Pendulum-v1", max_episode_steps=next(limits)))
        made.append(env)
        return env, limit

    simulators = GymSimulators("pendulum", make, 2, 0)
    simulators.reset(0)
    ended = []
    for number in range(1, 9):
        if number == 6:  # it raises, and the one in its place has two steps
            made[1].step = None
        simulators.send(torch.zeros(2, 1))
        ended += [(number, e.simulator, e.length) for e in simulators.receive().episodes]
    assert ended == [(3, 0, 3), (5, 1, 5), (6, 0, 3), (8, 1, 2)]


def test_a_time_limit_is_saved() -> None:
    def simulators(*limits: int) -> GymSimulators:
        return GymSimulators("pendulum", lambda b: (gymnasium.make("Pendulum-v1").unwrapped, limits[b]), 2, 0)

    saved, loaded = simulators(3, 5), simulators(9, 9)
    saved.reset(0)
    state = saved.state()
    assert state is not None
    loaded.load(state)
    assert [len(play(loaded, torch.zeros(2, 1)).episodes) for _ in range(5)] == [0, 0, 1, 0, 1]


def assert_resumes(ident: str, limit: int | None, before: int, after: int) -> None:
    world = GymWorld(ident, limit)
    simulators, other = world.open(2, training=True), world.open(2, training=True)
    simulators.reset(1)
    other.reset(2)
    chosen = actions(simulators.spec, before + after, 2, seed=3)
    last = None
    for t in range(before):
        simulators.send(chosen[t])
        last = simulators.receive()
        other.send(chosen[t].flip(0))
        other.receive()
    saved = simulators.state()
    assert saved is not None
    assert last is not None
    assert torch.equal(other.load(saved).observation, last.observation)
    for t in range(before, before + after):
        steps: list[TimeStep] = []
        for each in (simulators, other):
            each.send(chosen[t])
            steps.append(each.receive())
        a, b = steps
        assert torch.equal(a.observation, b.observation)
        assert torch.equal(a.reward, b.reward)
        assert torch.equal(a.terminated, b.terminated)
        assert torch.equal(a.truncated, b.truncated)
        assert list(a.episodes) == list(b.episodes)


@pytest.mark.parametrize("ident", sorted(CLASSIC.values()))
def test_classic_control_resumes_bit_for_bit(ident: str) -> None:
    assert_resumes(ident, 60, before=37, after=500)


@pytest.mark.parametrize("ident", MODELS)
def test_mujoco_resumes_bit_for_bit(ident: str) -> None:
    pytest.importorskip("mujoco")
    assert_resumes(ident, 50, before=21, after=100)


def test_a_loaded_state_is_not_shared_with_the_simulators() -> None:
    simulators = GymWorld("CartPole-v1").open(2, training=True)
    start = simulators.reset(0).observation.clone()
    saved = simulators.state()
    assert saved is not None
    for _ in range(2):
        assert torch.equal(simulators.load(saved).observation, start)
        for _ in range(30):
            simulators.send(torch.tensor([0, 1]))
            simulators.receive()


@pytest.mark.parametrize("ident", ["CartPole-v1", "Pendulum-v1"])
def test_two_halves_play_what_the_whole_plays(ident: str) -> None:
    world = GymWorld(ident, 20)
    parts: list[Simulators] = [
        world.open(5, training=True),
        world.open(2, training=True, first=0),
        world.open(3, training=True, first=2),
    ]
    whole, *halves = (part.reset(9).observation for part in parts)
    assert torch.equal(whole, torch.cat(halves))
    assert len({tuple(row) for row in whole.tolist()}) == 5
    for chosen in actions(parts[0].spec, 60, 5, seed=0):
        for part, its in zip(parts, (chosen, chosen[:2], chosen[2:]), strict=True):
            part.send(its)
        whole, *halves = (part.receive().observation for part in parts)
        assert torch.equal(whole, torch.cat(halves))


class Mystery(gymnasium.Env):  # type: ignore[type-arg]
    """Nobody knows how to save it; discrete actions that begin at 3."""

    observation_space = gymnasium.spaces.Box(0, 255, (2,), np.uint8)
    action_space = gymnasium.spaces.Discrete(4, start=3)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):  # type: ignore[no-untyped-def]
        super().reset(seed=seed)
        return np.zeros(2, np.uint8), {}

    def step(self, action):  # type: ignore[no-untyped-def]
        return np.full(2, action, np.uint8), 0.5, False, False, {}


def test_an_environment_of_the_users_own() -> None:
    gymnasium.register("Mystery-v0", entry_point=Mystery)
    try:
        simulators = GymWorld("Mystery-v0").open(3, training=True)
    finally:
        del gymnasium.registry["Mystery-v0"]
    simulators.reset(0)
    assert simulators.state() is None
    assert simulators.spec.observation_dtype == torch.uint8
    simulators.send(torch.tensor([0, 3, 1]))
    step = simulators.receive()
    assert step.observation.tolist() == [[3, 3], [6, 6], [4, 4]]
    assert not step.truncated.any()
    with pytest.raises(ValueError, match="actions 0 to 3"):
        simulators.send(torch.tensor([0, 4, 1]))
    with pytest.raises(ValueError, match="cannot be saved"):
        simulators.load({"physics": [{}] * 3, "generators": [np.random.PCG64(0).state] * 3, "episodes": {}})


class Broken(Mystery):
    def __init__(self) -> None:
        raise OSError("no device")


@pytest.mark.parametrize("mode", ["none", "async"])
@pytest.mark.parametrize(
    ("entry_point", "cause"),
    [
        (Broken, r"OSError \(test_gym.py:\d+ in __init__\): no device"),
        ("no_such_module:Env", "ModuleNotFoundError: No module named 'no_such_module'"),
    ],
)
def test_environments_that_cannot_be_made_are_refused(entry_point: Any, cause: str, mode: Any) -> None:
    gymnasium.register("Broken-v0", entry_point=entry_point)
    try:
        with pytest.raises(Refusal, match=f"The world gym:Broken-v0 cannot be opened: {cause}"):
            GymWorld("Broken-v0", vectorization=mode).open(2, training=True)
    finally:
        del gymnasium.registry["Broken-v0"]


def test_specs() -> None:
    cart = GymWorld("CartPole-v1").open(1, training=True).spec
    assert cart == EnvSpec("cartpole", (4,), torch.float32, actions=2)
    pendulum = GymWorld("Pendulum-v1").open(1, training=True).spec
    assert pendulum == EnvSpec("pendulum", (3,), torch.float32, 0, (1,), (-2.0,), (2.0,))
    assert {GymWorld(i).name for i in (CLASSIC | MUJOCO).values()} == {*CLASSIC, *MUJOCO}


def test_worlds_travel_between_processes() -> None:
    world = GymWorld("CartPole-v1", 7)
    assert pickle.loads(pickle.dumps(world)) == world


@pytest.mark.parametrize("bad", [-1, 2])
def test_cartpole_refuses_other_actions(bad: int) -> None:
    simulators = GymWorld("CartPole-v1").open(2, training=True)
    simulators.reset(0)
    with pytest.raises(ValueError, match="actions 0 and 1"):
        simulators.send(torch.tensor([0, bad]))


def test_cartpole_draws_the_same_game_with_and_without_pictures() -> None:
    pytest.importorskip("pygame")
    world = GymWorld("CartPole-v1")
    drawn, fast = world.open(1, training=False, picture=True), world.open(1, training=False)
    assert isinstance(drawn, GymSimulators)
    assert torch.equal(drawn.reset(3).observation, fast.reset(3).observation)
    first = drawn.picture()
    assert first.shape == (400, 600, 3)
    assert first.dtype == np.uint8
    for _ in range(5):
        steps = []
        for each in (drawn, fast):
            each.send(torch.tensor([1]))
            steps.append(each.receive().observation)
        assert torch.equal(*steps)
    assert not np.array_equal(first, drawn.picture())
    with pytest.raises(ValueError, match="picture=True"):
        fast.picture()


def test_opening_a_model_writes_no_log_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mujoco")
    monkeypatch.chdir(tmp_path)
    GymWorld("HalfCheetah-v5").open(1, training=True).reset(0)
    assert list(tmp_path.iterdir()) == []


def test_missing_mujoco_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [m for m in sys.modules if m.startswith(("gymnasium.envs.mujoco", "mujoco"))]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "mujoco", None)
    with pytest.raises(MissingExtra, match=r"world hopper needs the package mujoco.*murmurate\[mujoco\]"):
        GymWorld("Hopper-v5").open(1, training=True)


def test_an_unknown_id_is_refused() -> None:
    with pytest.raises(Refusal, match="Did you mean 'CartPole-v1'"):
        GymWorld("CartPol-v1").open(1, training=True)
