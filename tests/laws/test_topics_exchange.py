"""What nodes of DPSVI exchange: rows instead of whole matrices, and counts that stay counts."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
import torch

from laws.centre import finish, is_centre, serve_until
from laws.topic_learners import DOCUMENTS, WORDS, K
from murmurate.datasets.generated import generate
from murmurate.fabric.simulated.fabric import SimulatedFabric
from murmurate.replica.sparse import Rows
from murmurate.replica.vector import Replica
from murmurate.replicator.learner import Context
from murmurate.replicator.replicator import Replicator
from murmurate.spec import Batch, EnvSpec
from murmurate.strategies.dpsgd import DPSGD
from murmurate.strategies.dpsgd.sparse_delta import SparseDelta
from murmurate.strategies.dpsgd.sparse_node import SparseNode
from murmurate.workloads.topic_model import TopicModel

WIDE = 1_500  # words, of which a mini-batch has few


@functools.lru_cache
def wide():
    return generate(
        documents=400, vocabulary=WIDE, topics=K, mean_length=30, seed=2, topic_mass=60.0, alpha_mass=1.0
    ).corpus


def dpsvi(strategy, count, dense, fabric):
    """(consensus [V + 1, W], bytes) of a member; dense: gradients are made whole, and pushes with them."""
    torch.set_num_threads(1)
    replicator = Replicator(strategy, fabric)
    spec = EnvSpec("corpus", (WIDE,), torch.int32, 0, examples=len(wide()))
    model = TopicModel(
        topics=K, batch=8, alpha=0.3, prior=0.1, validate_every=0, step_rule="average", rate=0.02
    )
    it = model.build(Context(spec, replicator.replicate, 0, examples=wide()))
    it.replica.scale.keeps_scale = not dense
    bound = replicator.bound_replicas["topics"]
    if is_centre(fabric):
        serve_until(replicator, fabric)
    else:
        order = np.random.default_rng(fabric.rank).permutation(len(wide()))
        for number in range(count):
            part = order[(8 * number + np.arange(8)) % len(order)]
            it.learn(Batch(wide().select(part)))
        finish(replicator, fabric)
    return replicator.consensus()["topics"], bound.channel.traffic.bytes


def both(strategy, size, count=24, seed=3):
    """The same schedule with sparse and with dense pushes: ((v, bytes of rank 0), (v, bytes of rank 0))."""
    found = []
    for dense in (False, True):
        members = SimulatedFabric(size, seed=seed, latency=(0.0, 1e-4)).run(
            [functools.partial(dpsvi, strategy, count, dense)] * size
        )
        found.append((members[-1][0], members[0][1]))
    return found


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("local_updates", [1, 4])
def test_one_node_pushes_the_same_as_dense(local_updates, wait):
    """Nobody else moves v between a pull and a push, so the sparse push is the dense one."""
    strategy = DPSGD(threads=1, local_updates=local_updates, batch=1, global_learning_rate=0.5, wait=wait)
    (sparse, few), (dense, many) = both(strategy, 2)
    if wait:
        torch.testing.assert_close(sparse, dense, rtol=1e-4, atol=1e-2)
    assert few < 0.9 * many
    assert float((dense - sparse).norm() / dense.norm()) < (1e-5 if wait else 0.005)


PULLED = {
    "B 3": {"batch": 1, "local_updates": 3},
    "B 2, M 2": {"batch": 2, "local_updates": 2},
    "M 3": {"batch": 3, "local_updates": 1},
    "late": {"batch": 1, "local_updates": 2, "delay_bound": 1},
    "momentum": {"batch": 3, "local_updates": 2, "global_learning_rate": 0.2, "global_momentum": 0.3},
}


@pytest.mark.parametrize(
    ("fields", "seed"),
    [  # each with one schedule, in turn; the others are slow
        pytest.param(
            PULLED[name], seed, id=f"{name}-{seed}", marks=() if seed == row % 3 else pytest.mark.slow
        )
        for row, name in enumerate(PULLED)
        for seed in range(3)
    ],
)
def test_the_shrink_of_the_pulled_v_is_that_of_dense_pushes(fields, seed):
    """Algorithm 1, line 4, to rounding, though other nodes have moved v since."""
    strategy = DPSGD(threads=1, wait=True, shrinks="pulled", **fields)
    (sparse, few), (dense, many) = both(strategy, 5, seed=seed)
    assert few < 0.9 * many
    assert float((sparse - dense).norm() / dense.norm()) < 1e-5
    (present, _), _ = both(dataclasses.replace(strategy, shrinks="present"), 5, seed=seed)
    assert float((present - dense).norm() / dense.norm()) > 1e-4


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(k, marks=pytest.mark.slow) for k in range(2, 6))])
@pytest.mark.parametrize(
    "strategy",
    [
        DPSGD(threads=1, local_updates=2, batch=2, wait=True),
        DPSGD(threads=1, local_updates=3, batch=1),
        DPSGD(threads=2, local_updates=2, batch=1, delay_bound=1),
        DPSGD(threads=1, local_updates=2, batch=3, global_learning_rate=0.2, global_momentum=0.3),
    ],
    ids=["M 2", "free", "p 2", "momentum"],
)
def test_with_several_nodes_only_the_shrink_differs(strategy, seed):
    """Of a push's shrink, (s_m - 1) v, v is the present one: a difference of second order in the step."""
    (sparse, _), (dense, _) = both(strategy, 4, seed=seed)
    apart = float((sparse - dense).norm() / dense.norm())
    # threads of a node are asked who lives, so that their turns are others
    assert apart < (0.04 if strategy.threads > 1 or strategy.global_momentum else 0.01)
    x = sparse.double().view(WIDE + 1, -1)
    torch.testing.assert_close(x[-1], x[:-1].sum(0), rtol=1e-3, atol=0.5)
    assert float(x.min()) > -1e-3


