"""Checkpoints: named tensors in safetensors, everything else in JSON; never pickle, never incomplete.

``checkpoints/last``, ``previous`` and ``best`` each hold a ``replica-<i>.safetensors`` a replica and one
``state.json`` with a checksum of each. The contents of a replica's
replay are in ``replay-<i>.safetensors`` (``replay.<name>-<i>`` for further replays); ``best`` is for
evaluation and has none. Chunks of a replay's images are separate files; unchanged ones are hard-linked from
one checkpoint to the next. Parts are written into a staging folder beside ``last``, which is renamed to
``last`` when complete.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from murmurate.errors import Refusal, RunFailed
from murmurate.replay.interface import Chunk

FORMAT = 1
_REQUIRED = frozenset({"env_steps", "seconds", "replicas"})  # keys of every state.json
_REPLAY_STEM = re.compile(r"replay(?:\.(?P<name>[^-]+))?-(?P<rank>\d+)")
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def write_part(
    staging: Path, rank: int, state: dict[str, Any], replays: Mapping[str, dict[str, Any]] | None = None
) -> None:
    """Write one replica's nested ``state`` (tensors and plain values) into a staging folder.

    replays: the state of each replay, by name; it may be many times larger.
    The write is atomic: if this process is killed, the part does not appear. Raises RunFailed when the disk
    is full.
    """
    try:
        staging.mkdir(parents=True, exist_ok=True)
        for name, replay in (replays or {}).items():
            _write(staging, _replay_stem(name, rank), replay)
        _write(staging, f"replica-{rank}", state)
    except (OSError, SafetensorError) as error:
        raise disk_failure(staging, error) from error


def _write(folder: Path, name: str, state: dict[str, Any]) -> None:
    tensors: dict[str, torch.Tensor] = {}
    chunks: list[Chunk] = []
    plain = _split(state, (), tensors, chunks)
    listed = _listed(folder.parent / "last") if chunks else {}
    for chunk in chunks:
        path = folder / _chunk_file(name, chunk.name)
        path.unlink(missing_ok=True)
        try:
            if path.name not in listed:
                raise FileNotFoundError(path)
            os.link(folder.parent / "last" / path.name, path)
        except OSError:  # no such chunk, or a file system without hard links
            _save(path, {"x": chunk.values.detach().cpu().contiguous()})
    _save(folder / f"{name}.safetensors", tensors, {"plain": json.dumps(plain)})


def _save(path: Path, tensors: dict[str, torch.Tensor], about: dict[str, str] | None = None) -> None:
    fresh = path.with_name(f".{path.stem}.new")
    save_file(tensors, fresh, metadata=about)
    _sync(fresh)
    fresh.rename(path)


def _chunk_file(name: str, chunk: str) -> str:
    return f"{name}-{chunk}.safetensors"


def link_part(source: Path, target: Path, rank: int) -> None:
    """Hard-link (or copy) one replica's part, if there is one, from one staging folder into another."""
    part_of_rank = re.compile(rf"(replica|replay(\.[^-]+)?)-{rank}[.-].*safetensors")
    for file in source.iterdir() if source.exists() else ():
        if part_of_rank.fullmatch(file.name):
            (target / file.name).unlink(missing_ok=True)
            try:
                os.link(file, target / file.name)
            except OSError:  # a file system without hard links
                shutil.copyfile(file, target / file.name)


def commit(folder: Path, staging: Path, manifest_fields: dict[str, Any]) -> None:
    """Make ``staging`` the newest checkpoint of ``folder``; the one before is kept as ``previous``.

    A crash at any point leaves at least one complete checkpoint under ``last`` or ``previous``. Raises
    RunFailed when the disk is full, ValueError if nothing is staged.
    """
    parts = sorted(staging.glob("repl*-*.safetensors"))
    if not parts:
        raise ValueError(f"{staging} has no part of any replica: there is nothing to commit")
    try:
        linked_digests = _digests_of_linked(parts, folder / "last")
        digests = {part.name: linked_digests.get(part.name) or _digest(part) for part in parts}
        manifest = {"format": FORMAT, "package": "murmurate", "parts": digests, **manifest_fields}
        _write_json(staging / "state.json", manifest)
        for part in parts:
            _sync(part)
        _sync(staging)
        last, previous, old = folder / "last", folder / "previous", folder / ".old"
        if last.exists():
            if previous.exists():
                shutil.rmtree(old, ignore_errors=True)
                previous.rename(old)
            last.rename(previous)
        staging.rename(last)
        _sync(folder)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise disk_failure(folder, error) from error


