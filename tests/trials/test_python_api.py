"""docs/api.md, followed from top to bottom."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from user_commands import command, python

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()


@pytest.mark.slow
def test_the_page_runs_as_it_is_written(tmp_path: Path) -> None:
    train, simulate, load, export, callbacks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "train.py").write_text(train)
    folder, mean = python(tmp_path, "train.py").split()[-2:]
    assert Path(folder) == tmp_path / "runs" / "api"
    assert float(mean) > 15
    (tmp_path / "use.py").write_text(f"import murmurate\n{simulate}{load}{export}{callbacks}")
    said = python(tmp_path, "use.py")
    assert "max_error=" in said
    assert f"saved {tmp_path}/runs/watched/checkpoints/last" in said
    assert "\nfinished\n" in said
    for line in re.findall(r"^    murmurate (export .*)$", PAGE, re.MULTILINE):
        if "onnx" in line:
            pytest.importorskip("onnxscript")
            pytest.importorskip("onnxruntime")
        if "parquet" in line:
            pytest.importorskip("pyarrow")
        command(tmp_path, *shlex.split(line))
    for name in ("policy.onnx", "record.csv", "record.parquet"):
        assert (tmp_path / name).stat().st_size > 100
