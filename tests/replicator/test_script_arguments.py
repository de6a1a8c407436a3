"""The arguments of ``murmurate.run``: of the wrong kind they are refused by name."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from torch import nn

import murmurate
from murmurate.errors import Refusal
from murmurate.launch.script import run
from murmurate.strategies import strategy_from
from murmurate.strategies.gala import GALA


def nothing(loop):
    return loop.rank


def test_fields_of_a_strategy_may_be_numpys():
    made = strategy_from({"name": "elastic", "wait": np.False_, "period": np.int64(3)})
    assert (made.wait, made.period, type(made.period)) == (False, 3, int)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"strategy": GALA}, r"strategy is the class GALA: give an object, GALA\(\), or its name, 'gala'"),
        ({"strategy": {"name": "gala", "staleness": 3}}, "has no field 'staleness'.*'staleness_bound'"),
        ({"strategy": {"period": 3}}, "strategy has no name: give it one"),
        ({"strategy": {"name": "local-sgd", "period": 0}}, r"strategy.period is 0.*--strategy.period 10"),
        ({"strategy": {"name": "local-sgd", "period": "5"}}, "period of .* is '5'; it must be int"),
        ({"strategy": {"name": "local-sgd", "period": None}}, "period of .* is None; it must be int"),
        ({"strategy": {"name": "hogwild", "shared_moments": "no"}}, "moments of .* is 'no'; it must be bool"),
        ({"strategy": {"name": "synchronous-gossip", "direction": "up"}}, r"is 'up'; it must be '\w+' or"),
        ({"strategy": object()}, "strategy is <object object.*give a name"),
        ({"replicas": "2"}, "replicas is '2': give a whole number"),
        ({"replicas": 2.0}, "replicas is 2.0: give a whole number"),
        ({"threads": 0}, "threads is 0: use at least 1"),
        ({"seed": -1}, "seed is -1: use at least 0"),
        ({"seed": None}, "seed is None: give a whole number"),
        ({"seed": 1.5}, "seed is 1.5: give a whole number"),
        ({"deadline_seconds": -1.0}, "deadline_seconds is -1.0: give a number of seconds above 0"),
        ({"devices": ("foo",)}, "devices has 'foo', which is no device of torch"),
        ({"devices": ()}, r"devices is \(\): name at least one"),
        ({"strategy": "hogwild", "devices": "meta"}, r"Use .*strategy='gala'.*devices='cpu'"),
        ({"replicas": 2, "strategy": "solo"}, "solo trains one replica.*strategy='all-reduce'"),
    ],
)
def test_arguments_of_the_wrong_kind_are_refused_by_name(given, words):
    with pytest.raises(Refusal, match=words):
        murmurate.run(nothing, **given)
    with pytest.raises(Refusal, match="main is 3: give a function"):
        murmurate.run(3)


def saves(loop):
    model = nn.Linear(2, 1)
    optimizer = loop.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for x in loop.inputs([torch.ones(2, 2)] * 2):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    file = io.BytesIO()
    torch.save({"state": loop.state(), "loop": [loop.seed, loop.size, loop.workers]}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)["loop"]


def test_states_of_runs_with_numbers_of_numpy_can_be_loaded():
    one, two = np.int64(1), np.int64(2)
    given = {"replicas": two, "workers": two, "threads": one, "parts": one, "seed": np.uint32(3)}
    results = murmurate.run(saves, launcher="inline", deadline_seconds=np.float32(60.0), **given)
    assert results == [[3, 2, 2]] * 2


def one_device(loop):
    return str(loop.device())


def fields(loop):
    return loop.strategy.period


def test_fields_of_a_strategy_may_be_given_as_a_mapping():
    given = {"name": "local-sgd", "period": 50}
    assert murmurate.run(fields, replicas=2, launcher="inline", strategy=given) == [50, 50]
    assert given == {"name": "local-sgd", "period": 50}


def test_one_device_need_not_be_in_a_sequence():
    assert run(one_device, launcher="inline", devices="meta") == ["meta"]


def test_rank_and_size_are_documented():
    for name in ("rank", "size"):
        assert getattr(murmurate.OwnLoop, name).__doc__
