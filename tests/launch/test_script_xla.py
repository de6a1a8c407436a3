"""``murmurate.run`` on XLA devices; needs torch_xla, in an environment of its own (docs/tpu.md)."""

from __future__ import annotations

import functools
import importlib.util
import os
import signal
import sys
import warnings

import pytest
import torch
from torch import nn

from murmurate.errors import Refusal, RunFailed
from murmurate.launch.script import run
from replicator.steps import pairs, tanh_net

needs_xla = pytest.mark.skipif(
    importlib.util.find_spec("torch_xla") is None, reason="needs torch_xla: docs/tpu.md"
)


@pytest.mark.skipif(importlib.util.find_spec("torch_xla") is not None, reason="torch_xla is installed")
def test_without_torch_xla_the_error_names_the_extra():
    with pytest.raises(Refusal, match=r"torch_xla, which is not installed.*murmurate\[tpu\]"):
        run(learn, replicas=2, launcher="xla")


@pytest.mark.parametrize("name", ["gala", "hogwild", "parameter-server", "elastic"])
def test_strategies_without_common_rounds_are_refused(name):
    with pytest.raises(Refusal, match=rf"{name} needs .*, which XLA does not offer.*--strategy all-reduce"):
        run(learn, replicas=2, strategy=name, launcher="xla")


def test_parts_and_devices_are_refused():
    with pytest.raises(Refusal, match="replicas of one part"):
        run(learn, replicas=2, parts=2, launcher="xla")
    with pytest.raises(Refusal, match="leave out devices"):
        run(learn, replicas=2, devices=("cuda:0",), launcher="xla")


def test_torchrun_does_not_start_it(monkeypatch):
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Refusal, match="start the script without torchrun"):
        run(learn, launcher="xla")


def learn(loop, clip=None):
    """A usual loop; returns (losses over all replicas, final parameters, whether it prints)."""
    net = tanh_net().to(loop.device())
    plain = torch.optim.Adam(net.parameters(), lr=0.05)
    optimizer = loop.wrap_optimizer(plain, net, clip=clip)
    scheduler = torch.optim.lr_scheduler.StepLR(plain, step_size=3, gamma=0.5)
    losses = []
    for x, y in loop.inputs(pairs(6)):
        optimizer.zero_grad()
        loss = (net(x.to(loop.device())) - y.to(loop.device())).square().mean()
        loss.backward()
        optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch does not see that the wrapped optimizer has stepped
            scheduler.step()
        losses.append(loop.mean(loss.detach()))
    print("printed by", loop.rank)
    return torch.stack(losses), dict(net.named_parameters()), loop.is_main, str(loop.device())


@needs_xla
@pytest.mark.parametrize("strategy", ["all-reduce", "local-sgd"])
def test_a_script_on_two_devices_is_the_script_on_two_processes(strategy, capfd):
    expected = run(learn, replicas=2, strategy=strategy, launcher="local")
    capfd.readouterr()
    found = run(learn, replicas=2, strategy=strategy, launcher="xla")
    assert capfd.readouterr().out == "printed by 0\n"
    assert [(one[2], one[3]) for one in found] == [(True, "xla:0"), (False, "xla:1")]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one[0], other[0], rtol=1e-12, atol=1e-12)
        for name, values in one[1].items():
            torch.testing.assert_close(values, other[1][name].detach(), rtol=1e-12, atol=1e-12)


@needs_xla
def test_one_device_is_the_plain_script():
    (alone,) = run(learn, launcher="inline", strategy="solo")
    (found,) = run(functools.partial(learn, clip=100.0), launcher="xla", strategy="solo")
    for name, values in found[1].items():
        torch.testing.assert_close(values, alone[1][name].detach(), rtol=1e-12, atol=1e-12)


@needs_xla
def test_replicas_are_as_many_as_the_devices(monkeypatch):
    monkeypatch.setenv("CPU_NUM_DEVICES", "3")
    assert run(collect, launcher="xla", workers=3) == [
        (rank, 3, [0.0, 1.0, 2.0], 2.0, 0.0, [rank]) for rank in range(3)
    ]
    with pytest.raises(Refusal, match=r"there are 3 XLA devices, and replicas is 2: leave out replicas"):
        run(collect, replicas=2, launcher="xla")


