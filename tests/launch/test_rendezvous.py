"""How ranks find one another: epochs under one store, and the memory of one host."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from murmurate.cli.main import main
from murmurate.errors import Refusal
from murmurate.fabric.network.authenticated_store import AuthenticatedStore
from murmurate.fabric.processes.fork_server import fork_server
from murmurate.fabric.processes.shared_memory import SharedMemoryFile
from murmurate.launch import rendezvous
from murmurate.launch.addresses import own_address
from murmurate.launch.host_memory import MemoryOffer, Process, borrow, lend, this_host
from murmurate.launch.job_spec import JobSpec, MemberHost, check_folder, fresh_secret, write_proof
from murmurate.launch.rendezvous import Environment, Rendezvous
from murmurate.launch.secret import drawn_secret, weakness
from murmurate.training.worker_context import Resume
from waiting import DEADLINE_SECONDS, until

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="memory is lent through /proc")


@pytest.fixture
def server() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def around(server: TCPStore, rank: int, size: int = 2) -> Environment:
    return Environment(rank, size, 1, "127.0.0.1", server.port, 0, "test", agent_store=True)


def job(ranks: Rendezvous, folder: str) -> JobSpec:
    resume = Resume(Path(folder) / "last", {0: 0, 1: 0}, {"env_steps": 7}, 3.0)
    return JobSpec("test", ranks.epoch, 2, ranks.offer, 0.0, folder=folder, resume=resume)


def in_thread(act: Callable[[], Any]) -> Callable[[], Any]:
    """Begin ``act``; calling the result waits for its value, or raises its error."""
    found: list[Any] = []

    def go() -> None:
        try:
            found.append(act())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=go, daemon=True)
    thread.start()

    def value() -> Any:
        thread.join(60)
        assert found, "it is still waiting"
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]

    return value


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


# -- secrets ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def secret(monkeypatch: pytest.MonkeyPatch, text: str) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setenv("MURMURATE_SECRET", text)
        yield


@pytest.mark.parametrize(("leaders", "others"), [("A", ""), ("", "A"), ("A", "B")])
def test_ranks_with_different_secrets_refuse_each_other_by_name(
    leaders: str, others: str, server: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"A": drawn_secret(), "B": drawn_secret(), "": ""}
    with secret(monkeypatch, given[others]):
        one = Rendezvous(around(server, 1))
    with secret(monkeypatch, given[leaders]):
        leader = Rendezvous(around(server, 0))
    announced = in_thread(one.join)
    host = re.escape(socket.gethostname())
    with pytest.raises(Refusal, match=rf"rank 1 \(process {os.getpid()} on '{host}'\) has another M"):
        leader.gather()
    with pytest.raises(Refusal, match="rank 0 has another MURMURATE_SECRET than rank 1, or none"):
        announced()


def test_the_secret_of_the_environment_is_that_of_every_message(
    server: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MURMURATE_SECRET", drawn_secret())
    one = Rendezvous(around(server, 1))
    announced = in_thread(one.join)
    leader = Rendezvous(around(server, 0))
    leader.gather()
    assert fresh_secret() == ""
    leader.announce(dataclasses.replace(job(leader, "/runs/first"), offer=None))
    spec = announced()
    hosts = [
        MemberHost(spec, ranks.store, [rank], leads=ranks.leads, address="127.0.0.1")
        for rank, ranks in ((0, leader), (1, one))
    ]
    hosts[0].run_state.request_stop()
    until(lambda: hosts[1].run_state.stop_requested)
    monkeypatch.delenv("MURMURATE_SECRET")
    with pytest.raises(Refusal, match="this host does not have MURMURATE_SECRET, and the one"):
        MemberHost(spec, one.store, [1], leads=False, address="127.0.0.1")
    for host in hosts:
        host.close()


@pytest.mark.parametrize("key", ["current", "offer", "announcement", "rank/1", "folder"])
def test_what_a_stranger_writes_into_the_store_is_refused(
    key: str, server: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """He flips one bit of what was written, and of his own signs what he pleases."""
    monkeypatch.setenv("MURMURATE_SECRET", drawn_secret())
    leader, one = Rendezvous(around(server, 0)), Rendezvous(around(server, 1))
    place = "murmurate/test" if key in ("current", "folder") else f"murmurate/test/epoch-{leader.epoch}"
    leader.claimed(Path("/runs/first"))
    first = in_thread(leader.gather)
    until(lambda: server.check(["murmurate/test/current"]))
    if key != "rank/1":
        one._enter(leader.epoch)
        one._register("a nonce")
        first()
        leader.announce(job(leader, "/runs/first"))
        true = server.get(f"{place}/{key}")
        server.set(f"{place}/{key}", true[:-1] + bytes([true[-1] ^ 1]))
        one = Rendezvous(around(server, 1))
        with pytest.raises(Refusal, match=r"rank 0 has another .* or a stranger has written"):
            Rendezvous(around(server, 0)).earlier_folder() if key == "folder" else one.join()
    else:
        AuthenticatedStore(server, place, b"").set(key, b"{}")
        with pytest.raises(Refusal, match=r"rank 1 has another .* or a stranger has written"):
            first()


def test_a_strangers_word_neither_ends_a_rank_nor_reports_its_death(
    server: TCPStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rendezvous, "_POLL_SECONDS", 0.0)
    monkeypatch.setenv("MURMURATE_SECRET", drawn_secret())
    leader, one = Rendezvous(around(server, 0)), Rendezvous(around(server, 1))
    one._enter(leader.epoch)
    stranger = AuthenticatedStore(server, f"murmurate/test/epoch-{leader.epoch}", b"")
    stranger.set("over", b"0")
    stranger.set("exit/1", b'{"how": "failed", "error": "says the stranger"}')
    assert leader.reported(1) is None
    looks = iter([False] * 100 + [True])
    with caplog.at_level(logging.WARNING):
        assert one.await_dismissal(lambda: next(looks)) is None
    assert 0 < sum("refused [store" in record.message for record in caplog.records) < 10, (
        "the log stays short"
    )
    leader.dismiss(3, deadline_seconds=0.0)
    assert one.await_dismissal(lambda: True) == 3


@pytest.mark.parametrize(
    "weak", ["secret", "x" * 64, "password" * 8, "0123456789abcdef" * 4, "correct horse battery"]
)
def test_a_secret_that_can_be_guessed_is_refused(weak: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MURMURATE_SECRET", weak)
    no_store = Environment(0, 2, 1, "127.0.0.1", 1, 0, "none", True)
    for act in (fresh_secret, lambda: Rendezvous(no_store)):
        with pytest.raises(Refusal, match=r"MURMURATE_SECRET can be guessed: it .*murmurate secret"):
            act()


def test_a_printed_secret_is_a_good_one(capsys: pytest.CaptureFixture[str]) -> None:
    secrets = set()
    for _ in range(2):
        assert main(["secret"]) == 0
        secrets.add(capsys.readouterr().out.strip())
    assert len(secrets) == 2
    assert not any(weakness(text) for text in secrets)


def test_ranks_without_a_run_id_agree_on_a_drawn_one(server: TCPStore) -> None:
    def unnamed(rank: int) -> Environment:
        return dataclasses.replace(around(server, rank), run_id="none")

    one, leader, again = (Rendezvous(unnamed(rank)) for rank in (1, 0, 0))
    assert one.run_id == leader.run_id == again.run_id
    assert re.fullmatch("[0-9a-f]{16}", one.run_id)
    server.set("murmurate/run_id", "../../elsewhere")
    with pytest.raises(Refusal, match="a stranger has written"):
        Rendezvous(unnamed(0))


# -- memory -----------------------------------------------------------------------------------------------


def add_one(offer: MemoryOffer) -> None:
    cells = borrow(offer).counters("cells", (1,))
    cells[0] += 1


def test_another_process_borrows_the_same_memory() -> None:
    memory_file = SharedMemoryFile.create()
    offer = lend(memory_file)
    memory_file.counters("cells", (1,))[0] = 41
    process = fork_server().Process(target=add_one, args=(offer,))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert borrow(offer).counters("cells", (1,))[0] == 42
    memory_file.close()


def test_what_is_not_the_lent_memory_is_not_taken(tmp_path: Path) -> None:
    memory_file = SharedMemoryFile.create()
    offer = lend(memory_file)
    with (tmp_path / "file").open("w") as file:
        not_memory = MemoryOffer(offer.host, offer.pid, file.fileno(), offer.mark)
        assert borrow(not_memory) is None
    assert borrow(MemoryOffer("another host", offer.pid, offer.descriptor, offer.mark)) is None
    assert borrow(MemoryOffer(offer.host, offer.pid, offer.descriptor, offer.mark + 1)) is None
    assert borrow(MemoryOffer(offer.host, offer.pid, -1, offer.mark)) is None
    other_file = SharedMemoryFile.create()
    other_file.counters("run_state", (3,))
    not_lent = MemoryOffer(offer.host, offer.pid, other_file.descriptor, offer.mark)
    opened = len(list(Path("/proc/self/fd").iterdir()))
    assert borrow(not_lent) is None
    assert len(list(Path("/proc/self/fd").iterdir())) == opened
    other_file.close()
    memory_file.close()
    assert borrow(offer) is None


def test_a_process_that_ended_is_gone_even_before_it_is_reaped() -> None:
    mine = Process.this()
    assert mine.is_gone() is False
    assert Process("another host", mine.pid, mine.created).is_gone() is None
    assert Process(this_host(), mine.pid, mine.created - 5).is_gone() is True, "a later one of that number"
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, and a zombie
    assert Process(this_host(), child.pid, 0).is_gone() is True
    child.wait()
    assert Process(this_host(), child.pid, 0).is_gone() is True


def test_a_process_is_not_gone_because_the_systems_clock_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Process.this()
    # the start that psutil reports moves with the clock: it adds the boot time, which Linux derives from it
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: 1e9)
    assert mine.is_gone() is False
