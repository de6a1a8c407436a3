"""Which replica gets which batch, and when inputs end."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

from murmurate.errors import Refusal
from murmurate.replicator.input_split import ReplicaIndex, inputs, split_along, split_leading
from murmurate.strategies.gala import GALA
from murmurate.strategies.solo import Solo
from replicator.steps import loops, processes, simulated


def rows(*numbers):
    return {"x": torch.tensor(numbers), "name": "kept", "scale": 2.0}


def taken(source, replicas, workers=1, per="worker", split=split_leading):
    """For each replica the batches it gets; a function as source is dealt without anybody's asking."""
    seats = [ReplicaIndex(rank, replicas, rank // (replicas // workers), workers) for rank in range(replicas)]
    return [list(inputs(source, index, per=per, split=split, all_have=bool)) for index in seats]


def numbers(batches):
    return [batch["x"].tolist() for batch in batches]


def test_a_workers_batch_is_split_in_equal_shares_and_the_rest_left_out():
    result = taken([rows(0, 1, 2, 3, 4, 5, 6), rows(7, 8, 9), rows(1, 2)], replicas=3)
    assert [numbers(f) for f in result] == [[[0, 1], [7]], [[2, 3], [8]], [[4, 5], [9]]]
    assert result[1][0]["name"] == "kept"


@pytest.mark.parametrize(
    ("source", "per", "left_out"),
    [
        ([rows(0, 1), rows(2, 3, 4, 5)], "worker", False),
        ([rows(0, 1), rows(2, 3, 4)], "worker", True),
        ([rows(0, 1), rows(2)], "worker", True),
        ([rows(0), rows(1)], "replica", False),
        ([rows(0), rows(1), rows(2)], "replica", True),
    ],
)
def test_rows_that_no_replica_gets_are_warned_of_once(source, per, left_out):
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("default")
        taken(source * 3, replicas=2, per=per)
        taken(source, replicas=2, per=per)
    assert ["leaves out rows" in str(one.message) for one in warned] == [True] * left_out
    assert all(one.filename == __file__ for one in warned), "the line that takes the batches is shown"


def test_time_major_batches_are_split_along_their_second_dimension():
    batch = (torch.arange(12).view(3, 4), torch.tensor(5))
    one, two = taken([batch], replicas=2, split=split_along(1))
    assert torch.equal(one[0][0], torch.tensor([[0, 1], [4, 5], [8, 9]]))
    assert torch.equal(two[0][0], torch.tensor([[2, 3], [6, 7], [10, 11]]))
    assert one[0][1] == two[0][1] == 5


@pytest.mark.parametrize("dimension", [-1, "time"])
def test_batches_are_split_along_a_dimension_counted_from_0(dimension):
    with pytest.raises(Refusal, match="give the number of a dimension, from 0"):
        split_along(dimension)


def test_a_split_of_ones_own():
    def every_other(batch, shares, index):
        return batch[index::shares]

    assert taken([[0, 1, 2, 3, 4]], replicas=2, split=every_other) == [[[0, 2, 4]], [[1, 3]]]


def test_workers_take_whole_batches_in_turn_up_to_the_last_whole_round():
    source = [rows(2 * k, 2 * k + 1) for k in range(5)]
    result = taken(source, replicas=4, workers=2)
    assert [numbers(f) for f in result] == [[[0], [4]], [[1], [5]], [[2], [6]], [[3], [7]]]


def test_all_workers_drop_a_round_in_which_one_batch_is_too_small():
    source = [rows(0, 1), rows(2, 3), rows(4, 5), rows(6)]
    result = taken(source, replicas=4, workers=2)
    assert [numbers(f) for f in result] == [[[0]], [[1]], [[2]], [[3]]]


def test_replicas_take_whole_batches_in_turn():
    result = taken([rows(k) for k in range(8)], replicas=3, per="replica")
    assert [numbers(f) for f in result] == [[[0], [3]], [[1], [4]], [[2], [5]]]


def test_a_source_for_each_worker_or_replica():
    def source(index):
        return [rows(10 * index, 10 * index + 1), rows(10 * index + 2, 10 * index + 3)]

    assert [numbers(f) for f in taken(source, 4, 2)] == [[[0], [2]], [[1], [3]], [[10], [12]], [[11], [13]]]
    assert [numbers(f) for f in taken(source, 2, 2, "replica")] == [[[0, 1], [2, 3]], [[10, 11], [12, 13]]]


def test_inputs_are_per_worker_or_per_replica():
    with pytest.raises(ValueError, match="per 'worker' or per 'replica', not per 'host'"):
        taken([], 1, per="host")


def test_batches_with_fewer_rows_than_replicas_are_refused_if_there_are_no_others():
    with pytest.raises(Refusal, match=r"\(1 rows do not make 2 shares\): make batches larger"):
        taken([rows(k) for k in range(8)], replicas=2)


def uneven(loop):
    def source(rank):
        return (torch.tensor([rank, k]) for k in range(3 + 2 * rank))

    return [batch.tolist() for batch in loop.inputs(source, per="replica")]


@pytest.mark.parametrize("fabric", [simulated, processes])
def test_synchronous_replicas_end_together_when_the_first_has_no_more(fabric):
    assert loops(3, uneven, fabric) == [[[r, 0], [r, 1], [r, 2]] for r in range(3)]


def test_others_end_each_on_its_own():
    assert [len(result) for result in loops(3, uneven, strategy=GALA())] == [3, 5, 7]
    assert [len(result) for result in loops(1, uneven, strategy=Solo())] == [3]


def test_names_are_split_like_the_rows_that_they_belong_to():
    batch = {"x": torch.arange(4), "name": ["a", "b", "c", "d"], "size": (1, 2, 3, 4), "scale": 2.0}
    one, two = taken([batch], replicas=2)
    assert (one[0]["name"], one[0]["size"], one[0]["scale"]) == (["a", "b"], (1, 2), 2.0)
    assert (two[0]["x"].tolist(), two[0]["name"], two[0]["size"]) == ([2, 3], ["c", "d"], (3, 4))
    assert taken([["a", "b", "c"]], replicas=2) == [[["a"]], [["b"]]]


@pytest.mark.parametrize(
    "batch",
    [
        (torch.ones(4, 2), ["a", "b", "c"]),
        (torch.ones(4, 2), torch.ones(3)),
        (torch.ones(4, 2), {1, 2, 3, 4}),
    ],
)
def test_what_has_no_rows_to_split_is_refused_with_the_remedy(batch):
    with pytest.raises(Refusal, match=r"split=, from \(batch, shares, index\)"):
        taken([batch], replicas=2)
    assert taken([batch], replicas=1) == [[batch]]
    assert taken([batch, batch], replicas=2, per="replica") == [[batch], [batch]]


def test_each_loop_over_the_batches_is_a_pass():
    def script(loop):
        batches = loop.inputs([rows(*range(4)) for _ in range(3)])
        first = next(batches)
        return first, list(batches), list(batches), list(loop.inputs(iter([rows(0, 1)])))

    for first, rest, whole, once in loops(2, script):
        assert (len(rest), len(whole), len(once)) == (2, 3, 1)
        assert numbers(whole) == numbers([first, *rest])


@pytest.mark.parametrize(
    ("replicas", "workers", "per"), [(2, 1, "worker"), (4, 2, "worker"), (2, 1, "replica"), (3, 1, "replica")]
)
def test_batches_have_a_length_if_their_source_has_one(replicas, workers, per):
    def script(loop):
        batches = loop.inputs([rows(*range(8)) for _ in range(7)], per=per)
        return len(batches), len(list(batches)), len(batches)

    for length, made, after in loops(replicas, script, workers=workers):
        assert length == made == after
    with pytest.raises(TypeError, match="no len"):
        loops(2, lambda loop: len(loop.inputs(iter([rows(0)]))))
    with pytest.raises(TypeError, match="not known where inputs"):
        loops(2, lambda loop: len(loop.inputs(lambda rank: [rows(0)], per="replica")))


def test_batches_have_the_attributes_of_their_loader():
    loader = torch.utils.data.DataLoader(torch.arange(8.0), batch_size=2)

    def script(loop):
        batches = loop.inputs(loader)
        return batches.dataset is loader.dataset, batches.batch_size, copy.copy(batches).batch_size

    assert loops(2, script) == [(True, 2, 2)] * 2
    with pytest.raises(AttributeError, match="no attribute 'dataset'"):
        loops(2, lambda loop: loop.inputs(lambda rank: [rows(0)], per="replica").dataset)