def _digests_of_linked(parts: list[Path], last: Path) -> dict[str, str]:
    """Digests, by name, of those parts that are also files of the checkpoint ``last``."""
    listed = _listed(last)
    return {part.name: listed[part.name] for part in parts if _same_file(part, last / part.name)}


def _listed(checkpoint: Path) -> dict[str, str]:
    """Digests by file name; empty for a checkpoint whose state.json cannot be read."""
    try:
        return dict(read_manifest(checkpoint)["parts"])
    except (OSError, ValueError, LookupError, TypeError):
        return {}


def _same_file(path: Path, other_path: Path) -> bool:
    return other_path.exists() and path.samefile(other_path)


def keep_as_best(folder: Path) -> None:
    """Copy ``last`` to ``best``; a crash leaves the old one or the new one (see ``restore_best``)."""
    fresh, best, old = folder / ".best", folder / "best", folder / ".old-best"
    restore_best(folder)
    try:
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.copytree(folder / "last", fresh, ignore=shutil.ignore_patterns("replay*"))
        manifest = read_manifest(fresh)
        kept_parts = {name: digest for name, digest in manifest["parts"].items() if (fresh / name).exists()}
        _write_json(fresh / "state.json", {**manifest, "parts": kept_parts})
        for path in fresh.iterdir():
            _sync(path)
        if best.exists():
            best.rename(old)
        fresh.rename(best)
        _sync(folder)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise disk_failure(folder, error) from error


def restore_best(folder: Path) -> None:
    """Restore the best checkpoint if a crash interrupted its replacement."""
    best, old = folder / "best", folder / ".old-best"
    if best.exists():
        shutil.rmtree(old, ignore_errors=True)
    elif old.exists():
        old.rename(best)


def newest(folder: Path) -> Path:
    """The newest complete checkpoint in ``folder``. Falls back, with a warning, to the one before and, where
    only replays are damaged in both (they share unchanged chunks), to the newest without its replays.

    Raises Refusal if there is none.
    """
    problems: list[str] = []
    for name in ("last", "previous"):
        candidate = folder / name
        problem = damage(candidate)
        if problem is None:
            for former in problems:
                warnings.warn(f"{former} Going on from {candidate} instead.", stacklevel=2)
            return candidate
        problems.append(problem)
    for name in ("last", "previous"):
        candidate = folder / name
        if damage(candidate, replays=False) is None:
            _set_replays_aside(candidate)
            warnings.warn(
                f"{problems[0]} Going on from {candidate} with empty replays; the rest of them is kept there "
                "in damaged-*.safetensors.",
                stacklevel=2,
            )
            return candidate
    raise Refusal(f"{problems[0]} There is no other to fall back to: start again with murmurate train.")


def _set_replays_aside(checkpoint: Path) -> None:
    manifest = read_manifest(checkpoint)
    kept_parts = {name: digest for name, digest in manifest["parts"].items() if not name.startswith("replay")}
    _write_json(checkpoint / "state.json", {**manifest, "parts": kept_parts})
    for path in checkpoint.glob("replay*"):
        path.rename(path.with_name(f"damaged-{path.name}"))


def set_aside(checkpoint: Path) -> None:
    """Rename a damaged checkpoint's ``state.json`` to ``damaged-state.json``, so that the next checkpoint
    links nothing from it."""
    if (checkpoint / "state.json").exists():
        (checkpoint / "state.json").rename(checkpoint / "damaged-state.json")


def damage(checkpoint: Path, replays: bool = True) -> str | None:
    """What is wrong with a checkpoint, in a sentence; None if it is complete. replays: check them too."""
    try:
        manifest = json.loads((checkpoint / "state.json").read_text())
    except FileNotFoundError:
        return f"{checkpoint} holds no checkpoint."
    except ValueError:
        return f"{checkpoint}/state.json is corrupt."
    except OSError as error:
        return f"{checkpoint} cannot be read ({error.strerror})."
    if not isinstance(manifest, dict) or manifest.get("package") != "murmurate":
        return f"{checkpoint} was not written by murmurate."
    if manifest.get("format") != FORMAT:
        return f"{checkpoint} has format {manifest.get('format')}, and this version reads {FORMAT}."
    listed = manifest.get("parts")
    if not isinstance(listed, dict) or not listed or not manifest.keys() >= _REQUIRED:
        return f"{checkpoint}/state.json is corrupt."
    for name, digest in listed.items():
        if not replays and name.startswith("replay"):
            continue
        part = checkpoint / name
        if not part.exists() or _digest(part) != digest:
            return f"{part} is corrupt or missing."
    return None


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((checkpoint / "state.json").read_text())
    return manifest


