"""Trajectories through shared memory, and joined into batches."""

from __future__ import annotations

import multiprocessing

import pytest
import torch

from murmurate.fabric.processes.shared_memory import SharedMemoryFile
from murmurate.sources.joined_trajectories import JoinedTrajectories, join_row_major
from murmurate.sources.trajectory_ring import TrajectoryRing, TrajectoryShape
from murmurate.spec import EnvSpec, Episode, Trajectory
from waiting import DEADLINE_SECONDS, until

pytestmark = pytest.mark.timeout(2 * DEADLINE_SECONDS)
SPEC = EnvSpec("toy", (2, 3), torch.uint8, actions=4)
CONTINUOUS = EnvSpec("toy", (3,), torch.float32, actions=0, action_shape=(2,))
SHAPE = TrajectoryShape(SPEC, steps=5, size=3, memory=4, behaviour={"log_probability": (), "value": (2,)})


def trajectory(shape: TrajectoryShape, seed: int) -> Trajectory:
    g = torch.Generator().manual_seed(seed)
    spec, area = shape.spec, (shape.steps, shape.size)

    def seen(*sizes: int) -> torch.Tensor:
        return torch.randint(0, 256, (*sizes, *spec.observation_shape), generator=g).to(
            spec.observation_dtype
        )

    truncated = torch.rand(area, generator=g) < 0.3
    count = int(truncated.sum())
    if spec.actions:
        action = torch.randint(spec.actions, area, generator=g)
    else:
        action = torch.randn(*area, *spec.action_shape, generator=g)
    return Trajectory(
        observation=seen(*area),
        action=action,
        reward=torch.randn(area, generator=g),
        terminated=torch.rand(area, generator=g) < 0.3,
        truncated=truncated,
        first=torch.rand(area, generator=g) < 0.3,
        last_observation=seen(shape.size),
        truncated_observation=seen(count) if count else None,
        memory=torch.randn(shape.size, shape.memory, generator=g) if shape.memory else None,
        behaviour={name: torch.randn(*area, *s, generator=g) for name, s in shape.behaviour.items()},
    )


def assert_same(one: Trajectory, other: Trajectory) -> None:
    assert one.behaviour.keys() == other.behaviour.keys()
    pairs = {name: (getattr(one, name), getattr(other, name)) for name in vars(one) if name != "behaviour"}
    pairs |= {name: (one.behaviour[name], other.behaviour[name]) for name in one.behaviour}
    for name, (x, y) in pairs.items():
        assert (x is None and y is None) or torch.equal(x, y), name


def episodes(number: int) -> list[Episode]:
    successes = (None, False, True)
    return [Episode(k % 3, number / 4, number, successes[k % 3]) for k in range(number % 16)]


def put_many(descriptor: int, count: int) -> None:
    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    ring = TrajectoryRing(SharedMemoryFile(descriptor), SHAPE, 2)
    for number in range(count):
        ring.beat()
        ring.wait_for_room()
        ring.put(trajectory(SHAPE, number), episodes(number), version=number)


def test_trajectories_come_whole_and_in_order_from_another_process_which_waits_while_it_is_full() -> None:
    memory_file = SharedMemoryFile.create()
    ring = TrajectoryRing(memory_file, SHAPE, 2)
    process = multiprocessing.get_context("fork").Process(
        target=put_many, args=(memory_file.descriptor, 200), daemon=True
    )
    process.start()
    until(lambda: ring.waiting_records == 2 and ring.full_seconds > 0.05, "a full queue")
    for number in range(200):
        until(lambda: ring.waiting_records, every=1e-5)
        assert ring.waiting_records <= 2
        queued = ring.oldest()
        assert_same(queued.data, trajectory(SHAPE, number))
        assert queued.version == number
        assert queued.episodes == episodes(number)
        ring.drop()
    process.join()
    assert ring.beats == 200
    memory_file.close()


@pytest.mark.parametrize("spec", [SPEC, CONTINUOUS], ids=["discrete", "continuous"])
@pytest.mark.parametrize("memory", [0, 4], ids=["feed-forward", "lstm"])
@pytest.mark.parametrize("seed", range(3))
def test_what_is_cut_into_trajectories_and_joined_is_whole_again(
    spec: EnvSpec, memory: int, seed: int
) -> None:
    """Final observations too, which are in the order of the whole."""
    whole = trajectory(TrajectoryShape(spec, 5, 12, memory, {"log_probability": ()}), seed)
    shape = TrajectoryShape(spec, 5, 3, memory, {"log_probability": ()})
    joined = JoinedTrajectories(shape, 4, torch.device("cpu"))
    memory_file = SharedMemoryFile.create()
    ring = TrajectoryRing(memory_file, shape, 1)
    finals = torch.zeros(5, 12, *spec.observation_shape, dtype=spec.observation_dtype)
    assert whole.truncated_observation is not None
    finals[whole.truncated] = whole.truncated_observation
    for k in range(4):
        part = slice(3 * k, 3 * k + 3)
        own = whole.truncated[:, part]
        cut = Trajectory(
            observation=whole.observation[:, part],
            action=whole.action[:, part],
            reward=whole.reward[:, part],
            terminated=whole.terminated[:, part],
            truncated=own,
            first=whole.first[:, part],
            last_observation=whole.last_observation[part],
            truncated_observation=finals[:, part][own] if own.any() else None,
            memory=None if whole.memory is None else whole.memory[part],
            behaviour={"log_probability": whole.behaviour["log_probability"][:, part]},
        )
        ring.put(cut, [], version=1)
        joined.put(k, ring.oldest().data)
        ring.drop()
    memory_file.close()
    assert_same(joined.trajectory(), whole)


def test_a_batch_in_which_nothing_is_truncated_has_no_final_observations() -> None:
    never = torch.zeros(2, 4, dtype=torch.bool)
    assert join_row_major(never, [None, None]) is None
    once = never.clone()
    once[1, 3] = True
    final = join_row_major(once, [None, torch.tensor([[7.0]])])
    assert final is not None
    assert final.tolist() == [[7.0]]
