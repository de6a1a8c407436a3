"""Topic models under strategies: inference is SGD on lambda - lambda-hat, and all else follows."""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
import pytest
import torch

from laws.centre import finish, is_centre, serve_until
from murmurate.datasets.corpus import Corpus
from murmurate.datasets.generated import generate
from murmurate.fabric.processes.fabric import run_members
from murmurate.fabric.simulated.fabric import SimulatedFabric
from murmurate.losses.topics import Documents, expected_topics, fold_in
from murmurate.replica.sparse import Rows, StepTooLarge
from murmurate.replica.vector import Replica
from murmurate.replicator.learner import Context
from murmurate.replicator.replicator import Replicator
from murmurate.spec import Batch, EnvSpec
from murmurate.strategies.all_reduce import AllReduce
from murmurate.strategies.dpsgd import DPSGD
from murmurate.strategies.dpsgd.sparse_delta import SparseDelta
from murmurate.strategies.dpsgd.sparse_master import SparseMaster
from murmurate.strategies.dpsgd.sparse_node import SparseNode
from murmurate.strategies.gala import GALA
from murmurate.strategies.hogwild import Hogwild
from murmurate.strategies.pull_gossip import PullGossip
from murmurate.strategies.solo import Solo
from murmurate.workloads.topic_model import TopicModel
from strategies.manual_fabric import ManualFabric

K, WORDS, DOCUMENTS = 6, 120, 240
MODEL = TopicModel(topics=K, batch=30, alpha=0.3, prior=0.1, iterations=30, validate_every=0)


@functools.lru_cache
def corpus():
    return generate(
        documents=DOCUMENTS,
        vocabulary=WORDS,
        topics=K,
        mean_length=60,
        seed=1,
        topic_mass=8.0,
        alpha_mass=1.0,
    ).corpus


def learner(replicate=Replica, model=MODEL):
    spec = EnvSpec("corpus", (WORDS,), torch.int32, 0, examples=DOCUMENTS)
    return model.build(Context(spec, replicate, 0, examples=corpus()))


def batches(rank=0, size=1, count=12):
    order = np.random.default_rng(rank).permutation(DOCUMENTS)
    for number in range(count):
        part = order[(number * MODEL.batch + np.arange(MODEL.batch)) % DOCUMENTS]
        yield Batch(corpus().select(part), env_steps=MODEL.batch)


def matrix(it):
    """lambda [V, K], float64."""
    return it.model.prior + it.replica.values().detach().double().view(WORDS + 1, -1)[:-1, :K]


def lambda_hat(it, documents):
    """zeta + n / G sum E[t] (Mohamad et al., equation 52) at the learner's present lambda."""
    now = torch.zeros(WORDS, it.model.width)
    now[:, :K] = matrix(it).float()
    beta = expected_topics(now, torch.arange(WORDS), now.double().sum(0), topics=K, prior=0.0)
    times = torch.from_numpy(documents.counts.astype(np.float32))
    batch = Documents(torch.from_numpy(documents.starts), torch.from_numpy(documents.words), times)
    folded = fold_in(batch, beta, it.model.alpha, topics=K, iterations=MODEL.iterations)
    return it.model.prior + DOCUMENTS / len(documents) * folded.statistics[:, :K].double()


def test_inference_is_equation_50():
    """lambda <- (1 - rho_t) lambda + rho_t lambda-hat."""
    it = learner()
    for t, batch in enumerate(batches()):
        before, towards = matrix(it), lambda_hat(it, batch.data)
        it.learn(batch)
        step = MODEL.eta(t)
        torch.testing.assert_close(matrix(it), (1 - step) * before + step * towards, rtol=1e-5, atol=1e-5)


def test_the_last_row_is_the_sum_of_the_others():
    it = learner()
    for batch in batches(count=40):
        it.learn(batch)
    x = it.replica.values().detach().double().view(WORDS + 1, -1)
    torch.testing.assert_close(x[-1], x[:-1].sum(0), rtol=1e-5, atol=1e-3)
    assert (x[:, K:] == 0).all()
    assert float(matrix(it).min()) > 0  # every step leaves the prior where it was
    tokens = corpus().tokens
    assert 0.5 * tokens < float(x[-1].sum()) < 1.5 * tokens


