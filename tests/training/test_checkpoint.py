"""Checkpoints: whole or not at all, at every point where a crash could come between."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import shutil
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from murmurate.errors import Refusal, RunFailed
from murmurate.recipes import recipe
from murmurate.record.stored import FORMAT, seal
from murmurate.replay.interface import Chunk
from murmurate.training import checkpoint, part_file, restore
from murmurate.tuning.run_process import can_resume


class Crash(BaseException):
    """As SIGKILL: nothing catches it."""


def _save(folder: Path, mark: int, replicas: int = 2) -> Path:
    """Stage one checkpoint whose every number is ``mark``."""
    staging = folder / f".staging-{mark}"
    for rank in range(replicas):
        checkpoint.write_part(staging, rank, {"x": torch.full((3,), mark), "env_steps": mark})
    return staging


def _about(mark: int) -> dict[str, Any]:
    return {"env_steps": mark, "seconds": float(mark), "replicas": 2}


def _mark(found: Path) -> int:
    """The one number of a checkpoint; fails if it is a mixture."""
    marks = {checkpoint.read_manifest(found)["env_steps"]}
    for rank in checkpoint.parts(found):
        state = checkpoint.read_part(found, rank)
        marks |= {state["env_steps"], *state["x"].tolist()}
    (mark,) = marks
    return int(mark)


def _crash_at(monkeypatch: pytest.MonkeyPatch, point: int) -> list[str]:
    """Crash instead of the ``point``-th change to the disk (from 0 up); the list fills with those before."""
    done: list[str] = []

    def wrap(owner: Any, name: str) -> None:
        real: Callable[..., Any] = getattr(owner, name)

        def change(*args: Any, **kwargs: Any) -> Any:
            if len(done) == point:
                raise Crash(name)
            done.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, change)

    wrap(Path, "rename")
    wrap(shutil, "rmtree")
    wrap(shutil, "copytree")
    wrap(os, "fsync")
    wrap(os, "replace")
    return done


@pytest.mark.parametrize("point", range(12))
def test_a_crash_at_any_point_of_a_commit_leaves_a_whole_checkpoint(
    point: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for mark in (1, 2):
        checkpoint.commit(tmp_path, _save(tmp_path, mark), _about(mark))
    staging = _save(tmp_path, 3)
    crashed = _crashes(lambda: checkpoint.commit(tmp_path, staging, _about(3)), point, monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whether it has to fall back depends on the point
        assert _mark(checkpoint.newest(tmp_path)) in ((2, 3) if crashed else (3,))
    # and the next commit goes through
    checkpoint.commit(tmp_path, _save(tmp_path, 4), _about(4))
    assert _mark(checkpoint.newest(tmp_path)) == 4
    assert not (tmp_path / ".old").exists()


def _crashes(act: Callable[[], None], point: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    with monkeypatch.context() as patch:
        _crash_at(patch, point)
        try:
            act()
        except Crash:
            return True
    return False


def test_the_crash_points_reach_past_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for mark in (1, 2):
        checkpoint.commit(tmp_path, _save(tmp_path, mark), _about(mark))
    staging = _save(tmp_path, 3)
    done = _crash_at(monkeypatch, 10**6)
    checkpoint.commit(tmp_path, staging, _about(3))
    assert done.count("rename") == 3
    assert 6 <= len(done) <= 12


@pytest.mark.parametrize("mended", [True, False])
@pytest.mark.parametrize("point", range(14))
def test_a_crash_at_any_point_of_keeping_the_best_leaves_the_old_or_the_new(
    point: int, mended: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.commit(tmp_path, _save(tmp_path, 1), _about(1))
    checkpoint.keep_as_best(tmp_path)
    checkpoint.commit(tmp_path, _save(tmp_path, 2), _about(2))
    crashed = _crashes(lambda: checkpoint.keep_as_best(tmp_path), point, monkeypatch)
    if mended:  # as the next start of the run does
        checkpoint.restore_best(tmp_path)
        assert checkpoint.damage(tmp_path / "best") is None
        assert _mark(tmp_path / "best") in ((1, 2) if crashed else (2,))
    checkpoint.keep_as_best(tmp_path)
    assert _mark(tmp_path / "best") == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best", "last", "previous"]


def test_nothing_is_kept_as_best_at_the_old_place_of_a_run_that_was_moved(tmp_path: Path) -> None:
    """Another folder may have come there by then."""
    with pytest.raises(RunFailed):
        checkpoint.keep_as_best(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_part_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(tensors: Any, path: Path, metadata: Any) -> None:
        Path(path).write_bytes(b"\x08\0\0\0")
        raise Crash

    checkpoint.write_part(tmp_path / "s", 0, {"x": torch.ones(2)})
    monkeypatch.setattr(part_file, "save_file", half)
    with pytest.raises(Crash):
        checkpoint.write_part(tmp_path / "s", 1, {"x": torch.ones(2)})
    assert checkpoint.parts(tmp_path / "s") == [0]
    checkpoint.commit(tmp_path, tmp_path / "s", _about(0))
    assert checkpoint.damage(tmp_path / "last") is None
    assert list(checkpoint.read_manifest(tmp_path / "last")["parts"]) == ["replica-0.safetensors"]


def test_nothing_staged_is_not_a_checkpoint(tmp_path: Path) -> None:
    checkpoint.commit(tmp_path, _save(tmp_path, 1), _about(1))
    (tmp_path / ".staging-2").mkdir()
    with pytest.raises(ValueError, match="nothing to commit"):
        checkpoint.commit(tmp_path, tmp_path / ".staging-2", _about(2))
    assert _mark(checkpoint.newest(tmp_path)) == 1


# -- damage ---------------------------------------------------------------------------------------------


def _flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


def _rewrite(path: Path, **fields: Any) -> None:
    """With another checksum, as an attacker writes."""
    state = json.loads(path.read_text())
    path.write_text(
        json.dumps(seal({k: v for k, v in {**state, **fields}.items() if v is not None}, "state.json"))
    )


def _change(path: Path, old: str, new: str) -> None:
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


_DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped bit": (lambda last: _flip_a_bit(last / "replica-1.safetensors"), "corrupt or missing"),
    "a missing part": (lambda last: (last / "replica-0.safetensors").unlink(), "corrupt or missing"),
    "half a part": (lambda last: os.truncate(last / "replica-0.safetensors", 100), "corrupt or missing"),
    "half a manifest": (lambda last: os.truncate(last / "state.json", 30), "corrupt"),
    "no manifest": (lambda last: (last / "state.json").unlink(), "holds no checkpoint"),
    "another's": (lambda last: _rewrite(last / "state.json", package="theirs"), "not written by murmurate"),
    "of tomorrow": (
        lambda last: _rewrite(last / "state.json", format=FORMAT + 1),
        f"has format {FORMAT + 1}",
    ),
    "no list": (lambda last: (last / "state.json").write_text("[]"), "holds no JSON object"),
    "another count": (
        lambda last: _change(last / "state.json", '"replicas": 2', '"replicas": 3'),
        "checksum",
    ),
    "no checksum": (lambda last: _change(last / "state.json", '"checksum"', '"checksun"'), "has no checksum"),
    "a count in words": (lambda last: _rewrite(last / "state.json", replicas="two"), "corrupt (replicas)"),
    "no time": (lambda last: _rewrite(last / "state.json", seconds=float("nan")), "corrupt (seconds)"),
    "counts of one": (lambda last: _rewrite(last / "state.json", replica_env_steps=[1]), "replica_env_steps"),
    "a part outside": (
        lambda last: _rewrite(last / "state.json", parts={"../previous/replica-0.safetensors": "0"}),
        "corrupt (parts)",
    ),
    "nested": (lambda last: (last / "state.json").write_text("[" * 10**5 + "]" * 10**5), "nested too deeply"),
    "a link": (
        lambda last: (
            (last / "replica-0.safetensors").rename(last / "x"),
            (last / "replica-0.safetensors").symlink_to("x"),
        ),
        "corrupt or missing",
    ),
    "no parts": (lambda last: _rewrite(last / "state.json", parts={}), "corrupt"),
    "no parts at all": (lambda last: _rewrite(last / "state.json", parts=None), "corrupt"),
    "no count": (lambda last: _rewrite(last / "state.json", replicas=None), "corrupt"),
    "a file for a folder": (lambda last: (shutil.rmtree(last), last.write_text("")), "cannot be read"),
}


@pytest.mark.parametrize("name", _DAMAGES)
def test_a_damaged_checkpoint_is_reported_and_the_one_before_is_taken(name: str, tmp_path: Path) -> None:
    harm, words = _DAMAGES[name]
    for mark in (1, 2):
        checkpoint.commit(tmp_path, _save(tmp_path, mark), _about(mark))
    assert checkpoint.damage(tmp_path / "last") is None
    harm(tmp_path / "last")
    assert words in (checkpoint.damage(tmp_path / "last") or "")
    with pytest.warns(UserWarning, match="Going on from .*previous instead"):
        assert _mark(checkpoint.newest(tmp_path)) == 1
    shutil.rmtree(tmp_path / "previous")
    with pytest.raises(Refusal, match="start again with murmurate train and another --out"):
        checkpoint.newest(tmp_path)
    checkpoint.commit(tmp_path, _save(tmp_path, 3), _about(3))
    (tmp_path / "last").rename(tmp_path / "best")
    checkpoint.commit(tmp_path, _save(tmp_path, 4), _about(4))
    shutil.rmtree(tmp_path / "previous", ignore_errors=True)
    harm(tmp_path / "last")
    with pytest.raises(Refusal, match="The best checkpoint is sound"):
        checkpoint.newest(tmp_path)


def test_an_unreadable_part_is_refused_by_name(tmp_path: Path) -> None:
    checkpoint.commit(tmp_path, _save(tmp_path, 1), _about(1))
    for content in (b"", b"\xff" * 8, b"\x02\0\0\0\0\0\0\0{}", b"\x02\0\0\0\0\0\0\0[]"):
        (tmp_path / "last" / "replica-0.safetensors").write_bytes(content)
        with pytest.raises(Refusal, match=r"replica-0\.safetensors"):
            checkpoint.read_part(tmp_path / "last", 0)


# -- what goes in comes out ------------------------------------------------------------------------------


@pytest.mark.parametrize(("written", "unit"), [({"unit": "documents"}, "documents"), (None, "env steps")])
def test_what_is_kept_is_said_in_the_unit_of_the_run(
    written: dict[str, str] | None, unit: str, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    checkpoint.commit(folder, _save(folder, 5), _about(5))
    if written:
        (tmp_path / "run.json").write_text(json.dumps(seal(written, "run.json")))
    assert checkpoint.kept_sentence(tmp_path).startswith(f"The checkpoint at 5 {unit} is kept")


def test_ctrl_c_while_a_part_is_read_is_not_taken_for_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for mark in (1, 2):
        checkpoint.commit(tmp_path, _save(tmp_path, mark), _about(mark))

    def load_file(path: Path) -> dict[str, torch.Tensor]:
        """As safetensors does: torch asks Python for a length, and reports any error of it as its own."""
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ValueError("could not determine the shape of object type") from None
        return {"x": torch.full((3,), 2)}

    monkeypatch.setattr(part_file, "load_file", load_file)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.newest(tmp_path, lambda path: checkpoint.read_part(path, 0))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_nested_state_of_every_dtype_comes_back(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    kinds = (
        torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32,
        torch.int16, torch.int8, torch.uint8, torch.bool,
    )  # fmt: skip
    state: dict[str, Any] = {
        "tensors": {str(k): torch.randn(3, 4, generator=generator).mul(9).to(k) for k in kinds},
        "strides": torch.randn(4, 3, generator=generator).t(),
        "part of another": torch.arange(10)[2:5],
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 7),
        "generator": generator.get_state(),
        "not finite": torch.tensor([float("nan"), float("inf"), -0.0]),
        "big": 2**127 + 1,
        "nothing": None,
        "list": [1, 2.5, "three", True, None, [torch.ones(1), {"deep": torch.zeros(1)}]],
        "odd keys": {"a/b": torch.ones(2), "a": {"b": torch.zeros(2)}, "d": 1, "l": 2, "v": "<tensor>"},
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "float": 0.1 + 0.2,
    }
    checkpoint.write_part(tmp_path, 3, state)
    assert checkpoint.parts(tmp_path) == [3]
    back = checkpoint.read_part(tmp_path, 3)
    _equal(state, back)
    assert not any(tensor.requires_grad for tensor in back["tensors"].values())
    assert not back["parameter"].requires_grad


def _equal(one: Any, other: Any) -> None:
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert torch.equal(torch.nan_to_num(one.detach()), torch.nan_to_num(other))
        assert torch.equal(one.detach().isnan(), other.isnan())
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            _equal(one[key], other[key])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            _equal(a, b)
    else:
        assert type(one) is type(other)
        assert one == other


def test_tensors_that_share_memory_are_saved_apart(tmp_path: Path) -> None:
    base = torch.arange(6.0)
    checkpoint.write_part(tmp_path, 0, {"all": base, "tail": base[3:]})
    base.zero_()
    back = checkpoint.read_part(tmp_path, 0)
    assert back["all"].tolist() == [0, 1, 2, 3, 4, 5]
    assert back["tail"].tolist() == [3, 4, 5]


def test_env_steps_are_read_without_the_tensors(tmp_path: Path) -> None:
    checkpoint.write_part(tmp_path, 1, {"env_steps": 1234, "x": torch.ones(3)})
    assert checkpoint.env_steps(tmp_path, 1) == 1234


# -- a disk that fills up --------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_named_with_its_remedy(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.commit(tmp_path, _save(tmp_path, 1), _about(1))

    def full(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    staging = _save(tmp_path, 2)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        for act in (
            lambda: checkpoint.write_part(tmp_path / ".staging-3", 0, {"x": torch.ones(1)}),
            lambda: checkpoint.commit(tmp_path, staging, _about(2)),
            lambda: checkpoint.keep_as_best(tmp_path),
        ):
            with pytest.raises(RunFailed, match=r"is full: free some space"):
                act()
    assert _mark(checkpoint.newest(tmp_path)) == 1


def test_the_full_disk_that_safetensors_meets_is_named_too(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(RunFailed, match="is full: free some space"):
            checkpoint.write_part(tmp_path / "s", 0, {"x": torch.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert checkpoint.parts(tmp_path / "s") == []


def test_another_error_of_the_disk_is_reported_as_it_is(tmp_path: Path) -> None:
    failure = checkpoint.disk_failure(tmp_path, OSError(errno.EROFS, os.strerror(errno.EROFS)))
    assert "Read-only file system" in str(failure)
    assert "full" not in str(failure)


def test_a_file_in_the_place_of_a_folder_is_to_be_moved_away(tmp_path: Path) -> None:
    folder, staging = tmp_path / "checkpoints", tmp_path / "checkpoints" / ".staging"
    folder.mkdir()
    staging.touch()
    with pytest.raises(RunFailed, match=r"/\.staging'\. A file has the name of a folder: move it away\."):
        checkpoint.write_part(staging, 0, {"x": torch.zeros(1)})
    staging.unlink()
    for mark in (1, 2):
        checkpoint.commit(folder, _save(folder, mark), _about(mark))
    shutil.rmtree(folder / "previous")
    (folder / "previous").touch()
    checkpoint.commit(folder, _save(folder, 3), _about(3))  # moves the file to .old
    with pytest.raises(RunFailed, match=r"/\.old'\. A file has the name of a folder: move it away\."):
        checkpoint.commit(folder, _save(folder, 4), _about(4))
    assert _mark(folder / "last") == 3


def test_a_limit_of_open_files_that_is_too_low_is_to_be_raised(tmp_path: Path) -> None:
    failure = checkpoint.disk_failure(tmp_path, OSError(errno.EMFILE, "Too many open files"))
    assert str(failure).endswith("Too many open files; raise their limit: ulimit -n 4096.")


# -- chunks -----------------------------------------------------------------------------------------------


def _with_chunks(folder: Path, values: dict[str, float]) -> dict[str, Path]:
    """A checkpoint whose replay has such chunks; the files by chunk."""
    staging = folder / ".staging"
    chunks = [Chunk(name, torch.full((3, 2), value)) for name, value in values.items()]
    checkpoint.write_part(staging, 0, {"env_steps": 1}, {"replay": {"images": [chunks], "x": torch.ones(2)}})
    checkpoint.commit(folder, staging, _about(1))
    return {name: folder / "last" / f"replay-0-{name}.safetensors" for name in values}


def test_chunks_that_stay_are_linked_and_read_with_the_rest(tmp_path: Path) -> None:
    first = _with_chunks(tmp_path, {"a-1": 1.0, "b-1": 2.0})
    numbers = {name: path.stat().st_ino for name, path in first.items()}
    second = _with_chunks(tmp_path, {"a-1": 1.0, "b-2": 3.0, "c-1": 4.0})
    assert second["a-1"].stat().st_ino == numbers["a-1"]
    assert second["b-2"].stat().st_ino not in numbers.values()
    for name, values in (("last", [1.0, 3.0, 4.0]), ("previous", [1.0, 2.0])):
        assert checkpoint.damage(tmp_path / name) is None
        held = checkpoint.read_replays(tmp_path / name, 0)["replay"]
        assert held is not None
        assert [float(chunk.values[0, 0]) for chunk in held["images"][0]] == values
    checkpoint.keep_as_best(tmp_path)
    assert checkpoint.damage(tmp_path / "best") is None
    assert not list((tmp_path / "best").glob("replay*"))


def test_a_chunk_that_is_gone_or_bad_is_damage(tmp_path: Path) -> None:
    for spoil in (lambda path: path.unlink(), lambda path: path.write_bytes(b"x" * path.stat().st_size)):
        files = _with_chunks(tmp_path, {"a": 1.0})
        spoil(files["a"])
        assert "corrupt or missing" in str(checkpoint.damage(tmp_path / "last"))
        with pytest.raises(Refusal):
            checkpoint.read_replays(tmp_path / "last", 0)["replay"]
        shutil.rmtree(tmp_path / "last")


def test_a_chunk_that_both_checkpoints_share_costs_the_replay_and_no_more(tmp_path: Path) -> None:
    for _ in range(2):
        files = _with_chunks(tmp_path, {"a": 1.0})
    data = bytearray(files["a"].read_bytes())
    data[-1] ^= 1
    files["a"].write_bytes(data)
    assert checkpoint.damage(tmp_path / "previous") is not None
    with pytest.warns(UserWarning, match="with empty replays"):
        found = checkpoint.newest(tmp_path)
    assert found == tmp_path / "last"
    assert checkpoint.read_part(found, 0)["env_steps"] == 1
    assert checkpoint.read_replays(found, 0) == {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert checkpoint.newest(tmp_path) == found


def test_a_disk_that_is_full_while_replays_are_set_aside_leaves_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        files = _with_chunks(tmp_path, {"a": 1.0})
    files["a"].write_bytes(b"bad")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("murmurate.record.stored.seal", full)
        with pytest.raises(OSError, match="No space"):
            checkpoint.newest(tmp_path)
    with pytest.warns(UserWarning, match="with empty replays"):
        assert checkpoint.newest(tmp_path) == tmp_path / "last"


def test_a_run_whose_replays_are_damaged_is_resumed_by_a_sweep(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    for _ in range(2):
        files = _with_chunks(checkpoints, {"a": 1.0})
    files["a"].write_bytes(b"bad")
    assert can_resume(tmp_path)
    for name in ("last", "previous"):
        (checkpoints / name / "replica-0.safetensors").write_bytes(b"bad")
    assert not can_resume(tmp_path)


def test_who_needs_no_replays_takes_the_newest_and_changes_nothing(tmp_path: Path) -> None:
    for _ in range(2):
        files = _with_chunks(tmp_path, {"a": 1.0})
    files["a"].write_bytes(b"bad")
    before = {path.name: path.read_bytes() for path in (tmp_path / "last").iterdir()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert checkpoint.newest(tmp_path, replays=False) == tmp_path / "last"
    assert {path.name: path.read_bytes() for path in (tmp_path / "last").iterdir()} == before


@pytest.mark.parametrize("fails", [False, True])
def test_a_checkpoint_that_is_replaced_while_it_is_read_is_read_again(fails: bool, tmp_path: Path) -> None:
    """As by ``murmurate eval`` while the run goes on."""
    checkpoint.commit(tmp_path, _save(tmp_path, 1), _about(1))

    def read(path: Path) -> int:
        mark = _mark(path)
        if mark == 1:
            checkpoint.commit(tmp_path, _save(tmp_path, 2), _about(2))
            if fails:
                raise Refusal("a part is missing")
        return mark

    assert checkpoint.undisturbed(tmp_path / "last", read) == 2
    with pytest.raises(LookupError, match="of another kind"):
        checkpoint.undisturbed(tmp_path / "last", _fails)


def _fails(path: Path) -> None:
    raise LookupError("of another kind")


def test_the_newest_is_taken_also_if_it_is_replaced_while_it_is_checked(tmp_path: Path) -> None:
    for mark in (1, 2):
        checkpoint.commit(tmp_path, _save(tmp_path, mark), _about(mark))

    def fits(path: Path) -> None:
        if _mark(path) == 2:
            checkpoint.commit(tmp_path, _save(tmp_path, 3), _about(3))
            raise Refusal("a part is missing")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _mark(checkpoint.newest(tmp_path, fits)) == 3


def _with_a_best(run_folder: Path) -> Path:
    """The folder of the checkpoints, of which one, marked 1, is the last and the best."""
    folder = run_folder / "checkpoints"
    folder.mkdir()
    checkpoint.commit(folder, _save(folder, 1), _about(1))
    checkpoint.keep_as_best(folder)
    return folder


def test_the_best_is_sound_also_if_it_is_replaced_while_it_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _with_a_best(tmp_path)
    checkpoint.commit(folder, _save(folder, 2), _about(2))
    read, replaced = checkpoint.digest, []

    def digest(path: Path) -> str:
        if not replaced:
            replaced.append(path)
            checkpoint.keep_as_best(folder)
        return read(path)

    monkeypatch.setattr(checkpoint, "digest", digest)
    monkeypatch.setattr(restore, "load_agent", lambda _, path, *__: _mark(path))
    run = recipe("cartpole-a2c")
    assert restore.load_chosen(run, tmp_path, take_best=True) == (folder / "best", 2)


def test_the_best_is_found_also_if_it_has_its_name_again_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _with_a_best(tmp_path)
    (folder / "best").rename(folder / ".old-best")  # as while a run replaces it
    found = checkpoint.best

    def best(path: Path) -> Path:
        chosen = found(path)
        if chosen.name == ".old-best":
            chosen.rename(folder / "best")
        return chosen

    monkeypatch.setattr(checkpoint, "best", best)
    monkeypatch.setattr(restore, "load_agent", lambda _, path, *__: _mark(path))
    assert restore.load_chosen(recipe("cartpole-a2c"), tmp_path, take_best=True) == (folder / "best", 1)


@pytest.mark.parametrize("point", range(12))
def test_a_crash_after_going_on_from_the_previous_leaves_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: int
) -> None:
    for mark in (1, 2):
        checkpoint.commit(tmp_path, _save(tmp_path, mark), _about(mark))
    checkpoint.set_aside(tmp_path / "last")
    staging = _save(tmp_path, 3)
    with monkeypatch.context() as patched:
        _crash_at(patched, point)
        with contextlib.suppress(Crash):
            checkpoint.commit(tmp_path, staging, _about(3))
    whole = [_mark(tmp_path / n) for n in ("last", "previous") if checkpoint.damage(tmp_path / n) is None]
    assert 1 in whole, "the checkpoint that the run went on from stays until the one after the next"


def test_nothing_is_linked_from_a_checkpoint_whose_list_is_lost(tmp_path: Path) -> None:
    files = _with_chunks(tmp_path, {"a": 1.0})
    files["a"].write_bytes(b"bad")
    (tmp_path / "last" / "state.json").write_text("{")
    _with_chunks(tmp_path, {"a": 1.0})
    assert checkpoint.damage(tmp_path / "last") is None
    assert checkpoint.read_replays(tmp_path / "last", 0)


def test_of_a_damaged_checkpoint_nothing_is_taken_over_once_another_is_gone_on_from(tmp_path: Path) -> None:
    for _ in range(2):
        _with_chunks(tmp_path, {"a": 1.0})
    shutil.copytree(tmp_path / "last", tmp_path / "copy")  # as one copies a run: files of its own
    shutil.rmtree(tmp_path / "last")
    (tmp_path / "copy").rename(tmp_path / "last")
    [spoilt] = (tmp_path / "last").glob("replay-0-a*")
    spoilt.write_bytes(b"x" * spoilt.stat().st_size)
    with pytest.warns(UserWarning, match="previous instead"):
        assert checkpoint.newest(tmp_path).name == "previous"
    checkpoint.set_aside(tmp_path / "last")
    _with_chunks(tmp_path, {"a": 1.0})
    assert checkpoint.damage(tmp_path / "last") is None


def test_without_links_chunks_are_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    first = _with_chunks(tmp_path, {"a": 1.0})["a"].stat().st_ino
    assert _with_chunks(tmp_path, {"a": 1.0})["a"].stat().st_ino != first
    assert checkpoint.damage(tmp_path / "last") is None


@pytest.mark.parametrize("links", [True, False])
def test_a_part_is_lent_with_all_its_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    source, target = tmp_path / ".staging-final", tmp_path / ".staging-2"
    for rank in (1, 11):
        chunks = {"images": [Chunk(f"a-{rank}", torch.full((2,), float(rank)))]}
        checkpoint.write_part(source, rank, {"env_steps": rank}, {"replay": chunks})
    checkpoint.write_part(target, 0, {"env_steps": 0})
    if not links:
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError("no links here")))
    checkpoint.link_part(source, target, 1)
    checkpoint.link_part(source, target, 7)
    assert checkpoint.parts(target) == [0, 1]
    checkpoint.commit(tmp_path, target, _about(1))
    held = checkpoint.read_replays(tmp_path / "last", 1)["replay"]
    assert held is not None
    assert float(held["images"][0].values[0]) == 1.0
    assert checkpoint.read_replays(tmp_path / "last", 11) == {}


def test_a_disk_that_fills_up_while_a_part_is_lent_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / ".staging-final", tmp_path / ".staging-2"
    checkpoint.write_part(source, 0, {"env_steps": 0})
    target.mkdir()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "link", full)
    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(RunFailed, match=r"staging-2 is full: free some space"):
        checkpoint.link_part(source, target, 0)
