"""Batch mode: so many env steps with one policy, then so many minibatches of them; saved and resumed."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from murmurate.agents.arm import ARM
from murmurate.errors import Refusal
from murmurate.recipes import recipe
from murmurate.replica.vector import Replica
from murmurate.replicator.learner import Context
from murmurate.sources.interface import SourceContext
from murmurate.sources.sequences import SequenceSourceConfig
from murmurate.spec import Batch

CONFIG = SequenceSourceConfig(simulators=4, collect_env_steps=40, minibatches=3)


def opened(config: SequenceSourceConfig = CONFIG, seed: int = 0, **learner: object):
    run = dataclasses.replace(
        recipe("cartpole-arm"), source=config, seed=seed, learner=ARM(batch=6, n_step=2, **learner)
    )
    built = run.learner.build(Context(run.world.spec(), Replica, seed))
    context = SourceContext(run, 0, built, lambda: 0.0, lambda name, like: pytest.fail("no channel"))
    return config.open(context), run


def equal(a: Batch, b: Batch) -> bool:
    return all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else all(torch.equal(x[k], y[k]) for k in x)
        for x, y in zip(vars(a.data).values(), vars(b.data).values(), strict=True)
    )


@pytest.mark.parametrize("double_buffer", [False, True])
def test_minibatches_follow_each_batch_of_env_steps(double_buffer: bool) -> None:
    source, run = opened(dataclasses.replace(CONFIG, double_buffer=double_buffer))
    played = [next(source).env_steps for _ in range(9)]
    assert played == [40, 0, 0] * 3
    assert run.source.batches(dataclasses.replace(run, env_steps=119)) == 6
    source.close()


def test_a_batch_is_a_whole_number_of_steps_of_all_simulators() -> None:
    source, run = opened(dataclasses.replace(CONFIG, collect_env_steps=41))
    assert next(source).env_steps == 44
    assert run.source.batches(dataclasses.replace(run, env_steps=88)) == 6
    source.close()


def test_on_policy_draws_are_of_the_latest_batch_only() -> None:
    """The behaviour output stands for the policy: each iteration's is another number."""
    for kept in (1, 2):
        source, _ = opened(dataclasses.replace(CONFIG, keep_batches=kept, minibatches=30))
        act = source.policy.act
        seen: list[set[float]] = []
        for iteration in range(4):

            def labelled(*args: object, act=act, label=iteration + 1.0, **kwargs: object):
                action = act(*args, **kwargs)
                label = torch.full_like(action.behaviour["advantage"], label)
                return action._replace(behaviour={"advantage": label})

            source.policy.act = labelled
            samples = [next(source).data.behaviour["advantage"] for _ in range(30)]
            seen.append({x for s in samples for x in s.flatten().tolist()} - {0.0})
        assert seen == [{i for i in (k - 1.0, float(k)) if i > 0 and i > k - kept} for k in (1, 2, 3, 4)]
        source.close()


def test_older_batches_are_for_agents_that_weigh_them() -> None:
    _, run = opened(config := dataclasses.replace(CONFIG, keep_batches=2))
    with pytest.raises(Refusal, match=r"arm learns on-policy.*--agent.importance-clip 1"):
        config.check(run)
    _, run = opened(config, importance_clip=1.0)
    config.check(run)


@pytest.mark.parametrize("after", [0, 2, 3, 7])
def test_saved_and_loaded_equals_uninterrupted(after: int) -> None:
    source, _ = opened(importance_clip=1.0)
    for _ in range(after):
        next(source)
    state = source.state()
    expected = [next(source) for _ in range(7)]
    other, _ = opened(importance_clip=1.0)
    assert other.exact
    other.load(state)
    for batch in expected:
        loaded = next(other)
        assert equal(batch, loaded)
        assert batch.env_steps == loaded.env_steps
    source.close()
    other.close()


def test_unsaved_steps_are_collected_anew() -> None:
    source, _ = opened(dataclasses.replace(CONFIG, saved=False))
    next(source)
    state = source.state()
    assert not state["replays"]
    other, _ = opened(dataclasses.replace(CONFIG, saved=False))
    assert not other.exact
    other.load(state)
    assert next(other).env_steps == 40
    source.close()
    other.close()


def test_a_joiner_begins_with_env_steps_that_no_one_has_had() -> None:
    sources = [opened()[0] for _ in range(3)]
    sources[1].fresh_start(5)
    sources[2].fresh_start(6)
    first = [next(source) for source in sources]
    assert [batch.env_steps for batch in first] == [40, 40, 40]
    assert not any(equal(first[a], first[b]) for a, b in ((0, 1), (0, 2), (1, 2)))
    # the second one had a minibatch left of its peers' iteration, and the next iteration begins for all
    assert [next(source).env_steps for source in sources] == [0, 40, 0]
    for source in sources:
        source.close()


def test_a_run_that_is_too_short_is_refused() -> None:
    _, run = opened()
    with pytest.raises(Refusal, match=r"its first batch takes 40\. Use more --env-steps"):
        CONFIG.check(dataclasses.replace(run, env_steps=39))
