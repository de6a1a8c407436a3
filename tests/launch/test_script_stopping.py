"""Scripts that call ``stopping``: all replicas save at one step, and the exit code is the signal's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from launch.test_script_ranks import by_hand
from sessions import session
from waiting import DEADLINE_SECONDS, until

HERE = Path(__file__).parents[1]


def saves(folder, loop):
    optimizer = loop.wrap_optimizer(torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1))
    step = 0
    while not loop.stopping():
        (folder / f"up {loop.rank}").touch()
        optimizer.step()
        step += 1
    (folder / f"heard {loop.rank}").touch()
    until((folder / "sent").exists, "all signals to be sent, before it saves")
    (folder / f"saved {loop.rank}").write_text(str(step))


def cannot_save(folder, loop):
    saves(folder, loop)
    loop.state()


def one_dies_and_the_other_waits_for_it(folder, loop):
    saves(folder, loop)
    if loop.rank == 1:
        os._exit(3)
    (folder / "finished").write_text(str(loop.finish(DEADLINE_SECONDS)))


def is_signalled_after_it_asked(folder, loop):
    optimizer = loop.wrap_optimizer(torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1))
    assert not loop.stopping()
    optimizer.step()
    signal.raise_signal(signal.SIGTERM)


_SCRIPT = """
import functools, sys
from pathlib import Path
import murmurate
from launch import test_script_stopping as t
from murmurate.launch import script_local
from waiting import DEADLINE_SECONDS

if __name__ == "__main__":
    script_local._SAVING_SECONDS = 0.0  # of replicas that do not ask
    main = functools.partial(t.{main}, Path({folder!r}))
    murmurate.run(main, replicas={replicas}, strategy={strategy!r}, deadline_seconds=DEADLINE_SECONDS)
    Path({folder!r}, "went on").touch()
"""


def written(folder, main="saves", strategy="all-reduce", replicas=2):
    path = folder / "own.py"
    path.write_text(_SCRIPT.format(folder=str(folder), main=main, strategy=strategy, replicas=replicas))
    return path


@pytest.fixture
def script(tmp_path):
    return written(tmp_path)


def both(folder, word):
    return all((folder / f"{word} {rank}").exists() for rank in range(2))


def saved_at_one_step(folder):
    """Whether both replicas have saved, after the same step, and the script did not go on after its run."""
    steps = {(folder / f"saved {rank}").read_text() for rank in range(2)}
    return len(steps) == 1 and not (folder / "went on").exists()


def started(script):
    environment = os.environ | {"PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', '')}"}
    return session([sys.executable, script], env=environment, stderr=subprocess.PIPE)


def test_local_replicas_save_without_a_limit_when_all_processes_get_sigterm(script, tmp_path):
    with started(script) as process:
        until(lambda: both(tmp_path, "up"), "both to make a step")
        members = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGTERM)
        until(lambda: both(tmp_path, "heard"), "both to hear it")
        (tmp_path / "sent").touch()
        said = process.communicate()[1]
        assert not psutil.wait_procs(members, timeout=DEADLINE_SECONDS)[1], "no process is left"
    assert process.returncode == 128 + signal.SIGTERM, said
    assert saved_at_one_step(tmp_path)


def test_a_replica_that_is_refused_while_it_saves_says_so(tmp_path):
    with started(written(tmp_path, "cannot_save", "elastic")) as process:
        until(lambda: both(tmp_path, "up"), "both to make a step")
        os.killpg(process.pid, signal.SIGTERM)
        (tmp_path / "sent").touch()
        said = process.communicate()[1]
    assert process.returncode == 128 + signal.SIGTERM
    for rank in range(2):
        assert f"murmurate: replica {rank} failed: state() and load() are of replicas alone" in said


def test_a_replica_that_dies_while_others_save_is_told_and_not_waited_for(tmp_path):
    main = "one_dies_and_the_other_waits_for_it"
    with started(written(tmp_path, main, "gala")) as process:
        until(lambda: both(tmp_path, "up"), "both to make a step")
        os.killpg(process.pid, signal.SIGTERM)
        (tmp_path / "sent").touch()
        said = process.communicate()[1]
    assert "murmurate: replica 1 died (exit code 3)" in said
    assert (tmp_path / "finished").read_text() == "True"


@pytest.mark.slow
def test_ranks_save_at_one_step_though_one_gets_sigterm(script, tmp_path):
    """Without torch elastic, which signals all ranks of a host, but not those of others."""
    with by_hand(script) as ranks:
        until(lambda: both(tmp_path, "up"), "both to make a step")
        ranks[1].send_signal(signal.SIGTERM)
        (tmp_path / "sent").touch()
        said = [rank.communicate(timeout=DEADLINE_SECONDS)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [128 + signal.SIGTERM] * 2, said
    assert saved_at_one_step(tmp_path)


def test_a_rank_that_is_signalled_after_it_asked_ends_with_the_signals_code(tmp_path):
    with by_hand(written(tmp_path, "is_signalled_after_it_asked", replicas=1), ranks=1) as (rank,):
        said = rank.communicate(timeout=DEADLINE_SECONDS)[0]
    assert rank.returncode == 128 + signal.SIGTERM, said
    assert not (tmp_path / "went on").exists()
