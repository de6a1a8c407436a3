"""Checkpoints: what goes in comes out, also while another takes its place."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from marked_checkpoints import about, mark_of, staged

from murmurate.errors import Refusal, RunFailed
from murmurate.recipes import recipe
from murmurate.record.stored import seal
from murmurate.training import checkpoint, restore


def test_nothing_is_kept_as_best_at_the_old_place_of_a_run_that_was_moved(tmp_path: Path) -> None:
    """Another folder may have come there by then."""
    with pytest.raises(RunFailed):
        checkpoint.keep_as_best(tmp_path)
    assert not list(tmp_path.iterdir())


# -- what goes in comes out ------------------------------------------------------------------------------


@pytest.mark.parametrize(("written", "unit"), [({"unit": "documents"}, "documents"), (None, "env steps")])
def test_what_is_kept_is_said_in_the_unit_of_the_run(
    written: dict[str, str] | None, unit: str, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    checkpoint.commit(folder, staged(folder, 5), about(5))
    if written:
        (tmp_path / "run.json").write_text(json.dumps(seal(written, "run.json")))
    assert checkpoint.kept_sentence(tmp_path).startswith(f"The checkpoint at 5 {unit} is kept")


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


@pytest.mark.parametrize("fails", [False, True])
def test_a_checkpoint_that_is_replaced_while_it_is_read_is_read_again(fails: bool, tmp_path: Path) -> None:
    """As by ``murmurate eval`` while the run goes on."""
    checkpoint.commit(tmp_path, staged(tmp_path, 1), about(1))

    def read(path: Path) -> int:
        mark = mark_of(path)
        if mark == 1:
            checkpoint.commit(tmp_path, staged(tmp_path, 2), about(2))
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
        checkpoint.commit(tmp_path, staged(tmp_path, mark), about(mark))

    def fits(path: Path) -> None:
        if mark_of(path) == 2:
            checkpoint.commit(tmp_path, staged(tmp_path, 3), about(3))
            raise Refusal("a part is missing")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert mark_of(checkpoint.newest(tmp_path, fits)) == 3


def _with_a_best(run_folder: Path) -> Path:
    """The folder of the checkpoints, of which one, marked 1, is the last and the best."""
    folder = run_folder / "checkpoints"
    folder.mkdir()
    checkpoint.commit(folder, staged(folder, 1), about(1))
    checkpoint.keep_as_best(folder)
    return folder


def test_the_best_is_sound_also_if_it_is_replaced_while_it_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _with_a_best(tmp_path)
    checkpoint.commit(folder, staged(folder, 2), about(2))
    read, replaced = checkpoint.digest, []

    def digest(path: Path) -> str:
        if not replaced:
            replaced.append(path)
            checkpoint.keep_as_best(folder)
        return read(path)

    monkeypatch.setattr(checkpoint, "digest", digest)
    monkeypatch.setattr(restore, "load_agent", lambda _, path, *__: mark_of(path))
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
    monkeypatch.setattr(restore, "load_agent", lambda _, path, *__: mark_of(path))
    assert restore.load_chosen(recipe("cartpole-a2c"), tmp_path, take_best=True) == (folder / "best", 1)
