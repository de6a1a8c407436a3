"""Replicas of several parts in a user's own loop, under the strategies, and with parts that die."""

from __future__ import annotations

import functools
import re
import signal

import pytest
import torch

import murmurate
from murmurate.errors import Refusal
from murmurate.fabric.processes.fabric import Died
from murmurate.launch.script import run
from murmurate.spatial import parallelize
from spatial import loops


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(
        ((one[k] - other[k]).abs().max() / max(1e-12, other[k].abs().max())).item()
        for k in one
        if one[k].is_floating_point()
    )


@functools.cache
def alone(steps: int):
    return run(functools.partial(loops.train, steps=steps), strategy="solo", launcher="inline")[0]


@pytest.mark.parametrize(("steps", "parts"), [(2, (1, 2)), pytest.param(20, (2, 2), marks=pytest.mark.slow)])
def test_parts_of_two_replicas_equal_one_process(steps, parts):
    """Bar of issue 23: 20 steps of a ResNet-18 on 4 parts x 2 replicas, 1e-6 relative in float64; with batch
    statistics over all parts of all replicas, against torch's of the whole batch."""
    found = run(
        functools.partial(loops.train, steps=steps),
        replicas=2,
        parts=parts,
        launcher="inline",
        strategy="all-reduce",
    )

    expected = {k: x for k, x in alone(steps)["state"].items() if x.is_floating_point()}
    for one in found:
        assert largest_difference(one["state"], expected) < 1e-6
    assert torch.tensor([f["losses"] for f in found], dtype=torch.float64).mean(0).tolist() == pytest.approx(
        alone(steps)["losses"], rel=1e-9
    )
    assert [f["main"] for f in found] == [True, False]


@pytest.mark.slow
def test_processes_equal_threads():
    local = run(loops.short, replicas=2, parts=2)
    inline = run(loops.short, replicas=2, parts=(2, 1), launcher="inline")

    for one, other in zip(local, inline, strict=True):
        assert all(torch.equal(one["state"][k], other["state"][k]) for k in one["state"])


@pytest.mark.parametrize(
    "strategy",
    [
        {"name": "synchronous-gossip"},
        {"name": "synchronous-elastic", "period": 2},
        pytest.param(
            {"name": "synchronous-gossip", "direction": "push", "stale": True}, marks=pytest.mark.slow
        ),
        pytest.param({"name": "local-sgd", "period": 2}, marks=pytest.mark.slow),
    ],
    ids=lambda strategy: strategy["name"],
)
def test_synchronous_strategies_do_the_same_with_parts(strategy):
    train = functools.partial(loops.train, steps=2)
    found = run(train, replicas=2, parts=2, strategy=strategy, launcher="inline")
    expected = run(train, replicas=2, strategy=strategy, launcher="inline")

    for one, other in zip(found, expected, strict=True):
        assert largest_difference(one["state"], other["state"]) < 1e-6
        assert largest_difference(one["agreed"], other["agreed"]) < 1e-6
        assert one["losses"] == pytest.approx(other["losses"], rel=1e-9)
        assert one["equal"]


def adam_steps(loop, steps, saved=None):
    """The replica's state and parameters after ``steps``, of which ``saved`` has made the first two."""
    torch.manual_seed(2)
    net = parallelize(torch.nn.Sequential(torch.nn.Conv2d(3, 2, 3), torch.nn.ReLU()).double(), loop.parts)
    optimizer = loop.wrap_optimizer(torch.optim.Adam(net.parameters(), lr=0.05), net)
    if saved is not None:
        loop.load(saved[loop.rank]["state"])
        loop.resumed()
    for number, (x, _) in enumerate(loop.inputs(loops.batches(steps, images=2, size=(6, 5)))):
        if saved is None or number >= 2:
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
    if loop.parts.rank:
        with pytest.raises(Refusal, match=r"that of its first part.*save it where replicator.parts.rank"):
            loop.state()
        return None
    return {"state": loop.state(), "net": net.state_dict()}


@pytest.mark.parametrize("strategy", ["all-reduce", "local-sgd"])
def test_a_resume_with_parts_is_exact(strategy):
    """From the states of the first parts: the others have no moments, and their files had the same names."""

    def trained(steps, saved=None):
        script = functools.partial(adam_steps, steps=steps, saved=saved)
        return run(script, replicas=2, parts=2, strategy=strategy, launcher="inline")

    resumed = trained(4, trained(2))

    for one, other in zip(resumed, trained(4), strict=True):
        assert all(torch.equal(x, other["net"][name]) for name, x in one["net"].items())


@functools.cache
def first_losses():
    """Of both replicas without parts, which have not heard of one another yet."""
    script = functools.partial(loops.train, steps=1)
    return [one["losses"][0] for one in run(script, replicas=2, strategy="gala", launcher="inline")]


SLOW = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in ("elastic", "parameter-server", "pull-gossip", "push-gossip", "push-sum")
]


@pytest.mark.parametrize("strategy", ["gala", *SLOW])
def test_every_asynchronous_strategy_steps_once_a_replica(strategy):
    """The leaders make the steps, so parts of a replica are equal."""
    script = functools.partial(loops.train, steps=3)
    found = run(script, replicas=2, parts=2, strategy=strategy, launcher="inline")

    assert [one["losses"][0] for one in found] == pytest.approx(first_losses(), rel=1e-9)
    for one in found:
        assert one["updates"] == 3
        assert all(torch.isfinite(x).all() for x in one["agreed"].values())
        assert one["equal"]


@pytest.mark.parametrize(
    ("script", "dead", "alive"),
    [(loops.one_part_dies, 1, 0), pytest.param(loops.leader_dies, 0, 1, marks=pytest.mark.slow)],
)
def test_a_killed_part_ends_its_replica_alone(script, dead, alive, capfd):
    result = run(script, replicas=2, parts=2)

    assert result[dead] == Died(dead, -signal.SIGKILL)
    assert result[alive]["heard"] == 1
    assert len(result[alive]["losses"]) == 12
    assert result[alive]["equal"], "both parts have the same running statistics"
    killed = (1, 1) if script is loops.one_part_dies else (0, 0)
    told = capfd.readouterr().err
    assert f"part {killed[1]} of replica {dead} died (SIGKILL)" in told
    assert f"part {1 - killed[1]} of replica {dead} stopped: part {killed[1]} of replica {dead} died" in told


def test_refusals():
    with pytest.raises(Refusal, match=r"under hogwild other replicas write .* Use all-reduce"):
        murmurate.run(loops.short, replicas=2, parts=2, strategy="hogwild")
    for parts in (0, 1.5, None, "2", (2, 2.5)):
        with pytest.raises(Refusal, match=re.escape(f"parts is {parts!r}: give the parts along rows")):
            murmurate.run(loops.short, replicas=2, parts=parts)
