"""The torchrun launcher: real ranks of torch elastic on this host, and what happens when one dies."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch.distributed import TCPStore

from faults.commands import Command, Written
from launch.rendezvous_ranks import around, in_thread
from launch.test_inline import params
from murmurate.cli.main import main
from murmurate.errors import Refusal
from murmurate.fabric.processes.spawn import REFUSED, Exit
from murmurate.launch import launcher, torchrun
from murmurate.launch.host_memory import Process
from murmurate.recipes import recipe
from murmurate.strategies import strategies
from murmurate.training import checkpoint
from murmurate.training.run import Run
from waiting import DEADLINE_SECONDS

pytestmark = pytest.mark.timeout(900)
_ENGINE = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
_SHORT = ("--simulators", 4, "--eval-episodes", 1, "--stop-at-return", "none", "--seed", 3)
SERVICE = (
    *("--actors", 1, "--simulators", 2, "--samplers", 1, "--replay.learning-starts", 200),
    *("--agent.batch", 16, "--env-steps", 2_000, "--record-every-seconds", 0.1, "--eval-episodes", 1),
)


class Ranks(Command):
    """``torchrun -m murmurate ...``: its ranks have sessions of their own, but share its TMPDIR."""

    program = ("torch.distributed.run",)

    def members(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                ours = process.environ().get("TMPDIR") == str(self.temporary)
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def left(self) -> list[str]:
        """Without torch elastic's own log folder, which it leaves to its user."""
        return [path for path in super().left() if "torchelastic_" not in path]


def ranks(
    folder: Path,
    *fields: object,
    size: int = 2,
    restarts: int = 0,
    verb: str = "train",
    recipe: str = "cartpole-gala",
) -> Ranks:
    engine = ("--standalone", "--nproc-per-node", size, "--max-restarts", restarts, "-m", "murmurate")
    what = ("train", recipe, "--out", folder) if verb == "train" else (verb, folder)
    return Ranks(folder, *engine, *what, "--launcher", "torchrun", *fields)


def alone(folder: Path, *fields: object) -> None:
    """The same run by the local launcher."""
    given = [str(field) for field in (*_SHORT, *fields)]
    assert main(["train", "cartpole-gala", "--replicas", "2", "--out", str(folder), *given]) == 0


def same(one: Path, other: Path) -> bool:
    pairs = list(zip(params(one), params(other), strict=True))
    return len(pairs) == 2 and all(torch.equal(x, y) for x, y in pairs)


# -- the same Run, the same numbers -----------------------------------------------------------------------


def test_all_reduce_gives_the_same_bits_as_the_local_launcher(tmp_path: Path) -> None:
    fields = ("--strategy", "all-reduce", "--updates", 30)
    with ranks(tmp_path / "ranks", *_SHORT, *fields) as command:
        assert command.wait() == 0, command.said()
        summary, said = command.summary(), command.said()
        pids = command.pids()
        command.leaves_nothing()
    alone(tmp_path / "alone", *fields)
    assert same(tmp_path / "ranks", tmp_path / "alone")
    assert (summary["launcher"], summary["replicas"], summary["exit"]) == ("torchrun", 2, "finished")
    assert len(set(pids.values())) == 2
    assert said.count("The run is in") == 1, "only rank 0 speaks"
    assert "A death ends the run" in said, "said at the start"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["parameter-server", "hogwild"])
def test_ranks_share_memory_and_rank_0_serves_the_centre(strategy: str, tmp_path: Path) -> None:
    fields = ("--compression", "int8") if strategy == "parameter-server" else ()
    with ranks(tmp_path / "run", *_SHORT, "--strategy", strategy, "--updates", 40, *fields) as command:
        assert command.wait() == 0, command.said()
        assert command.summary()["updates"] >= 40
        assert command.summary()["disagreement_final"] < 0.5
        pids = command.pids()
        warned = [e["message"] for e in command.events("warning") if "compression" in e["message"]]
        assert len(warned) == bool(fields)
    if strategy == "parameter-server":
        assert pids[2] == pids[0] != pids[1]
        assert checkpoint.parts(tmp_path / "run/checkpoints/last") == [0, 1, 2]


def assert_both_learned_from_actors(command: Written) -> None:
    """What ends a run of ``SERVICE`` with two learners."""
    summary = command.summary()
    assert (summary["exit"], summary["dead_replicas"]) == ("finished", [])
    assert summary["env_steps"] >= 2_000
    for rank in range(2):
        last = command.records(rank)[-1]
        assert last["updates"] > 0
        assert last["replay_transitions"] > 0
        assert last["actor_deaths"] == 0
    assert len(command.events("actor began")) == 2


@pytest.mark.slow
def test_learners_with_actors_share_a_replay_service(tmp_path: Path) -> None:
    with ranks(tmp_path / "run", *SERVICE, recipe="cartpole-service-dqn") as command:
        assert command.wait() == 0, command.said()
        assert_both_learned_from_actors(command)
        command.leaves_nothing()