def test_a_push_costs_its_rows():
    strategy = DPSGD(threads=1, local_updates=1, batch=1, global_learning_rate=0.5, wait=True)
    count = 10
    (_, few), _ = both(strategy, 2, count=count)
    distinct = 8 * 30  # at most, of a mini-batch
    width = 16
    assert few < (count + 2) * 2 * 4 * (2 * distinct * (width + 1) + 6) + 4 * 4 * (WIDE + 1) * width


@functools.lru_cache
def even():
    """Topics that use most words, so that a dozen mini-batches leave few out."""
    return generate(
        documents=DOCUMENTS, vocabulary=WORDS, topics=K, mean_length=60, seed=3, topic_mass=200.0
    ).corpus


def crowded(strategy, count, fabric):
    """The least of all parameters that a node has ever had; its every push moves nearly all words."""
    torch.set_num_threads(1)
    replicator = Replicator(strategy, fabric)
    model = TopicModel(topics=K, batch=10, alpha=0.3, prior=0.1, step_rule="average", rate=0.1)
    spec = EnvSpec("corpus", (WORDS,), torch.int32, 0, examples=DOCUMENTS)
    it = model.build(Context(spec, replicator.replicate, 0, examples=even()))
    least = 0.0
    if is_centre(fabric):
        serve_until(replicator, fabric)
    else:
        order = np.random.default_rng(fabric.rank).permutation(DOCUMENTS)
        for number in range(count):
            it.learn(Batch(even().select(order[(10 * number + np.arange(10)) % DOCUMENTS])))
            least = min(least, float(it.replica.values().min()))
        finish(replicator, fabric)
    return least


@pytest.mark.parametrize("seed", range(4))
def test_counts_stay_counts_when_nearly_all_words_have_moved(seed):
    """Most nodes learn from a v one fold old. Taken of that, what it is shrunk by is more than is left."""
    strategy = DPSGD(threads=1, local_updates=12, batch=4, wait=True)
    least = SimulatedFabric(5, seed=seed).run([functools.partial(crowded, strategy, 96)] * 5)
    assert min(least[:-1]) >= 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_rows_that_a_message_does_not_hold_wait_for_the_next(dtype):
    rows, width = 100, 32
    module = torch.nn.Module()
    module.matrix = torch.nn.Parameter(torch.zeros(rows, width, dtype=dtype))
    replica = Replica("x", module, lambda parameters: torch.optim.SGD(parameters, lr=1.0))
    node = SparseNode(replica, [0], 0)
    moves = (torch.rand(rows, width, generator=torch.Generator().manual_seed(0)) + 0.5).to(dtype)
    moves[7] /= 100  # moves least
    replica.scale.keeps_scale = True
    replica.follow(Rows(torch.arange(rows), moves, shrink=0.25))
    taken = torch.zeros(rows, width, dtype=dtype)
    for number in range(2):
        message = node.next_push(0).pack()
        assert message.dtype == dtype
        assert len(message) < rows * width
        delta = SparseDelta.unpack(message, width)
        assert (7 in delta.row) == (number == 1)
        taken[delta.row] += delta.values
        node.advance_base(delta, alone=True)
    torch.testing.assert_close(taken, moves)
    assert not len(node.next_push(0).row)
    torch.testing.assert_close(node.base_values().view(rows, width), moves)
