"""``murmurate.load``: models that learned from examples: a classifier, topics, posteriors."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import murmurate
from murmurate.cli.main import main
from smallest import smallest


def test_a_classifier_predicts_and_exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # what ~ stands for
    (tmp_path / "data").mkdir()
    run = dataclasses.replace(smallest("resnet20", tmp_path / "data"), launcher="inline", updates=2)
    murmurate.train(run, out="~/run", quiet=True)
    model = murmurate.load("~/run")
    images = np.random.default_rng(0).integers(0, 256, (3, *model.spec.observation_shape), np.uint8)
    probabilities = model.predict_proba(images)
    np.testing.assert_allclose(probabilities.sum(1), 1.0, rtol=1e-5)
    np.testing.assert_array_equal(model.predict(images), probabilities.argmax(1))
    np.testing.assert_allclose(model.predict_proba(images[0]), probabilities[0], rtol=1e-4)
    sizes = []
    with model.module.module.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0]))):
        many = model.predict_proba(np.resize(images, (260, *images.shape[1:])))
    assert sizes == [250, 10]  # a pass of any number would take any memory
    np.testing.assert_allclose(many, np.resize(probabilities, many.shape), rtol=1e-4)
    written = model.export("~/net.pt2")
    assert (written.inputs, written.outputs) == (("observation",), ("probabilities",))
    beside = {"murmurate.json": ""}
    program = torch.export.load(tmp_path / "net.pt2", extra_files=beside).module()
    (exported,) = program(torch.from_numpy(images))
    np.testing.assert_allclose(exported.detach(), probabilities, rtol=1e-4, atol=1e-6)
    assert len(model.classes) == probabilities.shape[1]
    assert json.loads(beside["murmurate.json"])["classes"] == model.classes
    assert model.evaluate(4)["test_images"] == 4
    with pytest.raises(murmurate.Refusal, match=r"keeps no best checkpoint: .* leave out --best"):
        murmurate.load("~/run", best=True)
    with pytest.raises(murmurate.Refusal, match=r"no actions that could be drawn\. .*sample=True"):
        model.evaluate(4, sample=True)
    with pytest.raises(murmurate.Refusal, match="Use predict"):
        model.act(images)


def test_topics_of_texts(tmp_path: Path) -> None:
    subjects = ("kettle boils water quickly", "novel tells moving story")
    (tmp_path / "texts.txt").write_text("".join(f"{subjects[k % 2]}\n" for k in range(40)))
    world = {"path": str(tmp_path / "texts.txt"), "bigrams": True}
    options: dict[str, Any] = {"launcher": "inline", "quiet": True, "env_steps": 800, "seed": 2}
    agent = {"topics": 2, "batch": 8, "alpha": 0.1, "prior": 0.1, "init": "random"}
    murmurate.train("corpus-lda", agent=agent, world=world, out=tmp_path / "run", **options)
    model = murmurate.load(tmp_path / "run")
    assert model.vocabulary == ["kettle_boils", "moving_story", "novel_tells", "water_quickly"]
    texts = ["The kettle boils water QUICKLY!", "a moving story, as the novel tells", "Something else"]
    shares = model.predict_proba(texts)
    assert shares.shape == (3, 2)
    assert shares[0].argmax() != shares[1].argmax()
    np.testing.assert_allclose(shares[2], 0.5)  # no word is known
    np.testing.assert_array_equal(model.predict_proba(texts[0]), shares[0])
    assert model.predict(texts[1]) == model.predict(np.array(texts))[1]


@pytest.mark.parametrize("recipe", ["table-gmm", "corpus-lda"])
def test_a_posterior_predicts(recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two clusters of rows, or of documents with words of their own."""
    x = (
        np.random.default_rng(0).poisson(3.0, (60, 6))
        + np.repeat(np.eye(2, dtype=int) * 20, 3, 1)[[0, 1] * 30]
    )
    np.save(tmp_path / "x.npy", x)
    lines = [" ".join(f"{w}:{n}" for w, n in enumerate(row) if n) for row in x]
    (tmp_path / "x.ldac").write_text("".join(f"{line.count(':')} {line}\n" for line in lines))
    size = {"components": 2} if recipe == "table-gmm" else {"topics": 2}
    world = {"path": str(tmp_path / ("x.npy" if recipe == "table-gmm" else "x.ldac"))}
    options: dict[str, Any] = {"launcher": "inline", "quiet": True, "env_steps": 1000}
    murmurate.train(recipe, agent={"batch": 20, **size}, world=world, out=tmp_path / "run", **options)
    model = murmurate.load(tmp_path / "run")
    shares = model.predict_proba(x)
    np.testing.assert_allclose(shares.sum(1), 1.0, rtol=1e-5)
    assert (model.predict(x) == np.tile(model.predict(x[:2]), 30)).all()
    assert set(model.predict(x[:2])) == {0, 1}
    np.testing.assert_allclose(model.predict_proba(x[0]), shares[0], rtol=1e-5)
    estimate = model.estimate()
    if recipe == "table-gmm":
        np.testing.assert_array_equal(shares, estimate.responsibilities(x))
    else:
        assert [len(top) for top in estimate.top_words(3)] == [3, 3]
        with pytest.raises(murmurate.Refusal, match="counts"):
            model.predict(x + 0.5)
        sparse = pytest.importorskip("scipy.sparse").csr_matrix(x)
        np.testing.assert_array_equal(model.predict_proba(sparse), shares)
        with pytest.raises(murmurate.Refusal, match=r"has 5 columns, and .* vocabulary 6 words"):
            model.predict(sparse[:, :5])
        assert model.vocabulary == []
        with pytest.raises(murmurate.Refusal, match="without names of its words"):
            model.predict(["some words"])
    with pytest.raises(murmurate.Refusal, match="takes no actions"):
        model.act(x)
    assert main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "x.pt2")]) == 2
    assert "Export its weights: --to weights.safetensors" in capsys.readouterr().err
