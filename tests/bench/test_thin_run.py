"""A run folder that was thinned is still one, and holds no path of the machine it was recorded on."""

import importlib.util
import json
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from murmurate.record import stored
from murmurate.record.runs import open_run

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def thin_run() -> ModuleType:
    spec = importlib.util.spec_from_file_location("thin_run", BENCHMARKS / "thin_run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return Path(shutil.copytree(BENCHMARKS / "runs" / "hopper-td3-s0", tmp_path / "run"))


def change(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps(stored.seal(stored.read_object(file) | fields, file.name)))


@pytest.mark.parametrize("out", [["--out", "/home/me/run"], ["--out=/home/me/run"]])
def test_the_output_folder_is_left_out_of_the_command(
    thin_run: ModuleType, source: Path, tmp_path: Path, out: list[str]
) -> None:
    change(source / "run.json", command=["murmurate", "train", *out, "--seed", "1"])
    thin_run.main(source, tmp_path / "thin")
    assert open_run(tmp_path / "thin").command == ("murmurate train --seed 1", True)


def test_of_a_run_that_was_resumed_all_commands_are_without_its_path(
    thin_run: ModuleType, source: Path, tmp_path: Path
) -> None:
    lines = "murmurate train --out /home/me/run --seed 1\nmurmurate resume /home/me/run --env-steps 9"
    change(source / "run.json", command=lines)
    thin_run.main(source, tmp_path / "thin")
    assert open_run(tmp_path / "thin").command == (
        "murmurate train --seed 1\nmurmurate resume run --env-steps 9",
        True,
    )


def test_a_run_that_was_killed_while_it_wrote_a_record(
    thin_run: ModuleType, source: Path, tmp_path: Path
) -> None:
    records = len(open_run(source).records)
    with open(source / "metrics.jsonl", "a") as file:
        file.write('{"time_seconds": 1.5, "env_st')
    thin_run.main(source, tmp_path / "thin")
    assert len(open_run(tmp_path / "thin").records) == records


def test_the_first_and_the_last_of_many_records_are_kept(
    thin_run: ModuleType, source: Path, tmp_path: Path
) -> None:
    records = [
        {"time_seconds": float(k), "env_steps": k, "updates": k, "episode_returns": [], "replica": k % 2}
        for k in range(400)
    ]
    (source / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    thin_run.main(source, tmp_path / "thin")
    lines = map(json.loads, (tmp_path / "thin" / "metrics.jsonl").read_text().splitlines())
    kept = [line["env_steps"] for line in lines if "episode_returns" not in line]
    assert kept[:2] == [0, 1]
    assert kept[-2:] == [398, 399]
    assert kept == sorted(kept)
    assert 100 <= len(kept) <= 200
