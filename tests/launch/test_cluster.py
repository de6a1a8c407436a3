"""What members hold of a Ray cluster, and that it fits on the GPUs that the placement names."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from murmurate.launch.ray_actor import _placed
from murmurate.launch.ray_cluster import bundle, place
from murmurate.recipes import recipe
from murmurate.spec import Placement
from murmurate.strategies import strategies
from murmurate.training.run import Run

ONE, TWO = ("cuda:0",), ("cuda:0", "cuda:1")


def _run(replicas: int, devices: tuple[str, ...], strategy: str = "gala", threads: int = 1) -> Run:
    return dataclasses.replace(
        recipe("cartpole-gala"),
        strategy=strategies()[strategy](),
        replicas=replicas,
        placement=Placement(devices=devices, threads=threads),
    )


@pytest.mark.parametrize(
    ("replicas", "devices", "strategy", "shares"),
    [
        (2, ("cpu",), "gala", [0, 0]),
        (2, ONE, "gala", [1 / 2] * 2),
        (3, ONE, "gala", [0.3333] * 3),
        (6, ONE, "gala", [0.1666] * 6),  # 0.1667 six times is more than one
        (2, TWO, "gala", [1, 1]),
        (3, TWO, "gala", [1 / 2] * 3),
        (4, TWO, "gala", [1 / 2] * 4),
        (5, TWO, "gala", [0.3333] * 5),
        (1, TWO, "gala", [1]),  # the second is nobody's
        (2, TWO, "parameter-server", [1, 1, 0]),
        (2, ONE, "parameter-server", [1 / 2, 1 / 2, 0]),
        (3, ("cpu", "cuda:0"), "gala", [0, 1, 0]),
    ],
)
def test_replicas_share_the_gpus_that_are_named_and_a_centre_has_none(
    replicas: int, devices: tuple[str, ...], strategy: str, shares: list[float]
) -> None:
    run = _run(replicas, devices, strategy, threads=2)
    held = [bundle(run, rank) for rank in range(run.members)]
    assert [one["CPU"] for one in held] == [2.0] * run.members
    assert [one.get("GPU", 0) for one in held] == shares
    assert all(one.get("GPU") != 0 for one in held), "a bundle that asks for none of a GPU names none"


@pytest.mark.parametrize(("rank", "device"), [(0, "cuda:0"), (1, "cuda:0"), (2, "cpu")])
def test_an_actor_works_on_the_gpu_that_it_is_shown_and_a_centre_on_the_processor(
    rank: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "" if device == "cpu" else "1")
    assert str(_placed(_run(2, TWO, "parameter-server"), rank).device(rank)) == device


def test_resources_are_given_back_if_the_wait_for_them_is_interrupted() -> None:
    def interrupted(timeout_seconds: float) -> bool:
        raise KeyboardInterrupt

    removed: list[Any] = []
    group = SimpleNamespace(wait=interrupted)
    util = SimpleNamespace(
        placement_group=lambda bundles, strategy: group, remove_placement_group=removed.append
    )
    with pytest.raises(KeyboardInterrupt):
        place(SimpleNamespace(util=util), [{"CPU": 1.0}], use_fewer="replicas")
    assert removed == [group]
