"""The fork server: forked from the command that asks for it, or a new interpreter; it leaves no trace."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import murmurate
from murmurate.cli import run_verbs
from murmurate.cli.main import INTERRUPTED, REFUSED
from murmurate.fabric.processes.fork_server import fork_server

_ASK = """
import json, os, signal, sys, threading, time
from multiprocessing.forkserver import _forkserver
from murmurate.fabric.processes.fork_server import begin_fork_server, end_fork_server, fork_server
if "threads" in os.environ:
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
begin_fork_server(json.loads(sys.argv[1]))
if "used" in os.environ:  # by a run, beside which another command is refused
    process = fork_server().Process(target=signal.pause)
    process.start()
    begin_fork_server([])
    end_fork_server()
    assert process.is_alive()
    process.kill()
print(json.dumps({
    "running": _forkserver._forkserver_pid is not None,
    "threads": os.environ.get("OMP_NUM_THREADS"),
    "heavy": [name for name in ("torch", "numpy") if name in sys.modules],
}))
end_fork_server()
"""


def asked(*arguments: str, **environment: str) -> dict[str, object]:
    kept = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", _ASK, json.dumps(arguments)],
        env=kept | environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=120,
    )
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_the_command_imports_once_and_its_threads_stay_its_own() -> None:
    assert asked("--seed", "1") == {"running": True, "threads": None, "heavy": ["torch", "numpy"]}


def test_a_process_with_threads_is_not_forked() -> None:
    assert asked("--seed", "1", threads="1") == {"running": True, "threads": None, "heavy": []}


def test_other_launchers_need_none() -> None:
    assert asked("--launcher", "inline") == {"running": False, "threads": None, "heavy": []}
    assert asked("--launcher=ray")["running"] is False


def test_where_it_cannot_begin_nothing_is_said_yet(tmp_path: Path) -> None:
    far = tmp_path / ("far" * 40)  # too far for the name of a socket
    far.mkdir()
    assert asked(TMPDIR=str(far))["running"] is False


@pytest.mark.parametrize(
    ("run", "here"), [({"launcher": "local"}, True), ({"launcher": "ray"}, False), ({}, False), ([], False)]
)
def test_a_resume_asks_for_it_where_the_run_was_this_hosts(run: object, here: bool, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps(run))
    assert run_verbs._launcher_is_local(tmp_path) is here
    assert run_verbs._launcher_is_local(tmp_path / "none") is False


_BEGINS = """
import sys
from murmurate.cli import main, run_verbs, topics_verbs
def begin(arguments):
    print("begins, torch" if "torch" in sys.modules else "begins, no torch", flush=True)
    sys.exit()
run_verbs.begin_fork_server = topics_verbs.begin_fork_server = begin
main.main(sys.argv[1:])
"""


@pytest.mark.parametrize("verb", ["train cartpole-a2c", "resume .", "topics fit corpus.txt"])
def test_the_command_line_imports_no_torch_before_it_forks(verb: str, tmp_path: Path) -> None:
    """Else the server would be another interpreter, and each command would begin two seconds later."""
    (tmp_path / "run.json").write_text(json.dumps({"launcher": "local"}))
    command = [sys.executable, "-c", _BEGINS, *verb.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "begins, no torch\n", done.stderr


_REFUSED = """
import sys
from multiprocessing.forkserver import _forkserver
from murmurate.cli import main, run_verbs
begin = run_verbs.begin_fork_server
def told(arguments):
    begin(arguments)
    print("server", _forkserver._forkserver_pid, flush=True)
run_verbs.begin_fork_server = told
sys.exit(main.main(["train", "nonsense-gala"]))
"""


def test_a_refused_command_leaves_no_process_importing(tmp_path: Path) -> None:
    with open(tmp_path / "said", "w") as said:  # a pipe would be waited for until the server has ended
        command = [sys.executable, "-c", _REFUSED]
        assert subprocess.run(command, stdout=said, stderr=said, check=False).returncode == REFUSED
    text = (tmp_path / "said").read_text()
    began = re.search(r"server (\d+)", text)
    assert began is not None
    assert not psutil.pid_exists(int(began[1]))
    assert "nonsense" in text


def test_a_daemon_is_refused_and_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a multiprocessing.Pool, where several seeds may be trained at once."""
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    monkeypatch.setitem(config, "daemon", True)
    with pytest.raises(murmurate.Refusal, match=r"daemon.*ProcessPoolExecutor.*--launcher inline"):
        murmurate.train("cartpole-a2c", updates=1, quiet=True, out=tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_others_live_under_is_not_ended_and_a_given_number_of_threads_stays() -> None:
    found = asked(used="1", OMP_NUM_THREADS="2")
    assert found == {"running": True, "threads": "2", "heavy": ["torch", "numpy"]}


def test_a_run_leaves_the_number_of_threads_to_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a script each has an equal share of the cores; OMP_NUM_THREADS would be the number of each."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    fork_server()
    assert "OMP_NUM_THREADS" not in os.environ


_COLLECTS = """
import gc, os, threading, time
from murmurate.fabric.processes.fork_server import begin_fork_server, end_fork_server, fork_server
if "threads" in os.environ:
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
def ask():
    print(gc.isenabled(), gc.get_freeze_count() > 100_000, flush=True)
if __name__ == "__main__":
    begin_fork_server([])
    process = fork_server().Process(target=ask)
    process.start()
    process.join()
    print(gc.isenabled())
    end_fork_server()
"""


@pytest.mark.parametrize("environment", [{}, {"threads": "1"}], ids=["forked", "interpreter"])
def test_workers_collect_garbage_but_not_among_what_the_server_imported(
    environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "collects.py").write_text(_COLLECTS)
    command = [sys.executable, str(tmp_path / "collects.py")]
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout == "True True\nTrue\n", done.stderr


_TRAINED = """
import sys
from murmurate.cli.main import main
for recipe, more in (("cartpole-a2c", ""), ("pendulum-td3", "--replay.learning-starts 50 --agent.batch 16")):
    words = [*"OPTIONS".split(), *more.split(), "--out", recipe]
    assert main(["train", recipe, "--launcher", "inline", *words]) == 0
    assert main(["resume", recipe, "--updates", "4"]) == 0
assert "torch" in sys.modules and "torch._dynamo" not in sys.modules
"""


def test_neither_a_launcher_nor_a_learner_imports_torchs_compiler(tmp_path: Path) -> None:
    """It would take a second before each run, and another one of each process whose optimizer steps."""
    options = "--simulators 1 --updates 2 --env-steps none --eval-episodes 1"
    code = _TRAINED.replace("OPTIONS", options)
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=120)


_INTERRUPTED = """
import sys
class PressedCtrlC:
    def find_spec(self, name, path=None, target=None):
        if name == "numpy._core.multiarray":
            sys.meta_path.remove(self)
            raise KeyboardInterrupt
sys.meta_path.insert(0, PressedCtrlC())
from murmurate.__main__ import main
sys.exit(main())
"""


def test_a_ctrl_c_while_torch_imports_numpy_is_not_lost(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _INTERRUPTED, "topics", "fit", str(tmp_path / "none")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (INTERRUPTED, "murmurate: interrupted\n")
