"""Scripts with a mistake that would otherwise be silent: it is refused, or a warning names it."""

from __future__ import annotations

import functools
import io
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import murmurate
from murmurate.errors import Refusal, RunFailed
from murmurate.fabric.interface import FabricError
from murmurate.fabric.processes.spawn import Died
from murmurate.launch.script import run
from murmurate.strategies import strategy_from
from murmurate.strategies.all_reduce import AllReduce
from murmurate.strategies.dpsgd import DPSGD
from murmurate.strategies.elastic import Elastic, SynchronousElastic
from murmurate.strategies.gala import GALA
from murmurate.strategies.hogwild import Hogwild
from murmurate.strategies.local_sgd import LocalSGD
from replicator.steps import alone, draw, loops, pairs, tanh_net


def warned(function, words):
    """What ``function`` returns, and the messages of its warnings that contain ``words``."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = function()
    return result, [str(one.message) for one in caught if words in str(one.message)]


def trained(loop, net, optimizer, batches, after=lambda: None):
    for x, y in batches:
        optimizer.zero_grad()
        F.mse_loss(net(x), y).backward()
        optimizer.step()
        after()
    return [p.detach().clone() for p in net.parameters()]


def test_a_module_in_place_of_the_optimizer_is_refused():
    with pytest.raises(Refusal, match=r"Sequential is no optimizer: call wrap_optimizer\(optimizer, mod"):
        loops(1, lambda loop: loop.wrap_optimizer(tanh_net(torch.float32)))


# -- frozen parameters, schedulers -------------------------------------------------------------------


def test_a_parameter_that_is_frozen_after_wrapping_is_refused_and_may_be_frozen_between_steps():
    def script(loop, again):
        net = tanh_net()
        optimizer = loop.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=0.1), net)
        net[2].weight.requires_grad_(False)
        optimizer.zero_grad()
        net[2].weight.requires_grad_(again)
        F.mse_loss(net(draw(0, 2, 4)), draw(1, 2, 3)).backward()
        optimizer.step()

    with pytest.raises(Refusal, match=r"'2.weight' was frozen \(requires_grad_\(False\)\) after"):
        alone(lambda loop: script(loop, False))
    alone(lambda loop: script(loop, True))


def test_a_scheduler_made_before_wrapping_warns_of_nothing():
    def script(loop):
        net = tanh_net()
        plain = torch.optim.SGD(net.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(plain, 0.5)
        optimizer = loop.wrap_optimizer(plain, net)
        trained(loop, net, optimizer, loop.inputs(pairs(2)), scheduler.step)
        return optimizer.param_groups[0]["lr"]

    rates, told = warned(lambda: loops(2, script), "lr_scheduler.step()")
    assert rates == [0.025, 0.025]
    assert told == []


@pytest.mark.parametrize("strategy", [DPSGD(threads=1), Elastic()])
def test_where_replicas_step_themselves_beside_a_centre_schedulers_work(strategy):
    def script(loop):
        net = tanh_net()
        optimizer = loop.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), net)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.0)
        trained(loop, net, optimizer, loop.inputs(pairs(1)), scheduler.step)
        before = optimizer.replica.values().clone()
        trained(loop, net, optimizer, pairs(2), scheduler.step)
        return bool(torch.equal(before, optimizer.replica.values()))

    assert loops(2, script, strategy=strategy)[0], "a rate of 0 moves nothing"


# -- what no optimizer steps ------------------------------------------------------------------------


def half_frozen(seed):
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 5), nn.Linear(5, 3)).double()
    net[3].weight = nn.Parameter(net[3].weight.detach().clone())
    net[0].requires_grad_(False)
    with torch.no_grad():
        for k, tensor in enumerate(net.state_dict().values()):
            tensor.copy_(draw(100 * seed + k, *tensor.shape)) if tensor.is_floating_point() else None
    return net


@pytest.mark.parametrize("strategy", [AllReduce(), GALA(), Elastic()])
def test_frozen_parameters_and_buffers_begin_as_those_of_the_lowest_rank(strategy):
    def script(loop, by_wrapping):
        net = half_frozen(loop.rank)
        stepped = [p for p in net.parameters() if p.requires_grad]
        if by_wrapping:
            loop.wrap_optimizer(torch.optim.SGD(stepped, lr=0.1), net)
        else:
            loop.replicate("net", net, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        return {k: v.clone() for k, v in net.state_dict().items()}

    expected = half_frozen(0).state_dict()
    for by_wrapping in (True, False):
        found = loops(3, lambda loop, by=by_wrapping: script(loop, by), strategy=strategy)
        for result in found[: 3 - strategy.centre]:
            torch.testing.assert_close(result, dict(expected), rtol=0, atol=0)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen, self.body = nn.Linear(3, 3), nn.Linear(3, 3)
        self.head, self.frozen.weight.requires_grad = nn.Linear(3, 3), False
        self.head.weight = self.body.weight
        self.register_buffer("cache", torch.ones(2), persistent=False)


def test_what_is_agreed_loads_into_a_module_with_frozen_and_tied_parameters():
    def script(loop):
        torch.manual_seed(loop.rank)
        net = Tied()
        loop.wrap_optimizer(torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1), net)
        loop.finish(30.0)
        fresh = Tied()
        fresh.load_state_dict(loop.agreed())
        return {k: v.clone() for k, v in fresh.state_dict().items()}, dict(net.state_dict())

    for loaded, own in loops(2, script):
        torch.testing.assert_close(loaded, own, rtol=0, atol=0)


class Averaging(nn.Module):
    """Assigns a new tensor to its buffer in every pass, and has a part under two names."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.both = nn.Sequential(self.layer, self.norm)
        self.register_buffer("average", torch.zeros(3))

    def forward(self, x):
        self.average = 0.5 * self.average + 0.5 * x.mean(0)
        return self.both(x)


