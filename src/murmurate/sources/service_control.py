"""What a learner and its replay shards exchange: columns of batches, counts, and contents of a replay."""

from __future__ import annotations

import io
import pickle
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from murmurate.buffers import as_bytes
from murmurate.fabric.processes.shared_memory import SharedMemoryFile
from murmurate.sources.service_slots import BatchSlots, SlotRows
from murmurate.spec import EnvSpec, Shapes

Field = tuple[tuple[int, ...], torch.dtype]


def batch_fields(spec: EnvSpec, behaviour: Shapes) -> dict[str, Field]:
    """For each column of a ``BatchSlots``, the shape of a row, which is one transition, and the dtype."""
    observation: Field = (spec.observation_shape, spec.observation_dtype)
    action: Field = ((), torch.int64) if spec.actions else (spec.action_shape, torch.float32)
    scalar: Field = ((), torch.float32)
    return {
        "keys": ((), torch.int64),
        "weights": scalar,
        "errors": scalar,
        "observation": observation,
        "next_observation": observation,
        "action": action,
        "reward": scalar,
        "discount": scalar,
        **{f"behaviour.{name}": (shape, torch.float32) for name, shape in behaviour.items()},
    }


def row_tensors(slots: BatchSlots, fields: dict[str, Field], slot: int, rows: SlotRows) -> dict[str, Tensor]:
    """The columns of some rows of a slot, as tensors in its memory."""
    return {
        name: torch.frombuffer(slots.bytes_of(name, slot, rows), dtype=dtype).view(-1, *shape)
        for name, (shape, dtype) in fields.items()
    }


class Counts(NamedTuple):
    """inserted: env steps inserted so far. drawn: rows drawn so far. transitions: those that can be drawn.

    version: version of the parameters with which the newest step was made. restarts: number of simulators
    that were replaced because they had failed.
    """

    inserted: int
    drawn: int
    transitions: int
    version: int
    restarts: int


class ShardCounts:
    """Counts that a shard keeps in shared memory, where its learner can read them at any time."""

    def __init__(self, memory_file: SharedMemoryFile) -> None:
        self._cells = memoryview(memory_file.counters("counts", (8,)))  # type: ignore[arg-type]

    def set(self, counts: Counts) -> None:
        for cell, count in enumerate(counts):
            self._cells[cell] = count

    def read(self) -> Counts:
        return Counts(*self._cells[:5])

    @property
    def beats(self) -> int:
        """Number of heartbeats so far."""
        return int(self._cells[5])

    def beat(self) -> None:
        self._cells[5] += 1

    @property
    def messages(self) -> int:
        """Number of messages that the shard has sent."""
        return int(self._cells[6])

    def note_message(self) -> None:
        self._cells[6] += 1


def send_state(connection: Connection, state: Any) -> None:
    """Send a nested state; contiguous tensors on the CPU are sent from their own memory, without a copy."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = io.BytesIO()
    _TensorPickler(pickled, protocol=5, buffer_callback=buffers.append).dump(state)
    tensor_bytes = [buffer.raw() for buffer in buffers]
    connection.send(([data.nbytes for data in tensor_bytes], pickled.getvalue()))
    for data in tensor_bytes:
        if data.nbytes:
            connection.send_bytes(data)


def receive_state(connection: Connection) -> Any:
    """The state that the other end sends with ``send_state``."""
    sizes, pickled = connection.recv()
    buffers = []
    for size in sizes:
        buffer = np.empty(size, np.uint8)
        if size:
            connection.recv_bytes_into(buffer)
        buffers.append(buffer)
    return pickle.loads(pickled, buffers=buffers)


class _TensorPickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        data = as_bytes(value).numpy()
        return _rebuild_tensor, (pickle.PickleBuffer(data.data), value.dtype, tuple(value.shape))


def _rebuild_tensor(data: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not memoryview(data).nbytes:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).view(shape)
