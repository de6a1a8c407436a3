"""Randomly drawn argument vectors for all verbs of the command line."""

from __future__ import annotations

import dataclasses
import importlib
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from murmurate.bench._fuzz_process import attack as _attack
from murmurate.bench._fuzz_process import run_command
from murmurate.datasets.generated import generate
from murmurate.datasets.writing import write
from murmurate.ranges import NumberKind
from murmurate.recipes import pairs, recipe
from murmurate.simulation.cluster import Cluster
from murmurate.strategies import strategies, strategy

_VERBS = ("train",) * 12 + ("simulate",) * 2 + ("topics fit",) * 2
_OTHER_VERBS = (
    *("topics show", "topics transform", "topics evaluate", "resume", "eval", "report", "list", "doctor"),
    *("bench", "trian", "", "--version", "-h"),
)
_WORLDS = ("cartpole",) * 8 + ("table", "corpus") * 2 + ("gym:Acrobot-v1", "gym:NoSuch-v0", "pong")
_NUMBER_TEXT = """
0 1 2 3 -1 -0 0.5 1.5 -0.0 1e-300 1e-9 5e-324 1e9 1e15 1e18 1e30 1e308 1e999 -1e308 -1e999 nan NaN -nan inf
-inf Infinity 2147483647 2147483648 9223372036854775807 9223372036854775808 18446744073709551616 1_0 1__0 _1
0x10 1e e1 +1 1. .5 1,2 1;2 1/2
"""
_EDGES = ("0", "1", "2", "3", "0.0", "0.5", "1.0", "1e-300", "5e-324", "1e-9", "0.999999", "7", "1e9", "1e30")
_NUMBERS = (*_NUMBER_TEXT.split(), "9" * 30, "9" * 5_000)
_WORD_TEXT = """
'; %s%n {0} $HOME - -- --- none None true false yes no null [] {} cpu cuda:0 meta ring complete torus
--replicas /dev/null /dev/zero / . .. /proc/self/mem /no/such/file ~ ports=maybe latency=nan bandwidth=0
constant:0 constant:nan lognormal:1e308,1e308 straggler:0.01,inf trace:/dev/zero
"""
_NOT_ASCII = ("\u0663", "\u0967\u0968", "\uff11", "\u00b2", "\u2161", "\u221e", "\U0001f41f", "\udcff\udc80")
_WORDS = (*_WORD_TEXT.split(), *_NOT_ASCII, "", " ", "\n", "\x1b[31m", "a" * 300, "a" * 5_000)
_MISPLACED_TEXT = """
run empty damaged docword.small.txt table.npy recipes strategies uci --json --full --episodes --seed --words
--out --video --best --passes -h --kind --skip-bad --one-based --vocabulary-size --transpose
"""
_MISPLACED_WORDS = _MISPLACED_TEXT.split()
_NOT_DRAWN = ("launcher",)  # chosen separately
# these keep an accepted run short; they come last, because the last of repeated options counts
_LIMITS = {"minutes": "0.02", "eval-episodes": "1", "updates": "3", "record-every-seconds": "0.2"}
_LIMITS |= {"world.max-frames-per-episode": "400", "world.max-episode-steps": "400"}


def attack(count: int, seed: int) -> dict[str, int]:
    """Try ``count`` argument vectors drawn from ``seed``; returns the number of each outcome."""
    return _attack(_attempt, _vectors(count, random.Random(seed)), preload="murmurate.cli.main")


def _attempt(vector: Sequence[str], folder: Path) -> str:
    """Run the command in a folder with a small corpus, a small table, and an empty and a damaged file."""
    generated = generate(documents=40, vocabulary=30, topics=2, mean_length=9, seed=0)
    write(generated.corpus, folder / "docword.small.txt", "uci")
    np.save(folder / "table.npy", np.random.default_rng(0).normal(size=(40, 3)))
    (folder / "empty").touch()
    (folder / "damaged").write_bytes(random.Random(0).randbytes(100))
    return run_command(vector)


def _vectors(count: int, draw: random.Random) -> Iterator[list[str]]:
    for _ in range(count):
        verb = draw.choice((*_VERBS, *_OTHER_VERBS))
        if verb in ("train", "simulate"):
            yield _training(verb, draw)
        elif verb == "topics fit":
            yield [
                "topics",
                "fit",
                *_run_options(recipe("corpus-lda"), "docword.small.txt", draw, draw.randint(0, 4)),
            ]
        else:
            yield [*verb.split(), *_random_words(draw)]


