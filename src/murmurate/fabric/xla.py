"""XLA devices, such as the cores of TPUs: members that exchange vectors by XLA's collectives.

torch_xla runs one process for each chip, and in it one thread for each of the chip's devices. Each thread is
a member. When one member dies, all end, as they run one program.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import os
import pickle
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from murmurate.errors import MissingExtra
from murmurate.fabric.interface import (
    Capability,
    FabricError,
    Traffic,
    check_shape,
    checked_group,
    checked_rank,
    ranks_across,
    ranks_within,
)
from murmurate.fabric.processes.spawn import DIED, FINISHED, Exit, pickled_exit

# Held while a program with a collective is compiled: the devices of a process can only meet in the same
# program, and threads that compile at the same time would each get one of their own.
_COMPILING = threading.Lock()


def torch_xla(module: str = "") -> Any:
    """The package torch_xla, or a module of it. Raises MissingExtra where it is not installed."""
    try:
        return importlib.import_module(f"torch_xla.{module}".rstrip("."))
    except ModuleNotFoundError as error:
        raise MissingExtra("torch_xla", "tpu", "A replica on an XLA device") from error


def execute(device: torch.device) -> None:
    """On an XLA device, begin to compute what has only been recorded so far; on others, do nothing."""
    if device.type == "xla":
        torch_xla().sync()


class XlaFabric:
    """The fabric of the calling thread's XLA device (see ``Fabric``); its rank is the device's ordinal.

    There are no deadlines: the XLA runtime decides how long a collective waits for a silent member, and then
    ends the process.
    """

    capabilities = frozenset({Capability.COLLECTIVE})

    def __init__(self) -> None:
        runtime = torch_xla("runtime")
        self.device: torch.device = torch_xla().device()
        self.rank: int = runtime.global_ordinal()
        self.size: int = runtime.world_size()

    def living(self) -> Sequence[int]:
        return range(self.size)

    def channel(self, name: str, like: Tensor, members: Sequence[int] | None = None) -> XlaChannel:
        """A channel among all members, or those of one part of a regular partition (see ``partition``)."""
        group = checked_group(members, self.rank, self.size)
        return XlaChannel(name, like.shape, self.device, group, partition(group, self.size))


class XlaChannel:
    """Collectives of XLA for the vectors of one channel, on the device or in host memory."""

    capabilities = XlaFabric.capabilities

    def __init__(
        self,
        name: str,
        shape: Sequence[int],
        device: torch.device,
        group: tuple[int, ...],
        groups: list[list[int]],
    ) -> None:
        self.name, self.traffic = name, Traffic()
        self._shape, self._device, self._groups = tuple(shape), device, groups
        self.rank, self.size = group.index(torch_xla("runtime").global_ordinal()), len(group)

    def living(self) -> Sequence[int]:
        return range(self.size)

    def has_lost(self, rank: int) -> bool:
        return False

    def mean_(self, x: Tensor) -> int:
        check_shape(self.name, self._shape, x)
        if self.size > 1:
            model = torch_xla("core.xla_model")
            # summed once by XLA, so the bits are the same on all devices
            mean = self._together(
                x,
                lambda own: (
                    model.all_reduce(model.REDUCE_SUM, own, groups=self._groups, pin_layout=False) / self.size
                ),
            )
            with torch.no_grad():
                x.copy_(mean)
        return self.size

    def gather(self, x: Tensor) -> dict[int, Tensor]:
        check_shape(self.name, self._shape, x)
        if self.size == 1:
            return {0: x.detach().clone()}
        model = torch_xla("core.xla_model")
        rows = self._together(
            x,
            lambda own: model.all_gather(own.unsqueeze(0), dim=0, groups=self._groups, pin_layout=False),
        ).to(x.device)
        return {rank: rows[rank].clone() for rank in range(self.size)}

    def broadcast_(self, x: Tensor, root: int) -> None:
        # a gather: torch_xla's broadcast is a sum of zero times the others, in which their NaNs would spread
        root_vector = self.gather(x)[checked_rank(root, self.size)]
        with torch.no_grad():
            x.copy_(root_vector)

    def _together(self, x: Tensor, collective: Callable[[Tensor], Tensor]) -> Tensor:
        """``collective`` of ``x`` as a program of its own.

        What ``x`` depends on may differ between members (a shape, a constant), and would make different
        programs of it, whose collectives never meet.
        """
        with self.traffic.timed():
            own = x.detach().to(self._device)
            torch_xla().sync()
            # the lock must not be held while this device is busy: it may be waiting for the device of another
            # thread, which needs the lock
            model = torch_xla("core.xla_model")
            model.wait_device_ops(model.xla_real_devices([self._device]))
            with _COMPILING:
                result = collective(own)
                torch_xla().sync()
        self.traffic.bytes += own.nbytes + result.nbytes
        return result

    # -- what XLA does not offer ----------------------------------------------------------------------

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise FabricError(
            f"channel '{self.name}' is one of XLA devices, which offer collectives, not mail, registers or "
            "shared memory. Use a synchronous strategy such as all-reduce."
        )

    send = receive = wait = publish = version = peek = wait_newer = shared = _refuse


def partition(group: Sequence[int], size: int) -> list[list[int]]:
    """All groups of the partition of ``size`` members to which ``group`` belongs.

    All devices run the same program, so it must name the groups of all of them. Raises ValueError unless the
    group is a block of equal size (the replicas of a worker) or consists of every k-th member.
    """
    length = len(group)
    if size % length == 0:
        blocks = [list(ranks_within(first, length)) for first in range(0, size, length)]
        strides = [list(ranks_across(first, size // length, size)) for first in range(size // length)]
        for groups in (blocks, strides):
            if list(group) in groups:
                return groups
    raise ValueError(
        f"{list(group)} of {size} XLA devices can form no group: all devices run one program, so groups must "
        "be equal blocks, or every k-th device."
    )


# -- members ------------------------------------------------------------------------------------------


def run_on_devices(member: Callable[[XlaFabric], Exit], devices: int | None = None) -> dict[int, Exit]:
    """Run ``member``, which is pickled, on each XLA device of this host; returns how each ended, by rank.

    Tensors in results come back in host memory. When a member fails, its whole process ends, as the other
    members in it would wait for ever: these have DIED, or are missing if they had not begun.

    devices: number of XLA devices that the CPU stands for, unless ``CPU_NUM_DEVICES`` gives it; ignored where
        there are TPUs.
    """
    package = torch_xla()
    with tempfile.TemporaryDirectory(prefix="murmurate-xla-") as folder, _cpu_devices(devices):
        # a member that fails ends its process; how it ended says why
        with contextlib.suppress(BrokenProcessPool):
            package.launch(functools.partial(_run_member, member=member, folder=folder))
        return {int(path.stem): _exit_in(path) for path in Path(folder).glob("*.begun")}


@contextlib.contextmanager
def _cpu_devices(devices: int | None) -> Iterator[None]:
    """On the CPU, set the number of XLA devices that it stands for, and enough threads for them, in processes
    started meanwhile, unless the environment has these settings already."""
    before = dict(os.environ)
    if torch_xla("runtime").device_type() == "CPU":
        if devices is not None:
            os.environ.setdefault("CPU_NUM_DEVICES", str(devices))
        # each device blocks a thread of torch_xla's pool while it waits for the others
        threads = (os.cpu_count() or 1) + int(os.environ.get("CPU_NUM_DEVICES", "1"))
        os.environ.setdefault("XLA_THREAD_POOL_SIZE", str(threads))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _run_member(rank: int, member: Callable[[XlaFabric], Exit], folder: str) -> None:
    """What torch_xla runs in each thread."""
    begun = Path(folder, f"{rank}.begun")
    begun.touch()
    try:
        end = member(XlaFabric())
    except BaseException as error:
        end = Exit.failed(error)
    written = begun.with_suffix(".writing")
    written.write_bytes(pickled_exit(end, _dumps))
    written.rename(begun.with_suffix(".ended"))
    if end.how != FINISHED:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _exit_in(begun: Path) -> Exit:
    try:
        end: Exit = pickle.loads(begun.with_suffix(".ended").read_bytes())
    except FileNotFoundError:
        return Exit(DIED, "its process was ended, by the XLA runtime or a signal; see the output above")
    return end


class _HostPickler(pickle.Pickler):
    """Pickles tensors on XLA devices as those in host memory: loading one would claim the devices."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.device.type == "xla":
            in_host_memory: Any = value.detach().cpu()
            return in_host_memory.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def _dumps(end: Exit) -> bytes:
    content = io.BytesIO()
    _HostPickler(content, pickle.HIGHEST_PROTOCOL).dump(end)
    return content.getvalue()
