"""``doctor``: what it finds is measured, and whatever is amiss comes with what to do."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from murmurate import native
from murmurate.cli import doctor
from murmurate.cli.main import main
from murmurate.errors import MissingExtra
from murmurate.fabric.processes import memory_limits, process_handle
from murmurate.fabric.processes.shared_memory import SharedMemoryFile
from murmurate.launch.secret import drawn_secret
from murmurate.native import system_calls

_CHECKS = {
    "compiled kernels": doctor._kernels,
    "torso": doctor._torso,
    "open files": doctor._open_files,
    "free memory": doctor._memory,
    "processes": doctor._processes,
    "shared memory": doctor._shared_memory,
    "secret": doctor._secret,
    "torchrun's store": doctor._store,
    "cores": doctor._cores,
    "video": doctor._video,
}


def _look(name: str) -> dict[str, str]:
    """One check alone: some of the others start simulators."""
    check = _CHECKS[name]()
    assert check["name"] == name
    return check


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What ``doctor --json`` prints; simulators are started for it."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["doctor", "--json"]) == 0
    printed: dict[str, Any] = json.loads(out.getvalue().splitlines()[-1])
    return printed


def test_it_prints_one_object(found: dict[str, Any]) -> None:
    names = {check["name"] for check in found["checks"]}
    assert {"cores", "free memory", "shared memory", "open files", "GPU", "Atari"} <= names
    for check in found["checks"]:
        assert check.keys() == {"name", "status", "found", "advice"}
        assert check["status"] in ("ok", "note", "bad")
        assert check["found"]
        assert check["advice"] or check["status"] == "ok", f"{check['name']} does not say what to do"
    assert found["ok"] == all(check["status"] != "bad" for check in found["checks"])
    assert found["hardware"]["cores"] == psutil.cpu_count()
    assert {"murmurate", "python", "torch"} <= found["versions"].keys()


def test_a_world_that_cannot_be_opened_is_a_finding() -> None:
    def opened(*_: object, **__: object) -> None:
        raise MissingExtra("cv2", "doom", "Doom")

    found = doctor._starts(
        "Doom", "doom", SimpleNamespace(names=lambda: ["doom"]), SimpleNamespace(open=opened)
    )
    assert (found["status"], found["found"]) == ("bad", "does not start")
    assert "pip install 'murmurate[doom]'" in found["advice"]


@pytest.mark.parametrize(
    ("there", "status", "found"),
    [
        ({"imageio_ffmpeg", "pygame"}, "ok", "installed"),
        ({"imageio_ffmpeg"}, "note", "installed, without pygame-ce"),
        ({"pygame"}, "note", "not installed"),
    ],
)
def test_films_of_classic_control_need_two_packages(
    there: set[str], status: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name in there else None)
    check = _look("video")
    assert (check["status"], check["found"]) == (status, found)
    assert ("murmurate[video]" in check["advice"]) == (status == "note")


def test_people_see_every_finding(
    found: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "findings", lambda: found)
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for check in found["checks"]:
        assert check["name"].split()[0] in text


def test_brackets_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    found = {"name": "MuJoCo", "status": "note", "found": "no [link]", "advice": "murmurate[mujoco]"}
    doctor.show({"checks": [found]})
    text = capsys.readouterr().out
    assert "murmurate[mujoco]" in text
    assert "no [link]" in text


def test_it_says_which_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for which, found, status in (([], "torch", "note"), (["amx", "avx512_bf16"], "compiled, amx", "ok")):
        monkeypatch.setattr(native, "kernels", SimpleNamespace(torso_kernels=lambda which=which: which))
        monkeypatch.setattr(native, "simd", "avx512")
        assert _look("compiled kernels")["found"] == "avx512"
        assert (_look("torso")["found"], _look("torso")["status"]) == (found, status)
    monkeypatch.setattr(native, "kernels", None)
    monkeypatch.setattr(native, "simd", "not built: no module")
    monkeypatch.delenv("MURMURATE_NATIVE", raising=False)
    check = _look("compiled kernels")
    assert check["status"] == "note"
    assert "C++ compiler" in check["advice"]
    assert " murmurate " in check["advice"]
    monkeypatch.setenv("MURMURATE_NATIVE", "off")
    assert _look("compiled kernels")["advice"] == "replay is slower: unset MURMURATE_NATIVE"
    assert _look("torso")["found"] == "torch"


@pytest.mark.parametrize(
    ("build", "words"),
    [("avx2", "not in avx2: unset"), ("", "need AVX512_BF16"), ("avx512", "need AVX512_BF16")],
)
def test_torso_kernels_that_do_not_run_are_blamed_on_a_build_only_if_it_lacks_them(
    monkeypatch: pytest.MonkeyPatch, build: str, words: str
) -> None:
    monkeypatch.setattr(native, "kernels", SimpleNamespace(torso_kernels=lambda: []))
    monkeypatch.setenv("MURMURATE_NATIVE", build)
    assert words in _look("torso")["advice"]


def test_few_open_files_are_bad_and_the_command_is_given() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
        check = _look("open files")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (check["status"], check["found"]) == ("bad", "512")
    assert check["advice"] == f"raise it: ulimit -n {min(4096, hard)}"


def test_little_memory_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = namedtuple("memory", "available total")
    monkeypatch.setattr(memory_limits, "_left_in_groups", lambda: iter(()))
    for free, status in ((2**30, "bad"), (2**33, "ok")):
        monkeypatch.setattr(psutil, "virtual_memory", lambda free=free: memory(free, 2**34))
        check = _look("free memory")
        assert (check["status"], check["found"]) == (status, f"{free / 2**30:.1f} GiB")


def test_memory_is_what_a_run_would_get(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container, what its control group has left."""
    monkeypatch.setattr(memory_limits, "_left_in_groups", lambda: iter([2**30]))
    assert (_look("free memory")["status"], _look("free memory")["found"]) == ("bad", "1.0 GiB")


