"""Mistakes that authors of strategies, worlds and agents make: the conformance tests find and name them."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch

from murmurate.conformance import test_recipes, test_strategies, test_strategy_states, test_worlds
from murmurate.conformance.simulators import drawn_actions
from murmurate.conformance.smallest import shortest
from murmurate.evaluation.interface import EvalContext, Evaluation
from murmurate.fabric.interface import Capability
from murmurate.ranges import PositiveInt, UnitInterval
from murmurate.replica.vector import Exchange
from murmurate.spec import EnvSpec
from murmurate.strategies.interface import Strategy, mean_of_published


def template(name: str) -> ModuleType:
    """A module of ``plugins``, without that folder on the path, where its entry points would be found."""
    path = Path(__file__).parent / "plugins" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"{name}_with_mistakes", path)
    assert spec is not None and spec.loader is not None  # noqa: PT018 - for mypy
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


catch_world = template("catch_world")


@dataclass
class Ring(Strategy):
    """Mix with what the preceding replica published."""

    name: ClassVar[str] = "faultless-ring"
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.REGISTER})
    rounds: int = field(default=0, init=False)

    def step(self, replica, channel):
        replica.update()
        channel.publish(replica.params.detach())
        self.rounds += 1
        peer = (channel.rank - 1) % channel.size
        if channel.version(peer) == 0:
            return Exchange(self.rounds, 1, 0)
        replica.params.lerp_(channel.peek(peer)[0], 0.5)
        return Exchange(self.rounds, 2, 0)

    def consensus(self, replica, channel):
        return mean_of_published(replica, channel)

    def state(self):
        return {"rounds": self.rounds}

    def load(self, state):
        self.rounds = state["rounds"]


class OtherKey(Ring):
    def load(self, state):
        self.rounds = state["round"]


class Forgetful(Ring):
    def load(self, state):
        pass


class Resumes(Ring):
    def resumed(self, replica, channel):
        raise ZeroDivisionError


class Joins(Ring):
    def joined(self, replica, channel):
        raise ZeroDivisionError


class Rewrites(Ring):
    def rewritten(self, replica, channel):
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("kind", "call", "raised"),
    [
        (OtherKey, "resumed", KeyError),
        (Forgetful, "rewritten", AssertionError),
        (Resumes, "resumed", ZeroDivisionError),
        (Joins, "joined", ZeroDivisionError),
        (Rewrites, "rewritten", ZeroDivisionError),
    ],
)
def test_what_only_a_resume_or_a_joiner_would_show_is_found(kind, call, raised):
    test_strategy_states.test_with_a_saved_state_it_goes_on_after(Ring, call)
    with pytest.raises(raised):
        test_strategy_states.test_with_a_saved_state_it_goes_on_after(kind, call)


@dataclass
class Momentum(Strategy):
    """Average gradients, and add a share of the average before; its vector is not saved."""

    name: ClassVar[str] = "forgotten-momentum"
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.COLLECTIVE})
    synchronous: ClassVar[bool] = True
    _before: torch.Tensor = field(default_factory=lambda: torch.empty(0), init=False, compare=False)

    def attach(self, replica, channel):
        self._before = torch.zeros_like(replica.grad)

    def step(self, replica, channel):
        heard = channel.mean_(replica.grad)
        self._before.mul_(0.5).add_(replica.grad)
        replica.grad.copy_(self._before)
        replica.update()
        return Exchange(replica.clock, heard, 0)


class SavedMomentum(Momentum):
    def state(self):
        return {"before": self._before.clone()}

    def load(self, state):
        self._before.copy_(state["before"])


class ListedMomentum(Momentum):
    def attach(self, replica, channel):
        self._all = [torch.zeros_like(replica.grad)]

    def step(self, replica, channel):
        self._before = self._all[0]
        return super().step(replica, channel)


@pytest.mark.parametrize("forgetful", [Momentum, ListedMomentum])
def test_a_vector_that_a_strategy_does_not_save_is_found(forgetful):
    test_strategy_states.test_its_state_is_all_that_must_survive_a_checkpoint(SavedMomentum, 0)
    with pytest.raises(AssertionError, match="leaves out something"):
        test_strategy_states.test_its_state_is_all_that_must_survive_a_checkpoint(forgetful, 0)


@dataclass
class EverySeventh(Strategy):
    """Take the mean with every seventh update."""

    name: ClassVar[str] = "every-seventh"
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.COLLECTIVE})
    synchronous: ClassVar[bool] = True
    period: ClassVar[int] = 7
    late: ClassVar[int] = 0

    def step(self, replica, channel):
        replica.update()
        rounds, staleness = divmod(replica.clock - self.late, self.period)
        heard = channel.mean_(replica.params.detach()) if staleness == 0 else 1
        return Exchange(rounds, heard, staleness)


class OneLate(EverySeventh):
    """With the updates 1, 3, 5, ..."""

    period, late = 2, 1


def test_any_period_is_right_whose_rounds_end_with_its_multiples():
    test = test_strategies.test_rounds_of_a_synchronous_strategy_also_end_with_batches_of_several_updates
    test(EverySeventh)
    with pytest.raises(AssertionError, match="Exchange with every period-th update"):
        test(OneLate)


class Unsaid(EverySeventh):
    period_field: ClassVar[str] = "every"  # there is no such field


def test_a_strategy_that_leaves_out_how_long_its_rounds_are_is_found():
    test = test_strategies.test_rounds_of_a_synchronous_strategy_also_end_with_batches_of_several_updates
    with pytest.raises(AssertionError, match="a round has 7 updates, and updates_per_round is 1"):
        test(Unsaid)


@dataclass
class Several(Ring):
    """shares: numbers that run.json has as a list."""

    shares: tuple[UnitInterval, ...] = (0.5, 0.25)


@dataclass
class NotStored(Ring):
    """share: a number that run.json cannot have."""

    share: complex = 0.5j


def test_hyper_parameters_are_what_run_json_gives_back():
    test_strategies.test_it_is_a_dataclass_whose_fields_all_have_defaults(Several)
    with pytest.raises(TypeError):
        test_strategies.test_it_is_a_dataclass_whose_fields_all_have_defaults(NotStored)


class OneForAll(Ring):
    """Remembers in the class, which all replicas share."""

    last: ClassVar[list[int]] = [0]

    def step(self, replica, channel):
        self.last[0] = replica.clock + 1
        return super().step(replica, channel)

    def state(self):
        return {"last": self.last[0]}


def test_state_that_replicas_share_is_found():
    test = test_strategies.test_one_strategy_object_serves_many_replicas_without_sharing_state
    test(Ring)
    with pytest.raises(AssertionError, match="change the state of another replica's strategy"):
        test(OneForAll)


class Returnless(Ring):
    def step(self, replica, channel):
        super().step(replica, channel)


class Live(Ring):
    def consensus(self, replica, channel):
        return replica.params.detach()


class Summed(Ring):
    def consensus(self, replica, channel):
        return channel.size * mean_of_published(replica, channel)


class Idle(Ring):
    def step(self, replica, channel):
        return Exchange(0, 1, 0)


class Alone(Ring):
    def step(self, replica, channel):
        replica.update()
        return Exchange(0, 1, 0)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Returnless, r"Returnless.step returned None: return Exchange\(round, heard, staleness\)"),
        (Live, "consensus must return a copy"),
        (Summed, "neither a mean of the members' parameters nor a vector that"),
        (Idle, r"call replica.update\(\) once"),
    ],
)
def test_a_strategys_mistake_is_named(kind, words):
    with pytest.raises((AssertionError, TypeError), match=words):
        test_strategies.test_it_learns_on_every_fabric(kind, "simulated", 2)


def test_members_that_drift_apart_are_found():
    with pytest.raises(AssertionError, match="does step change"):
        test_strategies.test_under_any_schedule_members_stay_closer_than_separate_learners(Alone, 0)


class Faulty(catch_world.CatchSimulators):
    """Catch with one mistake, which ``mistake`` names."""

    mistake = ""

    def __init__(self, spec, size, first):
        super().__init__(spec, size, 0 if self.mistake == "first" else first)
        self._board = super()._boards()
        self._steps = itertools.count(1)

    def _boards(self):
        boards = super()._boards()
        return self._board.copy_(boards) if self.mistake == "buffer" else boards

    def send(self, action):
        super().send(action)
        if self.mistake == "late" and next(self._steps) % 10:
            self._ball[:, 0] -= 1  # it falls at each tenth step: the first episode is of 70

    def receive(self):
        step = super().receive()
        if self.mistake in ("episodes", "late"):
            step.episodes = []
        if self.mistake == "final":
            step.terminated, step.truncated = step.truncated, step.terminated
        return step


@pytest.mark.parametrize(
    ("mistake", "test", "words"),
    [
        ("", "test_its_steps_agree_with_its_spec", None),
        ("", "test_each_episode_that_ends_is_listed", None),
        ("", "test_one_seed_gives_the_same_episodes_and_simulators_differ", None),
        ("buffer", "test_its_steps_agree_with_its_spec", "a later step wrote to the observation"),
        ("final", "test_its_steps_agree_with_its_spec", "final_observation .* must have its last"),
        ("images", "test_its_steps_agree_with_its_spec", "the config's images is None"),
        ("episodes", "test_each_episode_that_ends_is_listed", "list an Episode for each"),
        ("late", "test_each_episode_that_ends_is_listed", "list an Episode for each"),
        ("first", "test_one_seed_gives_the_same_episodes_and_simulators_differ", "from first \\+ b"),
    ],
)
def test_a_worlds_mistake_is_named(mistake, test, words, monkeypatch):
    class World(catch_world.CatchWorld):
        def open(self, simulators, *, training, threads=1, first=0, picture=False):
            return Faulty(self.spec(), simulators, first)

    if mistake == "images":
        World.images = None
    monkeypatch.setattr(Faulty, "mistake", mistake)
    monkeypatch.setattr(test_worlds, "world", lambda name: World())
    run = getattr(test_worlds, test)
    if words is None:
        run("catch")
    else:
        with pytest.raises(AssertionError, match=words):
            run("catch")


def test_a_world_is_sent_actions_that_agents_send():
    parts = EnvSpec("parts", (4,), torch.float32, actions=0, action_shape=(2,), factors=(2, 5))
    drawn = drawn_actions(parts, 50, 2, seed=0)
    assert (drawn.shape, drawn.dtype) == ((50, 2, 2), torch.float32)
    assert [drawn[..., k].unique().tolist() for k in (0, 1)] == [[0, 1], [0, 1, 2, 3, 4]]
    matrices = EnvSpec(
        "matrices", (4,), torch.float32, 0, action_shape=(2, 3), action_high=(1, 1, 1, 9, 9, 9)
    )
    drawn = drawn_actions(matrices, 50, 2, seed=0)
    assert drawn.shape == (50, 2, 2, 3)
    assert drawn[..., 1, :].std() > 5 * drawn[..., 0, :].std()


@dataclass(frozen=True)
class Longest(Evaluation):
    """rounds: steps of a game whose actions are counted."""

    rounds: PositiveInt = 3
    plays: ClassVar[bool] = True

    def evaluate(self, learner: Any, context: EvalContext) -> dict[str, Any]:
        return {"longest": context.count or self.rounds}

    def sentence(self, figures: Any) -> str:
        return f"{figures['longest']} steps" if figures else ""


def test_an_evaluation_need_not_have_the_options_of_another(tmp_path):
    run = dataclasses.replace(shortest("a2c", tmp_path), evaluation=Longest())
    test_recipes.test_an_evaluation_gives_plain_figures_and_a_sentence(run, tmp_path)


def test_nets_that_the_seed_does_not_determine_are_named(tmp_path, monkeypatch):
    run = shortest("a2c", tmp_path)
    built = test_recipes.build_learner

    def unseeded(*arguments):
        learner = built(*arguments)
        with torch.no_grad():
            learner.replicas["a2c"].params.add_(torch.rand(1))
        return learner

    monkeypatch.setattr(test_recipes, "build_learner", unseeded)
    with pytest.raises(AssertionError, match=r"build nets within seeded_by"):
        test_recipes.test_one_seed_gives_the_same_learner_which_acts_with_its_own_replicas(run)
