"""Checks of this machine: cores, memory, devices and optional packages, with advice for what is missing."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import resource
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import psutil
import rich.console
import rich.table
import torch
from rich.text import Text

from murmurate import native
from murmurate.errors import Refusal, RunFailed
from murmurate.fabric.processes.memory_limits import available_bytes
from murmurate.fabric.processes.process_handle import has_kqueue, refuse_without_handles
from murmurate.fabric.processes.shared_memory import SharedMemoryFile
from murmurate.launch import exposure, secret
from murmurate.native.cores import usable_cores
from murmurate.native.system_calls import has_memfd
from murmurate.nets.precision import faster_precision, native_bfloat16
from murmurate.training.host import hardware, versions
from murmurate.worlds import adroit, dm_control, mazes, vizdoom
from murmurate.worlds.atari import games
from murmurate.worlds.dm_control import DmcWorld
from murmurate.worlds.interface import SimulatorWorld

_OK, _NOTE, _BAD = "ok", "note", "bad"


def findings() -> dict[str, Any]:
    """``{"checks": [{"name", "status", "found", "advice"}], "ok": bool, "hardware", "versions"}``."""
    functions: list[Callable[[], dict[str, str]]] = [
        _cores, _threads, _memory, _processes, _shared_memory, _open_files, _gpu, _bfloat16, _kernels,
        _torso, _roms,
        partial(_installed, "MuJoCo", "mujoco", "mujoco"),
        # with pictures: to observe states it needs no library of the system
        partial(_starts, "dm_control", "control", dm_control, DmcWorld("pendulum", "swingup", pixels=True)),
        partial(_starts, "Adroit hand", "adroit", adroit, adroit.AdroitWorld("door")),
        partial(_starts, "Doom", "doom", vizdoom, vizdoom.DoomWorld("my-way-home")),
        partial(_starts, "mazes", "mazes", mazes, mazes.MazeWorld(5)),
        _video, _secret, _store,
    ]  # fmt: skip
    checks = [check() for check in functions]
    return {
        "checks": checks,
        "ok": all(check["status"] != _BAD for check in checks),
        "hardware": hardware(),
        "versions": versions(),
    }


def show(report: dict[str, Any]) -> None:
    style = {_OK: "green", _NOTE: "yellow", _BAD: "red"}
    table = rich.table.Table(box=None, pad_edge=False, header_style="bold")
    for column in ("", "check", "result", "advice"):
        table.add_column(column)
    for check in report["checks"]:
        mark = Text(check["status"], style[check["status"]])
        table.add_row(
            mark, *(Text(check[key]) for key in ("name", "found", "advice"))
        )  # Text, because brackets would be markup
    rich.console.Console().print(table)


def _check(name: str, status: str, found: str, advice: str = "") -> dict[str, str]:
    return {"name": name, "status": status, "found": found, "advice": advice}


def _cores() -> dict[str, str]:
    usable = usable_cores()
    if usable == 1:
        return _check("cores", _NOTE, "1", "replicas share it: more than one is not faster")
    return _check("cores", _OK, str(usable), f"up to {usable} replicas run side by side")


def _threads() -> dict[str, str]:
    count = torch.get_num_threads()
    return _check(
        "torch threads", _OK, f"{count} here", "each replica uses 1 (--placement.threads changes it)"
    )


def _memory() -> dict[str, str]:
    free = available_bytes()  # of this process's control groups, too
    status = _OK if free > 2 * 2**30 else _BAD
    advice = "" if status == _OK else "a replica takes about 0.5 GiB: close something or use fewer replicas"
    return _check("free memory", status, f"{free / 2**30:.1f} GiB", advice)


def _processes() -> dict[str, str]:
    try:
        refuse_without_handles()
    except Refusal as refusal:
        return _check("processes", _BAD, str(refusal), "use --launcher inline")
    if has_kqueue():
        return _check("processes", _NOTE, "watched by kqueue", "written for macOS, and not tried there yet")
    return _check("processes", _OK, "watched by pidfd")


def _shared_memory() -> dict[str, str]:
    try:
        memory_file = SharedMemoryFile.create()
        memory_file.tensors("doctor", (1024,), torch.float32).fill_(1.0)
        memory_file.close()
    except (OSError, Refusal) as error:
        return _check("shared memory", _BAD, str(error), "use --launcher inline")
    if not has_memfd():
        folder = tempfile.gettempdir()
        advice = "the system also writes them to the disk: set TMPDIR to a folder on a fast one with room"
        return _check("shared memory", _NOTE, f"works, by files in {folder}", advice)
    size = "none"
    if os.path.isdir("/dev/shm"):
        size = f"{psutil.disk_usage('/dev/shm').total / 2**20:.0f} MiB"
    return _check(
        "shared memory", _OK, f"works (/dev/shm: {size})", "unnamed files, not limited by /dev/shm's size"
    )


def _open_files() -> dict[str, str]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= 1024:
        return _check("open files", _OK, str(soft))
    return _check("open files", _BAD, str(soft), f"raise it: ulimit -n {min(4096, hard)}")


def _gpu() -> dict[str, str]:
    if not torch.cuda.is_available():
        return _check(
            "GPU", _NOTE, "none that torch sees", "none is needed; to use one: --placement.devices cuda:0"
        )
    names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return _check("GPU", _OK, names, "--placement.devices cuda:0 puts all learners on it")


def _bfloat16() -> dict[str, str]:
    processor = torch.device("cpu")
    if not native_bfloat16(processor):
        return _check("bfloat16", _NOTE, "emulated", "use float32")
    if faster_precision(processor) == "float32":
        return _check("bfloat16", _NOTE, "native, but slower than float32", "use float32, as auto does")
    return _check("bfloat16", _OK, "native", "image networks use it (--agent.precision)")


def _kernels() -> dict[str, str]:
    if native.kernels is not None:
        return _check("compiled kernels", _OK, native.simd)
    if os.environ.get("MURMURATE_NATIVE") == "off":
        return _check("compiled kernels", _NOTE, native.simd, "replay is slower: unset MURMURATE_NATIVE")
    return _check(
        "compiled kernels",
        _NOTE,
        native.simd,
        "replay is slower; with a C++ compiler they can be built: "
        "pip install --force-reinstall --no-deps --no-cache-dir murmurate (in a checkout: -e .)",
    )


def _torso() -> dict[str, str]:
    if native.kernels is None:
        return _check("torso", _NOTE, "torch", "image networks are slower: see compiled kernels")
    if kernels := native.kernels.torso_kernels():
        return _check("torso", _OK, f"compiled, {kernels[0]}", "where it computes in bfloat16")
    if (build := os.environ.get("MURMURATE_NATIVE")) in ("portable", "avx2"):
        return _check("torso", _NOTE, "torch", f"its kernels are not in {build}: unset MURMURATE_NATIVE")
    return _check(
        "torso",
        _NOTE,
        "torch",
        "its bfloat16 kernels need AVX512_BF16 (AMD since Zen 4, some of Intel) or AMX (Intel since 2023, "
        "on Linux), and a compiler from 2021 or later",
    )


def _roms() -> dict[str, str]:
    try:
        count = len(games())
    except Refusal as missing:
        return _check("Atari", _NOTE, "not installed", str(missing))
    return _check("Atari", _OK, f"{count} games")


def _installed(name: str, module: str, extra: str) -> dict[str, str]:
    if importlib.util.find_spec(module) is None:
        return _check(name, _NOTE, "not installed", f"pip install 'murmurate[{extra}]'")
    return _check(name, _OK, "installed")


def _video() -> dict[str, str]:
    check = _installed("video", "imageio_ffmpeg", "video")
    if check["status"] == _OK and importlib.util.find_spec("pygame") is None:
        # the extra atari brings the first, and its games draw themselves
        advice = "for films of classic control: pip install 'murmurate[video]'"
        return _check("video", _NOTE, "installed, without pygame-ce", advice)
    return check


def _starts(name: str, extra: str, module: Any, world: SimulatorWorld) -> dict[str, str]:
    """Check that ``world`` of ``module`` starts: it may lack a file, a system library or a driver."""
    if not module.names():
        return _check(name, _NOTE, "not installed", f"pip install 'murmurate[{extra}]'")
    try:
        with contextlib.closing(world.open(1, training=False)) as simulators:
            simulators.reset(0)
    except (Refusal, RunFailed) as problem:
        return _check(name, _BAD, "does not start", str(problem))
    return _check(name, _OK, "starts")


def _secret() -> dict[str, str]:
    text = os.environ.get(secret.VARIABLE, "")
    if not text:
        return _check("secret", _NOTE, "not set", "runs on several hosts should have one: murmurate secret")
    if why := secret.weakness(text):
        return _check("secret", _BAD, f"can be guessed: {why}", "murmurate secret prints a good one")
    return _check("secret", _OK, "set", f"the same {secret.VARIABLE} on every host")


def _store() -> dict[str, str]:
    if where := exposure.torchrun_listens():
        return _check("torchrun's store", _NOTE, f"listens on {where}", exposure.DANGER)
    return _check("torchrun's store", _OK, "none that other hosts can reach")