def test_no_shared_memory_is_bad_and_there_is_a_way_without(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _look("shared memory")["status"] == "ok"

    def denied() -> SharedMemoryFile:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(SharedMemoryFile, "create", staticmethod(denied))
    check = _look("shared memory")
    assert check["status"] == "bad"
    assert "Permission denied" in check["found"]
    assert "--launcher inline" in check["advice"]


def test_systems_that_lack_calls_of_linux_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _look("processes")["found"] == "watched by pidfd"

    def missing(_: object) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(system_calls, "memfd", missing)
    check = _look("shared memory")
    assert (check["status"], check["found"]) == ("note", f"works, by files in {tempfile.gettempdir()}")
    assert "TMPDIR" in check["advice"]
    monkeypatch.setattr(process_handle, "pidfd_open", missing)
    check = _look("processes")
    assert (check["status"], check["advice"]) == ("bad", "use --launcher inline")
    assert "Function not implemented" in check["found"]
    monkeypatch.setattr(doctor, "refuse_without_handles", lambda: None)
    monkeypatch.setattr(doctor, "has_kqueue", lambda: True)
    assert _look("processes")["status"] == "note"


def test_it_judges_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, status in (("", "note"), ("secret", "bad"), (drawn_secret(), "ok")):
        monkeypatch.setenv("MURMURATE_SECRET", text)
        check = _look("secret")
        assert check["status"] == status
        assert ("murmurate secret" in check["advice"]) is (status != "ok")


def test_a_store_of_torchrun_that_other_hosts_reach_is_noted() -> None:
    """A process that is called torchrun, and listens where it is told to."""
    script = (
        "import socket, sys\n"
        "server = socket.create_server((sys.argv[2], 0))\n"
        "print(server.getsockname()[1], flush=True)\n"
        "sys.stdin.read()"
    )
    others = _look("torchrun's store")["status"]  # of tests that run at the same time
    for address, status in (("127.0.0.1", others), ("0.0.0.0", "note")):
        command = [sys.executable, "-c", script, "torchrun", address]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as torchrun:
            assert torchrun.stdout is not None
            torchrun.stdout.readline()
            check = _look("torchrun's store")
            torchrun.kill()
        assert check["status"] == status
        assert (status == "ok") or "etcd-v2" in check["advice"]


def test_one_core_is_told_what_it_means(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    assert _look("cores")["status"] == "note"
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
    assert _look("cores")["found"] == "3"
