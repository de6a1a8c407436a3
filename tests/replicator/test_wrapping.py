"""A wrapped optimizer against the plain script: alone bit for bit, replicated as on the joined batch."""

from __future__ import annotations

import copy
import functools
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from murmurate.errors import Refusal
from murmurate.replica.vector import Exchange
from murmurate.strategies.all_reduce import AllReduce
from murmurate.strategies.hogwild import Hogwild
from murmurate.strategies.local_sgd import LocalSGD
from murmurate.strategies.parameter_server import ParameterServer
from murmurate.strategies.solo import Solo
from replicator.steps import alone, draw, loops, pairs, processes, simulated, tanh_net

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "dampened": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.5),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.02, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.02),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.02),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.02),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.02),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.02),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}
STEPS = 8


def two_groups(net):
    """The head first, at a rate of its own; the rest with weight decay."""
    return [
        {"params": list(net[2].parameters()), "lr": 0.03},
        {"params": net[0].parameters(), "weight_decay": 0.02},
    ]


def script(optimizer, wrap, batches, groups=False, scheduled=False, net=None):
    """The same loop, plain or wrapped: all parameters after every step."""
    net = tanh_net() if net is None else net
    made = OPTIMIZERS[optimizer](two_groups(net) if groups else net.parameters())
    made = wrap(made, net)
    scheduler = torch.optim.lr_scheduler.StepLR(made, step_size=3, gamma=0.5) if scheduled else None
    path = []
    for x, y in batches:
        made.zero_grad()
        F.mse_loss(net(x), y).backward()
        made.step()
        if scheduler is not None:
            scheduler.step()
        path.append([p.detach().clone() for p in net.parameters()])
    return path


def plain(optimizer, module):
    return optimizer


def same_bits(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_alone_it_is_the_plain_script_to_the_bit(optimizer, dtype):
    batches = pairs(STEPS, dtype=dtype)
    expected = script(optimizer, plain, batches, net=tanh_net(dtype))
    result = alone(
        lambda loop: script(optimizer, loop.wrap_optimizer, loop.inputs(batches), net=tanh_net(dtype))
    )
    same_bits(result, expected)


@pytest.mark.parametrize("optimizer", ["nesterov", "adamw"])
def test_alone_with_groups_and_a_scheduler_too(optimizer):
    batches = pairs(STEPS)
    expected = script(optimizer, plain, batches, groups=True, scheduled=True)
    result = alone(lambda loop: script(optimizer, loop.wrap_optimizer, batches, groups=True, scheduled=True))
    same_bits(result, expected)


@pytest.mark.parametrize(  # an optimizer steps by the mean, whatever number of gradients it is of
    ("optimizer", "size"), [*((name, 3) for name in OPTIMIZERS), ("adam", 2), ("adam", 4)]
)
def test_all_reduced_it_is_one_process_on_the_joined_batch(optimizer, size):
    batches = pairs(STEPS)
    expected = script(optimizer, plain, batches, groups=True, scheduled=True)
    result = loops(
        size, lambda r: script(optimizer, r.wrap_optimizer, r.inputs(batches), groups=True, scheduled=True)
    )
    for one in result:
        same_bits(one, result[0])
        torch.testing.assert_close(one, expected, rtol=1e-12, atol=1e-12)


def on_processes(loop):
    return script("adam", loop.wrap_optimizer, loop.inputs(pairs(STEPS)))


def test_all_reduced_on_real_processes():
    expected = script("adam", plain, pairs(STEPS))
    for one in loops(2, on_processes, processes):
        torch.testing.assert_close(one, expected, rtol=1e-12, atol=1e-12)


# -- as scripts are ---------------------------------------------------------------------------------


def clear_by_module(net, optimizer):
    net.zero_grad()


def clear_in_place(net, optimizer):
    optimizer.zero_grad(set_to_none=False)


def clear_by_hand(net, optimizer):
    for parameter in net.parameters():
        parameter.grad = None


@pytest.mark.parametrize("clear", [clear_by_module, clear_in_place, clear_by_hand])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_gradients_may_be_cleared_in_any_way_and_accumulated(clear, accumulate):
    def run(wrap):
        net = tanh_net()
        optimizer = wrap(torch.optim.Adam(net.parameters(), lr=0.02), net)
        for number, (x, y) in enumerate(pairs(6)):
            if number % accumulate == 0:
                clear(net, optimizer)
            F.mse_loss(net(x), y).backward()
            if (number + 1) % accumulate == 0:
                optimizer.step()
        return [p.detach() for p in net.parameters()]

    same_bits(alone(lambda loop: run(loop.wrap_optimizer)), run(plain))


@pytest.mark.parametrize("clear", [clear_by_module, clear_in_place])
def test_an_embedding_may_have_sparse_gradients(clear):
    def run(wrap):
        net = nn.Embedding(5, 2, sparse=True)
        with torch.no_grad():
            net.weight.copy_(torch.arange(10.0).view(5, 2))
        optimizer = wrap(torch.optim.SGD(net.parameters(), lr=0.1), net)
        for rows in ([0, 1], [1, 3], [4, 0]):
            clear(net, optimizer)
            net(torch.tensor(rows)).pow(2).sum().backward()
            optimizer.step()
        return net.weight.detach()

    torch.testing.assert_close(alone(lambda loop: run(loop.wrap_optimizer)), run(plain))


def test_a_closure_is_called_and_its_loss_returned():
    def script(loop):
        net = tanh_net()
        optimizer = loop.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
        x, y = pairs(1)[0]

        def closure():
            optimizer.zero_grad()
            loss = F.mse_loss(net(x), y)
            loss.backward()
            return loss

        return [optimizer.step(closure).item() for _ in range(3)], optimizer.last

    losses, last = alone(script)
    assert losses[2] < losses[1] < losses[0]
    assert last == Exchange(3, 1, 0)


def test_after_zero_grad_the_views_are_in_place_and_zero():
    def script(loop):
        net = tanh_net()
        optimizer = loop.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), net)
        x, y = pairs(1)[0]
        F.mse_loss(net(x), y).backward()
        optimizer.zero_grad()
        optimizer.replica.check()
        return optimizer.replica.grad, [n for n, _ in optimizer.replica.named_views()]

    grad, names = alone(script)
    assert not grad.any()
    assert names == ["0.weight", "0.bias", "2.weight", "2.bias"]


