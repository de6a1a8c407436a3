"""What every learner, source and evaluation must do, whichever it is.

They are found through the recipes, and recipes by listing their folder and the entry points, so a new recipe
is tested as soon as its file exists.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from murmurate.conformance.problems import same
from murmurate.conformance.smallest import DATA, recipe_of, shortest
from murmurate.evaluation.interface import EvalContext
from murmurate.fabric.simulated.fabric import SimulatedFabric
from murmurate.recipes import algorithms
from murmurate.replica.vector import Replica
from murmurate.replicator.learner import updates_of
from murmurate.training.members import build_learner, open_only_source, open_source
from murmurate.training.memory import bytes_of, planned_bytes
from murmurate.training.run import Run

ALGORITHMS = sorted(algorithms())


def _cases() -> list[Any]:
    """All recipes; those that differ from an earlier recipe only by settings are marked slow."""
    seen, cases = set(), []
    for name in ALGORITHMS:
        run = recipe_of(name)
        kinds = (type(run.learner), type(run.source), type(run.evaluation))
        cases.append(pytest.param(name, marks=pytest.mark.slow if kinds in seen else ()))
        seen.add(kinds)
    return cases


@pytest.fixture(params=_cases())
def run(request: Any, tmp_path: Path) -> Run:
    world = recipe_of(request.param).world
    if world.unit != "env steps" and getattr(world, "path", None) is not None and world.name not in DATA:
        pytest.skip(f"{world.name} needs files that are not part of the package")
    return shortest(request.param, tmp_path)


def learn(learner: Any, source: Any, batches: int) -> None:
    for _, batch in zip(range(batches), source, strict=False):
        outcome = learner.learn(batch)
        batch.feedback(outcome.priorities)


def values(learner: Any) -> dict[str, torch.Tensor]:
    return {name: replica.values().detach().clone() for name, replica in learner.replicas.items()}


def test_its_run_is_valid(run: Run) -> None:
    run.validate()
    assert run.source.gives == run.learner.requires.kind
    assert run.world.unit == run.learner.requires.unit
    batches = run.source.batches(run)
    assert batches is not None
    assert run.planned_updates() == run.learner.updates(batches)
    assert run.source.memory_bytes(run) >= 0


def test_one_seed_gives_the_same_learner_which_acts_with_its_own_replicas(run: Run) -> None:
    one, other = build_learner(run, 0, Replica), build_learner(run, 0, Replica)
    assert same(values(one), values(other)), (
        "the seed must determine the initial parameters: build nets within "
        "seeded_by(derive_generator(context.seed, 'net'))"
    )
    assert updates_of(one) == 0
    if run.world.unit == "env steps":
        unknown = set(one.acting) - set(one.replicas)
        assert not unknown, f"acting names {sorted(unknown)}, and the replicas are {sorted(one.replicas)}"


def test_the_size_of_its_vectors_is_planned_without_allocating_them(run: Run) -> None:
    planned = planned_bytes(run)
    if planned is None and not type(run.learner).__module__.startswith("murmurate."):
        pytest.skip("the learner computes with values while it is built, so its size is not planned")
    assert planned == bytes_of(build_learner(run, 0, Replica))


def test_a_learner_makes_as_many_updates_as_it_says(run: Run) -> None:
    learner = build_learner(run, 0, Replica)
    source = open_only_source(run, learner)
    learn(learner, source, 5)
    assert updates_of(learner) == run.learner.updates(5), (
        "the config's updates(5) is not what 5 batches make. Of several replicas, that with the most updates "
        "counts (or those that the learner's counted names)"
    )
    source.close()


def test_saved_and_loaded_equals_uninterrupted(run: Run) -> None:
    learner = build_learner(run, 0, Replica)
    source = open_only_source(run, learner)
    learn(learner, source, 6)
    assert source.exact or not type(run.source).__module__.startswith("murmurate.")
    saved = copy.deepcopy(
        {
            "source": source.state(),
            "learner": learner.state(),
            "replicas": {name: replica.state() for name, replica in learner.replicas.items()},
        }
    )
    json.dumps(source.fields())
    run.source.check_state(saved["source"])
    learn(learner, source, 4)
    loaded = build_learner(run, 0, Replica)
    loaded_source = open_only_source(run, loaded)
    for name, replica in loaded.replicas.items():
        replica.load(saved["replicas"][name])
    loaded.load(saved["learner"])
    loaded_source.load(saved["source"])
    learn(loaded, loaded_source, 4)
    assert updates_of(learner) == updates_of(loaded)
    assert same(values(learner), values(loaded)) or not source.exact, "state() or load() leaves out something"
    source.close()
    loaded_source.close()


def _numbers_of(batch: Any) -> torch.Tensor:
    """The examples, or the observations, of a batch as one vector of numbers."""
    data = batch.data
    for name in ("observation", "words", "values", "images"):
        if hasattr(data, name):
            return torch.as_tensor(np.asarray(getattr(data, name))).flatten()
    raise AssertionError(
        f"a {type(data).__name__} needs a field observation, words, values or images with its examples"
    )


def test_a_joining_replica_gets_other_data_than_its_peer_and_than_at_its_first_start(run: Run) -> None:
    run = dataclasses.replace(run, replicas=2)
    fabric = SimulatedFabric(2, seed=0, keep_log=False)

    def first(source: Any) -> torch.Tensor:
        data = _numbers_of(next(source))
        source.close()
        return data

    def role(rank: int, member: Any) -> dict[str, torch.Tensor]:
        # each source has a learner of its own, since a source may make its learner fit a model
        started, joiner, again = (
            open_source(run, rank, build_learner(run, rank, Replica), member) for _ in range(3)
        )
        joiner.fresh_start(7)
        again.fresh_start(7)
        return {"started": first(started), "joined": first(joiner), "joined again": first(again)}

    one, other = fabric.run([lambda m, r=r: role(r, m) for r in range(2)])  # type: ignore[misc]
    assert torch.equal(other["joined"], other["joined again"]), "the seed must determine the data"
    for different in (other["started"], one["started"], one["joined"]):
        assert different.shape != other["joined"].shape or not torch.equal(different, other["joined"])


def test_an_evaluation_gives_plain_figures_and_a_sentence(run: Run, tmp_path: Path) -> None:
    learner = build_learner(run, 0, Replica)
    evaluation = run.evaluation
    count = 1 if evaluation.plays else None
    context = EvalContext(run.world, tmp_path, 0, run.world.fingerprint(), count=count)
    figures = json.loads(json.dumps(evaluation.evaluate(learner, context)))
    again = json.loads(json.dumps(evaluation.evaluate(learner, context)))
    assert figures == again, "the seed must determine the figures"
    assert evaluation.sentence(figures)
    assert evaluation.sentence({}) == ""
