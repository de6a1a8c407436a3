"""``murmurate.run``: processes of a script, their output, results and errors; the examples."""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib.machinery
import importlib.util
import os
import pickle
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import murmurate
from murmurate.errors import MissingExtra, Refusal, RunFailed
from murmurate.launch import script_arguments
from murmurate.launch.script import run
from murmurate.launch.script_member import stdout_of
from murmurate.launch.tasks import starter_of_several
from murmurate.strategies.gala import GALA
from replicator.steps import alone, loops
from waiting import until

EXAMPLES = Path(__file__).parents[2] / "examples"


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


def environment():
    here = [str(Path(__file__).parents[1]), str(EXAMPLES), *sys.path]
    return os.environ | {"PYTHONPATH": os.pathsep.join(here), "OMP_NUM_THREADS": "1"}


def one_breaks(loop):
    optimizer = loop.wrap_optimizer(torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1))
    for step in range(10**9):  # without end, for whoever is not stopped
        if loop.rank == 1 and step == 3:
            raise LookupError("no such image")
        optimizer.step()


@pytest.mark.parametrize("launcher", ["local", "inline"])
@pytest.mark.parametrize("strategy", ["all-reduce", "gala"])
def test_who_raises_ends_all_and_its_traceback_is_told(launcher, strategy):
    with pytest.raises(RunFailed, match=r"(?s)replica 1 failed: LookupError: no such image.*in one_breaks"):
        run(one_breaks, replicas=2, strategy=strategy, launcher=launcher)


class OddError(Exception):
    """Its arguments are not its message, so it cannot be unpickled."""

    def __init__(self, code, why):
        super().__init__(f"{why} ({code})")


def breaks_oddly(loop):
    raise OddError(404, "no such image")


@pytest.mark.parametrize("launcher", ["local", "inline"])
def test_an_error_that_cannot_be_pickled_arrives_with_its_text_and_traceback(launcher):
    with pytest.raises(
        RunFailed, match=r"(?s)replica 0 failed: OddError: no such image \(404\).*in breaks_oddly"
    ):
        run(breaks_oddly, launcher=launcher)


@pytest.mark.parametrize(
    "error", [MissingExtra("ray", "ray", "the ray launcher"), Refusal("no"), RunFailed("a")]
)
def test_errors_of_the_package_are_the_same_after_pickling(error):
    """For executors that send exceptions themselves, such as Ray's and a process pool's."""
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (type(error), str(error))


def one_refuses(loop):
    loop.mean(torch.ones(1))


def test_a_refusal_in_a_member_is_a_refusal():
    with pytest.raises(Refusal, match=r"hogwild cannot give a collective.*Use all-reduce"):
        run(one_refuses, replicas=2, strategy="hogwild")


def one_is_killed(loop):
    net = torch.nn.Linear(2, 1)
    optimizer = loop.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    for step in range(30):
        if loop.rank == 0 and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        if loop.rank and step == 5:
            until(lambda: 0 not in loop.fabric.living(), "the news of rank 0's death")
    return loop.is_main, sys.stdout.is_main(), optimizer.last.round


def test_the_others_go_on_without_one_that_is_killed():
    dead, *others = run(one_is_killed, replicas=3)
    assert dead == murmurate.Died(0, -signal.SIGKILL)
    assert others == [(True, True, 30), (False, False, 30)]  # rank 1 prints and saves now


def test_another_replica_prints_only_when_it_is_the_lowest(capsys):
    with stdout_of("main", 1) as out:
        print("not this", file=out, flush=True)
        out.is_main = lambda: True
        print("but this", file=out, flush=True)
    assert capsys.readouterr().out == "but this\n"


def all_are_killed(loop):
    os.kill(os.getpid(), signal.SIGKILL)


def stop(loop):
    if loop.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    return loop.rank


def test_who_is_stopped_holds_up_nobody_who_has_finished():
    result = murmurate.run(stop, replicas=3, strategy="gala", deadline_seconds=2.0)
    assert result == [0, murmurate.Died(1, -signal.SIGKILL), 2]


def test_if_all_are_killed_the_run_failed():
    with pytest.raises(RunFailed, match=r"all replicas ended without a result \(exit codes -9\)"):
        run(all_are_killed, replicas=1)


def ends_early(loop):
    optimizer = loop.wrap_optimizer(torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1))
    for _ in range(5 if loop.rank else 15):
        optimizer.step()
    return loop.is_main, optimizer.last.heard


def test_who_ends_early_holds_nobody_up():
    """A loop without ``inputs``: rank 0 goes on alone, and stays the one that saves."""
    (main, heard), (other, _) = run(ends_early, replicas=2, deadline_seconds=20.0)
    assert (main, heard, other) == (True, 1, False)


def returns_a_function(loop):
    return lambda: loop


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


def test_a_result_that_cannot_travel_is_an_error_that_says_so():
    with pytest.raises(RunFailed, match="replica 0 failed: its result cannot be sent back"):
        run(returns_a_function)


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


# -- the examples -----------------------------------------------------------------------------------


def example(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def added(name):
    before, after = (EXAMPLES / f"{name}{end}.py" for end in ("", "_replicated"))
    lines = difflib.unified_diff(
        before.read_text().splitlines(), after.read_text().splitlines(), n=0, lineterm=""
    )
    return [line for line in lines if line.startswith("+") and not line.startswith("+++")]


def test_five_lines_replicate_a_script():
    assert 1 <= len(added("resnet")) <= 5
    assert 1 <= len(added("loader")) <= 5
    assert len(added("gan")) == 6  # a second optimizer to wrap


def test_the_documentation_shows_the_lines_of_the_examples():
    shown = [
        line
        for line in (EXAMPLES.parent / "docs" / "replicator.md").read_text().splitlines()
        if line.startswith("+")
    ]
    assert [line for line in shown if line in added("resnet")] == added("resnet")
    assert len(shown) == 7
    assert set(shown) <= {*added("resnet"), *added("gan")}


def shortened(name):
    return {"epochs": 1} if name == "loader" else {"steps": 3}


@pytest.mark.parametrize("name", ["resnet", "gan", "loader"])
def test_the_replicated_example_alone_is_the_plain_one_to_the_bit(name):
    expected = example(name).main(**shortened(name))
    result = alone(lambda loop: example(f"{name}_replicated").main(loop, **shortened(name)))
    torch.testing.assert_close(result, expected, rtol=0, atol=0)


def test_the_replicated_gan_is_the_plain_one_on_the_joined_batch():
    """Its batches are of a size that divides, its losses are means, and it has no batch statistics."""
    expected = example("gan").main(steps=3)
    for result in loops(3, lambda loop: example("gan_replicated").main(loop, steps=3)):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-6)


def test_the_replicated_resnets_agree_whatever_the_strategy():
    one, two = loops(2, lambda loop: example("resnet_replicated").main(loop, steps=2))
    torch.testing.assert_close(one, two, rtol=0, atol=0)
    for result in loops(2, lambda loop: example("resnet_replicated").main(loop, steps=2), strategy=GALA()):
        assert all(bool(p.isfinite().all()) for p in result)