@pytest.mark.parametrize(
    "convert", [lambda net: net.float(), lambda net: net.half(), lambda net: net.to("meta")]
)
def test_a_module_converted_after_wrapping_is_refused_with_the_remedy(convert):
    def script(loop):
        net = tanh_net()
        optimizer = loop.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), net)
        convert(net)
        optimizer.zero_grad()

    with pytest.raises(
        Refusal, match=r"module of '0.weight' was moved or converted .*Do that first, then make"
    ):
        alone(script)


def convolutions(seed):
    torch.manual_seed(seed)
    body = [nn.Conv2d(3, 5, 3, bias=False), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 7, 3, stride=2)]
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(7 * 4 * 4, 3))


@pytest.mark.parametrize("channels_last", [False, True])
def test_a_convolutional_net_in_float32_alone_is_plain_to_the_bit(channels_last):
    def run(wrap):
        net = convolutions(0)
        if channels_last:
            net = net.to(memory_format=torch.channels_last)
        optimizer = wrap(torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9), net)
        for k in range(4):
            optimizer.zero_grad()
            F.cross_entropy(net(draw(k, 6, 3, 12, 12).float()), torch.arange(6) % 3).backward()
            optimizer.step()
        return net.state_dict()

    same_bits(alone(lambda loop: run(loop.wrap_optimizer)), run(plain))


# -- several losses and optimizers ------------------------------------------------------------------


def adversaries(wrap, batches):
    """Generator and discriminator; the generator's loss leaves gradients in the discriminator, too."""
    generator, judge = tanh_net(seed=1), nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    with torch.no_grad():
        for k, parameter in enumerate(judge.parameters()):
            parameter.copy_(draw(70 + k, *parameter.shape))
    d_optimizer = wrap(torch.optim.Adam(judge.parameters(), lr=0.01, betas=(0.0, 0.9)), judge)
    g_optimizer = wrap(torch.optim.RMSprop(generator.parameters(), lr=0.01), generator)
    for noise, real in batches:
        for _ in range(2):
            d_optimizer.zero_grad()
            fake = generator(noise).detach()
            (F.softplus(-judge(real)).mean() + F.softplus(judge(fake)).mean()).backward()
            d_optimizer.step()
        g_optimizer.zero_grad()
        F.softplus(-judge(generator(noise))).mean().backward()
        g_optimizer.step()
    return [p.detach().clone() for p in [*generator.parameters(), *judge.parameters()]]


