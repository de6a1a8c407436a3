"""``murmurate.run`` in a script that torchrun started: its ranks are the replicas."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import murmurate
from launch.test_torchrun import Ranks
from murmurate.errors import Refusal
from murmurate.fabric.processes.spawn import FINISHED, REFUSED, Died, Exit, Worker
from murmurate.launch import script_ranks
from murmurate.strategies.gala import GALA
from sessions import session
from waiting import DEADLINE_SECONDS, until

_END_SECONDS = (
    2 * DEADLINE_SECONDS
)  # of a script, whose ranks may wait for one another as long as a test waits
_ENGINE = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
HERE = Path(__file__).parents[1]


def train(loop):
    torch.manual_seed(1)
    net = torch.nn.Linear(4, 1)
    optimizer = loop.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), net)
    source = torch.Generator().manual_seed(0)
    for batch in loop.inputs([torch.randn(8, 4, generator=source) for _ in range(10)]):
        optimizer.zero_grad()
        net(batch).pow(2).mean().backward()
        optimizer.step()
    print("hello from", loop.rank, "of", loop.size)
    loop.finish(DEADLINE_SECONDS)
    return {"rank": loop.rank, "weight": loop.agreed()["weight"], "what cannot be sent": train}


def plain(loop):
    found = train(loop)
    return {"rank": found["rank"], "weight": found["weight"].tolist()}


def one_is_killed(loop):
    optimizer = loop.wrap_optimizer(torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1))
    for step in range(30):
        if loop.rank == 1 and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
    return optimizer.last.heard


def the_centre_is_killed(loop):
    """By rank 0, once the centre has written its pid; no replica exchanges anything."""
    loop.wrap_optimizer(torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1))
    file = Path(os.environ["TEST_FOLDER"]) / "pid"
    if loop.is_centre:
        file.with_suffix(".written").write_text(str(os.getpid()))
        file.with_suffix(".written").rename(file)
    elif loop.rank == 0:
        until(file.exists, "the pid of the centre")
        os.kill(int(file.read_text()), signal.SIGKILL)


class OddError(Exception):
    """Its arguments are not its message, so it cannot be unpickled."""

    def __init__(self, code, why):
        super().__init__(f"{why} ({code})")


def one_breaks(loop):
    optimizer = loop.wrap_optimizer(torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1))
    for step in range(10**9):  # without end, for a rank that is not stopped
        if loop.rank == 1 and step == 3:
            raise OddError(404, "no such image")
        optimizer.step()


_SCRIPT = """
import sys
import murmurate
from launch import test_script_ranks as t
from waiting import DEADLINE_SECONDS

if __name__ == "__main__":
    for main, strategy in {calls}:
        given = dict(strategy=strategy, output="all", deadline_seconds=DEADLINE_SECONDS)
        result = murmurate.run(getattr(t, main), **given)
        print("RESULT", main, strategy, result, flush=True)
"""


def script(folder: Path, *calls: tuple[str, str]) -> Path:
    path = folder / "own.py"
    path.write_text(_SCRIPT.format(calls=calls))
    return path


def environment() -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}


def torchrun(folder: Path, *calls: tuple[str, str]) -> Ranks:
    given = ("--standalone", "--nproc-per-node", 2, script(folder, *calls))
    return Ranks(folder, *given, environment=environment())


@contextlib.contextmanager
def by_hand(path: Path, ranks: int = 2) -> Iterator[list[subprocess.Popen[str]]]:
    """The ranks as an engine other than torch elastic starts them: it leaves the others alone."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = {"MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(ranks)}
        engine = _ENGINE | environment() | port
    with contextlib.ExitStack() as sessions:
        yield [
            sessions.enter_context(
                session(
                    [sys.executable, path],
                    env=os.environ | engine | {"RANK": str(rank), "OMP_NUM_THREADS": "1"},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                )
            )
            for rank in range(ranks)
        ]


