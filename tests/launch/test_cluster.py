"""What members hold of a Ray cluster, and that it fits on the GPUs that the placement names."""

from __future__ import annotations

import dataclasses
import signal
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from murmurate.errors import Refusal
from murmurate.launch import ray_cluster
from murmurate.launch.ray_actor import _placed
from murmurate.launch.ray_cluster import bundle, cluster, place
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


def _ray(init: Any) -> SimpleNamespace:
    """A Ray that is not connected, and connects by ``init``."""
    return SimpleNamespace(
        init=init,
        is_initialized=lambda: False,
        shutdown=list,
        exceptions=SimpleNamespace(RayError=RuntimeError),
    )


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid", "a..b"])
def test_an_address_where_nothing_listens_is_refused_soon(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself tries for more than three minutes."""
    inits: list[Any] = []
    monkeypatch.setattr(ray_cluster, "import_ray", lambda: _ray(lambda **given: inits.append(given)))
    monkeypatch.setattr(ray_cluster, "_CONNECT_SECONDS", 0.5)
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        address = f"{host}:{unheard.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(Refusal, match=f"cannot connect to a Ray cluster at {address}"), cluster(1):
            pass
        assert inits == []
        unheard.listen()
        if host == "127.0.0.1":
            with cluster(1):
                assert [given["address"] for given in inits] == [address]


def test_a_sigterm_while_members_start_is_handled_as_before_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """By Ray's handler, which raises SystemExit, the folder of the run stayed and could not be used again."""

    def init(**given: Any) -> None:
        signal.signal(signal.SIGTERM, lambda *_: exit(15))

    def terminate(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ray_cluster, "import_ray", lambda: _ray(init))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        with pytest.raises(KeyboardInterrupt), cluster(1):
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