def test_two_losses_and_two_optimizers_alone_and_replicated():
    expected = adversaries(plain, pairs(5))
    same_bits(alone(lambda loop: adversaries(loop.wrap_optimizer, pairs(5))), expected)
    for result in loops(3, lambda loop: adversaries(loop.wrap_optimizer, loop.inputs(pairs(5)))):
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


# -- clipping, moments, state -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "clear", [lambda net, optimizer: optimizer.zero_grad(), lambda net, _: net.zero_grad()]
)
def test_gradients_may_be_clipped_through_the_parameter_groups(clear):
    def script(loop, wrapped):
        net = tanh_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        if wrapped:
            optimizer = loop.wrap_optimizer(optimizer, net)
        for x, y in pairs(4):
            clear(net, optimizer)
            F.mse_loss(net(x), y).backward()
            nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.05)
            optimizer.step()
        return [p.detach() for p in net.parameters()]

    wrapped, plain = (alone(functools.partial(script, wrapped=w)) for w in (True, False))
    torch.testing.assert_close(wrapped, plain, rtol=1e-12, atol=1e-12)


def test_clipping_acts_on_the_averaged_gradient():
    def clipped():
        net = tanh_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        for x, y in pairs(4):
            optimizer.zero_grad()
            F.mse_loss(net(x), y).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.05)
            optimizer.step()
        return [p.detach() for p in net.parameters()]

    def script(loop):
        net = tanh_net()
        optimizer = loop.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=0.5), net, clip=0.05)
        for x, y in loop.inputs(pairs(4)):
            optimizer.zero_grad()
            F.mse_loss(net(x), y).backward()
            optimizer.step()
        return [p.detach() for p in net.parameters()]

    for result in loops(3, script):
        torch.testing.assert_close(result, clipped(), rtol=1e-12, atol=1e-12)


def test_under_hogwild_parameters_and_moments_are_one_storage():
    def script(loop):
        net = tanh_net(seed=loop.rank)
        optimizer = loop.wrap_optimizer(OPTIMIZERS["adamw"](two_groups(net)), net)
        moments = [m["exp_avg"].data_ptr() for m in optimizer.state.values()]
        return optimizer.replica.params.data_ptr(), moments

    one, two = loops(2, script, strategy=Hogwild())
    assert one == two
    assert len(one[1]) == 2


@pytest.mark.parametrize("optimizer", ["nesterov", "adam", "adamw", "rmsprop", "nadam"])
def test_state_travels_between_plain_and_wrapped(optimizer):
    """Four steps plain and four wrapped, and the other way, are eight plain."""
    batches = pairs(8)
    expected = script(optimizer, plain, batches, groups=True)[-1]

    def half(wrap, net, before, data):
        made = wrap(OPTIMIZERS[optimizer](two_groups(net)), net)
        if before is not None:
            made.load_state_dict(before)
        for x, y in data:
            made.zero_grad()
            F.mse_loss(net(x), y).backward()
            made.step()
        return copy.deepcopy(made.state_dict())

    def there(loop):
        net = tanh_net()
        before = half(plain, net, None, batches[:4])
        after = half(loop.wrap_optimizer, net, before, batches[4:])
        return [p.detach() for p in net.parameters()], after

    def back(wrap):
        net = tanh_net()
        before = half(wrap, net, None, batches[:4])
        fresh = tanh_net()
        fresh.load_state_dict(net.state_dict())
        half(plain, fresh, before, batches[4:])
        return [p.detach() for p in fresh.parameters()]

    result, after = alone(there)
    same_bits(result, expected)
    # loading costs torch itself some bits of NAdam's product of momenta
    same_bits(alone(lambda loop: back(loop.wrap_optimizer)), back(plain))
    assert set(after["state"]) == {0, 1, 2, 3}
    with pytest.raises(ValueError, match="another model"):
        alone(lambda r: r.wrap_optimizer(torch.optim.Adam(tanh_net().parameters())).load_state_dict(after))