def test_each_rank_is_one_replica_and_the_results_are_those_of_local_processes(tmp_path: Path) -> None:
    """Twice in one script: under all-reduce, and under a strategy with a centre."""
    with torchrun(tmp_path, ("plain", "all-reduce"), ("plain", "parameter-server")) as command:
        assert command.wait(_END_SECONDS) == 0, command.said()
        said = command.said()
        command.leaves_nothing()
    assert sorted(re.findall(r"^\[\d\] hello.*$", said, re.M)) == [
        f"[{rank}] hello from {rank} of 2" for rank in (0, 0, 1, 1)
    ]
    results = re.findall(r"^RESULT plain (\S+) (.*)$", said, re.M)
    for strategy in ("all-reduce", "parameter-server"):
        one, other = (result for name, result in results if name == strategy)
        assert one == other, "every rank has the results of all"
    local = murmurate.run(plain, replicas=2, deadline_seconds=DEADLINE_SECONDS)
    assert results[0][0] == "all-reduce"
    assert results[0][1] == str(local), "the same bits"


@pytest.mark.slow
def test_without_torch_elastic_the_others_go_on_without_a_rank_that_is_killed(tmp_path: Path) -> None:
    with by_hand(script(tmp_path, ("one_is_killed", "all-reduce"))) as ranks:
        said = [rank.communicate(timeout=_END_SECONDS)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, -signal.SIGKILL], said
    assert f"RESULT one_is_killed all-reduce {[1, Died(1, None)]}" in said[0]
    assert re.search(r"murmurate: replica 1 died \(process \d+ on ", said[0])


@pytest.mark.slow
def test_a_centre_that_is_killed_fails_the_run_after_all_replicas_have_ended(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TEST_FOLDER", str(tmp_path))
    with by_hand(script(tmp_path, ("the_centre_is_killed", "parameter-server"))) as ranks:
        said = [rank.communicate(timeout=_END_SECONDS)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1], said
    assert "the centre of parameter-server died before it had ended" in said[0]
    assert "another member has failed" in said[1]


@pytest.mark.slow
def test_a_rank_that_raises_ends_all_and_each_tells_why(tmp_path: Path) -> None:
    with by_hand(script(tmp_path, ("one_breaks", "all-reduce"))) as ranks:
        said = [rank.communicate(timeout=_END_SECONDS)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1], said
    for text in said:
        assert "replica 1 failed: OddError: no such image (404)" in text
        assert "in one_breaks" in text


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["all-reduce", "gala"])
def test_ranks_that_share_no_memory_talk_over_the_network(strategy: str, tmp_path: Path) -> None:
    path = script(tmp_path, ("plain", strategy))
    apart = "import os\nfrom murmurate.launch import host_memory, job_spec, rendezvous\n"
    apart += "for module in (host_memory, job_spec, rendezvous):\n"
    apart += "    module.this_host = lambda: f\"host {os.environ['RANK']}\"\n"
    path.write_text(apart + path.read_text())
    with by_hand(path) as ranks:
        said = [rank.communicate(timeout=_END_SECONDS)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    results = [re.findall(r"^RESULT .*$", text, re.M) for text in said]
    assert results[0] == results[1]
    if strategy == "all-reduce":
        assert str(murmurate.run(plain, replicas=2, deadline_seconds=DEADLINE_SECONDS)) in results[0][0]


def test_a_result_of_another_rank_arrives_if_it_is_plain() -> None:
    sent = {"loss": 0.5, "weights": [torch.ones(2)], "name": "a", "none": None}
    found = script_ranks._unpacked(script_ranks._packed(sent))
    assert torch.equal(found.pop("weights")[0], torch.ones(2))
    assert found == {"loss": 0.5, "name": "a", "none": None}
    assert script_ranks._unpacked(script_ranks._packed(lambda: 1)) is None


def nothing(loop):
    pass


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"replicas": 3},
            r"started 2 rank\(s\), each of them a replica: they do not make replicas=3. "
            r"Leave replicas out, or start 3 rank",
        ),
        ({"parts": 3}, r"2 rank\(s\), each of them a part of a replica of 3 parts.*whole replicas. Start 3"),
        ({"launcher": "local"}, r"started this script 2 times.*launcher='local'. Leave launcher out"),
        ({"launcher": "ray"}, r"launcher='ray'. Leave launcher out"),
        ({"launcher": "inline"}, r"launcher='inline'. Leave launcher out"),
        ({"strategy": "solo"}, "solo trains one replica, and the run has 2"),
    ],
)
def test_what_does_not_fit_the_ranks_is_refused(given, sentence, monkeypatch) -> None:
    for name, value in _ENGINE.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Refusal, match=sentence):
        murmurate.run(nothing, **given)


