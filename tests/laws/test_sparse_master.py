"""The master of sparse pushes: what it refuses, by how much it shrinks, and what it answers."""

from __future__ import annotations

import math

import pytest
import torch

from murmurate.replica.sparse import Rows, StepTooLarge
from murmurate.replica.vector import Replica
from murmurate.strategies.dpsgd.sparse_delta import SparseDelta
from murmurate.strategies.dpsgd.sparse_master import SparseMaster
from murmurate.strategies.dpsgd.sparse_node import SparseNode
from strategies.manual_fabric import ManualFabric


def replica_of_ones(rows):
    """A replica of ones [rows, 16]."""
    module = torch.nn.Module()
    module.matrix = torch.nn.Parameter(torch.ones(rows, 16))
    return Replica("x", module, lambda parameters: torch.optim.SGD(parameters, lr=1.0))


def master_of(replica, shrinks="present", nodes=((0,), (1,))):
    optimizer = torch.optim.SGD([replica.params], lr=1.0)
    return SparseMaster(replica, optimizer, nodes, shrinks=shrinks)


def fold(master, *pushes):
    master.pending += pushes
    master.apply_pending()


def test_messages_that_no_member_packed_are_refused_and_change_nothing():
    master = master_of(replica_of_ones(20))
    good = SparseDelta(0.9, 0, torch.tensor([3, 19]), torch.ones(2, 16)).pack()
    assert master.is_valid(good)
    wrong = [
        good[:3],
        good[:-1],
        SparseDelta(0.9, 0, torch.tensor([3, 20]), torch.ones(2, 16)).pack(),
        SparseDelta(0.9, 0, torch.tensor([-1, 2]), torch.ones(2, 16)).pack(),
        SparseDelta(0.0, 0, torch.tensor([3]), torch.ones(1, 16)).pack(),
        SparseDelta(float("nan"), 0, torch.tensor([3]), torch.ones(1, 16)).pack(),
        SparseDelta(0.9, 0, torch.tensor([3]), torch.full((1, 16), float("nan"))).pack(),
        SparseDelta(0.9, math.inf, torch.tensor([3]), torch.ones(1, 16)).pack(),
    ]
    assert not any(master.is_valid(message) for message in wrong)
    assert all(len(master.reply_to(message)) == 320 for message in wrong)


@pytest.mark.parametrize(("factor", "rho"), [(0.6, 1.0), (0.2, 0.99 / 1.6)])
def test_a_fold_that_would_leave_nothing_has_a_smaller_rho(factor, rho):
    """Of its shrink and of its increments alike; any other is as Algorithm 1, line 4, has it."""
    replica = replica_of_ones(20)
    messages = [
        SparseDelta(factor, 0, torch.tensor([row]), torch.full((1, 16), 5.0)).pack() for row in (3, 4)
    ]
    fold(master_of(replica), *messages)
    expected = torch.full((20, 16), 1 - rho * 2 * (1 - factor))
    expected[3:5] += rho * 5.0
    torch.testing.assert_close(replica.values().detach().view(20, 16), expected)


def test_of_a_pulled_v_nothing_left_is_an_error():
    master = master_of(replica_of_ones(20), "pulled")
    message = SparseDelta(0.2, 0, torch.tensor([3]), torch.ones(1, 16)).pack()
    with pytest.raises(StepTooLarge, match=r"shrink v by 1\.6 .* use shrinks 'present'"):
        fold(master, message, message)


def test_the_master_outlives_all_nodes_and_begins_again_after_a_resume():
    replica = replica_of_ones(20)
    replica.scale.keeps_scale = True
    replica.follow(Rows(torch.arange(2), torch.zeros(2, 16), shrink=0.0))  # its vector has rows
    master = master_of(replica, "pulled")

    def push(version):
        message = SparseDelta(0.9, version, torch.tensor([3]), torch.ones(1, 16)).pack()
        fold(master, message)
        return message

    began = replica.clock
    push(began)
    master.replied(0, [])  # whoever pushed it is dead, and so are all
    fabric = ManualFabric(3)
    fabric.dead |= {0, 1}
    master.resumed(fabric.member(2))
    resumed = replica.clock
    before = replica.values().detach().view(20, 16).clone()
    push(resumed)
    late = push(resumed)  # of another node, from the same version
    expected = before * (1 - 0.1 - 0.1)
    expected[3] += 2
    torch.testing.assert_close(replica.values().detach().view(20, 16), expected)
    assert len(master.reply_to(late)) < 320  # rows, as the version is known
    old = SparseDelta(0.9, began, torch.tensor([3]), torch.ones(1, 16)).pack()
    assert len(master.reply_to(old)) == 320  # of one that is not, all


@pytest.mark.parametrize("shrinks", ["present", "pulled"])
def test_a_push_whose_answer_is_lost_counts_once(shrinks):
    """Its leader died: the next push shrinks what the node had then, which is no version of v."""
    rows = 50
    replica, centre = replica_of_ones(rows), replica_of_ones(rows)
    for one in (replica, centre):
        one.scale_rates(0.1)
        one.scale.keeps_scale = True
    node = SparseNode(replica, [0, 1], 0, threads=2)
    master = master_of(centre, shrinks, [[0, 1]])
    for expected in (0, -1):  # the answer to the first never comes
        replica.follow(Rows(torch.arange(5), torch.ones(5, 16) / 2))
        delta = node.next_push(0)
        assert delta.version == expected
        message = delta.pack()
        node.advance_base(delta, alone=True)
        fold(master, message)  # v is what one node alone makes of it
        answer = master.reply_to(message)
        master.replied(0, [1])
        torch.testing.assert_close(centre.values(), replica.values(), rtol=1e-5, atol=0)
    node.apply_reply(answer, afresh=False)
    torch.testing.assert_close(node.base_values(), centre.values().detach(), rtol=1e-5, atol=0)
    torch.testing.assert_close(replica.values(), centre.values(), rtol=1e-5, atol=0)
    assert node.next_push(2).version == 2
