"""``murmurate.run``: processes of a script, their devices, threads, output and results."""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import re
import subprocess
import sys

import pytest
import torch

import murmurate
from murmurate.errors import Refusal
from murmurate.launch import script_arguments
from murmurate.launch.script import run
from murmurate.launch.script_member import stdout_of
from murmurate.launch.tasks import starter_of_several
from murmurate.strategies.gala import GALA
from replicator.example_scripts import environment


def who(loop):
    print("hello from", loop.rank)
    return loop.rank, loop.size, [str(d) for d in (loop.device(), loop.device(1))], torch.ones(2)


@pytest.mark.parametrize("launcher", ["local", "inline"])
def test_each_replica_runs_and_its_result_comes_back_by_rank(launcher):
    result = murmurate.run(who, replicas=2, strategy=GALA(), launcher=launcher, devices=[("cpu", "meta")])
    assert [one[:3] for one in result] == [(r, 2, ["cpu", "meta"]) for r in range(2)]
    assert torch.equal(result[1][3], torch.ones(2))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this host has a GPU")
def test_a_gpu_that_is_not_there_is_refused():
    with pytest.raises(Refusal, match="devices has 'cuda', and torch sees 0 GPUs here"):
        run(who, launcher="inline", devices="cuda")


def devices_here(loop):
    return str(loop.device()), CURRENT[-1:]


CURRENT = []  # stands for torch's current device


@contextlib.contextmanager
def current_device(device):
    CURRENT.append(str(device))
    yield
    CURRENT.pop()


@pytest.mark.parametrize(
    ("gpus", "devices", "expected"),
    [
        (2, "auto", ["cuda:0", "cuda:1", "cuda:0"]),
        (2, ["cuda:1", "cpu"], ["cuda:1", "cpu", "cuda:1"]),
        (0, "auto", ["cpu", "cpu", "cpu"]),
    ],
)
def test_the_gpu_of_a_replica_is_its_current_device(gpus, devices, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "device", current_device)
    found = run(devices_here, replicas=3, launcher="inline", devices=devices)
    assert found == [(device, [device] * device.startswith("cuda")) for device in expected]
    assert CURRENT == []


def test_another_replica_prints_only_when_it_is_the_lowest(capsys):
    with stdout_of("main", 1) as out:
        print("not this", file=out, flush=True)
        out.is_main = lambda: True
        print("but this", file=out, flush=True)
    assert capsys.readouterr().out == "but this\n"


def test_what_is_refused_before_anything_starts():
    with pytest.raises(Refusal, match="at module level, or use launcher='inline'"):
        run(lambda loop: None, replicas=2)
    with pytest.raises(Refusal, match="'all-reduce'"):
        run(who, strategy="all-redcue")
    with pytest.raises(Refusal, match="solo trains one replica, and the run has 2"):
        run(who, replicas=2, strategy="solo")
    with pytest.raises(Refusal, match="use at least 1"):
        run(who, replicas=0)
    with pytest.raises(
        Refusal,
        match=r"no launcher for scripts called 'slurm'.*: inline, local, ray, torchrun, xla",
    ):
        run(who, launcher="slurm")


def test_a_main_from_a_notebook_is_refused_where_other_processes_must_import_it(monkeypatch):
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)  # a worker of xdist has none
    for name, thing in (("my_main", who), ("functools", functools.partial)):
        monkeypatch.setattr(sys.modules["__main__"], name, thing, raising=False)
    monkeypatch.setattr(who, "__module__", "__main__")
    monkeypatch.setattr(who, "__qualname__", "my_main")
    for main in (who, functools.partial(who)):
        with pytest.raises(Refusal, match=r"who was defined in a notebook.*%%writefile.*launcher='inline'"):
            run(main, replicas=2)


@pytest.mark.parametrize("started_as", ["__main__", "package.__main__"])
def test_a_main_from_the_file_of_a_folder_that_was_started_is_refused(monkeypatch, started_as):
    script = sys.modules["__main__"]
    monkeypatch.setattr(script, "__file__", "__main__.py", raising=False)
    monkeypatch.setattr(script, "__spec__", importlib.machinery.ModuleSpec(started_as, None))
    monkeypatch.setattr(script, "my_main", who, raising=False)
    monkeypatch.setattr(who, "__module__", "__main__")
    monkeypatch.setattr(who, "__qualname__", "my_main")
    with pytest.raises(Refusal, match=r"who was defined in a file __main__.py.*Move it to another file"):
        run(who, replicas=2)


