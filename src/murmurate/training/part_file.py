"""A part of a checkpoint as a file: named tensors in safetensors, all else as JSON in its metadata."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from murmurate.errors import Refusal
from murmurate.fabric.processes.deferred_signals import signals_deferred
from murmurate.record.stored import UNSOUND, in_usual_mode, parse, replacing
from murmurate.replay.interface import Chunk

_TENSOR = "<tensor>"
_LARGE_BYTES = 64 * 2**20  # larger tensors (a replay's images) are written without a copy
UNREADABLE = (OSError, SafetensorError, *UNSOUND)


def write(folder: Path, name: str, state: dict[str, Any], link: Callable[[Path], bool]) -> None:
    """Write nested ``state`` as ``<name>.safetensors``, each chunk in it as a file beside it.

    link: hard-links an unchanged chunk's file to the given path, or returns False.
    """
    tensors: dict[str, torch.Tensor] = {}
    chunks: list[Chunk] = []
    plain = _split(state, (), tensors, chunks)
    for chunk in chunks:
        path = folder / chunk_file(name, chunk.name)
        path.unlink(missing_ok=True)
        if not link(path):
            _save(path, {"x": chunk.values.detach().cpu().contiguous()})
    _save(folder / f"{name}.safetensors", tensors, {"plain": json.dumps(plain)})


def read(path: Path, listed: dict[str, str]) -> dict[str, Any]:
    """The nested state in a part. listed: files that its checkpoint lists. Raises Refusal if unreadable."""
    try:
        if path.name not in listed:
            raise LookupError("the checkpoint's state.json does not list it")
        joined = _join(_plain(path), (), _tensors(path), path, listed)
        if not isinstance(joined, dict):
            raise TypeError("it holds no state")
    except UNREADABLE as error:
        raise Refusal(f"{path} cannot be read ({error}). Resume from another checkpoint.") from error
    return joined


def read_count(path: Path, name: str) -> int:
    """An integer in a part, without reading the tensors. Raises Refusal if the part is unreadable."""
    try:
        value = _plain(path)["d"][name]["v"]
        if not isinstance(value, int) or value < 0:
            raise TypeError(f"{name} is {value!r}")
    except UNREADABLE as error:
        raise Refusal(f"{path} cannot be read ({error}). Resume from another checkpoint.") from error
    return value


def chunk_file(name: str, chunk: str) -> str:
    """File name of a chunk of part ``name``."""
    return f"{name}-{chunk}.safetensors"


def _save(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    with replacing(path, synced=True) as fresh, in_usual_mode(fresh):
        save_file(tensors, fresh, metadata=metadata)


def _plain(path: Path) -> Any:
    """The state in a part without its tensors, as ``_split`` returned it."""
    with safe_open(path, framework="pt") as file:
        return parse(file.metadata()["plain"])


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    # torch would turn a KeyboardInterrupt within it into a ValueError, as if the file were damaged
    with signals_deferred():
        return load_file(path)


def _key(path: tuple[str, ...]) -> str:
    return "/".join(step.replace("%", "%25").replace("/", "%2F") for step in path)


def _split(value: Any, path: tuple[str, ...], tensors: dict[str, torch.Tensor], chunks: list[Chunk]) -> Any:
    """``value`` without its tensors, which go to ``tensors`` under their path, and without its chunks.

    Each value is in a dictionary that says what it is: "c"hunk, "d"ictionary, "l"ist or other "v"alue.
    """
    if isinstance(value, Chunk):
        chunks.append(value)
        return {"c": value.name}
    if isinstance(value, torch.Tensor):
        # a copy, because safetensors refuses tensors that share memory
        copy = value.nbytes < _LARGE_BYTES
        tensors[_key(path)] = value.detach().to("cpu", copy=copy).contiguous()
        return _TENSOR
    if isinstance(value, dict):
        return {"d": {str(k): _split(v, (*path, str(k)), tensors, chunks) for k, v in value.items()}}
    if isinstance(value, (list, tuple)):
        return {"l": [_split(v, (*path, str(i)), tensors, chunks) for i, v in enumerate(value)]}
    return {"v": value}


def _join(
    value: Any, path: tuple[str, ...], tensors: dict[str, torch.Tensor], file: Path, listed: dict[str, str]
) -> Any:
    """The inverse of ``_split``."""
    if value == _TENSOR:
        return tensors[_key(path)]
    ((kind, inner),) = value.items()
    if kind == "c":
        name = chunk_file(file.stem, inner)
        if name not in listed:
            raise LookupError(f"the checkpoint's state.json does not list {name}")
        return Chunk(inner, _tensors(file.with_name(name))["x"])
    if kind == "d":
        return {k: _join(v, (*path, k), tensors, file, listed) for k, v in inner.items()}
    if kind == "l":
        return [_join(v, (*path, str(i)), tensors, file, listed) for i, v in enumerate(inner)]
    if kind != "v":
        raise LookupError(f"it holds a value of kind {kind!r}")
    return inner
