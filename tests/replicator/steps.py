"""Members of own loops, for the tests of this folder."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import nn

from murmurate.fabric.processes.fabric import run_members as in_processes
from murmurate.fabric.simulated.fabric import SimulatedFabric
from murmurate.replicator.user_loop import OwnLoop
from murmurate.strategies.all_reduce import AllReduce
from murmurate.strategies.solo import Solo


def simulated(size, member):
    return SimulatedFabric(size, seed=size, collective_deadline_seconds=60.0, coroutines="threads").run(
        [member] * size
    )


def processes(size, member):
    return in_processes(size, [member] * size)


def loops(size, script, fabric=simulated, strategy=None, **options):
    """What ``script(loop)`` gives on each of ``size`` members."""
    strategy = AllReduce() if strategy is None else strategy
    return fabric(size, functools.partial(live, script, strategy, options))


def alone(script, **options):
    return loops(1, script, simulated, Solo(), **options)[0]


def live(script, strategy, options, fabric):
    result = None
    with OwnLoop(strategy, fabric, **options) as loop:
        result = script(loop)
    return result


def draw(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tanh_net(dtype=torch.float64, seed=0):
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)
    with torch.no_grad():
        for k, parameter in enumerate(net.parameters()):
            parameter.copy_(0.5 * draw(100 * seed + k, *parameter.shape))
    return net


def pairs(count, rows=12, dtype=torch.float64):
    return [(draw(1000 + k, rows, 4).to(dtype), draw(2000 + k, rows, 3).to(dtype)) for k in range(count)]


def second_smallest(stacked):
    return stacked.sort(0).values[min(1, len(stacked) - 1)]


def close(result, right):
    torch.testing.assert_close(result, right, rtol=1e-12, atol=1e-12, check_dtype=True)


def trained(loop, net, optimizer, batches, after=lambda: None):
    for x, y in batches:
        optimizer.zero_grad()
        F.mse_loss(net(x), y).backward()
        optimizer.step()
        after()
    return [p.detach().clone() for p in net.parameters()]
