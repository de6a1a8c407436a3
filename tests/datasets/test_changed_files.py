"""A process reads a data set once, and again when its files have changed."""

from __future__ import annotations

import dataclasses
import os

import numpy as np
import pytest

from murmurate.datasets.corpus_world import CorpusWorld
from murmurate.datasets.image_arrays import ArraysWorld
from murmurate.datasets.image_cifar10 import Cifar10World
from murmurate.datasets.image_cifar100 import Cifar100World
from murmurate.datasets.image_fashion import FashionWorld
from murmurate.datasets.image_shards import ShardsWorld
from murmurate.datasets.table_world import TableWorld
from murmurate.errors import Refusal
from pictures import drawn, tar_of, write_cifar10, write_cifar100, write_fashion


def sample(label):
    return [("a.jpg", b"1"), ("a.cls", str(label).encode())]


def arrays(path, seed):
    np.savez(path, images=drawn(30, 4, 4, seed=seed), labels=np.arange(30) % 3)


def texts(path, word):
    (path / "deep").mkdir(parents=True, exist_ok=True)
    (path / "deep" / "a.txt").write_text(f"ant {word}\n")


# kind -> (its world, name of its files, what writes them first, what changes them)
KINDS = {
    "table": (
        TableWorld,
        "a.csv",
        lambda path: path.write_text("1,2\n3,4\n"),
        lambda path: path.write_text("1,2\n3,5\n"),
    ),
    "arrays": (ArraysWorld, "a.npz", lambda path: arrays(path, 0), lambda path: arrays(path, 1)),
    "cifar10": (
        Cifar10World,
        "",
        write_cifar10,
        lambda path: np.zeros(3073, np.uint8).tofile(path / "data_batch_3.bin"),
    ),
    "cifar100": (Cifar100World, "", write_cifar100, lambda path: write_cifar100(path, train=50)),
    "fashion": (FashionWorld, "", write_fashion, lambda path: write_fashion(path, train=50)),
    "shards": (
        lambda path: ShardsWorld(path, classes=3, test=0),
        "a-{0..1}.tar",
        lambda path: [tar_of(path.with_name(f"a-{k}.tar"), sample(k)) for k in range(2)],
        lambda path: tar_of(path.with_name("a-1.tar"), sample(2)),
    ),
    "corpus": (
        lambda path: CorpusWorld(path, min_df=1, max_df=1.0),
        "zoo",
        lambda path: texts(path, "bee"),
        lambda path: texts(path, "cow"),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_changed_files_are_read_again(kind, tmp_path):
    make_world, name, write, change = KINDS[kind]
    path = tmp_path / name
    write(path)
    world = make_world(str(path))
    before, first = world.fingerprint(), world.load()
    assert dataclasses.replace(world).load() is first
    change(path)
    for file in (file for file in tmp_path.rglob("*") if file.is_file() and ".corpus" not in str(file)):
        os.utime(file, ns=(0, 0))  # two writes within a tick of the file system's clock have one time
    with pytest.raises(Refusal, match="is not what the run was fitted on"):
        world.check_fingerprint(before)


def test_a_changed_vocabulary_and_changed_stop_words_are_read_again(tmp_path):
    path, words, stop = tmp_path / "x.ldac", tmp_path / "x.ldac.vocab.txt", tmp_path / "stop.txt"
    path.write_text("2 0:2 1:1\n1 1:1\n")
    for names in ("a\nb\n", "a\ncd\n"):
        words.write_text(names)
        assert CorpusWorld(str(path)).load().vocabulary == tuple(names.split())
    (tmp_path / "zoo.txt").write_text("cat horse\ncat\n")
    for word, left in (("horse", ("cat",)), ("cat", ("horse",))):
        stop.write_text(word)
        world = CorpusWorld(str(tmp_path / "zoo.txt"), min_df=1, max_df=1.0, stop_words=str(stop))
        assert world.load().vocabulary == left
