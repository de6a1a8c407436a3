"""DQN: targets by hand, updates of the target net, exploration; it learns a chain."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import agreeing
from murmurate.agents.dqn import DQN, DQNAgent
from murmurate.replay.interface import Sample
from murmurate.replica.vector import Replica
from murmurate.replicator.learner import Context
from murmurate.spec import Batch, EnvSpec

SPEC = EnvSpec("toy", (5,), torch.float32, actions=3)


def agent(**changes: object) -> DQNAgent:
    config = dataclasses.replace(DQN(hidden=16, batch=8, target_every=4), **changes)
    return config.build(Context(SPEC, Replica, 0))


def sample(size: int = 8, seed: int = 0) -> Sample:
    g = torch.Generator().manual_seed(seed)
    return Sample(
        keys=torch.arange(size),
        weights=torch.rand(size, generator=g),
        observation=torch.randn(size, 5, generator=g),
        action=torch.randint(3, (size,), generator=g),
        reward=torch.randn(size, generator=g),
        discount=torch.where(torch.rand(size, generator=g) < 0.3, 0.0, 0.9),
        next_observation=torch.randn(size, 5, generator=g),
    )


@pytest.mark.parametrize("selector", ["online", "target", "agreed"])
def test_errors_are_those_of_the_definition(selector: str) -> None:
    """A row at a time, with nets that differ from one another."""
    made = agent(selector=selector)
    for number, net in enumerate((made.target, made.agreed)):
        for x in () if net is None else net.net.parameters():
            x.data += 0.3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(number))
    data = sample()
    chooser = {"online": made.net, "target": made.target, "agreed": made.agreed}[selector]
    expected = []
    with torch.no_grad():
        for i in range(8):
            best = int(chooser(data.next_observation[i : i + 1]).argmax())
            following = made.target(data.next_observation[i : i + 1])[0, best]
            value = made.net(data.observation[i : i + 1])[0, data.action[i]]
            expected.append(float(data.reward[i] + data.discount[i] * following - value))
    errors, before = torch.tensor(expected), made.net(data.observation).detach().clone()
    outcome = made.learn(Batch(data))
    torch.testing.assert_close(outcome.priorities, errors, rtol=1e-4, atol=1e-5)
    huber = torch.where(errors.abs() < 1, 0.5 * errors**2, errors.abs() - 0.5)
    reported = outcome.read_metrics()
    torch.testing.assert_close(reported["loss"], (data.weights * huber).mean(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(reported["td_error"], errors.abs().mean(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(reported["q_mean"], before.mean(), rtol=1e-4, atol=1e-6)


def test_the_target_net_follows_every_so_many_updates() -> None:
    made = agent()
    for update in range(1, 13):
        made.learn(Batch(sample(seed=update)))
        same = torch.equal(next(made.net.parameters()), next(made.target.net.parameters()))
        assert same == (update % 4 == 0)


def test_under_common_rounds_nets_move_only_at_their_end() -> None:
    """H = 3 and a target that is due after 4 updates: it moves with the second round (F = 2)."""
    made = agent(selector="agreed")
    made.replica.exchange = agreeing.every(3)
    moved, agreed = [], []
    for update in range(1, 13):
        before = [next(each.net.parameters()).clone() for each in (made.target, made.agreed)]
        made.learn(Batch(sample(seed=update)))
        moved += [update] if not torch.equal(before[0], next(made.target.net.parameters())) else []
        agreed += [update] if not torch.equal(before[1], next(made.agreed.net.parameters())) else []
    assert agreed == [3, 6, 9, 12]
    assert moved == [6, 12]
    made.replica.common_rounds = False  # gossip: nobody waits for a round
    for update in range(4):
        assert made.target.since == update
        made.learn(Batch(sample()))
    assert made.target.since == 0


def test_the_net_of_the_last_round_acts() -> None:
    """H = 3; exploration is off. An actor process, which never learns, and an evaluation take the own net."""
    made = agent(behaviour="agreed", selector="online", epsilon=0.0, explore_updates=0, learning_rate=0.1)
    made.replica.exchange = agreeing.every(3)
    observation, first = torch.randn(500, 5), torch.zeros(500, dtype=torch.bool)

    def action(greedy: bool = False) -> torch.Tensor:
        return made.act(observation, None, first, torch.Generator(), greedy=greedy).action

    def own() -> torch.Tensor:
        return made.net(observation).argmax(1)

    with torch.no_grad():
        for x in made.net.parameters():
            x.add_(torch.randn(x.shape, generator=torch.Generator().manual_seed(1)))
    torch.testing.assert_close(action(), own())  # published parameters, as in an actor
    made.agreed.reset()
    last = own()
    for update in range(1, 7):
        made.learn(Batch(sample(seed=update)))
        last = own() if update % 3 == 0 else last
        torch.testing.assert_close(action(), last)
        torch.testing.assert_close(action(greedy=True), own())
        assert torch.equal(last, own()) == (update % 3 == 0)
    again = agent(behaviour="agreed", epsilon=0.0, explore_updates=0)
    again.load(made.state())
    torch.testing.assert_close(again.act(observation, None, first, torch.Generator()).action, last)


def test_exploration_falls_and_ends() -> None:
    made = agent(epsilon=0.1, explore_updates=10)
    assert made.epsilon(4) == 1.0
    made.replica.clock = 5
    assert made.epsilon(4) == pytest.approx(0.55)
    made.replica.clock = 50
    assert made.epsilon(4) == pytest.approx(0.1)
    observation, first = torch.randn(20_000, 5), torch.zeros(20_000, dtype=torch.bool)
    generator = torch.Generator().manual_seed(0)
    best = made.act(observation, None, first, generator, greedy=True).action
    torch.testing.assert_close(best, made.net(observation).argmax(1))
    other = (made.act(observation, None, first, generator).action != best).float().mean()
    assert float(other) == pytest.approx(0.1 * 2 / 3, abs=4 * (0.0667 / 20_000) ** 0.5)


def test_a_fit_begins_with_the_target_net_that_it_ends_with() -> None:
    """Fitted Q-iteration: steps come with the first batch of a fit."""
    made = agent(target_every=0)
    for update in range(12):
        before = [x.clone() for x in (made.net if update % 4 == 0 else made.target.net).parameters()]
        made.learn(Batch(sample(seed=update), env_steps=40 if update % 4 == 0 else 0))
        for kept, now in zip(before, made.target.net.parameters(), strict=True):
            assert torch.equal(kept, now)
        assert not torch.equal(made.net.head.weight, made.target.net.head.weight)


def test_a_fit_that_begins_within_a_round_moves_the_target_net_at_its_end() -> None:
    """H = 3, fits of 4 updates. Within a round replicas differ, and so would their targets."""
    one, other = agent(target_every=0), agent(target_every=0)
    for made in (one, other):
        made.replica.exchange = agreeing.every(3)
    moved = []
    for update in range(12):
        before = one.target.net.head.weight.clone()
        one.learn(Batch(sample(seed=update), env_steps=40 if update % 4 == 0 else 0))
        if not torch.equal(before, one.target.net.head.weight):
            moved.append(update)
            assert torch.equal(one.target.net.head.weight, one.net.head.weight)
        if update == 4:  # the move is due
            other.replica.load(one.replica.state())
            other.load(one.state())
        elif update > 4:
            other.learn(Batch(sample(seed=update), env_steps=40 if update % 4 == 0 else 0))
            assert torch.equal(one.replica.params, other.replica.params)
    assert moved == [5, 8]


def test_a_ladder_gives_each_simulator_its_own_epsilon() -> None:
    made = agent(exploration="ladder", epsilon=0.4)
    expected = [0.4 ** (1 + 7 * i / 3) for i in range(4)]
    torch.testing.assert_close(made.epsilon(4), torch.tensor(expected))
    torch.testing.assert_close(made.epsilon(1), torch.tensor([0.4]))


def test_the_epsilon_that_is_told_is_that_of_the_first_of_its_simulators() -> None:
    made = agent(exploration="ladder", epsilon=0.4)
    for first in (8, 12):  # two groups of four, of the second of two learners
        made.assign_simulators(first, 16)
    reported = made.learn(Batch(sample())).read_metrics()["epsilon"]
    assert float(reported) == pytest.approx(0.4 ** (1 + 7 * 8 / 15))


@pytest.mark.parametrize("selector", ["online", "agreed"])
def test_it_goes_on_from_its_state(selector: str) -> None:
    one, other = agent(selector=selector), agent(selector=selector)
    for update in range(6):
        one.learn(Batch(sample(seed=update)))
    other.replica.load(one.replica.state())
    other.load(one.state())
    for update in range(6, 12):
        a, b = one.learn(Batch(sample(seed=update))), other.learn(Batch(sample(seed=update)))
        assert torch.equal(a.priorities, b.priorities)
    assert torch.equal(one.replica.params, other.replica.params)


@pytest.mark.parametrize(
    ("changes", "words"), [({"target_every": -1}, "target_every is -1"), ({"epsilon": 1.5}, "epsilon is 1.5")]
)
def test_what_makes_no_sense_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        agent(**changes)


@pytest.mark.parametrize("dueling", [pytest.param(False, marks=pytest.mark.slow), True])
def test_it_finds_the_values_of_a_chain(dueling: bool) -> None:
    """Five places in a row; going right from the last one is worth 1, action 1 goes right, others left."""
    made = agent(learning_rate=3e-3, target_every=25, dueling=dueling, hidden=32)
    g = torch.Generator().manual_seed(0)
    places = torch.eye(5)
    for update in range(1200):
        if update == 1000:
            made.replica.optimizer.param_groups[0]["lr"] = 3e-4
        place = torch.randint(5, (32,), generator=g)
        action = torch.randint(3, (32,), generator=g)
        after = torch.where(action == 1, place + 1, place - 1).clamp(0)
        ends = after == 5
        data = Sample(
            keys=torch.arange(32),
            weights=torch.ones(32),
            observation=places[place],
            action=action,
            reward=ends.float(),
            discount=torch.where(ends, 0.0, 0.9),
            next_observation=places[after.clamp(max=4)],
        )
        made.learn(Batch(data))
    with torch.no_grad():
        values = made.net(places)
    torch.testing.assert_close(values[:, 1], 0.9 ** torch.tensor([4.0, 3, 2, 1, 0]), rtol=0, atol=0.05)
    assert values.argmax(1).tolist() == [1] * 5