def test_the_same_seed_begins_alike_and_topics_are_found():
    one, other = learner(), learner()
    assert torch.equal(one.replica.params, other.replica.params)
    for _ in range(8):
        for batch in batches(count=15):
            one.learn(batch)
    before = other.estimate().completion_perplexity(corpus())
    after = one.estimate().completion_perplexity(corpus())
    everywhere = np.bincount(corpus().words, corpus().counts, minlength=WORDS) / corpus().tokens
    entropy = -np.sum(everywhere[everywhere > 0] * np.log(everywhere[everywhere > 0]))
    assert after < 0.9 * before
    assert after < 0.7 * np.exp(entropy)  # far below what counting words alone knows


@pytest.mark.parametrize("k", [69, 100, 300])
def test_a_word_that_is_new_is_learned(k):
    """All its tokens, where the default prior of 1 / K has no exponential in float32."""
    model = TopicModel(topics=k, batch=30, validate_every=0)
    it = learner(model=model)
    x = it.replica.params.detach().view(WORDS + 1, -1)
    x[:60] = 0.0
    it.model.refresh(x)
    documents = next(batches()).data
    it.step(documents)
    times = np.bincount(documents.words, documents.counts, minlength=WORDS)[:60]
    expected = torch.from_numpy(model.eta(0) * DOCUMENTS / len(documents) * times).float()
    torch.testing.assert_close(it.values()[:60].sum(1), expected, rtol=1e-4, atol=0)
    assert float(expected.max()) > 0


