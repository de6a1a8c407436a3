"""How ranks find one another: epochs under one store, and the addresses of their hosts."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from launch.rendezvous_ranks import around, in_thread, job, needs_proc
from murmurate.errors import Refusal
from murmurate.launch import rendezvous
from murmurate.launch.addresses import own_address
from murmurate.launch.host_memory import Process
from murmurate.launch.job_spec import JobSpec, MemberHost, check_folder, write_proof
from murmurate.launch.rendezvous import Environment, Rendezvous
from murmurate.training.checkpoint import write_part
from murmurate.training.worker_context import Resume
from waiting import DEADLINE_SECONDS, until

pytestmark = needs_proc


def test_the_leaders_announcement_reaches_the_others_and_its_code_ends_them(server: TCPStore) -> None:
    one = Rendezvous(around(server, 1))
    announced = in_thread(one.join)
    leader = Rendezvous(around(server, 0))
    leader.gather()
    assert leader.offer is not None, "one process surely shares memory with itself"
    leader.announce(job(leader, "/runs/first"))
    assert announced().folder == "/runs/first"
    assert announced().leader == leader.process
    assert announced().resume == job(leader, "/runs/first").resume, "paths and ranks survive the store"
    for rank, ranks in ((0, leader), (1, one)):
        host = MemberHost(announced(), ranks.store, [rank], leads=ranks.leads, address="127.0.0.1")
        host.run_state.advance(rank, 10, 1)
    assert host.run_state.total_env_steps() == 20
    code = in_thread(lambda: one.await_dismissal(lambda: False))
    leader.dismiss(143)
    assert code() == 143


def test_replicas_count_from_the_checkpoint_before_they_have_read_their_parts(
    server: TCPStore, tmp_path: Path
) -> None:
    """As a run that is stopped before that has a summary, too. Replica 1, which had died, takes part 0."""
    leader = Rendezvous(around(server, 0, size=1))
    leader.gather()
    write_part(tmp_path / "last", 0, {"env_steps": 30, "updates": 3, "x": torch.zeros(1)})
    resume = Resume(tmp_path / "last", {0: 0, 1: 0}, {"replicas": 2, "replica_env_steps": [30, 20]}, 3.0)
    spec = dataclasses.replace(job(leader, str(tmp_path)), resume=resume)
    host = MemberHost(spec, leader.store, [0], leads=True, address="127.0.0.1")
    counts = [(host.run_state.env_steps(rank), host.run_state.clock(rank)) for rank in (0, 1)]
    host.close()
    assert counts == [(30, 3), (20, 3)]


def test_the_leader_does_not_wait_for_the_answer_of_a_rank_that_has_ended(server: TCPStore) -> None:
    leader, two = Rendezvous(around(server, 0, 3)), Rendezvous(around(server, 2, 3))
    two._enter(leader.epoch)
    ended = dataclasses.replace(Process.this(), created=0)
    leader.others = {
        rank: rendezvous.RankInfo("", process, "", "", True)
        for rank, process in ((1, ended), (2, Process.this()))
    }
    two.confirm_dismissal()
    begun = time.monotonic()
    leader.dismiss(0, deadline_seconds=DEADLINE_SECONDS)
    assert time.monotonic() - begun < DEADLINE_SECONDS / 2


def test_a_member_that_has_finished_waits_for_the_others_as_long_as_the_leader_lives(
    server: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    hours = iter(range(100))
    monkeypatch.setattr(rendezvous, "_POLL_SECONDS", 0.0)
    monkeypatch.setattr(rendezvous.time, "monotonic", lambda: 3600.0 * next(hours))
    looks = iter([False, False, False, True])
    assert Rendezvous(around(server, 1)).await_dismissal(lambda: next(looks)) is None
    assert list(looks) == [], "it looked until the leader was gone"


def test_a_job_of_another_version_is_refused_in_words(tmp_path: Path) -> None:
    """The constructor's TypeError was all that told of it."""
    spec = JobSpec("test", 1, 2, None, 0.0, folder=str(tmp_path))
    plain = dataclasses.asdict(spec)
    assert JobSpec.restored(plain) == spec
    for other in ({"versions": "murmurate 0.0.9"}, {"versions": "murmurate 0.0.9", "field": 1}):
        with pytest.raises(Refusal, match=r"rank 0 has murmurate 0\.0\.9, and this host murmurate"):
            JobSpec.restored({**plain, **other})
    del plain["versions"]
    with pytest.raises(Refusal, match="Install the same on every host"):
        JobSpec.restored(plain)