_APART = """
import os, sys
from murmurate.launch import host_memory, job_spec, rendezvous
name = f"host {os.environ['RANK']}"
for module in (host_memory, job_spec, rendezvous):
    module.this_host = lambda: name
from murmurate.cli.main import main
sys.exit(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("all-reduce", ()),
        ("gala", ()),
        ("gala", ("--compression", "bfloat16")),
        ("parameter-server", ("--compression", "int8")),
        ("dpsgd", ("--strategy.threads", 1)),
    ],
)
def test_ranks_that_share_no_memory_talk_over_the_network(
    strategy: str, options: tuple[object, ...], tmp_path: Path
) -> None:
    (tmp_path / "apart.py").write_text(_APART)
    fields = ("--strategy", strategy, *options, "--updates", 30)
    given = ("--standalone", "--nproc-per-node", 2, tmp_path / "apart.py", "train", "cartpole-gala")
    where = ("--out", tmp_path / "apart", "--launcher", "torchrun")
    with Ranks(tmp_path / "apart", *given, *where, *_SHORT, *fields) as command:
        assert command.wait() == 0, command.said()
        assert command.summary()["updates"] >= 30
        assert command.summary()["bytes_exchanged"] > 0
        assert command.summary()["disagreement_final"] < 0.5
        command.leaves_nothing()
    if strategy == "all-reduce":
        alone(tmp_path / "alone", *fields)
        assert same(tmp_path / "apart", tmp_path / "alone")


# -- deaths -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_after_a_death_all_go_on_from_the_last_checkpoint_as_if_nothing_had_been(
    victim: int, tmp_path: Path
) -> None:
    fields = ("--strategy", "all-reduce", "--updates", 1_500, "--checkpoint-every-env-steps", 4_000)
    folder = tmp_path / "ranks"
    with ranks(folder, *_SHORT, *fields, restarts=1) as command:
        command.until_checkpoint()
        first = command.pids()
        os.kill(first[victim], signal.SIGKILL)
        assert command.wait() == 0, command.said()
        assert set(first.values()).isdisjoint(command.pids().values()), "all were started again"
        assert "at most 1 time(s)" in command.said()
        (resumed,) = command.events("resumed")
        (at,) = re.findall(r"resumed at ([\d,]+) env steps", resumed["message"])
        assert 0 < int(at.replace(",", "")) < command.summary()["env_steps"]
        command.leaves_nothing()
    alone(tmp_path / "alone", *fields)
    assert same(folder, tmp_path / "alone")


@pytest.mark.slow
def test_without_restarts_a_death_is_a_failure_that_keeps_the_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    often = ("--env-steps", 10**9, "--checkpoint-every-env-steps", 2_000)
    with ranks(folder, *_SHORT, "--strategy", "all-reduce", *often) as command:
        command.until_checkpoint()
        os.kill(command.pids()[1], signal.SIGKILL)
        assert command.wait() == 1
        assert "replica 1 died" in command.said()
        assert command.summary()["exit"].startswith("failed: replica 1 died")
        command.leaves_nothing()
    last = checkpoint.newest(folder / "checkpoints")
    assert checkpoint.parts(last) == [0, 1], "never a checkpoint without the dead one"
    end = checkpoint.read_manifest(last)["env_steps"] + 2_000
    with ranks(folder, "--env-steps", end, verb="resume") as command:
        assert command.wait() == 0, command.said()
        assert command.summary()["env_steps"] >= end


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["gala", "all-reduce"])
def test_a_frozen_rank_ends_the_run_and_is_named(strategy: str, tmp_path: Path) -> None:
    fields = (*_SHORT, "--strategy", strategy, "--env-steps", 10**9, "--record-every-seconds", 0.1)
    with ranks(tmp_path / "run", *fields, size=3) as command:
        command.learning(3)
        os.kill(command.pids()[1], signal.SIGSTOP)
        assert command.wait() == 1, command.said()
        assert [event["member"] for event in command.events("excluded")] == [1]
        assert "replica 1: silent" in command.summary()["exit"]
        command.leaves_nothing()


@pytest.mark.slow
def test_a_folder_of_another_run_is_refused_at_every_attempt(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    alone(folder, "--updates", 2)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with ranks(folder, *_SHORT, "--updates", 3, restarts=1) as command:
        assert command.wait() == 1
        assert "already holds a run" in command.said()
        assert "(exitcode: 2)" in command.said(), "torch elastic tells each rank's own code"
        command.leaves_nothing()
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_of_torchrun_saves_all_ranks(number: signal.Signals, tmp_path: Path) -> None:
    with ranks(tmp_path / "run", *_SHORT, "--env-steps", 10**9) as command:
        command.learning(2)
        command.process.send_signal(number)
        command.wait()
        assert command.summary()["exit"] == "interrupted", command.said()
        assert command.summary()["dead_replicas"] == []
        command.leaves_nothing()
    last = tmp_path / "run/checkpoints/last"
    assert checkpoint.damage(last) is None
    assert checkpoint.parts(last) == [0, 1]


@pytest.mark.slow
def test_ranks_do_not_outlive_torchrun(tmp_path: Path) -> None:
    with ranks(tmp_path / "run", *_SHORT, "--env-steps", 10**9) as command:
        command.learning(2)
        command.process.kill()
        command.leaves_nothing()


@pytest.mark.parametrize("elsewhere", [True, False])
def test_a_refusal_names_the_host_and_is_heard_before_its_silence(elsewhere: bool) -> None:
    """Rank 0 printed what another host had said of "this host", after 30 s."""
    mine = Process.this()
    process = dataclasses.replace(mine, host="another") if elsewhere else mine
    elastic = SimpleNamespace(
        others={1: SimpleNamespace(process=process, name="host-b")},
        process=mine,
        reported=lambda rank: Exit(REFUSED, "this host cannot listen at nosuch"),
    )
    host = SimpleNamespace(
        is_gone=lambda *_: not elsewhere, run_state=SimpleNamespace(has_saved=lambda *_: False)
    )
    with pytest.raises(Refusal) as refusal:
        torchrun._raise_ends(elastic, host, None)  # type: ignore[arg-type]
    assert str(refusal.value) == "on host-b: " * elsewhere + "this host cannot listen at nosuch"
    host.run_state.has_saved = lambda *_: True
    torchrun._raise_ends(elastic, host, None)  # type: ignore[arg-type]


_TWO_RUNS = """
import sys
from pathlib import Path
import murmurate
if __name__ == "__main__":
    for seed in (1, 2):
        murmurate.train(
            "cartpole-a2c", launcher="torchrun", env_steps=200, seed=seed, out=Path(sys.argv[1]) / str(seed),
            eval_episodes=1, quiet=True,
        )