def _training(verb: str, draw: random.Random) -> list[str]:
    name = _recipe(draw)
    vector = [verb, name] if draw.random() < 0.97 else [verb, *_random_words(draw)]
    try:
        run: Any = recipe(name)
        if draw.random() < 0.6:
            chosen = draw.choice(sorted(strategies()))
            vector += ["--strategy", chosen]
            run = dataclasses.replace(run, strategy=strategy(chosen)())
    except Exception:  # an unknown world: any recipe's options will do
        run = recipe("cartpole-a2c")
    vector += _run_options(run, "", draw, draw.randint(1, 4))
    if verb == "simulate":  # its minutes are virtual, so that they do not keep it short
        vector += ["--updates", _LIMITS["updates"]]
        known = list(_options(Cluster()))
        for option in draw.sample(known, draw.randint(0, 3)):
            vector += _drawn_option(option, draw)
        vector = [*vector, "--replicas", "2"]
    return vector


def _recipe(draw: random.Random) -> str:
    world = draw.choice(_WORLDS)
    algorithms = sorted({algorithm for other, algorithm in pairs().values() if other == world})
    if world.startswith("gym:") or not algorithms:
        algorithms = ["a2c", "dqn", "gala"]
    name = f"{world}-{draw.choice(algorithms)}"
    return name if draw.random() < 0.97 else draw.choice((*_WORDS, name[:-1], name + "-gala"))


def _options(config: Any) -> Iterator[Any]:
    """``murmurate.cli.options.options``, imported by name because the command line is a layer above."""
    options: Iterator[Any] = importlib.import_module("murmurate.cli.options").options(config)
    return options


def _run_options(run: Any, path: str, draw: random.Random, count: int) -> list[str]:
    """Options for ``count`` fields of a run, the path of its data, and the limits."""
    known = {option.name: option for option in _options(run)}
    vector = [path] if path else []
    if not path and "world.path" in known:
        data = {"documents": "docword.small.txt", "rows": "table.npy"}[run.world.unit]
        vector += [
            "--world.path",
            data if draw.random() < 0.95 else draw.choice((*_WORDS, "empty", "damaged")),
        ]
    in_range = draw.random() < 0.5  # numbers within their ranges get past the parser and reach the run
    names = [name for name in known if name not in _NOT_DRAWN and (known[name].numbers or not in_range)]
    for name in draw.choices(names, k=count):
        number = known[name].numbers
        vector += [f"--{name}", _in_range(number[0], draw)] if in_range else _drawn_option(known[name], draw)
    if not in_range and draw.random() < 0.05:
        vector += _random_words(draw)
    for name, value in _LIMITS.items():
        if name in known and (name != "updates" or draw.random() < 0.8):
            vector += [f"--{name}", value]
    launcher = "local" if draw.random() < 0.04 else "inline"
    return [
        *vector,
        "--launcher",
        launcher,
        "--out",
        draw.choice(("run",) * 20 + ("damaged", "/dev/null", "a/b")),
    ]


def _drawn_option(option: Any, draw: random.Random) -> list[str]:
    """The option with a value of its type, at the edge of its range or of another type; sometimes twice, or
    without a value."""
    chance = draw.random()
    text = ",".join(map(str, option.value)) if isinstance(option.value, tuple) else str(option.value)
    if chance < 0.1:
        value = text
    elif chance < 0.65 and option.numbers:
        value = _in_range(draw.choice(option.numbers), draw)
    elif chance < 0.75 and ("integer" in option.type_name() or "number" in option.type_name()):
        value = draw.choice(_NUMBERS)
    elif chance < 0.9 and "|" in option.type_name():
        value = draw.choice(option.type_name().split("|"))
    else:
        value = draw.choice((*_WORDS, *_NUMBERS))
    if draw.random() < 0.03:
        return [f"--{option.name}"]
    name = option.name if draw.random() < 0.97 else draw.choice((option.name[:-1], option.name + "x", ""))
    words = [f"--{name}={value}"] if draw.random() < 0.3 else [f"--{name}", value]
    return words * (2 if draw.random() < 0.05 else 1)


def _in_range(number: NumberKind, draw: random.Random) -> str:
    """A number in its range, mostly at one of the ends."""
    integer, most = number.type is int, number.range.most
    values = [number.type(float(edge)) for edge in _EDGES if not integer or float(edge).is_integer()]
    values += [int(most) if integer else most, number.type(number.range.least)]
    return str(draw.choice([value for value in values if value in number.range]))


def _random_words(draw: random.Random) -> list[str]:
    """Up to four words of any kind: values, paths, names, options of other verbs."""
    pool = (*_WORDS, *_NUMBERS, *_MISPLACED_WORDS)
    return [draw.choice(pool) for _ in range(draw.randint(0, 4))]
