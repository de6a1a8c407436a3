"""Checkpoints: named tensors in safetensors, everything else in JSON; never pickle, never incomplete.

``checkpoints/last``, ``previous`` and ``best`` each hold a ``replica-<i>.safetensors`` for each replica and
one ``state.json`` with a checksum of each file and of itself; files that it does not list are never read. The
contents of a replica's replay are in ``replay-<i>.safetensors`` (``replay.<name>-<i>`` for further replays);
``best`` is for evaluation and has no replays. Chunks of a replay's images are separate files; unchanged ones
are hard-linked from one checkpoint to the next. Parts are written into a staging folder beside ``last``,
which is renamed to ``last`` when complete.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import warnings
from collections.abc import Callable, Container, Mapping
from errno import EEXIST, ENOTDIR
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError

from murmurate.errors import DISK_FULL, Refusal, RunFailed, file_limit
from murmurate.record.stored import FORMAT, sync, write_json
from murmurate.training import part_file
from murmurate.training.manifest import MANIFEST_NAME, digest, files, lacks, read_manifest, replay_files
from murmurate.training.manifest import ranks as parts
from murmurate.training.run_folder import command_for, unit_of

__all__ = ["lacks", "parts", "read_manifest"]
_READS = 3  # of a checkpoint that a run replaces meanwhile
T = TypeVar("T")


def write_part(
    staging: Path, rank: int, state: dict[str, Any], replays: Mapping[str, dict[str, Any]] | None = None
) -> None:
    """Write one replica's nested ``state`` (tensors and plain values) into a staging folder.

    replays: the state of each replay, by name, which may be many times larger than ``state``.
    The write is atomic: if this process is killed, the part does not appear. Raises RunFailed when the disk
    is full.
    """
    # the list is read once, as there may be hundreds of chunks
    link = functools.partial(_link_unchanged, _listed(staging.parent / "last"))
    try:
        staging.mkdir(exist_ok=True)
        for name, replay in (replays or {}).items():
            stem = f"replay-{rank}" if name == "replay" else f"replay.{name}-{rank}"
            part_file.write(staging, stem, replay, link)
        part_file.write(staging, f"replica-{rank}", state, link)
    except (OSError, SafetensorError) as error:
        raise disk_failure(staging, error) from error


def _link_unchanged(listed: Container[str], path: Path) -> bool:
    """Link a chunk of the checkpoint ``last``, which has the files ``listed``, into a staging folder; returns
    False if that fails."""
    if path.name not in listed:
        return False
    try:
        os.link(path.parent.parent / "last" / path.name, path)
    except OSError:  # another ``last`` by now, without this chunk; or a file system without hard links
        return False
    return True


def link_part(source: Path, target: Path, rank: int) -> None:
    """Hard-link (or copy) one replica's part, if there is one, from one staging folder into another.

    Raises RunFailed when the disk is full.
    """
    part_of_rank = re.compile(rf"(replica|replay(\.[^-]+)?)-{rank}[.-].*safetensors")
    for file in source.iterdir() if source.exists() else ():
        if part_of_rank.fullmatch(file.name):
            try:
                (target / file.name).unlink(missing_ok=True)
                _link_or_copy(file, target / file.name)
            except OSError as error:
                raise disk_failure(target, error) from error


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)


def commit(folder: Path, staging: Path, manifest_fields: dict[str, Any]) -> None:
    """Make ``staging`` the newest checkpoint of ``folder``; the one before is kept as ``previous``.

    A crash at any point leaves at least one complete checkpoint under ``last`` or ``previous``. Raises
    RunFailed when the disk is full, ValueError if nothing is staged.
    """
    try:
        complete(staging, manifest_fields)
        for name in files(staging):
            sync(staging / name)
        sync(staging)
        last, previous, old = folder / "last", folder / "previous", folder / ".old"
        if last.exists():
            shutil.rmtree(old, ignore_errors=True)
            if not (last / MANIFEST_NAME).exists():  # it was set aside, and ``previous`` is the one to keep
                last.rename(old)
            else:
                if previous.exists():
                    previous.rename(old)
                last.rename(previous)
        staging.rename(last)
        sync(folder)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise disk_failure(folder, error) from error


def complete(staging: Path, manifest_fields: dict[str, Any]) -> None:
    """Write the manifest of the parts in ``staging``. Raises OSError; ValueError if there is no part."""
    parts = [staging / name for name in files(staging)]
    if not parts:
        raise ValueError(f"{staging} has no part of any replica: there is nothing to commit")
    last = staging.parent / "last"
    listed, digests = _listed(last), {}
    for part in parts:
        is_linked = part.name in listed and (last / part.name).exists() and part.samefile(last / part.name)
        digests[part.name] = listed[part.name] if is_linked else digest(part)
    manifest = {"format": FORMAT, "package": "murmurate", "parts": digests, **manifest_fields}
    write_json(staging / MANIFEST_NAME, manifest)


def _listed(checkpoint: Path) -> dict[str, str]:
    """Digests by file name; empty for a checkpoint whose state.json cannot be read."""
    try:
        return dict(read_manifest(checkpoint)["parts"])
    except Refusal:
        return {}


def keep_as_best(folder: Path, source: Path | None = None, **manifest_fields: Any) -> None:
    """Copy ``source`` (``last``, if it is None) to ``best``; a crash leaves the old or the new ``best`` (see
    ``restore_best``). manifest_fields: added to the manifest of ``best``."""
    fresh, best, old = folder / ".best", folder / "best", folder / ".old-best"
    restore_best(folder)
    try:
        # first: if the run folder was moved meanwhile, nothing is written at its old place
        copied = list((source or folder / "last").iterdir())
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir()  # not by ``copytree``, which would make a run folder anew that was removed meanwhile
        for file in copied:
            if not file.name.startswith("replay"):
                shutil.copy2(file, fresh / file.name)
        manifest = read_manifest(fresh)
        kept_parts = {name: digest for name, digest in manifest["parts"].items() if (fresh / name).exists()}
        write_json(fresh / MANIFEST_NAME, {**manifest, "parts": kept_parts, **manifest_fields})
        for path in fresh.iterdir():
            sync(path)
        if best.exists():
            best.rename(old)
        fresh.rename(best)
        sync(folder)
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


def best(folder: Path) -> Path:
    """The best checkpoint in ``folder``; if a crash interrupted its replacement, the one before."""
    kept, old = folder / "best", folder / ".old-best"
    return old if old.exists() and not kept.exists() else kept


def newest(
    folder: Path, fits: Callable[[Path], object] = lambda checkpoint: None, *, replays: bool = True
) -> Path:
    """The newest complete checkpoint in ``folder``. Falls back, with a warning, to the previous checkpoint
    or, if only replays are damaged in both (they share unchanged chunks), to the newest, whose replays are
    then set aside.

    fits: raises Refusal for a checkpoint that is not of this run. replays: whether replays are needed; else
    damage to them does not matter, and nothing is changed. Raises Refusal if no checkpoint is usable.
    """
    problems: list[str] = []
    for name in ("last", "previous"):
        candidate = folder / name
        problem = undisturbed(candidate, lambda path: damage(path, replays) or _unfit(path, fits))
        if problem is None:
            for earlier_problem in problems:
                warnings.warn(f"{earlier_problem} Going on from {candidate} instead.", stacklevel=2)
            return candidate
        problems.append(problem)
    for name in ("last", "previous") if replays else ():
        candidate = folder / name
        is_complete = damage(candidate) is None
        if not is_complete and (damage(candidate, replays=False) or _unfit(candidate, fits)) is None:
            _set_replays_aside(candidate)
            warnings.warn(
                f"{problems[0]} Going on from {candidate} with empty replays; the rest of the replays is "
                "kept there in damaged-*.safetensors.",
                stacklevel=2,
            )
            return candidate
    if damage(folder / "last", replays) is None:
        raise Refusal(problems[0])
    remedy = "There is no other to fall back to: start again with murmurate train and another --out."
    if damage(best(folder)) is None:
        remedy = "The best checkpoint is sound: evaluate or export that one with --best."
    raise Refusal(f"{problems[0]} {remedy}")


def load_newest(folder: Path, load: Callable[[Path], T]) -> tuple[Path, T]:
    """(the ``newest`` checkpoint without regard to its replays, what ``load`` made of it).

    load: raises Refusal for a checkpoint that is not of this run.
    """
    loaded: list[T] = []

    def fits(checkpoint: Path) -> None:
        loaded[:] = [load(checkpoint)]

    return newest(folder, fits, replays=False), loaded[0]


def _unfit(checkpoint: Path, fits: Callable[[Path], object]) -> str | None:
    try:
        fits(checkpoint)
    except Refusal as refusal:
        return str(refusal)
    return None


def _set_replays_aside(checkpoint: Path) -> None:
    manifest = read_manifest(checkpoint)
    kept_parts = {name: digest for name, digest in manifest["parts"].items() if not name.startswith("replay")}
    write_json(checkpoint / MANIFEST_NAME, {**manifest, "parts": kept_parts})
    for path in checkpoint.glob("replay*"):
        path.rename(path.with_name(f"damaged-{path.name}"))


def undisturbed(checkpoint: Path, read: Callable[[Path], T]) -> T:
    """What ``read(checkpoint)`` returns or raises, of one checkpoint: if a run that goes on replaced it
    meanwhile, it is read again."""
    for _ in range(_READS - 1):
        before = _identity(checkpoint)
        try:
            found = read(checkpoint)
        except Exception:
            if _identity(checkpoint) == before:
                raise
        else:
            if _identity(checkpoint) == before:
                return found
    return read(checkpoint)


def _identity(checkpoint: Path) -> tuple[int, int] | None:
    """Differs between successive checkpoints of the same name; None if there is none."""
    try:
        status = (checkpoint / MANIFEST_NAME).stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def set_aside(checkpoint: Path) -> None:
    """Rename a damaged checkpoint's ``state.json`` to ``damaged-state.json``, so that the next checkpoint
    links nothing from it."""
    with contextlib.suppress(FileNotFoundError):
        (checkpoint / MANIFEST_NAME).rename(checkpoint / f"damaged-{MANIFEST_NAME}")


def is_one(folder: Path) -> bool:
    """Whether ``folder`` is that of a checkpoint, sound or not, and not of a run."""
    return (folder / MANIFEST_NAME).exists()


def damage(checkpoint: Path, replays: bool = True) -> str | None:
    """What is wrong with a checkpoint, in a sentence; None if it is complete. replays: check these, too."""
    try:
        listed = read_manifest(checkpoint)["parts"]
    except Refusal as refusal:
        return str(refusal)
    for name, expected in listed.items():
        if not replays and name.startswith("replay"):
            continue
        with contextlib.suppress(OSError):
            if digest(checkpoint / name) == expected:
                continue
        return f"{checkpoint / name} is corrupt or missing."
    return None


def read_part(checkpoint: Path, rank: int) -> dict[str, Any]:
    """One replica's nested state. Raises Refusal if it is unreadable."""
    return part_file.read(checkpoint / f"replica-{rank}.safetensors", files(checkpoint))


