"""The ray launcher: a Ray of this host alone, and one that was there before; deaths and replacements."""

from __future__ import annotations

import dataclasses
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from faults.commands import Command, training
from launch.test_inline import params
from launch.test_torchrun import _SHORT, SERVICE, alone, assert_both_learned_from_actors, same
from murmurate.errors import MissingExtra
from murmurate.fabric.processes.run_state import RunState
from murmurate.fabric.processes.spawn import LEFT, Exit
from murmurate.launch import launcher, ray_cluster
from murmurate.launch.ray import RayJob
from murmurate.recipes import recipe
from murmurate.strategies import strategies
from murmurate.training import checkpoint
from waiting import until

pytestmark = pytest.mark.timeout(900)
_RAY = ("--launcher", "ray", "--replicas", 2)


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match=r"pip install 'murmurate\[ray\]'"):
        launcher("ray").check(recipe("cartpole-gala"))


@pytest.mark.parametrize(
    ("case", "replaced"),
    [
        ("while all learn", True),
        ("while a new epoch is forming", True),
        ("stopped", False),
        ("interrupted", False),
        ("its env steps are made", False),
        ("the others have made their updates", False),
        ("for the fourth time", False),
        ("the centre", False),
    ],
)
def test_a_member_that_dies_is_replaced_unless_the_run_is_over(case: str, replaced: bool) -> None:
    run = dataclasses.replace(
        recipe("cartpole-gala"),
        strategy=strategies()["parameter-server"](),
        replicas=2,
        env_steps=1_000,
        updates=100,
    )
    run_state = RunState(run.members)
    run_state.open()
    job = RayJob.__new__(RayJob)  # no cluster: what it decides by
    coordinator: Any = SimpleNamespace(
        run_state=run_state, interrupted=case == "interrupted", stopped_because=""
    )
    job.run, job.coordinator, job.replacements = run, coordinator, {}
    job.restarts = Counter({1: 3 * (case == "for the fourth time")})
    job._actor = lambda rank: (None, None)  # type: ignore[method-assign]
    if case == "while a new epoch is forming":
        run_state.request_stop()
    if case == "stopped":
        coordinator.stopped_because = "5 minutes have passed"
    run_state.advance(
        0,
        env_steps=1_000 if "env steps" in case else 999,
        clock=100 if "updates" in case else 99,
    )
    victim = run.replicas if case == "the centre" else 1
    run_state.mark_dead(victim)
    job._replace(victim)
    assert list(job.replacements) == [victim] * replaced


def test_a_replica_that_lost_one_of_its_parts_is_replaced() -> None:
    job = RayJob.__new__(RayJob)
    killed: list[Any] = []
    died: list[Any] = []
    replaced: list[int] = []
    job.ray = SimpleNamespace(get=lambda end: end, kill=killed.append)
    job.actors, job.workers = {1: "actor"}, {1: "worker"}  # type: ignore[dict-item]
    coordinator: Any = SimpleNamespace(died=lambda *told: died.append(told))
    job.coordinator = coordinator
    job._replace = replaced.append  # type: ignore[method-assign]
    job._handle_end(1, Exit(LEFT, "part 1 died"))
    assert (killed, died, replaced) == (["actor"], [(1, "part 1 died")], [1])
    assert not job.actors
    assert not job.workers


def test_actors_that_are_starting_are_asked_for_the_memory_of_the_new_epoch() -> None:
    """What they were asked before is closed by then: they could not share memory for the rest of the run."""
    job, asked = RayJob.__new__(RayJob), []
    actor = SimpleNamespace(
        describe_process=SimpleNamespace(remote=lambda offer: asked.append(offer) or offer)
    )
    job.memory_file, job.epoch, job.replacements = None, 0, {1: (actor, "info of the last epoch")}
    job._lend()
    try:
        assert asked == [job.offer]
        assert job.replacements == {1: (actor, job.offer)}
    finally:
        job.memory_file.close()  # type: ignore[attr-defined]