def test_no_mini_batch_of_the_warm_start_is_what_is_left_over():
    """One document would stand for all, at the last step."""
    sizes = []

    class Library:
        def __len__(self):
            return DOCUMENTS

        def select(self, index):
            sizes.append(len(index))
            return corpus().select(index)

    spec = EnvSpec("corpus", (WORDS,), torch.int32, 0, examples=DOCUMENTS)
    model = dataclasses.replace(MODEL, init="svi", batch=DOCUMENTS - 1)
    model.build(Context(spec, Replica, 0, examples=Library()))
    assert sizes[-2:] == [DOCUMENTS // 2] * 2


# -- strategies ---------------------------------------------------------------------------------------------


def work(strategy, count, fabric):
    """A learner's part, or the centre's: what it came to, by the consensus of all."""
    torch.set_num_threads(1)
    replicator = Replicator(strategy, fabric)
    it = learner(replicator.replicate, MODEL)
    if strategy.centre and is_centre(fabric):
        serve_until(replicator, fabric)
        return replicator.consensus()["topics"]
    for batch in batches(fabric.rank, count=count):
        it.learn(batch)
    if strategy.centre:
        finish(replicator, fabric)
    else:
        replicator.publish()
        fabric.channel("end", torch.zeros(1)).mean_(torch.zeros(1))
    return replicator.consensus()["topics"]


def test_dpsvi_with_b_m_and_p_of_1_is_svi_with_step_rho_eta():
    """Mohamad et al., Algorithms 3 and 4: what is pushed counts rho of it."""
    rho = 0.25
    strategy = DPSGD(threads=1, local_updates=1, batch=1, global_learning_rate=rho, wait=True)
    found, _ = SimulatedFabric(2, seed=1).run([functools.partial(work, strategy, 12)] * 2)
    alone = learner(
        functools.partial(Replica), TopicModel(**{**vars(MODEL), "step_rule": "average", "rate": 0.1})
    )
    alone.replica.schedule = lambda t: rho * MODEL.eta(t)
    for batch in batches(count=12):
        alone.learn(batch)
    torch.testing.assert_close(found, alone.replica.values().detach(), rtol=1e-5, atol=2e-3)


def test_a_late_answer_leaves_topics_that_can_be_read():
    """What was learned since a push stays beside v', so a word that a topic lost meanwhile is below 0 there.

    Steps of a half, a master that hardly moves, and answers that are many steps late.
    """
    strategy = DPSGD(threads=1, local_updates=1, batch=1, global_learning_rate=0.01)
    model = TopicModel(**{**vars(MODEL), "step_rule": "average", "rate": 0.5})
    low = []

    def worker(fabric):
        replicator = Replicator(strategy, fabric)
        it = learner(replicator.replicate, model)
        it.replica.scale.keeps_scale = False  # whole vectors go to and fro
        if is_centre(fabric):
            serve_until(replicator, fabric)
            return it.estimate()
        for batch in batches(count=60):
            fabric.compute(1e-3)
            it.learn(batch)
            x = it.replica.params.detach().view(WORDS + 1, -1)
            low.append(float(x.min()))
            assert torch.isfinite(x).all()
            assert float(it.estimate().matrix.min()) > 0
        finish(replicator, fabric)
        return it.estimate()

    centre = SimulatedFabric(2, seed=3, latency=(5e-3, 2e-2)).run([worker] * 2)[1]
    assert min(low) < -MODEL.prior  # it did come to that
    assert centre.completion_perplexity(corpus()) < learner().estimate().completion_perplexity(corpus())


def late(strategy, count, fabric):
    """The least of all parameters that a node has ever had, of the master the topics in the end."""
    torch.set_num_threads(1)
    replicator = Replicator(strategy, fabric)
    it = learner(replicator.replicate, dataclasses.replace(MODEL, step_rule="average", rate=0.1))
    if is_centre(fabric):
        serve_until(replicator, fabric)
        return float(it.replica.values().min()), it.estimate()
    least = 0.0
    for batch in batches(fabric.rank, count=count):
        fabric.compute(1e-3)
        it.learn(batch)
        least = min(least, float(it.replica.values().min()))
    finish(replicator, fabric)
    return least, None


def test_pushes_later_than_asked_for_leave_counts_and_topics():
    """With an answer at once a fold takes 0.82 of v; these nodes learn on for 10 to 40 steps instead of 5."""
    strategy = DPSGD(threads=1, local_updates=5, batch=4)
    strategy.check(2, shrinks=0.1)
    found = SimulatedFabric(3, seed=0, latency=(0.005, 0.02)).run(
        [functools.partial(late, strategy, 150)] * 3
    )
    assert min(least for least, _ in found) >= 0
    start = learner().estimate().completion_perplexity(corpus())
    assert found[-1][1].completion_perplexity(corpus()) < 0.7 * start


def test_what_is_below_zero_counts_as_none():
    """The same step as from 0, but for what the numbers themselves are."""
    moves = []
    for floor in (-20.4, 0.0):
        it = learner()
        it.replica.scale.keeps_scale = False  # as under strategies that exchange dense vectors
        x = it.replica.params.detach().view(WORDS + 1, -1)
        x[:WORDS:7, 0] = floor
        before = x.clone()
        it.learn(next(batches()))
        moves.append(x - (1 - MODEL.eta(0)) * before)
    torch.testing.assert_close(*moves, rtol=1e-5, atol=1e-4)
    assert float(moves[0].min()) > -1e-4


@pytest.mark.parametrize("strategy", [Solo(), Hogwild(), AllReduce(), GALA(), PullGossip()])
def test_one_replica_is_solo_under_every_strategy(strategy):
    (found,) = SimulatedFabric(1, seed=0).run([functools.partial(work, strategy, 10)])
    alone = learner()
    for batch in batches(count=10):
        alone.learn(batch)
    torch.testing.assert_close(found, alone.replica.values().detach(), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(
    "strategy",
    [Hogwild(), AllReduce(), GALA(), PullGossip(), DPSGD(threads=1, local_updates=3), DPSGD(threads=2)],
    ids=lambda s: f"{s.name} {getattr(s, 'threads', '')}",
)
def test_replicas_on_real_processes_find_topics_together(strategy):
    size = 2 + strategy.centre
    found = run_members(size, [functools.partial(work, strategy, 40)] * size)[0]
    it = learner()
    start = it.estimate().completion_perplexity(corpus())
    with torch.no_grad():
        it.replica.params.copy_(found)
    assert it.estimate().completion_perplexity(corpus()) < 0.9 * start
    x = found.double().view(WORDS + 1, -1)
    torch.testing.assert_close(x[-1], x[:-1].sum(0), rtol=0.05, atol=1.0)  # unlocked writers may lose some


def test_all_reduce_over_two_is_one_on_the_joined_batch():
    def joined(count):
        return zip(batches(0, count=count), batches(1, count=count), strict=True)

    found, other = SimulatedFabric(2, seed=0).run([functools.partial(work, AllReduce(), 8)] * 2)
    assert torch.equal(found, other)
    alone = learner()
    for one, two in joined(8):
        parts = [one.data, two.data]
        alone.learn(Batch(_stacked(parts)))
    torch.testing.assert_close(found, alone.replica.values().detach(), rtol=1e-4, atol=5e-3)


def _stacked(parts):
    starts = np.concatenate([parts[0].starts, parts[1].starts[1:] + parts[0].starts[-1]])
    words = np.concatenate([part.words for part in parts])
    counts = np.concatenate([part.counts for part in parts])
    return Corpus(starts, words, counts, parts[0].vocabulary, WORDS)


# -- what is exchanged --------------------------------------------------------------------------------------

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