"""


@pytest.mark.slow
def test_a_script_may_train_twice(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_TWO_RUNS)
    engine = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    command = [sys.executable, *engine, str(tmp_path / "script.py"), str(tmp_path)]
    subprocess.run(command, check=True, timeout=DEADLINE_SECONDS)
    for seed in (1, 2):
        summary = json.loads((tmp_path / str(seed) / "summary.json").read_text())
        assert (summary["exit"], summary["seed"], summary["replicas"]) == ("finished", seed, 2)


def test_all_ranks_end_with_a_run_that_had_finished_before(tmp_path: Path) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    leader, other = (torchrun.ElasticRanks(around(server, rank)) for rank in (0, 1))
    ended = in_thread(lambda: other.follow(recipe("cartpole-gala"), lambda folder: pytest.fail("it is read")))
    leader.finished(tmp_path)
    assert ended() == (tmp_path.resolve(), 0)


def test_a_rank_with_other_options_than_rank_0_is_refused() -> None:
    """Which of two commands counted was chance: that of the host where torch elastic put rank 0."""
    own = recipe("cartpole-a2c")
    learner: Any = own.learner

    def by(**fields: Any) -> Run:
        return dataclasses.replace(own, learner=dataclasses.replace(learner, **fields))

    own, leaders = by(precision="auto"), by(precision="float32")  # which rank 0 has chosen
    torchrun._refuse_other_options(own, leaders)
    with pytest.raises(Refusal, match=r"other options than rank 0 \(agent\.learning_rate, seed\)"):
        torchrun._refuse_other_options(dataclasses.replace(by(learning_rate=0.5), seed=2), leaders)
    with pytest.raises(Refusal, match=r"strategy.name"):
        torchrun._refuse_other_options(dataclasses.replace(own, strategy=strategies()["gala"]()), leaders)


# -- before anything is changed ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "fields", "words"),
    [
        ({"RANK": None}, (), "RANK is not set. Start the same command with torchrun: torchrun"),
        ({"WORLD_SIZE": "two"}, (), "make no sense"),
        ({}, ("--replicas", "3"), "started 2 rank(s) and the run has 3 replicas"),
        ({"LOCAL_WORLD_SIZE": "1"}, ("--strategy", "hogwild"), "the torchrun launcher across hosts"),
        ({"GROUP_WORLD_SIZE": "2"}, ("--strategy", "hogwild"), "the torchrun launcher across hosts"),
        ({"LOCAL_WORLD_SIZE": "1"}, ("--strategy", "dpsgd"), "--strategy.threads 1"),
        ({}, ("--strategy", "all-reduce", "--compression", "int8"), "all-reduce sends nothing that is compr"),
        ({}, ("--strategy", "hogwild", "--compression", "bfloat16"), "Leave it out, or use --strategy gala"),
    ],
)
def test_refusals_name_cause_and_remedy(
    environment: dict[str, Any],
    fields: tuple[str, ...],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in {**_ENGINE, **environment}.items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    folder = tmp_path / "run"
    given = ["train", "cartpole-gala", "--launcher", "torchrun", "--out", str(folder), *fields]
    assert main(given) == 2
    assert words in capsys.readouterr().err
    assert not folder.exists()


def test_there_are_as_many_replicas_as_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "7")
    assert launcher("torchrun").dictated_replicas() == 7
    assert launcher("local").dictated_replicas() is None
    monkeypatch.delenv("WORLD_SIZE")
    assert launcher("torchrun").dictated_replicas() is None
    with pytest.raises(Refusal, match="WORLD_SIZE is not set"):
        launcher("torchrun").capabilities(recipe("cartpole-gala"))
