"""The bench of image loading on a few small files: every loader runs, and gives what it should."""

from __future__ import annotations

import json

import numpy as np
import pytest

from murmurate.bench import image_loading
from murmurate.bench._image_loaders import files_of, make_folder
from murmurate.bench.image_loading import LoadingPlan

pytest.importorskip("cv2")
pytest.importorskip("PIL")
TINY = LoadingPlan(images=12, height=40, width=50, size=16, batch=3, workers=1, rounds=2, batches=2)


def test_all_loaders_are_measured():
    result = image_loading.measure(TINY, lambda line: None)
    json.dumps(result)
    assert len(result["by_loader"]) == 3
    for rates in result["by_loader"].values():
        assert rates["images_per_cpu_second"]["repetitions"] == 2
        assert rates["images_per_second"]["least"] > 0
    assert result["ratio_pillow"] > 0
    assert result["bytes_per_image"] > 100


def test_generated_files_are_always_the_same(tmp_path):
    for name in ("one", "other"):
        make_folder(tmp_path / name, 4, 40, 50, 90, 2)
    one, other = (files_of(tmp_path / name, 16).select(range(4)) for name in ("one", "other"))
    np.testing.assert_array_equal(one.pixels, other.pixels)
    assert one.pixels.std() > 10
    assert one.labels.tolist() == [0, 0, 1, 1]
