"""Steps 1 to 3 on costs that are written down; the assignment is never beaten by another pair of devices."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from murmurate.errors import Refusal
from murmurate.mapping.assignment import Device, assign, steps_per_second
from murmurate.mapping.lines import Line
from murmurate.mapping.profile import Link, RecipeCosts

PCIE = Link(5e-6, 1e10)


def device(
    name: str, train: tuple[float, float] | None, draw: tuple[float, float] | None, link: Link | None = PCIE
) -> Device:
    """train, draw: (a, b) of the seconds of a batch."""

    def line(ab: tuple[float, float]) -> Line:
        return Line(*ab, ab, ab, (1, 1024))

    nothing = line((0.0, 0.0))
    lines = {}
    if train is not None:
        lines |= {"forward": line(train), "backward": nothing, "update": nothing}
    if draw is not None:
        lines |= {"sample": line(draw), "priority": nothing}
    costs = RecipeCosts(lines, dict.fromkeys(lines, 1.0), 0.0, 1000)
    return Device(name, costs, None if name == "cpu" else link, shares=name == "gpu")


CPU = device("cpu", (1e-4, 1e-5), (1e-6, 2e-7))
GPU = device("gpu", (3e-4, 1e-7), (5e-5, 1e-9))
FPGA = device("fpga", (1e-6, 3e-6), (4e-7, 8e-9))


def test_small_nets_go_to_the_fpga_and_large_batches_to_the_gpu() -> None:
    small = assign([CPU, GPU, FPGA], 32, 40, actors=16, stored=1000)
    assert (small.learner, small.replay, small.storage) == ("fpga", "fpga", "fpga")
    large = assign([CPU, GPU, FPGA], 16384, 40, actors=16, stored=1000)
    assert large.learner == "gpu"
    assert large.replay == "fpga"  # on the CPU it would limit; on the GPU it would share
    assert large.storage == "gpu"


def test_the_host_manages_the_replay_where_that_does_not_limit() -> None:
    found = assign([CPU, device("gpu", (5e-3, 0), (5e-5, 1e-9)), FPGA], 256, 40, actors=16, stored=1000)
    assert found.learner in ("gpu", "fpga", "cpu")
    hosted = assign([CPU, device("gpu", (5e-4, 0), (5e-5, 1e-9))], 256, 40, actors=16, stored=1000)
    assert (hosted.learner, hosted.replay) == ("gpu", "cpu")


def test_a_slow_link_keeps_the_replay_on_the_host() -> None:
    slow = device("fpga", None, (4e-7, 8e-9), Link(1e-3, 1e9))
    assert assign([CPU, slow], 64, 40, actors=4, stored=1000).replay == "cpu"
    assert (
        assign([CPU, device("fpga", None, (4e-7, 8e-9), Link(0, 1e12))], 16384, 40, 4, 1000).replay == "cpu"
    )


def test_a_learner_and_a_replay_share_a_gpu() -> None:
    apart = steps_per_second(GPU, CPU, 256, 40)
    together = steps_per_second(GPU, GPU, 256, 40)
    assert apart is not None
    assert together is not None
    assert together < apart


def test_what_does_not_fit_is_stored_elsewhere() -> None:
    little = Device("fpga", FPGA.costs, PCIE, bytes=1e6)
    assert assign([CPU, little], 32, 40, actors=16, stored=1000).storage == "fpga"
    assert assign([CPU, little], 32, 40, actors=16, stored=1_000_000).storage == "cpu"


def test_devices_that_cannot_train_are_refused() -> None:
    with pytest.raises(Refusal, match="none of these devices can train"):
        assign([device("fpga", None, (1e-6, 1e-9))], 32, 40, 1, 100)


positive = st.tuples(st.floats(1e-7, 1e-2), st.floats(1e-10, 1e-4))


@given(
    costs=st.lists(st.tuples(positive, positive), min_size=3, max_size=3),
    batch=st.sampled_from([8, 256, 16384]),
)
def test_no_other_replay_is_faster_for_the_chosen_learner(
    costs: list[tuple[tuple[float, float], tuple[float, float]]], batch: int
) -> None:
    devices = [device(name, *cost) for name, cost in zip(("cpu", "gpu", "fpga"), costs, strict=True)]
    found = assign(devices, batch, 100, actors=8, stored=100)
    for (learner, _), rate in found.others.items():
        if learner == found.learner:
            assert rate <= found.steps_per_second * (1 + 1e-6)
    best = max([found.steps_per_second, *found.others.values()])
    assert found.steps_per_second == pytest.approx(best, rel=1e-6)


def test_of_equal_rates_the_learner_goes_where_it_trains_fastest() -> None:
    slow_draw = (1e-2, 0.0)
    near = Link(0.0, 1e15)
    devices = [device("cpu", (2e-4, 0), slow_draw), device("fpga", (1e-4, 0), None, near)]
    found = assign(devices, 32, 40, actors=1, stored=10)
    assert found.learner == "fpga"
    assert "fpga: 10,000 gradient steps/s" in found.why[0]
    assert "drawing, or the link, limits" in found.why[1]


def test_parts_on_one_device_send_nothing_over_its_link() -> None:
    far = device("fpga", (1e-4, 0), (1e-5, 0), Link(1.0, 1e3))
    assert steps_per_second(far, far, 256, 40) == pytest.approx(1e4)
    apart = steps_per_second(far, CPU, 256, 40)
    assert apart is not None
    assert apart < 1


def test_rows_that_a_device_has_no_room_for_are_sent_to_its_learner() -> None:
    near = device("fpga", (1e-4, 0), (1e-5, 0), Link(0.0, 1e6))
    little = Device("fpga", near.costs, near.link, bytes=1e3)
    assert steps_per_second(little, little, 256, 40, stored=10) == pytest.approx(1e4)
    assert steps_per_second(little, little, 256, 40, stored=1_000) == pytest.approx(1e6 / (256 * 40))