@pytest.mark.parametrize("optimizer", ["adam", "nadam", "asgd"])
def test_state_of_numbers_is_told_from_counters(optimizer):
    """A parameter without a dimension, such as a temperature, has moments of the shape that counters have."""

    def stepped(wrap, reloads):
        torch.manual_seed(3)
        net = torch.nn.Module()
        net.weight = torch.nn.Parameter(torch.randn(4))
        net.log_scale, net.shift = (torch.nn.Parameter(torch.randn(())) for _ in range(2))
        made = wrap(OPTIMIZERS[optimizer](net.parameters()), net)
        for step in range(6):
            if reloads and step == 3:
                made.load_state_dict(copy.deepcopy(made.state_dict()))
            made.zero_grad()
            ((net.weight * net.log_scale.exp()).sum() - net.shift).square().backward()
            made.step()
        return [p.detach().clone() for p in net.parameters()]

    found = alone(lambda loop: stepped(loop.wrap_optimizer, reloads=True))
    torch.testing.assert_close(found, stepped(plain, reloads=False))


@pytest.mark.parametrize("steps_before", [0, 2])
def test_parameters_without_state_begin_with_initial_moments(steps_before):
    """A plain Adam has no moments of parameters that never had a gradient, whatever the loading one has."""
    x, y = pairs(1)[0]

    def script(loop):
        trained = tanh_net()
        plain_optimizer = torch.optim.Adam(trained.parameters())
        first, *others = trained.parameters()
        first.grad = torch.ones_like(first)
        plain_optimizer.step()
        net = tanh_net()
        wrapped = loop.wrap_optimizer(torch.optim.Adam(net.parameters()), net)
        for _ in range(steps_before):
            wrapped.zero_grad()
            F.mse_loss(net(x), y).backward()
            wrapped.step()
        wrapped.load_state_dict(plain_optimizer.state_dict())
        assert others
        return wrapped.state_dict()["state"], plain_optimizer.state_dict()["state"]

    loaded, stored = alone(script)
    assert list(stored) == [0]
    assert torch.equal(loaded[0]["exp_avg"], stored[0]["exp_avg"])
    for index in range(1, 4):
        for key in ("exp_avg", "exp_avg_sq"):
            assert not loaded[index][key].any(), (index, key)


# -- refused ----------------------------------------------------------------------------------------


def stepped(net):
    optimizer = torch.optim.Adam(net.parameters())
    F.mse_loss(net(torch.ones(1, 4, dtype=torch.float64)), torch.ones(1, 3, dtype=torch.float64)).backward()
    optimizer.step()
    return optimizer


def mixed(net):
    return torch.optim.SGD([net[0].weight, nn.Parameter(torch.ones(2))], lr=0.1)


def frozen(net):
    net[0].weight.requires_grad_(False)
    return torch.optim.SGD(net.parameters(), lr=0.1)


class DecaysMatrices(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad + p * (p.ndim > 1), alpha=-group["lr"])


class DecaysAll(DecaysMatrices):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad + p, alpha=-group["lr"])


class TakesAnother(DecaysMatrices):
    def __init__(self, params, inner):
        super().__init__(params)
        self.inner = inner


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (stepped, "has stepped already. Wrap it first"),
        (lambda net: DecaysMatrices(net.parameters()), "DecaysMatrices does not step a flat vector"),
        (lambda net: TakesAnother(net.parameters(), None), "TakesAnother cannot be made again"),
        (
            lambda net: torch.optim.LBFGS(net.parameters()),
            "LBFGS computes the loss several times in one step",
        ),
        (lambda net: torch.optim.SparseAdam(net.parameters()), "Use Adam, whose step is dense"),
        (lambda net: torch.optim.Adafactor(net.parameters()), "shape_aware=True"),
        (mixed, "more than one dtype"),
        (frozen, "require no gradient"),
    ],
)
def test_what_cannot_be_wrapped_is_refused_and_stays_as_it_was(make, words):
    net = tanh_net()
    optimizer = make(net)
    before = [id(p) for g in optimizer.param_groups for p in g["params"]]
    with pytest.raises(Refusal, match=words):
        alone(lambda loop: loop.wrap_optimizer(optimizer))
    assert [id(p) for g in optimizer.param_groups for p in g["params"]] == before


@pytest.mark.parametrize("clip", [-1.0, 0, math.nan, "1"])
def test_a_clip_that_is_not_above_0_is_refused(clip):
    def script(loop):
        net = tanh_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        parameter = next(net.parameters())
        with pytest.raises(Refusal, match=r"clip is .+give the largest norm of the gradient"):
            loop.wrap_optimizer(optimizer, net, clip=clip)
        assert optimizer.param_groups[0]["params"][0] is parameter
        with pytest.raises(Refusal, match="clip is"):
            loop.replicate_over_devices("net", net, lambda p: torch.optim.SGD(p, lr=0.1), clip=clip)

    alone(script)