def test_an_announcement_of_an_earlier_start_is_not_taken(server: TCPStore) -> None:
    epochs = set()
    for number in ("first", "second"):
        one = Rendezvous(around(server, 1))  # before the leader: all that it finds is old
        announced = in_thread(one.join)
        leader = Rendezvous(around(server, 0))
        leader.gather()
        leader.announce(job(leader, number))
        assert announced().folder == number
        leader.close()
        assert leader.epoch == one.epoch
        epochs.add(one.epoch)
    assert len(epochs) == 2, "each start has an epoch of its own"


def test_one_job_after_another_has_an_epoch_and_a_folder_of_its_own(server: TCPStore, tmp_path: Path) -> None:
    """As in a script that trains twice; after the second, torch elastic starts the script again."""
    one = Rendezvous(around(server, 1))
    leader = Rendezvous(around(server, 0))
    for name in ("first", "second"):
        announced = in_thread(one.join)
        assert leader.earlier_folder() is None
        leader.claimed(tmp_path / name)
        leader.gather()
        leader.announce(job(leader, name))
        assert announced().folder == name
        code = in_thread(lambda: one.await_dismissal(lambda: False))
        leader.dismiss(0)
        assert code() == 0
        one.end()
        leader.close()
        leader.end()
    again = Rendezvous(around(server, 0))
    for name in ("first", "second"):
        assert again.earlier_folder() == tmp_path / name
        again.end()


def test_jobs_of_two_rendezvous_of_one_process_may_alternate(server: TCPStore) -> None:
    """As where a program calls ``murmurate.run`` and ``train``, which have one each."""
    run, train = ([Rendezvous(around(server, rank)) for rank in (0, 1)] for _ in range(2))
    for number, (leader, one) in enumerate([run, train, train, run]):
        leader.begin()
        announced = in_thread(one.join)
        if number == 3:  # it sees that the last job was another's
            until(lambda: run[1].epoch == train[0].epoch)
        leader.gather()
        leader.announce(job(leader, str(number)))
        assert announced().folder == str(number)


def test_a_job_after_one_that_was_refused_begins(server: TCPStore) -> None:
    one, leader = Rendezvous(around(server, 1)), Rendezvous(around(server, 0))
    leader.refuse()
    with pytest.raises(Refusal, match="rank 0 refused"):
        one.join()
    one.end()
    announced = in_thread(one.join)
    leader.gather()
    leader.announce(job(leader, "/runs/second"))
    assert announced().folder == "/runs/second"


def test_a_refusal_of_the_leader_is_one_for_all(server: TCPStore) -> None:
    announced = in_thread(Rendezvous(around(server, 1)).join)
    leader = Rendezvous(around(server, 0))
    leader.refuse()
    with pytest.raises(Refusal, match="rank 0 refused"):
        announced()