def collect(loop):
    mine = torch.tensor(float(loop.rank), device=loop.device())
    gathered = loop.gather(mine)
    assert gathered.device == loop.device()
    largest, first = loop.reduce(mine, "max"), loop.broadcast(mine)
    return (
        loop.rank,
        loop.size,
        gathered.tolist(),
        float(largest),
        float(first),
        loop.within.gather(mine).tolist(),
    )


def one_breaks(loop):
    net = nn.Linear(2, 1).to(loop.device())
    optimizer = loop.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), net)
    for step in range(10**9):  # without end, for whoever is not stopped
        if loop.rank == 1 and step == 3:
            raise LookupError("no such image")
        optimizer.step()


@needs_xla
def test_who_raises_ends_all_and_its_traceback_is_told():
    with pytest.raises(RunFailed, match=r"(?s)replica 1 failed: LookupError: no such image.*in one_breaks"):
        run(one_breaks, replicas=2, launcher="xla")


class Odd(Exception):
    def __init__(self, one, two):
        super().__init__(one)


def ends_as(how, loop):
    if how == "exits":
        sys.exit("enough")
    return Odd(1, 2)


@needs_xla
@pytest.mark.parametrize(
    ("how", "message"),
    [("exits", "failed: SystemExit: enough"), ("odd", "failed: its result cannot be sent back")],
)
def test_ends_that_are_no_results_are_failures(how, message):
    with pytest.raises(RunFailed, match=message):
        run(functools.partial(ends_as, how), replicas=2, launcher="xla")


def one_moves(loop):
    net = nn.Linear(2, 1).to(loop.device())
    optimizer = loop.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), net)
    net.double()
    optimizer.step()


@needs_xla
def test_a_module_that_is_converted_after_wrapping_is_refused():
    with pytest.raises(Refusal, match="was moved or converted"):
        run(one_moves, replicas=2, launcher="xla")


def all_are_killed(loop):
    os.kill(os.getpid(), signal.SIGKILL)


@needs_xla
def test_a_killed_process_is_told(capfd):
    with pytest.raises(RunFailed, match="all replicas ended without a result"):
        run(all_are_killed, replicas=2, launcher="xla")
    assert "replica 0 died (its process was ended" in capfd.readouterr().err


def count_compilations(loop):
    from torch_xla.debug import metrics

    net = tanh_net().to(loop.device())
    plain = torch.optim.Adam(net.parameters(), lr=0.05)
    optimizer = loop.wrap_optimizer(plain, net)
    counts = []
    for x, y in loop.inputs(pairs(8)):
        plain.param_groups[0]["lr"] *= 0.9
        optimizer.zero_grad()
        (net(x.to(loop.device())) - y.to(loop.device())).square().mean().backward()
        optimizer.step()
        counts.append(metrics.metric_data("CompileTime")[0])
    return counts


@needs_xla
def test_later_steps_compile_nothing():
    for counts in run(count_compilations, replicas=2, launcher="xla"):
        assert counts[3:] == [counts[-1]] * 5


def normalise_over_replicas(loop):
    net = tanh_net().to(loop.device())
    optimizer = loop.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), net)
    for x, _ in loop.inputs(pairs(4)):
        optimizer.zero_grad()
        h = net(x.to(loop.device()))
        mean, square = loop.mean((h.mean(0), h.pow(2).mean(0)))
        ((h - mean) / (square - mean.pow(2) + 1e-5).sqrt())[:, :2].sigmoid().mean().backward()
        optimizer.step()
    return loop.agreed()


@needs_xla
def test_collectives_have_gradients_on_devices():
    expected = run(normalise_over_replicas, replicas=2, launcher="local")[0]
    for found in run(normalise_over_replicas, replicas=2, launcher="xla"):
        for name, values in found.items():
            torch.testing.assert_close(values, expected[name], rtol=1e-10, atol=1e-12)
