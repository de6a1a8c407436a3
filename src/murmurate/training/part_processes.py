"""The parts of a replica in a run: processes of its learner, which learn from the same batches.

The learner's own process is part 0. It sends every batch to the other parts. All build the same learner and
make the same steps: each net computes its part's share of the images (``murmurate.spatial``), gradients are
averaged over the parts, and only part 0 makes the strategy's step (docs/decisions/0029).
"""

from __future__ import annotations

import functools
import os
import pickle
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from murmurate.errors import Refusal
from murmurate.fabric.processes.fabric import ProcessFabric
from murmurate.fabric.processes.module_process import end_process
from murmurate.fabric.processes.shared_memory import SharedMemoryFile
from murmurate.fabric.processes.spawn import open_run_state
from murmurate.replica.vector import MakeOptimizer, Replica
from murmurate.replicator.gather import NoExchange
from murmurate.replicator.learner import Learner, Replicate
from murmurate.replicator.replica_parts import SharedVector
from murmurate.spatial import PartLost, Parts, parallelize
from murmurate.spatial.parts import Expected
from murmurate.spec import Batch, Outcome
from murmurate.training.run import Run

_MODULE = "murmurate.training.part_process"
_REFUSALS_BYTES = 2**16  # that are read of what parts refuse
_HEADER_SIZE = 2  # int64 values before a batch: its size in bytes, updates so far


@dataclass(frozen=True)
class PartSettings:
    """What a part's process gets. memory: file descriptor of the shared memory of the replica's parts.
    refusals: of the file to which it writes why it refuses."""

    run: Run
    rank: int
    part: int
    memory: int
    refusals: int


def write_refusal(descriptor: int, refusal: Refusal) -> None:
    """Add ``refusal`` to the file of the refusals of a replica's parts."""
    os.write(descriptor, f"{refusal}\0".encode())  # at the offset that all parts share


class PartsOfReplica:
    """The parts of one replica, as one of them sees them: the vectors that they share, and their batches."""

    def __init__(self, run: Run, rank: int, part: int, memory_file: SharedMemoryFile) -> None:
        rows, columns = run.grid
        self._state = open_run_state(memory_file, rows * columns)
        if part == 0:
            self._state.open()
        deadline = run.hang_after_seconds
        fabric = ProcessFabric(memory_file, self._state, part, deadline)
        name = f"parts of {rank}"
        self.parts = Parts.open(
            fabric, run.grid, seed=run.seed, deadline_seconds=deadline, name=name, replica=rank
        )
        self._shared: dict[str, tuple[Replica, SharedVector]] = {}

    def replicate(
        self, inner: Replicate, name: str, module: nn.Module, make_optimizer: MakeOptimizer, **options: Any
    ) -> Replica:
        """Like ``inner``, for a module that computes this part's share of every training image."""
        if self._shared:
            raise Refusal("replicas of several parts have one optimizer: leave out --parts for this learner")
        replica = inner(name, module, make_optimizer, **options)
        parallelize(module, self.parts, in_evaluation=False)
        vector = self.parts.share(replica)
        replica.exchange = functools.partial(vector.exchange, step=replica.exchange)
        self._shared[name] = replica, vector
        return replica

    def died(self, part: int) -> None:
        """From now on no part waits for ``part``."""
        self._state.mark_dead(part)

    # -- batches ------------------------------------------------------------------------------------

    def send(self, data: Any, clock: int) -> None:
        """Called by part 0: send the other parts a batch, and the parameters, which may have been restored.

        clock: number of updates so far.
        """
        packed = torch.frombuffer(bytearray(pickle.dumps(data)), dtype=torch.uint8)
        header = torch.tensor([len(packed), clock], dtype=torch.int64)
        other_parts = range(1, self.parts.size)
        self.parts.receive(self.parts.send([(part, header) for part in other_parts]), [])
        self.parts.receive(self.parts.send([(part, packed) for part in other_parts]), [])
        self._share_vectors()

    def receive(self) -> Any:
        """Called by the other parts: the next batch from part 0, which may take any time to prepare it."""
        size, clock = (int(n) for n in self._receive_from_part_0(_HEADER_SIZE, torch.int64, patient=True))
        data = pickle.loads(self._receive_from_part_0(size, torch.uint8).numpy().data)
        self._share_vectors()
        for replica, _ in self._shared.values():
            while replica.clock < clock:
                replica.tick()
        return data

    def _receive_from_part_0(self, count: int, dtype: torch.dtype, patient: bool = False) -> Tensor:
        return self.parts.receive(self.parts.send([]), [Expected(0, (count,), dtype)], patient)[0]

    def _share_vectors(self) -> None:
        with torch.no_grad():
            for replica, vector in self._shared.values():
                vector.broadcast(replica.params.data)
                replica.reload()