def test_buffers_that_a_module_assigns_anew_are_saved_and_agreed_under_all_names():
    def script(loop):
        net = Averaging()
        optimizer = loop.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), net)
        net(torch.full((4, 3), float(loop.rank + 1)))
        state, seen = loop.state(), net.average.clone()
        agreed = loop.agreed()
        net(torch.ones(4, 3))
        loop.load(state)
        return seen, net.average.clone(), agreed, optimizer.replica.clock

    for rank, (seen, loaded, agreed, _) in enumerate(loops(2, script)):
        assert seen.tolist() == loaded.tolist() == [0.5 * (rank + 1)] * 3
        assert torch.equal(agreed["norm.running_mean"], agreed["both.1.running_mean"])
        assert agreed["average"].tolist() == [0.75] * 3


def test_two_optimizers_of_one_module_agree_on_all_of_it():
    def script(loop):
        net = nn.Linear(3, 3)
        first = loop.wrap_optimizer(torch.optim.SGD([net.weight], lr=0.1), net)
        second = loop.wrap_optimizer(torch.optim.SGD([net.bias], lr=0.1), net, name="bias")
        for optimizer, value in ((first, 1.0), (second, 2.0)):
            optimizer.replica.params.data.fill_(value)
        loop.finish(30.0)
        return loop.agreed()

    for agreed in loops(2, script):
        assert torch.equal(agreed["weight"], torch.ones(3, 3))
        assert torch.equal(agreed["bias"], torch.full((3,), 2.0))


# -- nothing exchanged, and an early end ------------------------------------------------------------


def test_a_script_that_exchanges_nothing_is_warned_once():
    def plain(loop):
        net = tanh_net()
        return trained(loop, net, torch.optim.SGD(net.parameters(), lr=0.1), loop.inputs(pairs(2)))

    _, told = warned(lambda: loops(3, plain), "nothing was exchanged")
    assert len(told) == 1
    assert "replicator.wrap_optimizer(optimizer, model)" in told[0]
    for size, script in ((1, plain), (2, lambda loop: loop.sum(1)), (2, lambda loop: wrapped(loop))):
        assert warned(lambda n=size, s=script: loops(n, s), "nothing was exchanged")[1] == []


def wrapped(loop):
    net = tanh_net()
    loop.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), net)


def uneven(loop):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        net = tanh_net()
        optimizer = loop.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), net)
        trained(loop, net, optimizer, pairs(3 if loop.rank == 1 else 12))
        return [str(one.message) for one in caught if "returned from main" in str(one.message)]


def even(loop):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        net = tanh_net()
        optimizer = loop.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), net)
        trained(loop, net, optimizer, loop.inputs(pairs(12)))
        return [str(one.message) for one in caught if "returned from main" in str(one.message)]


@pytest.mark.parametrize(
    ("strategy", "fields"),
    [(Elastic(period=5), "period"), (DPSGD(batch=2, local_updates=3), "local_updates or batch")],
)
@pytest.mark.parametrize("steps", [0, 4, 12])
def test_updates_that_never_reached_the_centre_are_told(strategy, fields, steps):
    def script(loop):
        net = tanh_net(torch.float32)
        optimizer = loop.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), net)
        trained(loop, net, optimizer, loop.inputs(pairs(steps, dtype=torch.float32)))

    _, told = warned(lambda: run(script, replicas=2, strategy=strategy, launcher="inline"), "no update of")
    assert len(told) == (steps == 4)
    for message in told:
        assert message.endswith(f"Make more steps, or the strategy's {fields} smaller.")


def test_a_replica_that_returns_early_is_told_by_one_of_the_others():
    (told,), silent = run(uneven, replicas=2, strategy="all-reduce")
    assert told.startswith("replica 1 after 3 steps returned from main")
    assert "replicator.inputs" in told
    assert silent == []
    assert run(even, replicas=2) == [[], []]