def test_an_optimizer_of_ones_own_that_steps_all_parameters_alike_is_wrapped():
    def script(loop, wrapped):
        net = tanh_net()
        optimizer = DecaysAll([{"params": []}, {"params": net.parameters()}])
        if wrapped:
            optimizer = loop.wrap_optimizer(optimizer, net)
        for x, y in pairs(3):
            optimizer.zero_grad()
            F.mse_loss(net(x), y).backward()
            optimizer.step()
        return [p.detach().clone() for p in net.parameters()]

    torch.testing.assert_close(
        alone(lambda loop: script(loop, True)), alone(lambda loop: script(loop, False)), rtol=0, atol=0
    )


def refused(words, script, size=1):
    with pytest.raises(Refusal, match=words):
        loops(size, script, strategy=Solo() if size == 1 else AllReduce())


def test_an_optimizer_is_wrapped_once():
    def twice(loop):
        net = tanh_net()
        plain_one = torch.optim.SGD(net.parameters(), lr=0.1)
        wrapped = loop.wrap_optimizer(plain_one, net)
        for one in (plain_one, wrapped):
            with pytest.raises(Refusal, match="wrapped already: wrap each optimizer once"):
                loop.wrap_optimizer(one, net)
        loop.wrap_optimizer(torch.optim.Adam(net[0].parameters()), net)

    refused("Adam has parameters that another wrapped optimizer steps", twice)


def test_an_optimizer_without_parameters_is_refused():
    def script(loop):
        loop.wrap_optimizer(torch.optim.SGD([{"params": []}], lr=0.1), tanh_net())

    refused("SGD has no parameters: give it", script)


def test_an_optimizer_of_another_modules_parameters_is_refused():
    def script(loop):
        net, extra = tanh_net(), nn.Parameter(torch.ones(2, dtype=torch.float64))
        loop.wrap_optimizer(torch.optim.SGD([*net.parameters(), extra], lr=0.1), net)

    refused(
        r"1 of the 5 parameters of SGD are not parameters of the Sequential.*leave out the module", script
    )


@pytest.mark.parametrize("given", [lambda net: [net], lambda net: net.parameters(), lambda _: "generator"])
def test_what_is_no_module_is_refused_as_one(given):
    def script(loop):
        net = tanh_net()
        with pytest.raises(Refusal, match=r"is a (list|generator|str): give the module that has"):
            loop.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), given(net))

    alone(script)


def test_steps_and_groups_of_the_optimizer_inside_are_refused():
    def steps(loop):
        optimizer = torch.optim.SGD(tanh_net().parameters(), lr=0.1)
        loop.wrap_optimizer(optimizer)
        optimizer.step()

    def adds(loop):
        optimizer = torch.optim.SGD(tanh_net().parameters(), lr=0.1)
        wrapped = loop.wrap_optimizer(optimizer)
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
        wrapped.step()

    refused(r"Keep what wrap_optimizer returns", steps, size=2)
    refused("a parameter group was added after wrapping", adds)


def test_a_wrapped_optimizer_is_not_copied_but_its_module_is():
    def script(loop):
        net = tanh_net()
        optimizer = loop.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), net)
        for copier in (copy.deepcopy, copy.copy, pickle.dumps):
            with pytest.raises(Refusal, match=r"cannot be copied or pickled.*state_dict\(\)"):
                copier(optimizer)
        average = copy.deepcopy(net)
        before = [p.detach().clone() for p in average.parameters()]
        F.mse_loss(
            net(torch.ones(2, 4, dtype=torch.float64)), torch.ones(2, 3, dtype=torch.float64)
        ).backward()
        optimizer.step()
        return [p.detach() for p in average.parameters()], before, [p.detach() for p in net.parameters()]

    kept, before, stepped = alone(script)
    same_bits(kept, before)
    assert not torch.equal(stepped[0], before[0])


def test_no_group_is_added_to_a_wrapped_optimizer():
    def script(loop):
        optimizer = loop.wrap_optimizer(torch.optim.SGD(tanh_net().parameters(), lr=0.1))
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})

    with pytest.raises(Refusal, match="add the group before wrapping"):
        alone(script)