class LeaderAlone(NoExchange):
    """Stands for the exchange of a group on all parts but the first, which alone is in the group of the
    replicas. ``BatchNorm`` copies its sums (see ``spatial.own_norm``)."""

    def gather(self, call: str, tensors: Sequence[Tensor], wants_gradient: bool = False) -> NoReturn:
        raise Refusal(
            f"this learner makes a collective of its own ({call}), and with --parts only batch normalisation "
            "over replicas can: leave out --parts"
        )


class LearnerInParts:
    """Part 0's learner, whose other parts learn from the same batches (see ``Learner``)."""

    def __init__(self, learner: Learner, processes: PartProcesses) -> None:
        self._learner, self._processes = learner, processes

    @property
    def replicas(self) -> dict[str, Replica]:
        return self._learner.replicas

    def learn(self, batch: Batch) -> Outcome:
        """Raises PartLost if one of the other parts died, and Refusal if it ended as it refused."""
        try:
            clock = max(replica.clock for replica in self.replicas.values())
            self._processes.replica_parts.send(batch.data, clock)
            return self._learner.learn(batch)
        except PartLost:
            if refusal := self._processes.refusal():
                raise Refusal(refusal) from None
            raise

    def state(self) -> dict[str, Any]:
        return self._learner.state()

    def load(self, state: dict[str, Any]) -> None:
        self._learner.load(state)


class PartProcesses:
    """The processes of the other parts of replica ``rank``; they end with this one, however it ends."""

    def __init__(self, run: Run, rank: int) -> None:
        self._memory_file = SharedMemoryFile.create()
        self.replica_parts = PartsOfReplica(run, rank, 0, self._memory_file)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._refusals = tempfile.TemporaryFile()  # noqa: SIM115 - closed with this
        descriptors = self._memory_file.descriptor, self._refusals.fileno()
        for part in range(1, self.replica_parts.parts.size):
            process = subprocess.Popen(
                [sys.executable, "-m", _MODULE],
                stdin=subprocess.PIPE,
                pass_fds=descriptors,
                env={**os.environ, "OMP_NUM_THREADS": str(run.placement.threads)},
            )
            self._processes.append(process)
            assert process.stdin is not None
            process.stdin.write(pickle.dumps(sys.path))  # the run's classes may be in files of the user
            process.stdin.write(pickle.dumps(PartSettings(run, rank, part, *descriptors)))
            process.stdin.flush()  # stdin stays open: the part exits when it is closed
            threading.Thread(target=self._watch, args=(process, part), daemon=True).start()

    def _watch(self, process: subprocess.Popen[bytes], part: int) -> None:
        process.wait()
        self.replica_parts.died(part)

    def refusal(self) -> str:
        """Why the first of the other parts that refused did; empty if none has."""
        written = os.pread(self._refusals.fileno(), _REFUSALS_BYTES, 0)
        return written.decode(errors="replace").partition("\0")[0]

    def close(self) -> None:
        for process in self._processes:
            end_process(process)
        self._memory_file.close()
        self._refusals.close()