def read_part(checkpoint: Path, rank: int) -> dict[str, Any]:
    """One replica's nested state. Raises Refusal if it is unreadable."""
    return _read(checkpoint / f"replica-{rank}.safetensors")


def read_replays(checkpoint: Path, rank: int) -> dict[str, dict[str, Any]]:
    """The states of one replica's replays, by name. Raises Refusal if one is unreadable."""
    replays = {}
    for path in sorted(checkpoint.glob(f"replay*-{rank}.safetensors")):
        if (match := _REPLAY_STEM.fullmatch(path.stem)) and int(match["rank"]) == rank:
            replays[match["name"] or "replay"] = _read(path)
    return replays


def _replay_stem(name: str, rank: int) -> str:
    return f"replay-{rank}" if name == "replay" else f"replay.{name}-{rank}"


def _read(path: Path) -> dict[str, Any]:
    try:
        plain = _read_plain(path)
        joined: dict[str, Any] = _join(plain, (), load_file(path), path)
    except (
        OSError,
        ValueError,
        LookupError,
        TypeError,
        ArithmeticError,
        MemoryError,
        SafetensorError,
    ) as error:
        raise Refusal(f"{path} cannot be read ({error}). Resume from another checkpoint.") from error
    return joined


def env_steps(checkpoint: Path, rank: int) -> int:
    """Env steps of one replica when it wrote its part, without reading the tensors."""
    return int(_read_plain(checkpoint / f"replica-{rank}.safetensors")["d"]["env_steps"]["v"])


def updates(checkpoint: Path, rank: int) -> int:
    """Updates of one replica when it wrote its part, without reading the tensors."""
    return int(_read_plain(checkpoint / f"replica-{rank}.safetensors")["d"]["updates"]["v"])


def parts(checkpoint: Path) -> list[int]:
    """Ranks that have a part."""
    return sorted(int(p.stem.split("-")[1]) for p in checkpoint.glob("replica-*.safetensors"))


def disk_failure(path: Path, error: Exception) -> RunFailed:
    number = getattr(error, "errno", None)
    if number in _FULL or "No space" in str(error) or "File too large" in str(error):
        run = next((p for p in (path, *path.parents) if (p / "run.json").exists()), path)
        return RunFailed(
            f"The disk that holds {path} is full; the last whole checkpoint is kept. "
            f"Free some space, then run: murmurate resume {run}"
        )
    return RunFailed(f"Cannot write to {path}: {error}. The last whole checkpoint is kept.")


_TENSOR = "<tensor>"
_LARGE_BYTES = 64 * 2**20  # larger tensors (a replay's images) are written without a copy


def _key(path: tuple[str, ...]) -> str:
    return "/".join(step.replace("%", "%25").replace("/", "%2F") for step in path)


def _split(value: Any, path: tuple[str, ...], tensors: dict[str, torch.Tensor], chunks: list[Chunk]) -> Any:
    """``value`` without its tensors, which go to ``tensors`` under their path, and without its chunks."""
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


def _join(value: Any, path: tuple[str, ...], tensors: dict[str, torch.Tensor], file: Path) -> Any:
    if value == _TENSOR:
        return tensors[_key(path)]
    if "c" in value:
        name = str(value["c"])
        return Chunk(name, load_file(file.with_name(_chunk_file(file.stem, name)))["x"])
    if "d" in value:
        return {k: _join(v, (*path, k), tensors, file) for k, v in value["d"].items()}
    if "l" in value:
        return [_join(v, (*path, str(i)), tensors, file) for i, v in enumerate(value["l"])]
    return value["v"]


def _read_plain(path: Path) -> Any:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return json.loads(json.loads(file.read(size))["__metadata__"]["plain"])


def _write_json(path: Path, value: Any) -> None:
    with path.open("w") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