def one_batch_skipped(loop, skipping=1):
    net = tanh_net()
    optimizer = loop.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), net)
    batches = list(loop.inputs(pairs(6)))
    trained(loop, net, optimizer, batches[1:] if loop.rank == skipping else batches)


@pytest.mark.parametrize("skipping", [0, 1, 2, None])
def test_a_step_that_one_replica_leaves_out_is_told_at_the_end(skipping):
    def script(loop):
        one_batch_skipped(loop, skipping)

    _, told = warned(lambda: loops(3, script, strategy=LocalSGD(period=4)), "steps")
    assert (len(told) in (1, 2)) if skipping is not None else told == []
    assert all("5 steps" in one or "made 5" in one for one in told)
    assert warned(lambda: loops(3, script, strategy=GALA()), "steps")[1] == []


# -- optimizers that differ, gradients that are not finite ------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda p, r: torch.optim.SGD(p, lr=0.1 + r),
            "lr of group 0 is 0.1 on replica 0 and 1.1 on",
        ),
        (lambda p, r: (torch.optim.SGD, torch.optim.Adam)[r](p, lr=0.1), "the class is SGD on.* and Adam on"),
        (lambda p, r: torch.optim.SGD([{"params": p, "momentum": 0.5 * r}], lr=0.1), "momentum of group 0"),
        (lambda p, r: torch.optim.SGD(p, lr=torch.tensor(0.5 + r)), "lr of group 0 is 0.5 on"),
    ],
)
def test_where_gradients_are_averaged_optimizers_that_differ_are_refused(make, words):
    def script(loop, wraps=True):
        net = tanh_net()
        if wraps:
            loop.wrap_optimizer(make(list(net.parameters()), loop.rank), net)
        else:
            loop.replicate("net", net, lambda parameters: make(parameters, loop.rank))

    with pytest.raises(Refusal, match=f"different optimizers for 'optimizer 0': {words}"):
        loops(2, script)
    with pytest.raises(Refusal, match=f"different optimizers for 'net': {words}"):
        loops(2, lambda loop: script(loop, False))
    for strategy in (LocalSGD(), GALA()):
        loops(2, script, strategy=strategy)


def test_optimizers_may_differ_in_what_chooses_an_implementation():
    def script(loop):
        net = tanh_net()
        loop.wrap_optimizer(torch.optim.Adam(net.parameters(), foreach=bool(loop.rank)), net)

    loops(2, script)


@pytest.mark.parametrize("strategy", [AllReduce(), LocalSGD(period=2)])
def test_the_replica_whose_gradient_is_not_finite_is_named_once(strategy):
    def script(loop, bad):
        net = tanh_net()
        optimizer = loop.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), net)
        for step, (x, y) in enumerate(loop.inputs(pairs(6))):
            optimizer.zero_grad()
            factor = float("nan") if bad and (step, loop.rank) == (3, 1) else 1.0
            (factor * F.mse_loss(net(x), y)).backward()
            optimizer.step()

    (told,) = warned(lambda: loops(3, lambda loop: script(loop, True), strategy=strategy), "not finite")[1]
    assert told.startswith("the gradient of 'optimizer 0' on replica 1 is not finite")
    assert "at its update 3" in told
    assert warned(lambda: loops(3, lambda loop: script(loop, False), strategy=strategy), "finite")[1] == []


def test_a_replica_with_complex_parameters_learns_and_its_nan_is_named():
    def script(loop, factor):
        weight = nn.Parameter(torch.ones(3, dtype=torch.complex128))
        optimizer = loop.wrap_optimizer(torch.optim.SGD([weight], lr=0.1))
        (factor * (weight * (1 + loop.rank)).abs().pow(2).sum()).backward()
        optimizer.step()
        return weight.detach().clone()

    for one in loops(2, lambda loop: script(loop, 1.0)):
        torch.testing.assert_close(one, torch.full((3,), 0.5 + 0j, dtype=torch.complex128))
    assert warned(lambda: loops(2, lambda loop: script(loop, float("nan"))), "is not finite")[1]


# -- a resume from states that do not fit -----------------------------------------------------------


def saved_states(loop, steps):
    net = tanh_net()
    optimizer = loop.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), net)
    states = []
    trained(loop, net, optimizer, loop.inputs(pairs(steps)), lambda: states.append(loop.state()))
    return states


def resume(loop, state, calls=True):
    net = tanh_net()
    optimizer = loop.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), net)
    if calls:
        loop.load(state)
        loop.resumed()
    return trained(loop, net, optimizer, loop.inputs(pairs(2)))