def test_all_are_wrapped_before_the_first_step():
    def script(loop):
        net = tanh_net()
        optimizer = loop.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
        optimizer.step()
        loop.wrap_optimizer(torch.optim.SGD(tanh_net().parameters(), lr=0.1))

    with pytest.raises(Refusal, match="comes after the first step"):
        loops(2, script)


def scheduled(loop, how):
    net = tanh_net()
    factor = (lambda clock: 0.5 ** (clock // 2)) if how == "schedule" else None
    optimizer = loop.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), net, schedule=factor)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2) if how == "torch" else None
    for x, y in loop.inputs(pairs(6)):
        optimizer.zero_grad()
        F.mse_loss(net(x), y).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    loop.finish(30.0)
    return loop.agreed()


def test_where_the_centre_steps_a_scheduler_must_be_a_schedule():
    with pytest.raises(Refusal, match="Give wrap_optimizer a schedule"):
        loops(3, lambda loop: scheduled(loop, "torch"), strategy=ParameterServer())
    result = loops(2, lambda loop: scheduled(loop, "schedule"), strategy=ParameterServer())
    net = tanh_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    for x, y in pairs(6):
        optimizer.zero_grad()
        F.mse_loss(net(x), y).backward()
        optimizer.step()
        scheduler.step()
    # one client that waits for each pull is the plain script
    torch.testing.assert_close(result[0], dict(net.state_dict()), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_what_a_scheduler_changes_beside_the_rate_is_saved(optimizer):
    """OneCycleLR also cycles the momentum, which its own state does not have."""

    def script(loop, saved=None, steps=8):
        net = tanh_net()
        made = functools.partial(torch.optim.SGD, momentum=0.9) if optimizer == "sgd" else torch.optim.Adam
        made = loop.wrap_optimizer(made(net.parameters(), lr=0.1), net)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(made, 0.1, total_steps=8)
        batches = list(pairs(8))[:steps]
        if saved is not None:
            loop.load(saved[0])
            loop.resumed()
            scheduler.load_state_dict(saved[1])
            batches = batches[4:]
        for x, y in batches:
            made.zero_grad()
            F.mse_loss(net(x), y).backward()
            made.step()
            scheduler.step()
        return copy.deepcopy((loop.state(), scheduler.state_dict())), net.state_dict()

    whole = alone(script)[1]
    half = alone(lambda loop: script(loop, steps=4))[0]
    same_bits(alone(lambda loop: script(loop, half))[1], whole)


def test_loading_an_optimizers_state_leaves_the_parameters_to_others():
    """Under hogwild another replica may step meanwhile."""

    def script(loop):
        optimizer = loop.wrap_optimizer(torch.optim.Adam(tanh_net().parameters()))
        saved, replica = optimizer.state_dict(), optimizer.replica
        before, read_state = replica.params.detach().clone(), replica.state

        def state_before_a_step():
            state = read_state()
            replica.params.detach().add_(1.0)
            return state

        replica.state = state_before_a_step
        optimizer.load_state_dict(saved)
        return replica.params.detach() - before

    assert bool((alone(script) > 0.5).all())


def test_a_rate_that_is_a_tensor_is_saved_by_its_value():
    """A scheduler writes into the tensor."""

    def script(loop):
        net = tanh_net()
        made = torch.optim.SGD(net.parameters(), lr=torch.tensor(0.5, dtype=torch.float64))
        made = loop.wrap_optimizer(made, net)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(made, 0.5)
        rates, saved, of_torch = [], loop.state(), copy.deepcopy(made.state_dict())
        for load in (lambda: loop.load(saved), lambda: made.load_state_dict(of_torch)):
            for _ in range(2):  # the second time after what was loaded has changed
                made.step()
                scheduler.step()
                load()
                rates.append(float(made.param_groups[0]["lr"]))
        return rates

    assert alone(script) == [0.5] * 4


def sgd_alone(loop):
    return script("sgd", loop.wrap_optimizer, loop.inputs(pairs(4)))


def test_local_sgd_with_a_period_of_one_is_all_reduce_for_plain_sgd():
    one = loops(2, sgd_alone, simulated, LocalSGD(period=1))
    two = loops(2, sgd_alone, simulated, AllReduce())
    torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)
