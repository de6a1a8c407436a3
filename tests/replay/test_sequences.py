"""Sequences drawn from a ring of trajectories equal those cut from a list of all steps."""

from __future__ import annotations

import pytest
import torch

from murmurate.replay.interface import Steps
from murmurate.replay.sequences import Trajectories, trajectory_bytes
from murmurate.spec import EnvSpec, SequenceSample

SPEC = EnvSpec("toy", (2,), torch.float32, actions=5)
SIMULATORS = 3


def written(length: int, steps: int, seed: int = 0) -> tuple[Trajectories, dict[tuple[int, float], dict]]:
    """A ring after ``steps`` steps, in two groups, and each step in it by (simulator, time).

    An observation is (simulator, time); a final observation has the time + 0.5; the reward is the time.
    """
    g = torch.Generator().manual_seed(seed)
    ring = Trajectories(SPEC, length, SIMULATORS, {"probability": ()})
    log: dict[tuple[int, float], dict] = {}
    for t in range(steps):
        ends = torch.rand(SIMULATORS, generator=g)
        terminated, truncated = ends < 0.15, (ends > 0.15) & (ends < 0.3)
        action = torch.randint(5, (SIMULATORS,), generator=g)
        for low, size in ((0, 2), (2, 1)):
            part = slice(low, low + size)
            names = torch.arange(low, low + size).float()
            after = torch.full((size,), t + 1.0) - 0.5 * truncated[part].float()
            ring.observe(
                low,
                Steps(
                    torch.stack([names, torch.full((size,), float(t))], 1),
                    action[part],
                    torch.full((size,), float(t)),
                    torch.stack([names, after], 1),
                    terminated[part],
                    truncated[part],
                    behaviour={"probability": names + 0.01 * t},
                ),
            )
        for b in range(SIMULATORS):
            ended = bool(terminated[b] | truncated[b])
            log[b, t] = {"action": int(action[b]), "ended": ended, "terminated": bool(terminated[b])}
            log[b, t]["after"] = t + (0.5 if truncated[b] else 1.0)
            log.pop((b, t - length), None)
    return ring, log


def check(sample: SequenceSample, log: dict, steps: int, newest: int) -> list[tuple[int, int]]:
    """Every sequence of a sample against the log; returns their beginnings."""
    beginnings = []
    for k in range(sample.length.shape[0]):
        b, t = (int(x) for x in sample.observation[0, k])
        m = 1
        while m < steps and t + m <= newest and not log[b, t + m - 1]["ended"]:
            m += 1
        assert int(sample.length[k]) == m
        last = log[b, t + m - 1]
        assert bool(sample.terminated[k]) == last["terminated"]
        if not last["terminated"]:
            assert sample.last_observation[k].tolist() == [b, last["after"]]
        for i in range(steps):
            inside = i < m
            assert float(sample.reward[i, k]) == (t + i if inside else 0)
            assert int(sample.action[i, k]) == (log[b, t + i]["action"] if inside else 0)
            expected = b + 0.01 * (t + i) if inside else 0.0
            assert float(sample.behaviour["probability"][i, k]) == pytest.approx(expected)
            if inside and len(sample.observation) > 1:
                assert sample.observation[i, k].tolist() == [b, t + i]
        beginnings.append((b, t))
    return beginnings


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize(("length", "written_steps"), [(20, 7), (20, 20), (20, 21), (20, 63), (1, 5)])
@pytest.mark.parametrize("steps", [1, 3])
def test_sequences_are_those_of_the_steps(length: int, written_steps: int, steps: int, every: bool) -> None:
    ring, log = written(length, written_steps)
    assert len(ring) == SIMULATORS * min(length, written_steps)
    g = torch.Generator().manual_seed(1)
    sample = ring.draw(400, steps, g, every)
    assert len(sample.observation) == (steps if every else 1)
    assert set(check(sample, log, steps, written_steps - 1)) == set(log)  # all steps are drawn


def test_all_steps_are_equally_likely() -> None:
    ring, log = written(10, 25)
    draws = ring.draw(60_000, 1, torch.Generator().manual_seed(2), every=False).observation[0]
    counts = torch.zeros(SIMULATORS, 25)
    counts.index_put_((draws[:, 0].long(), draws[:, 1].long()), torch.ones(60_000), accumulate=True)
    expected = 60_000 / len(log)
    assert counts[:, :15].sum() == 0
    assert (
        float(((counts[:, 15:] - expected) ** 2 / expected).sum()) < 60
    )  # chi-squared, 29 degrees of freedom


def test_simulators_that_were_reset_are_cut_off() -> None:
    ring, log = written(20, 8, seed=1)
    assert not log[1, 7]["ended"]
    ring.restart(1, 1)
    log[1, 7] |= {"ended": True, "after": 8.0}
    sample = ring.draw(200, 3, torch.Generator().manual_seed(3), every=True)
    check(sample, log, 3, 7)
    step = torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64), torch.zeros(1), torch.ones(1, 2)
    no = torch.zeros(1, dtype=torch.bool)
    ring.observe(1, Steps(*step, no, no, behaviour={"probability": torch.zeros(1)}))
    sample = ring.draw(400, 3, torch.Generator().manual_seed(3), every=True)
    at = (sample.observation[0] == torch.tensor([1.0, 7.0])).all(1)
    assert at.any()
    assert sample.length[at].eq(1).all()
    assert (sample.last_observation[at] == torch.tensor([1.0, 8.0])).all()


def test_a_loaded_ring_draws_the_same() -> None:
    ring, _ = written(12, 30)
    other = Trajectories(SPEC, 12, SIMULATORS, {"probability": ()})
    other.load(ring.state())
    samples = [x.draw(50, 4, torch.Generator().manual_seed(4), every=True) for x in (ring, other)]
    for name, value in vars(samples[0]).items():
        torch.testing.assert_close(getattr(samples[1], name), value)


def test_the_memory_is_what_was_counted() -> None:
    ring = Trajectories(SPEC, 100, SIMULATORS, {"probability": ()})
    stored = sum(x.numel() * x.element_size() for x in ring.state()["columns"].values())
    assert stored == trajectory_bytes(SPEC, 100, SIMULATORS, {"probability": ()})


def test_nothing_can_be_drawn_from_an_empty_ring() -> None:
    ring, _ = written(5, 3)
    ring.forget()
    with pytest.raises(ValueError, match="no steps yet"):
        ring.draw(1, 1, torch.Generator(), every=False)
    with pytest.raises(ValueError, match="at least one step"):
        Trajectories(SPEC, 0, 1)
