"""Damages to a run folder, drawn at random: bits, lengths, names, links, JSON values, tensors."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from murmurate.record.stored import seal
from murmurate.training.manifest import digest

_DEEP = "<deep>"  # stands for deeply nested lists (see ``_json_text``)
_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 3, 2**63, 10**30, 10**400, 1e308, -1e308, float("nan"), float("inf"), 0.5, "",
    "x", "9" * 5000, "../../outside", "/etc/passwd", "\x1b]52;c;\x07", "\x00", "\ud800", "<script>", "$x_{$",
    [], {}, [[]], {"v": 1}, {"name": "x"}, [1, "2", None], _DEEP,
)  # fmt: skip


def damage(folder: Path, draw: random.Random) -> tuple[str, bool]:
    """Damage a run folder once; returns a description, and whether checksums and digests were recomputed to
    match the damage."""
    if not any(path.suffix == ".json" for path in _files(folder)):
        return "nothing", False  # earlier damages left no JSON file
    kinds: list[Callable[[Path, random.Random], tuple[str, bool]]] = [
        _damage_bytes,
        _damage_names,
        _damage_json,
        _damage_part_of_checkpoint,
    ]
    return draw.choices(kinds, weights=(3, 2, 5, 3))[0](folder, draw)


def _files(folder: Path) -> list[Path]:
    """Files that a command reads; ``run.json`` and the files of the checkpoint ``last`` are drawn three times
    as often as others."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and "tensorboard" not in path.parts)
    readable = [path for path in files if path.suffix != ".html" and path.parent.name != "logs"]
    return readable + 2 * [path for path in readable if path.parent.name == "last" or path.name == "run.json"]


def _damage_bytes(folder: Path, draw: random.Random) -> tuple[str, bool]:
    path = draw.choice(_files(folder))
    content = bytearray(path.read_bytes())
    kind = draw.choice(("bits", "cut", "longer", "noise", "utf-8", "empty", "nesting"))
    at = draw.randrange(len(content) + 1)
    if kind == "bits" and content:
        for _ in range(draw.randint(1, 8)):
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    elif kind == "cut":
        del content[at:]
    elif kind == "longer":
        content += draw.randbytes(draw.randint(1, 100))
    elif kind == "noise":
        content[at : at + 50] = draw.randbytes(50)
    elif kind == "utf-8":
        content[at:at] = b"\xff\xfe\xed\xa0\x80"
    elif kind == "nesting":
        content[:] = b"[" * 10**5 if draw.random() < 0.5 else b'{"a":' * 10**5
    else:
        content.clear()
    path.unlink()  # so that other hard links to the file keep its content
    path.write_bytes(bytes(content))
    return f"{kind} in {path.relative_to(folder)}", False


def _damage_names(folder: Path, draw: random.Random) -> tuple[str, bool]:
    files = _files(folder)
    path, other = draw.choice(files), draw.choice(files)
    kind = draw.choice(("gone", "renamed", "swapped", "folder", "link in", "link out", "pipe", "no folder"))
    if kind == "swapped" and path != other:
        spare = path.with_name("spare")
        path.rename(spare)
        other.rename(path)
        spare.rename(other)
    elif kind == "renamed":
        path.rename(path.with_name(path.name[:-1] + draw.choice("xyz")))
    elif kind == "no folder":
        if path.parent != folder:
            shutil.rmtree(path.parent)
    else:
        content = path.read_bytes()
        path.unlink()
        if kind == "folder":
            path.mkdir()
        elif kind == "link in":
            path.symlink_to(other)
        elif kind == "link out":
            outside = folder.with_name(folder.name + "-outside")
            outside.write_bytes(content)
            path.symlink_to(outside)
        elif kind == "pipe":
            os.mkfifo(path)
    return f"{kind}: {path.relative_to(folder)} ({other.name})", False


