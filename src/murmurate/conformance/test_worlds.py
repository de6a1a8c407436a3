"""What every world of simulators must do. Tested: all worlds of other packages, and one world of each module
of murmurate."""

from __future__ import annotations

import pickle

import pytest
import torch

from murmurate import plugins
from murmurate.conformance.simulators import assert_resumes_exactly, drawn_actions, play
from murmurate.errors import MissingExtra, Refusal
from murmurate.worlds.registry import world, world_names

STEPS = 40
LONGEST = 1_000  # steps in which an episode should end


def _tested_names() -> list[str]:
    """All worlds of other packages' modules, and the first world of each module of murmurate."""
    names = []
    for module in plugins.modules("murmurate.worlds"):
        if hasattr(module, "names"):
            is_own = module.__name__.startswith("murmurate.worlds.")
            names += module.names()[:1] if is_own else module.names()
    return names


@pytest.fixture(params=_tested_names())
def name(request):
    """The name of a world that can be opened here."""
    try:
        world(request.param).spec()
    except (MissingExtra, Refusal) as problem:
        pytest.skip(str(problem))
    return request.param


def test_it_is_found_by_its_name_and_can_be_pickled(name):
    assert name in world_names()
    tested = world(name)
    assert tested.name == name
    assert tested == world(name)
    assert pickle.loads(pickle.dumps(tested)) == tested
    assert tested.unit == "env steps"


def test_its_steps_agree_with_its_spec(name):
    tested = world(name)
    simulators = tested.open(2, training=True)
    spec = simulators.spec
    assert spec == tested.spec()
    assert simulators.size == 2
    assert bool(spec.actions) != bool(spec.action_shape), "actions are numbers, or vectors"
    assert tested.images == spec.holds_images, (
        f"the config's images is {tested.images}, and its observations are {list(spec.observation_shape)} of "
        f"{spec.observation_dtype}: let images say whether they are [C, H, W] in uint8, or have such parts; "
        "recipes go by it"
    )
    step = simulators.reset(1)
    returned = []
    for action in drawn_actions(spec, STEPS, 2, seed=3):
        assert step.observation.shape == (2, *spec.observation_shape)
        assert step.observation.dtype == spec.observation_dtype
        for tensor, dtype in ((step.reward, torch.float32), (step.terminated, torch.bool)):
            assert (tensor.shape, tensor.dtype) == ((2,), dtype)
        assert not bool((step.terminated & step.truncated).any()), "termination takes precedence"
        assert all(0 <= episode.simulator < 2 and episode.length > 0 for episode in step.episodes)
        if bool(step.truncated.any()):
            final = step.final_observation
            assert getattr(final, "shape", None) == step.observation.shape, (
                "where an episode is truncated, final_observation [B, ...] must have its last observation"
            )
        returned.append((step.observation, step.observation.clone()))
        step = play(simulators, action)
    assert all(torch.equal(observation, copy) for observation, copy in returned), (
        "a later step wrote to the observation that receive() had returned: return a new tensor at each step"
    )
    simulators.close()


def test_each_episode_that_ends_is_listed(name):
    """Of a whole game, so not in training, where an episode may end with a life. Skipped if none ends."""
    tested = world(name)
    simulators = tested.open(2, training=False)
    simulators.reset(1)
    # those of murmurate, some of which are slow, have tests of their own
    enough = type(tested).__module__.startswith("murmurate.worlds.")
    for number, action in enumerate(drawn_actions(simulators.spec, LONGEST, 2, seed=3)):
        if number >= STEPS and enough:
            break
        step = play(simulators, action)
        ended = (step.terminated | step.truncated).nonzero()[:, 0].tolist()
        listed = sorted(episode.simulator for episode in step.episodes)
        assert listed == ended or step.restarts, (
            f"the episodes of simulators {ended} ended, and TimeStep.episodes lists those of {listed}: list "
            "an Episode for each, from which returns are recorded and games are evaluated"
        )
        enough = enough or bool(ended)
    simulators.close()
    if not enough:
        pytest.skip(f"no episode ends within {LONGEST} steps of random actions")


def test_one_seed_gives_the_same_episodes_and_simulators_differ(name):
    def observations(first=0):
        """[T, B, ...] of two simulators, or of the second alone."""
        simulators = world(name).open(2 - first, training=True, first=first)
        actions = drawn_actions(simulators.spec, STEPS, 2, seed=3)[:, first:]
        steps = [simulators.reset(1), *(play(simulators, action) for action in actions)]
        simulators.close()
        return torch.stack([step.observation for step in steps])

    one = observations()
    assert torch.equal(one, observations())
    assert not torch.equal(one[:, 0], one[:, 1]), "each simulator has its own seed"
    assert torch.equal(one[:, 1:], observations(first=1)), (
        "opened with first=1, one simulator must play as the second of two: derive the seed of simulator b "
        "from first + b, or all replicas play the same games"
    )


def test_saved_and_loaded_equals_uninterrupted(name):
    simulators = world(name).open(1, training=True)
    simulators.reset(1)
    savable = simulators.state() is not None
    simulators.close()
    if not savable:
        pytest.skip("its simulators cannot be saved")
    assert_resumes_exactly(world(name), before=STEPS, after=STEPS)