def read_replays(checkpoint: Path, rank: int) -> dict[str, dict[str, Any]]:
    """The states of one replica's replays, by name. Raises Refusal if one is unreadable."""
    listed = files(checkpoint)
    return {
        name: part_file.read(checkpoint / file, listed)
        for name, file in replay_files(checkpoint, rank).items()
    }


def env_steps(checkpoint: Path, rank: int) -> int:
    """Env steps of one replica when it wrote its part, without reading the tensors. Raises Refusal if the
    part is unreadable."""
    return part_file.read_count(checkpoint / f"replica-{rank}.safetensors", "env_steps")


def updates(checkpoint: Path, rank: int) -> int:
    """Updates of one replica when it wrote its part, without reading the tensors. Raises Refusal if the
    part is unreadable."""
    return part_file.read_count(checkpoint / f"replica-{rank}.safetensors", "updates")


def disk_failure(path: Path, error: Exception) -> RunFailed:
    """The exception to raise after an ``error`` of writing to ``path``."""
    number = getattr(error, "errno", None)
    if number in DISK_FULL or "No space" in str(error) or "File too large" in str(error):
        return RunFailed(
            f"The disk that holds {path} is full: free some space (or raise the quota or file-size limit)."
        )
    remedy = " A file has the name of a folder: move it away." if number in (EEXIST, ENOTDIR) else ""
    return RunFailed(f"Cannot write to {path}: {error}{file_limit(error)}.{remedy}")


def kept_sentence(folder: Path, resumable: bool = True, command_prefix: str = "") -> str:
    """What a failed run has left in its folder, in a sentence. resumable: whether it can go on from it.
    command_prefix: see ``command_for``."""
    for name in ("last", "previous"):
        with contextlib.suppress(Refusal):
            steps = read_manifest(folder / "checkpoints" / name)["env_steps"]
            command = command_for("resume" if resumable else "eval", folder, command_prefix)
            return f"The checkpoint at {steps:,} {unit_of(folder)} is kept: {command}"
    return "No checkpoint had been saved, so nothing that was learned is kept."
