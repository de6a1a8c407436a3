"""XLA devices: collectives conform as those of every fabric, and all-reduce obeys its laws on them.

Most of it needs torch_xla, in an environment of its own (docs/tpu.md), where the CPU stands for the devices.
"""

from __future__ import annotations

import functools
import importlib.util

import pytest
import torch

from conformance import test_fabric as conformance
from conformance.fabric_roles import use_what_is_missing
from laws.problems import LINEAR, OPTIMIZERS, Problem, same
from murmurate.errors import MissingExtra
from murmurate.fabric.interface import Capability, FabricError
from murmurate.fabric.processes.spawn import FINISHED, Exit
from murmurate.fabric.xla import XlaFabric, partition, run_on_devices, torch_xla
from murmurate.strategies.all_reduce import AllReduce
from murmurate.strategies.local_sgd import LocalSGD

needs_xla = pytest.mark.skipif(
    importlib.util.find_spec("torch_xla") is None, reason="needs torch_xla: docs/tpu.md"
)
UPDATES = 8


def test_a_group_names_its_whole_partition():
    assert partition([2, 3], 6) == [[0, 1], [2, 3], [4, 5]]
    assert partition([1, 3, 5], 6) == [[0, 2, 4], [1, 3, 5]]
    assert partition(range(4), 4) == [[0, 1, 2, 3]]
    assert partition([3], 4) == [[0], [1], [2], [3]]


@pytest.mark.parametrize("group", [[0, 2], [1, 2], [0, 1, 2, 3]])
def test_a_group_without_a_regular_partition_is_refused(group):
    with pytest.raises(ValueError, match=r"of 6 XLA devices can form no group.*equal blocks"):
        partition(group, 6)


@pytest.mark.skipif(not needs_xla.args[0], reason="torch_xla is installed")
def test_without_torch_xla_the_error_names_the_extra():
    with pytest.raises(MissingExtra, match=r"XLA device needs.*torch_xla.*murmurate\[tpu\]"):
        XlaFabric()