def _damage_json(folder: Path, draw: random.Random) -> tuple[str, bool]:
    files = [path for path in _files(folder) if path.suffix in (".json", ".jsonl")]
    path = draw.choice(files)
    resealed = draw.random() < 0.6
    try:
        lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        at = draw.randrange(len(lines))
        value = json.loads(lines[at])
        description = _spoil(value, draw)
    except (OSError, ValueError, TypeError, LookupError, OverflowError, RecursionError):  # an earlier damage
        return "nothing", False
    if path.suffix == ".jsonl":
        lines[at] = _json_text(value, separators=(",", ":"))
        path.write_text("\n".join(lines) + "\n")
        return f"{description} in line {at} of {path.name}", False
    if resealed and isinstance(value, dict):
        value = _sealed(value, path.name)
    path.write_text(_json_text(value))
    return f"{description} in {path.relative_to(folder)}{' resealed' * resealed}", resealed


def _damage_part_of_checkpoint(folder: Path, draw: random.Random) -> tuple[str, bool]:
    """Damage the content of one ``.safetensors`` file of a checkpoint, and recompute its digest and the
    manifest's checksum."""
    paths = [path for path in _files(folder) if path.suffix == ".safetensors"]
    path = draw.choice(paths or [folder])
    try:
        if not (path.parent / "state.json").is_file():  # it may be a pipe, whose reading would block for ever
            return "nothing", True
        with safe_open(path, framework="pt") as file:
            plain = json.loads((file.metadata() or {})["plain"])
        tensors = load_file(path)
        description = _spoil_tensor(tensors, draw) if draw.random() < 0.4 else _spoil(plain, draw)
        path.unlink()
        save_file(tensors, path, metadata={"plain": _json_text(plain)})
        manifest = json.loads((path.parent / "state.json").read_text())
        manifest["parts"][path.name] = digest(path)
        (path.parent / "state.json").write_text(json.dumps(seal(manifest, "state.json")))
    except Exception:  # an earlier damage
        return "nothing", True
    return f"{description} in {path.relative_to(folder)}", True


def _spoil_tensor(tensors: dict[str, torch.Tensor], draw: random.Random) -> str:
    name = draw.choice(sorted(tensors))
    value = tensors[name]
    kind = draw.choice(("nan", "shape", "dtype", "gone", "empty"))
    if kind == "nan" and value.is_floating_point():
        tensors[name] = torch.full_like(value, draw.choice((float("nan"), float("inf"))))
    elif kind == "shape":
        tensors[name] = torch.zeros(draw.choice(((1,), (3, 5), ())), dtype=value.dtype)
    elif kind == "dtype":
        tensors[name] = value.to(draw.choice((torch.int64, torch.float64, torch.bool)))
    elif kind == "gone":
        del tensors[name]
    else:
        tensors[name] = value.flatten()[:0]
    return f"{kind} of tensor {name}"


def _spoil(value: Any, draw: random.Random) -> str:
    """Change one place in ``value``, drawn at random; returns a description."""
    container: Any = value
    while True:
        key: Any = draw.choice(list(container) if isinstance(container, dict) else range(len(container)))
        if not isinstance(container[key], (dict, list)) or not container[key] or draw.random() < 0.2:
            break
        container = container[key]
    kind = draw.choice(("value", "value", "near", "near", "name", "gone", "more"))
    if kind == "name" and isinstance(container, dict) and key:
        letter = draw.randrange(len(key))
        container[key[:letter] + draw.choice("abcxyz_/") + key[letter + 1 :]] = container.pop(key)
    elif kind == "gone":
        del container[key]
    elif kind == "near" and isinstance(container[key], (bool, int, float)):  # a wrong value of the right type
        container[key] = (
            not container[key]
            if isinstance(container[key], bool)
            else container[key] + draw.choice((1, 0.5, -1))
        )
        return f"{key} = {container[key]!r}"
    elif kind == "more" and isinstance(container, dict):
        container["more"] = draw.choice(_VALUES)
    else:
        container[key] = draw.choice(_VALUES)
        return f"{key} = {str(container[key])[:20]!r}"
    return f"{kind} of {key}"


def _sealed(value: dict[str, Any], name: str) -> dict[str, Any]:
    """``value`` with its checksum recomputed, where that is possible."""
    try:
        return seal(json.loads(_json_text(value)), name)
    except (ValueError, RecursionError):
        return value


def _json_text(value: Any, **options: Any) -> str:
    """``value`` as JSON, with lists nested more deeply than a parser allows in place of ``_DEEP``."""
    deep = "[" * 3000 + "]" * 3000
    text: str = json.dumps(value, **options).replace(f'"{_DEEP}"', deep)
    return text