@pytest.fixture
def ray() -> None:
    pytest.importorskip("ray")


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a one-node cluster that nobody in the tests started."""
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}  # of this cluster alone
    with pytest.MonkeyPatch.context() as patch:
        for name, value in token.items():
            patch.setenv(name, value)
        pytest.importorskip("ray")
        yield from _clusters()


def _clusters() -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix="mray")
    bare = [sys.executable, "-m", "ray.scripts.scripts"]
    begin = ["start", "--head", "--port", "0", "--num-cpus", "3", "--include-dashboard", "false"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    given = ["--temp-dir", folder, "--disable-usage-stats", "--block"]
    with (Path(folder) / "said").open("w") as said:
        process = subprocess.Popen([*bare, *begin, *given], env=environment, stdout=said, stderr=said)
        try:
            address = Path(folder) / "ray_current_cluster"
            until(lambda: address.exists() or process.poll() is not None, "a Ray cluster")
            assert process.poll() is None, (Path(folder) / "said").read_text()
            yield address.read_text().strip()
        finally:
            process.terminate()
            process.wait(60)
            shutil.rmtree(folder, ignore_errors=True)


# -- the same Run, the same numbers -----------------------------------------------------------------------


# before the tests with ``cluster``, whose token would differ from the one that Ray keeps for this process
@pytest.mark.slow
@pytest.mark.usefixtures("ray")
@pytest.mark.parametrize("length", [30, 40])
def test_rays_sockets_fit_whatever_the_folder_of_temporary_files(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with tempfile.TemporaryDirectory(prefix="m", dir="/tmp") as parent:
        folder = Path(f"{parent}/".ljust(length, "x"))
        folder.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        with ray_cluster.cluster(1) as ray:
            assert ray.is_initialized()
        assert not list(folder.iterdir())


@pytest.mark.slow
@pytest.mark.usefixtures("ray")
def test_all_reduce_gives_the_same_bits_as_the_local_launcher(tmp_path: Path) -> None:
    fields = ("--strategy", "all-reduce", "--updates", 30)
    with training(tmp_path / "ray", "cartpole-gala", *_SHORT, *fields, *_RAY) as command:
        assert command.wait() == 0, command.said()
        summary, pids = command.summary(), command.pids()
        command.leaves_nothing()
    alone(tmp_path / "alone", *fields)
    assert same(tmp_path / "ray", tmp_path / "alone")
    assert (summary["launcher"], summary["exit"]) == ("ray", "finished")
    assert len(set(pids.values())) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("ray")
def test_learners_with_actors_share_a_replay_service(tmp_path: Path) -> None:
    with training(tmp_path / "run", "cartpole-service-dqn", *SERVICE, *_RAY) as command:
        assert command.wait() == 0, command.said()
        assert_both_learned_from_actors(command)
        command.leaves_nothing()


@pytest.mark.slow
def test_it_runs_on_a_cluster_by_its_address(cluster: str, tmp_path: Path) -> None:
    where = {"RAY_ADDRESS": cluster}
    given = ("train", "cartpole-gala", *_SHORT, *_RAY, "--strategy", "parameter-server", "--updates", 40)
    with Command(tmp_path / "run", *given, "--out", tmp_path / "run", environment=where) as command:
        assert command.wait() == 0, command.said()
        assert command.summary()["updates"] >= 40
        assert len(set(command.pids().values())) == 3, "the centre has a process of its own"
        command.leaves_nothing()
    assert checkpoint.parts(tmp_path / "run/checkpoints/last") == [0, 1, 2]


@pytest.mark.slow
def test_a_cluster_without_room_is_a_refusal(cluster: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    given = ("train", "cartpole-gala", "--launcher", "ray", "--replicas", 4, "--updates", 2, "--out", folder)
    with Command(folder, *given, environment={"RAY_ADDRESS": cluster}) as command:
        assert command.wait() == 2, command.said()
        assert "found no room for 4 members" in command.said()
        assert not folder.exists()


# -- deaths -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("ray")
@pytest.mark.parametrize(("strategy", "victim"), [("gala", 1), ("all-reduce", 0)])
def test_a_dead_replica_is_replaced_and_goes_on_from_a_living_ones_state(
    strategy: str, victim: int, tmp_path: Path
) -> None:
    other = 1 - victim
    fields = ("--env-steps", 10**9, "--strategy", strategy, "--record-every-seconds", 0.05)
    with training(tmp_path / "run", "cartpole-gala", *_SHORT[:2], *_RAY, *fields) as command:
        command.learning(2)
        first = command.pids()
        os.kill(first[victim], signal.SIGKILL)
        (died,) = until(lambda: command.events("died"), "the death to be noticed")
        (joined,) = until(lambda: command.events("joined"), f"a replacement; it said: {command.said()}")
        at_joining = len(command.records(victim))
        until(lambda: len(command.records(victim)) > at_joining + 3, "what the new one learns")
        command.process.send_signal(signal.SIGTERM)
        assert command.wait() == 143, command.said()
        assert command.summary()["dead_replicas"] == []
        assert command.pids()[victim] != first[victim]
        assert command.pids()[other] == first[other], "the living one's process stays"
        mine, theirs = command.records(victim), command.records(other)
        command.leaves_nothing()
    assert (died["member"], joined["member"]) == (victim, victim)
    # the other went on in between, and its clock is where the new one starts: never at zero
    meanwhile = [r for r in theirs if died["time_seconds"] < r["time_seconds"] < joined["time_seconds"]]
    assert meanwhile[-1]["updates"] > meanwhile[0]["updates"]
    after = [r for r in mine if r["time_seconds"] > joined["time_seconds"]]
    assert after[0]["updates"] > meanwhile[-1]["updates"]
    assert {r["heard"] for r in after[1:]} >= {2}
    if strategy == "all-reduce":
        one, two = params(tmp_path / "run")
        assert torch.equal(one, two)


@pytest.mark.slow
@pytest.mark.usefixtures("ray")
def test_all_killed_is_a_failure_that_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    fields = ("--env-steps", 10**9, "--checkpoint-every-env-steps", 2_000)
    with training(tmp_path / "run", "cartpole-gala", *_SHORT[:2], *_RAY, *fields) as command:
        command.until_checkpoint()
        for pid in command.pids().values():
            os.kill(pid, signal.SIGKILL)
        assert command.wait() == 1
        assert "all replicas died. See logs/" in command.said()
        command.leaves_nothing()
    assert checkpoint.damage(checkpoint.newest(tmp_path / "run/checkpoints")) is None