def test_a_refusal_before_a_restart_is_not_one_for_the_restarted_ranks(
    server: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_GATHER_SECONDS", 30.0)
    earlier = Rendezvous(around(server, 0))
    earlier.refuse()
    one = Rendezvous(dataclasses.replace(around(server, 1), restarts_allowed=1))
    announced = in_thread(one.join)
    until(lambda: one.epoch == earlier.epoch)
    leader = Rendezvous(around(server, 0))
    leader.gather()
    leader.announce(job(leader, "/runs/first"))
    assert announced().folder == "/runs/first"
    announced = in_thread(one.join)
    leader = Rendezvous(around(server, 0))
    leader.gather()
    leader.refuse()
    with pytest.raises(Refusal, match="rank 0 refused"):
        announced()


def test_members_that_do_not_arrive_are_named(
    server: TCPStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rendezvous, "_GATHER_SECONDS", 0.1)
    monkeypatch.setattr(rendezvous, "_QUIET_SECONDS", 0.01)
    with pytest.raises(Refusal, match=r"ranks \[1, 2\] did not register"):
        Rendezvous(around(server, 0, size=3)).gather()
    with pytest.raises(Refusal, match="rank 0 did not announce"):
        Rendezvous(Environment(1, 2, 1, "127.0.0.1", server.port, 0, "other", True)).join()
    assert capsys.readouterr().err.splitlines() == [
        "murmurate: waiting for rank(s) [1, 2], which have not begun yet (at most 0.1 s)",
        "murmurate: rank 1 waits for rank 0, which has announced no job yet (at most 0.1 s)",
    ]


def test_the_folder_outlives_an_epoch(server: TCPStore, tmp_path: Path) -> None:
    first = Rendezvous(around(server, 0))
    assert first.earlier_folder() is None
    first.claimed(tmp_path)
    assert Rendezvous(around(server, 0)).earlier_folder() == tmp_path.resolve()


def test_no_store_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_STORE_SECONDS", 0.5)
    with pytest.raises(Refusal, match="MASTER_ADDR and MASTER_PORT"):
        Rendezvous(Environment(1, 2, 1, "127.0.0.1", 1, 0, "none", True))


def test_a_run_folder_that_is_another_one_here_is_refused(server: TCPStore, tmp_path: Path) -> None:
    leader = Rendezvous(around(server, 0))
    right = dataclasses.replace(job(leader, str(tmp_path)), proof=write_proof(tmp_path))
    check_folder(right)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for folder in (elsewhere, tmp_path / "nowhere"):
        with pytest.raises(Refusal, match="give --out a folder that they share"):
            check_folder(dataclasses.replace(right, folder=str(folder)))


@pytest.mark.parametrize("address", ["no-such-host.invalid", "a..b"])
def test_an_address_without_a_route_is_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MURMURATE_ADDRESS", raising=False)
    with pytest.raises(Refusal, match=f"finds no route to {address}. Set MURMURATE_ADDRESS"):
        own_address(address)


def test_the_own_address_is_that_of_the_route_of_either_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    """On hosts that have routes of some protocols only."""
    routes = {socket.AF_INET: "192.0.2.7", socket.AF_INET6: "2001:db8::7"}

    class Probe(contextlib.nullcontext[Any]):
        def __init__(self, family: socket.AddressFamily, *_: int) -> None:
            super().__init__(self)
            self.family = family

        def connect(self, target: Any) -> None:
            if self.family not in routes:
                raise OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))

        def getsockname(self) -> Any:
            return (routes[self.family], 1)

    found = [
        (socket.AF_INET6, 2, 17, "", ("2001:db8::1", 9, 0, 0)),
        (socket.AF_INET, 2, 17, "", ("192.0.2.1", 9)),
    ]
    resolve = socket.getaddrinfo
    with monkeypatch.context() as patch:
        patch.setattr(socket, "socket", Probe)
        patch.setattr(
            socket, "getaddrinfo", lambda host, *a, **k: found if host == "first" else resolve(host, *a, **k)
        )
        assert own_address("first") == "192.0.2.7"
        assert own_address("2001:db8::1") == "2001:db8::7"
        assert own_address("127.0.0.1") == "127.0.0.1"
        assert own_address("::1") == "::1"
        assert own_address("::1", ["2001:db8::1"]) == "2001:db8::7"  # on the leader's own host
        del routes[socket.AF_INET]
        assert own_address("first") == "2001:db8::7"
        routes.clear()
        with pytest.raises(Refusal, match=r"no route to first\. Set MURMURATE_ADDRESS"):
            own_address("first")
        patch.setenv("MURMURATE_ADDRESS", "192.0.2.8")
        assert own_address("first") == "192.0.2.8"