@pytest.mark.parametrize(
    ("gpus", "devices", "expected"),
    [
        (2, "auto", (("cuda:1",),)),
        (1, "auto", (("cuda:0",),)),
        (0, "auto", (("cpu",),)),
        (2, ["cuda:7", "cuda:1"], (("cuda:7",), ("cuda:1",))),  # the first is the other rank's
        (2, ["cuda:1", "cuda:7"], None),
    ],
)
def test_a_rank_has_the_gpu_of_its_number_on_its_host(gpus, devices, expected, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(script_ranks, "run_rank", lambda settings: settings.devices)
    for name, value in (_ENGINE | {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}).items():
        monkeypatch.setenv(name, value)
    if expected is None:
        with pytest.raises(Refusal, match="devices has 'cuda:7', and torch sees 2 GPUs here"):
            murmurate.run(nothing, devices=devices)
    else:
        assert murmurate.run(nothing, devices=devices) == expected


def test_a_rank_with_other_settings_tells_rank_0() -> None:
    """Rank 0 waited for it for a minute, and said that it had died."""
    reports: list[Exit] = []
    rendezvous = SimpleNamespace(
        environment=SimpleNamespace(rank=1),
        leads=False,
        begin=list,
        join=lambda: SimpleNamespace(proof="of other settings"),
        report=reports.append,
    )
    settings = SimpleNamespace(strategy=GALA(), grid=(1, 1), seed=3, workers=1, collectives=False)
    members = script_ranks._Members(settings, rendezvous)  # type: ignore[arg-type]
    with pytest.raises(Refusal, match="with other settings") as refusal, members:
        pass
    assert reports == [Exit(REFUSED, str(refusal.value))]


def test_a_centre_reports_its_end_before_it_answers_the_ranks_that_have_not_closed(monkeypatch) -> None:
    """They close once rank 0 knows that all have ended: it waited for them to no purpose."""
    deeds: list[str] = []
    host = SimpleNamespace(
        run_state=SimpleNamespace(mark_finished=lambda rank: deeds.append(f"{rank} finished")),
        fabric=lambda rank, deadline_seconds: None,
        flush=lambda: deeds.append("flushed"),
        close=lambda: deeds.append("closed"),
    )
    monkeypatch.setattr(script_ranks, "take_signals", lambda _: None)
    monkeypatch.setattr(script_ranks, "torchrun_environment", lambda: SimpleNamespace())
    monkeypatch.setattr(script_ranks.Rendezvous, "client", lambda *_: None)
    monkeypatch.setattr(script_ranks, "MemberHost", lambda *_, **__: host)
    settings = SimpleNamespace(
        members=3, deadline_seconds=1.0, run_to_exit=lambda fabric, out: Exit(FINISHED, result=1)
    )
    spec, worker = SimpleNamespace(run_id="a run", epoch=1), Worker(0, None, None)  # type: ignore[arg-type]
    assert script_ranks._run_centre(settings, spec, "here", worker) == Exit(FINISHED)  # type: ignore[arg-type]
    assert deeds == ["2 finished", "flushed"]
    worker.afterwards.close()
    assert deeds[-1] == "closed"


def test_hogwild_over_several_hosts_is_refused(monkeypatch) -> None:
    for name, value in (_ENGINE | {"LOCAL_WORLD_SIZE": "1"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Refusal, match="hogwild needs shared memory, which a group of 2 hosts does not offer"):
        murmurate.run(nothing, strategy="hogwild")


def test_the_launcher_torchrun_outside_torchrun_names_the_command() -> None:
    with pytest.raises(
        Refusal, match=r"did not start this script. Run: torchrun --nproc-per-node 2 script.py"
    ):
        murmurate.run(nothing, launcher="torchrun")
