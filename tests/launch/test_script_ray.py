"""``murmurate.run(launcher="ray")``: members of a user's own script as actors of a Ray of this host alone."""

from __future__ import annotations

import os
import signal
import sys

import pytest

import murmurate
from launch.test_script_ranks import nothing, one_breaks, one_is_killed, plain, train
from murmurate.errors import MissingExtra, Refusal, RunFailed
from murmurate.fabric.processes.spawn import Died

pytestmark = pytest.mark.timeout(600)


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match=r"pip install 'murmurate\[ray\]'"):
        murmurate.run(nothing, launcher="ray")


def test_a_replica_of_several_devices_is_refused():
    with pytest.raises(Refusal, match=r"names 2 devices for one replica, and under Ray a replica has one"):
        murmurate.run(nothing, launcher="ray", devices=[("cuda:0", "cuda:1")])


def test_devices_of_other_hosts_are_not_guessed():
    with pytest.raises(Refusal, match=r"Ray's hosts may have others\. Name as many as"):
        murmurate.run(nothing, launcher="ray", devices="auto")


def test_a_main_that_cannot_be_sent_is_refused_before_ray_starts():
    with pytest.raises(Refusal, match=r"main cannot be sent to a process .*function at module level"):
        murmurate.run(lambda loop: None, launcher="ray")


@pytest.fixture(scope="module")
def ray():
    """One Ray for all tests of this file, as it takes ten seconds to start."""
    ray = pytest.importorskip("ray")
    ray.init(
        address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR",
        object_store_memory=100 * 2**20, runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}},
    )  # fmt: skip
    yield ray
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.usefixtures("ray")
def test_the_members_give_the_same_bits_as_local_processes_and_print(capfd):
    assert murmurate.run(plain, replicas=2, launcher="ray") == murmurate.run(plain, replicas=2)
    said = capfd.readouterr().out.splitlines()
    assert said.count("hello from 0 of 2") == 2, "one line of each run"
    assert "hello from 1 of 2" not in said
    one, other = murmurate.run(plain, replicas=2, strategy="parameter-server", launcher="ray", output="all")
    assert one["weight"] == other["weight"]
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0] hello from 0 of 2", "[1] hello from 1 of 2"]


@pytest.mark.slow
@pytest.mark.usefixtures("ray")
def test_the_others_go_on_without_one_that_is_killed():
    assert murmurate.run(one_is_killed, replicas=2, launcher="ray") == [1, Died(1, None)]


@pytest.mark.slow
@pytest.mark.usefixtures("ray")
def test_one_that_raises_ends_all_and_its_traceback_is_told():
    with pytest.raises(
        RunFailed, match=r"(?s)replica 1 failed: OddError: no such image \(404\).*in one_breaks"
    ):
        murmurate.run(one_breaks, replicas=2, launcher="ray")


def kills_itself(loop):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.usefixtures("ray")
def test_if_all_are_killed_the_run_failed():
    with pytest.raises(RunFailed, match="all replicas ended without a result"):
        murmurate.run(kills_itself, replicas=1, launcher="ray")


@pytest.mark.slow
@pytest.mark.usefixtures("ray")
def test_a_result_of_any_kind_that_pickles_comes_back():
    (found,) = murmurate.run(train, launcher="ray")
    assert found["what cannot be sent"] is train
