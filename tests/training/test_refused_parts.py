"""What a part refuses ends the run with the part's sentence: it was only in the part's own output."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from murmurate.cli.main import main
from murmurate.errors import Refusal
from murmurate.spatial import PartLost
from murmurate.spec import Batch
from murmurate.training.part_processes import LearnerInParts, PartProcesses, write_refusal

PLUGINS = Path(__file__).parents[1] / "conformance" / "plugins"
# a classifier whose updates after the first `--agent.free` take a mean over the replicas
FILE = """
import dataclasses
from typing import ClassVar
import torch
import stripes
from stripes import WORLDS

ALGORITHM = "meaning"

@dataclasses.dataclass(frozen=True)
class Meaning(stripes.StripesClassifier):
    name: ClassVar[str] = "meaning"
    free: int = 0

    def build(self, context):
        return MeaningLearner(self, context)

class MeaningLearner(stripes.ClassifierLearner):
    def __init__(self, config, context):
        super().__init__(config, context)
        self.group = context.group()

    def learn(self, batch):
        if self.replica.clock >= self.config.free:
            self.group.mean(torch.ones(()))
        return super().learn(batch)

def recipe(name):
    return dataclasses.replace(stripes.recipe(name), learner=Meaning())
"""


@pytest.mark.slow
@pytest.mark.parametrize("free", [0, 2])
def test_a_collective_of_a_learners_own_is_refused_on_the_console(
    free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    recipe = tmp_path / f"meaning_after_{free}.py"  # a module of its own, as both are imported here
    recipe.write_text(FILE)
    monkeypatch.syspath_prepend(str(PLUGINS))
    monkeypatch.setenv("MURMURATE_IMPORT", "")
    options = ["--parts", "2", "--launcher", "inline", "--updates", "4", "--agent.free", str(free)]
    assert main(["train", str(recipe), *options, "--out", str(tmp_path / "run")]) == (2 if free == 0 else 1)
    told = capsys.readouterr().err.splitlines()[-1]
    assert "this learner makes a collective of its own (mean)" in told
    assert "leave out --parts" in told
    assert (tmp_path / "run").exists() == (free > 0)


@pytest.mark.parametrize(("said", "kind", "told"), [("no", Refusal, "no"), ("", PartLost, "part 1 died")])
def test_a_lost_part_is_one_that_refused_if_it_said_so(said: str, kind: type[Exception], told: str) -> None:
    def learn(batch: Batch) -> NoReturn:
        raise PartLost("part 1 died")

    parts: Any = SimpleNamespace(
        refusal=lambda: said, replica_parts=SimpleNamespace(send=lambda data, clock: None)
    )
    learner: Any = SimpleNamespace(learn=learn, replicas={"net": SimpleNamespace(clock=0)})
    with pytest.raises(kind, match=told):
        LearnerInParts(learner, parts).learn(Batch(None))


def test_the_first_refusal_is_read_whole_and_where_parts_write_is_left() -> None:
    with tempfile.TemporaryFile() as file:
        processes: Any = PartProcesses.__new__(PartProcesses)  # of none
        processes._refusals = file
        assert processes.refusal() == ""
        for refusal in ("the shapes differ:\n[2, 3]", "another"):
            write_refusal(file.fileno(), Refusal(refusal))
        written = os.lseek(file.fileno(), 5, os.SEEK_SET)  # anywhere
        assert processes.refusal() == "the shapes differ:\n[2, 3]"
        assert os.lseek(file.fileno(), 0, os.SEEK_CUR) == written