@pytest.mark.parametrize("strategy", [AllReduce(), SynchronousElastic(), DPSGD()], ids=lambda s: s.name)
def test_parameters_that_are_changed_after_wrapping_are_refused(strategy):
    def script(loop):
        net = tanh_net()
        optimizer = loop.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), net)
        net.load_state_dict({name: x + 1 for name, x in net.state_dict().items()})
        return trained(loop, net, optimizer, loop.inputs(pairs(2)))

    with pytest.raises(Refusal, match=f"changed .by load_state_dict.* when {strategy.name} had"):
        loops(2, script, strategy=strategy)
    alone(script)  # nothing is exchanged


@pytest.mark.parametrize("strategy", [Hogwild(), DPSGD()], ids=lambda s: s.name)
def test_a_replica_may_begin_after_others_that_share_its_memory(strategy):
    def script(loop):
        net = tanh_net()
        optimizer = loop.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), net)
        if loop.rank == 1:
            loop.fabric.channel("late", torch.zeros(1)).wait_newer([0], [0], 60.0)
        trained(loop, net, optimizer, loop.inputs(pairs(2)))
        if loop.rank == 0:
            loop.fabric.channel("late", torch.zeros(1)).publish(torch.ones(1))
        return net.state_dict()

    members = 2 + strategy.centre
    first, second = loops(members, script, strategy=strategy)[:2]
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_a_resume_under_another_strategy_or_number_of_replicas_is_refused():
    states = [of_one[-1] for of_one in loops(2, lambda loop: saved_states(loop, 2))]
    for size, strategy, words in (
        (2, LocalSGD(), "this run is local-sgd with 2"),
        (2, GALA(), "this run is gala with 2"),
        (3, AllReduce(), "this run is all-reduce with 3"),
    ):
        with pytest.raises(Refusal, match=f"saved under all-reduce with 2 replicas, and {words}"):
            loops(size, lambda loop: resume(loop, states[0]), strategy=strategy)
    for state, found in (({"net": states[0]["optimizer 0"]}, "'net'"), ({}, "nothing")):
        with pytest.raises(Refusal, match=f"the state has no replica 'optimizer 0', but {found}: load what"):
            loops(2, functools.partial(resume, state=state))
    earlier = [{"optimizer 0": {k: v for k, v in one["optimizer 0"].items() if k != "run"}} for one in states]
    for kept in (states, earlier):
        first, second = loops(2, lambda loop, kept=kept: resume(loop, kept[loop.rank]))
        torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.parametrize("strategy", [Elastic(), DPSGD()], ids=lambda s: s.name)
def test_states_without_that_of_their_centre_are_refused(strategy):
    with pytest.raises(Refusal, match=f"under {strategy.name} the centre has a state of its own"):
        loops(2 + strategy.centre, lambda loop: saved_states(loop, 1), strategy=strategy)
    state = loops(1, lambda loop: saved_states(loop, 1))[0][-1]
    earlier = {"optimizer 0": {k: v for k, v in state["optimizer 0"].items() if k != "run"}}
    with pytest.raises(Refusal, match=r"Save agreed\(\), and load it into the model before wrapping"):
        loops(2 + strategy.centre, lambda loop: resume(loop, earlier), strategy=strategy)


@pytest.mark.parametrize("strategy", [AllReduce(), LocalSGD(period=2)])
def test_a_resume_from_different_steps_is_refused(strategy):
    states = loops(2, lambda loop: saved_states(loop, 4), strategy=strategy)
    with pytest.raises(Refusal, match="updates of 'optimizer 0' is 3 on replica 0 and 4 on replica 1"):
        loops(2, lambda loop: resume(loop, states[loop.rank][2 + loop.rank]), strategy=strategy)
    with pytest.raises(FabricError, match=r"Call resumed\(\) on all replicas or on none"):
        loops(2, lambda loop: resume(loop, states[0][2], loop.rank == 0), strategy=strategy)


# -- arguments --------------------------------------------------------------------------------------


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


def exits(loop, code=0):
    raise SystemExit(code)


@pytest.mark.parametrize("launcher", ["local", "inline"])
def test_an_exit_with_code_0_is_an_end_without_result(launcher):
    assert run(exits, replicas=2, launcher=launcher) == [None, None]


def exits_with_3(loop):
    exits(loop, 3)


@pytest.mark.parametrize("launcher", ["local", "inline"])
def test_an_exit_with_another_code_is_a_failure(launcher):
    with pytest.raises(RunFailed, match="replica 0 failed: SystemExit: 3"):
        run(exits_with_3, launcher=launcher)


def one_vanishes(loop):
    if loop.rank:
        import os

        os._exit(0)


def test_the_exit_code_of_a_process_that_vanished_is_told():
    assert run(one_vanishes, replicas=2) == [None, Died(1, 0)]


def test_rank_and_size_are_documented():
    for name in ("rank", "size"):
        assert getattr(murmurate.OwnLoop, name).__doc__