def members(size, *functions):
    """(size, one function for all or one each) -> results by rank."""
    functions = list(functions) * (size // len(functions))
    ends = run_on_devices(functools.partial(each, functions), size)
    assert [(rank, ends[rank].how, ends[rank].trace) for rank in sorted(ends)] == [
        (rank, FINISHED, "") for rank in range(size)
    ]
    return [ends[rank].result for rank in range(size)]


def each(functions, fabric):
    return Exit(FINISHED, result=functions[fabric.rank](fabric))


@needs_xla
class TestCollectives:
    """The tests of all fabrics, of what this one offers; their vectors are in host memory."""

    @pytest.mark.parametrize(
        "test",
        [
            "test_mean_of_whole_numbers_is_exact",
            "test_mean_with_one_is_the_identity_bit_for_bit",
            "test_mean_writes_into_a_parameter_in_place",
            "test_broadcast_gives_everybody_the_roots",
            "test_gather_gives_copies_by_rank",
            "test_rounds_are_matched_in_number",
        ],
    )
    def test_as_of_every_fabric(self, test):
        getattr(conformance.TestEveryFabric(), test)(members)

    @pytest.mark.parametrize("size", [1, 3])
    def test_members_know_who_they_are(self, size):
        conformance.TestEveryFabric().test_members_know_who_they_are(members, size)

    @pytest.mark.parametrize("size", [2, 3, 4])
    def test_mean(self, size):
        conformance.TestEveryFabric().test_mean_is_the_mean_and_bitwise_the_same_everywhere(members, size)

    def test_on_devices_and_of_all_dtypes(self):
        for results in members(2, collect_on_device):
            assert all(kept for kept, _ in results.values()), "on another device than before"
            for dtype, (_, values) in results.items():
                rows = torch.stack([numbers(rank, dtype) for rank in range(2)])
                torch.testing.assert_close(values["gathered"], rows, rtol=0, atol=0, equal_nan=True)
                torch.testing.assert_close(values["of rank 1"], rows[1], rtol=0, atol=0, equal_nan=True)
                if dtype.is_floating_point:
                    finite = rows[:, 1:]
                    torch.testing.assert_close(values["mean"][1:], finite.mean(0), rtol=0, atol=0)

    def test_groups_are_blocks_or_every_kth_device(self):
        for rank, (block, stride, whole) in enumerate(members(4, mean_in_groups)):
            assert block == (rank % 2, 2, [rank // 2 * 2 + 0.5] * 3)
            assert stride == (rank // 2, 2, [rank % 2 + 1.0] * 3)
            assert whole == [1.5] * 3

    def test_members_may_compute_different_things_in_between(self):
        """Other shapes and constants make other programs of what comes before a mean."""
        one, other = members(2, compute_unalike)
        assert one == other

    def test_other_capabilities_are_refused_by_name(self):
        outcome, claimed = members(1, use_what_is_missing)[0]
        assert claimed
        for capability, (offered, works) in outcome.items():
            assert offered is (capability is Capability.COLLECTIVE)
            assert works == [offered] * len(works)

    def test_another_shape_is_refused(self):
        assert members(1, take_another_shape) == ["Channel 'model' is for [3], this is [4]."]


def numbers(rank, dtype):
    values = (
        torch.tensor([float("nan") if rank else 2.0, -0.5, 1.0 + rank, 0.25 - rank, 3.0])
        if dtype.is_floating_point
        else (torch.arange(5) + rank)
    )
    return values.to(dtype)


def collect_on_device(fabric):
    results = {}
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8):
        x = numbers(fabric.rank, dtype).to(fabric.device)
        channel = fabric.channel(str(dtype), x)
        gathered = torch.stack(list(channel.gather(x).values()))
        root, mean = x.clone(), x.clone()
        channel.broadcast_(root, 1)
        if dtype.is_floating_point:
            channel.mean_(mean)
        kept = {y.device for y in (gathered, root, mean)} == {fabric.device}
        results[dtype] = kept, {"gathered": gathered, "of rank 1": root, "mean": mean}
    return results


def mean_in_groups(fabric):
    rank, like = fabric.rank, torch.zeros(3)
    found = []
    for ranks in ([rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2], None):
        x = torch.full((3,), float(rank), device=fabric.device)
        channel = fabric.channel("group", like, ranks)
        channel.mean_(x)
        found.append((channel.rank, channel.size, x.tolist()))
    return found[0], found[1], found[2][2]


def compute_unalike(fabric):
    x, channel = torch.ones(3, device=fabric.device), fabric.channel("model", torch.zeros(3))
    for turn in range(5):
        rows = torch.full((2 + 3 * fabric.rank + turn, 3), 0.5, device=fabric.device)
        x = x * (7 if fabric.rank else 5) + rows.sum(0)
        if fabric.rank and turn % 2:
            x = x - float(x.max())
        channel.mean_(x)
    return x.tolist()


def take_another_shape(fabric):
    try:
        fabric.channel("model", torch.zeros(3)).mean_(torch.zeros(4))
        fabric.channel("model", torch.zeros(3)).gather(torch.zeros(4))
    except ValueError as error:
        return str(error).split(" Make")[0]
    except FabricError as error:
        return f"another error: {error}"
    return "no error"


class OnDevice(Problem):
    def net(self, seed=0):
        return super().net(seed).to(torch_xla().device())

    def batch(self, rank, step):
        return tuple(x.to(torch_xla().device()) for x in super().batch(rank, step))


def learn_all(strategies, problems, fabric):
    return [
        problem.learn(strategy, UPDATES, fabric)
        for strategy, problem in zip(strategies, problems, strict=True)
    ]


def learn_on_devices(size, strategies, problems):
    """Results [problem][rank], on the CPU."""
    found = members(size, functools.partial(learn_all, strategies, problems))
    for_each = zip(*([result.__dict__ for result in results] for results in found), strict=True)
    return [list(results) for results in for_each]


@needs_xla
class TestAllReduce:
    """The laws of tests/laws/test_averaging.py."""

    @pytest.mark.parametrize("size", [2, 3])
    def test_equals_one_replica_on_the_joined_batch(self, size):
        problems = [OnDevice(optimizer=name) for name in OPTIMIZERS]
        for problem, results in zip(
            problems, learn_on_devices(size, [AllReduce()] * len(problems), problems), strict=True
        ):
            whole = Problem(optimizer=problem.optimizer).alone(UPDATES, range(size))
            for found in results:
                torch.testing.assert_close(found["path"][-1], whole.params, rtol=1e-12, atol=1e-12)
                assert [tuple(e) for e in found["exchanges"]] == [(k, size, 0) for k in range(1, UPDATES + 1)]
            assert all(same(found["path"], results[0]["path"]) for found in results), "not the same bits"

    def test_clips_and_schedules_the_mean_as_the_whole_would(self):
        options = {"optimizer": "adam", "clip": 0.05, "scheduled": True, "grouped": True}
        (results,) = learn_on_devices(2, [AllReduce()], [OnDevice(**options)])
        whole = Problem(**options).alone(UPDATES, range(2))
        for found in results:
            torch.testing.assert_close(found["path"][-1], whole.params, rtol=1e-12, atol=1e-12)
            assert found["state"]["learning_rates"] == whole.state["learning_rates"]

    def test_local_sgd_at_every_step_equals_it_where_updates_are_linear(self):
        problems = [OnDevice(optimizer=name) for name in LINEAR]
        mean = learn_on_devices(2, [AllReduce()] * len(LINEAR), problems)
        local = learn_on_devices(2, [LocalSGD(period=1)] * len(LINEAR), problems)
        for one, other in zip(mean, local, strict=True):
            torch.testing.assert_close(one[0]["path"][-1], other[0]["path"][-1], rtol=1e-12, atol=1e-12)
