"""A node of DPSGD with gradients of rows, one thread of which is killed while u and the base are changed."""

from __future__ import annotations

import multiprocessing
import os
import signal

import pytest
import torch
from torch import nn

from murmurate.replica.scale import Scale
from murmurate.replica.sparse import Rows
from murmurate.replicator.replicator import Replicator
from murmurate.strategies.dpsgd import DPSGD, sparse_node
from murmurate.strategies.dpsgd.node import REPLY
from strategies.manual_fabric import ManualFabric, ManualMember

ROWS, WIDTH, RATE = 40, 16, 0.1


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.x = nn.Parameter(torch.rand(ROWS, WIDTH, generator=torch.Generator().manual_seed(0)))


class Node:
    """Ranks 0 and 1, and the master; memory is shared with processes that are forked."""

    def __init__(self):
        self.fabric, self.bound_replicas = ManualFabric(3), []
        for rank in range(3):
            replicator = Replicator(DPSGD(threads=2, local_updates=1), ManualMember(self.fabric, rank))
            replicator.replicate("x", Table(), lambda p: torch.optim.SGD(p, lr=RATE))
            self.bound_replicas.append(replicator.bound_replicas["x"])

    def step(self, rank, row, value):
        self.bound_replicas[rank].replica.follow(Rows(torch.tensor([row]), torch.full((1, WIDTH), value)))

    def serve(self):
        centre = self.bound_replicas[2]
        with torch.no_grad():
            while centre.strategy.serve(centre.replica, centre.channel):
                pass

    def values(self, rank):
        return self.bound_replicas[rank].replica.values().detach().clone().view(ROWS, WIDTH)

    def dies(self, rank, work):
        """``work`` in a process of its own, which must be killed in it; the others see it dead."""
        process = multiprocessing.get_context("fork").Process(target=work)
        process.start()
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
        self.fabric.dead.add(rank)


def moved(x, row, value):
    """x after a step along ``Rows``."""
    x = (1 - RATE) * x
    x[row] += RATE * value
    return x


def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def in_a_pull(node):
    """The base is v' already, u and the scales are not."""
    node.serve()

    def work():
        torch.Tensor.index_copy_ = _second_time(torch.Tensor.index_copy_)
        node.step(0, 3, 1.0)

    return work


def in_a_push(node):
    """It was sent, and the base's scale has moved; the rows of the base have not."""
    node.serve()
    node.step(0, 3, 1.0)

    def work():
        sparse_node.add_rows = die
        node.step(0, 4, 1.0)
        node.step(1, 4, 1.0)
        node.step(0, 4, 1.0)

    return work


def in_a_fold(node):
    """u has been multiplied by the scale, the base has not."""

    def work():
        fold = Scale.fold
        Scale.fold = lambda scale: (fold(scale), die())
        while True:
            node.step(1, 5, 1.0)

    return work


def _second_time(index_copy):
    calls = []

    def copy(*arguments):
        calls.append(1)
        return die() if len(calls) == 2 else index_copy(*arguments)

    return copy


@pytest.mark.parametrize(("when", "victim"), [(in_a_pull, 0), (in_a_push, 0), (in_a_fold, 1)])
def test_a_node_that_was_torn_goes_on_from_the_whole_of_v(when, victim, monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.setattr(
        ManualMember,
        "shared",
        lambda it, key, like: it.fabric.memory.setdefault(key, like.detach().clone().share_memory_()),
    )
    node, survivor = Node(), 1 - victim
    for rank in (0, 1, 0):
        node.step(rank, 2 + rank, 5.0)  # the third of them is pushed
    node.dies(victim, when(node))
    node.serve()
    v = node.values(2)

    node.step(survivor, 7, 9.0)  # asks for v; what it learns on the torn vector is lost
    node.serve()
    node.step(survivor, 8, 9.0)  # gets it
    torch.testing.assert_close(node.values(survivor), v, rtol=0, atol=0)
    torch.testing.assert_close(node.values(2), v)

    for row in (9, 10, 9):
        node.step(survivor, row, 2.0)
        v = moved(v, row, 2.0)
        torch.testing.assert_close(node.values(survivor), v)
        node.serve()
    torch.testing.assert_close(node.values(2), v)
    state = node.bound_replicas[survivor].strategy.state()
    assert not state["torn"]
    torch.testing.assert_close(state["params"].view(ROWS, WIDTH), v)


def test_a_leader_takes_no_reply_to_a_push_that_it_made_before_another_led_the_node():
    node = Node()
    leader, channel = node.bound_replicas[1].strategy._node, node.bound_replicas[1].channel
    node.fabric.dead.add(0)
    node.step(1, 3, 1.0)
    node.serve()
    leader.reply = channel.receive(REPLY)  # as when another thread was stopped in the middle of a write
    assert leader.reply is not None
    node.fabric.dead.remove(0)  # it was started again, and leads
    node.step(0, 4, 1.0)
    node.fabric.dead.add(0)
    node.step(1, 5, 1.0)  # pushes
    pulls = leader.pulls
    node.step(1, 6, 1.0)
    assert leader.pulls == pulls
    node.serve()
    node.step(1, 7, 1.0)
    assert leader.pulls == pulls + 1