@pytest.mark.slow
def test_a_script_without_a_guard_says_what_is_missing(tmp_path):
    script = tmp_path / "unguarded.py"
    script.write_text("import murmurate\n\ndef main(loop):\n    pass\n\nmurmurate.run(main, replicas=1)\n")
    ended = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, env=environment(), check=False
    )
    assert ended.returncode != 0
    assert "if __name__ == '__main__':" in ended.stderr


COMMAND = """
import functools, sys
import murmurate
assert "torch" not in sys.modules, "the command line would wait for it"
import gan_replicated, replicator.test_script as t
murmurate.run(t.who, replicas=2, output="all", devices=[("cpu", "meta")])
murmurate.run(functools.partial(gan_replicated.main, steps=3), replicas=2)
"""


@pytest.mark.parametrize("output", ["main", "all"])
def test_inline_it_prints_once_or_marked_by_rank_too(output, capsys):
    run(who, replicas=2, launcher="inline", output=output, devices=[("cpu", "meta")])
    print("after it")
    *said, after = capsys.readouterr().out.splitlines()
    assert sorted(said) == (
        ["hello from 0"] if output == "main" else ["[0] hello from 0", "[1] hello from 1"]
    )
    assert after == "after it"


def says_half(loop):
    print("half a", end="")
    print(f" line of {loop.rank}", end="")
    return torch.get_num_threads()


def test_a_last_line_that_is_not_ended_is_printed_and_threads_are_set(capsys):
    before = torch.get_num_threads()
    threads = run(says_half, replicas=2, launcher="inline", output="all", threads=before + 1)
    assert sorted(capsys.readouterr().out.splitlines()) == ["[0] half a line of 0", "[1] half a line of 1"]
    assert threads == [before + 1] * 2
    assert torch.get_num_threads() == before


def threads_here(loop):
    return torch.get_num_threads()


@pytest.mark.parametrize(
    ("variable", "strategy", "threads"),
    [(None, "all-reduce", 3), (None, "parameter-server", 2), ("5", "all-reduce", 5), ("4,2", "gala", 4)],
)
def test_threads_are_those_of_the_environment_or_a_share_of_the_cores(
    variable, strategy, threads, monkeypatch
):
    monkeypatch.setattr(script_arguments, "usable_cores", lambda: 7)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    assert run(threads_here, replicas=2, strategy=strategy, launcher="inline") == [threads] * 2


def test_members_beyond_the_cores_have_a_thread_each(monkeypatch):
    monkeypatch.setattr(script_arguments, "usable_cores", lambda: 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "none")
    assert script_arguments.default_threads(3) == 1


SLURM_STEP = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}


@pytest.mark.parametrize("variables", [SLURM_STEP, {"OMPI_COMM_WORLD_SIZE": "4"}])
def test_one_of_several_tasks_without_torchrun_is_refused(variables, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Refusal, match=r"started 4 (tasks|processes) of this script.*torchrun.*'local'"):
        run(threads_here)
    assert len(run(threads_here, replicas=2, launcher="inline")) == 2


@pytest.mark.parametrize(
    "other",
    [
        {"SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_STEP_ID": "batch"},
        {"SLURM_PTY_PORT": "30000"},  # a shell at a terminal, with room for four tasks
    ],
)
def test_a_process_that_was_started_once_is_no_task_of_several(other):
    assert starter_of_several(SLURM_STEP) == "srun started 4 tasks"
    assert starter_of_several(SLURM_STEP | other) is None
    assert starter_of_several({"PMI_SIZE": "3"}) == "mpirun started 3 processes"


def test_another_output_is_refused():
    with pytest.raises(Refusal, match="output is 'none'; it is 'main' or 'all'"):
        run(says_half, replicas=2, launcher="inline", output="none")


def test_as_a_command_it_prints_once_or_marked_by_rank_and_an_example_runs():
    ended = subprocess.run(
        [sys.executable, "-c", COMMAND], capture_output=True, text=True, env=environment(), check=True
    )
    *marked, example = ended.stdout.splitlines()  # a line of the first replica alone
    assert sorted(marked) == ["[0] hello from 0", "[1] hello from 1"]
    assert re.fullmatch(r"losses .*, radius [\d.]+", example)


def test_the_package_has_what_it_says_and_no_more():
    with pytest.raises(AttributeError, match="no attribute 'walk'"):
        _ = murmurate.walk
