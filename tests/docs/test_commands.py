"""Every command that a page shows is one: its verb, its options, and the names and values that it gives."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence

import pytest
from shown import Shown, commands, numbered, pages, shown

from murmurate.bench import benchmark
from murmurate.cli import main as cli
from murmurate.cli.listing import LISTS
from murmurate.cli.options import change, divide
from murmurate.cli.run_verbs import recipe_run
from murmurate.cli.search import search_space
from murmurate.cli.topics import _with_full_names as full_names
from murmurate.datasets.corpus_world import CorpusWorld
from murmurate.errors import MissingExtra, Refusal
from murmurate.mapping.candidates import named_strategies
from murmurate.recipes import recipe
from murmurate.simulation.cluster import Cluster
from murmurate.strategies import strategy
from murmurate.tuning.sweep import read_seeds

ALL = [command for page in pages() for command in shown(page)]
PLACEHOLDERS = {  # what a page leaves to the reader, or makes itself: its own package, a variable of a loop
    "RECIPE": "cartpole-a2c", "...": "cartpole-a2c", "NAME": "fuzz", "N": "64",
    "$strategy": "gala", "$seed": "0",
    "cartpole-clipped": "cartpole-ppo", "ring-average": "gala", "gym:my_module:MyEnv-v0-mbpo": "hopper-mbpo",
}  # fmt: skip


def resolved(words: Sequence[str]) -> None:
    """Raises Refusal unless ``murmurate`` with these words gets as far as to open something."""
    if words[-1] == "..." and len(words) > 2:  # more options
        words = words[:-1]
    words = [PLACEHOLDERS.get(word, word) for word in words if word != "--help"]
    if "--env" in words:  # the file is the reader's own
        words[words.index("--env") + 1] = "CartPole-v1"
    if words[0] == "train" and words[1:2] and ".py:" in words[1]:
        words[1] = "cartpole-a2c"
    options, rest = cli._parser().parse_known_args(cli._name_first(words))
    match options.verb:
        case "train":
            change(recipe_run(options), rest, "train").validate()
            if options.seeds is not None:
                read_seeds(options.seeds)
        case "tune":
            run = change(recipe_run(options), rest, "tune")
            run.validate()
            search_space(run, options.search, "tune")
        case "simulate":
            run, cluster = recipe_run(options), Cluster()
            of_cluster, of_run = divide(rest, cluster, run, "simulate")
            change(cluster, of_cluster, "simulate")
            change(run, of_run, "simulate").validate()
        case "plan":
            run = recipe(options.recipe)
            if options.strategy is not None:
                run = dataclasses.replace(run, strategy=strategy(options.strategy)())
            run = change(run, rest, "plan")
            run.validate()
            if options.strategies is not None:
                named_strategies(run, options.strategies)
        case "resume":
            change(recipe("corpus-lda" if "--world.path" in rest else "cartpole-a2c"), rest, "resume")
        case "bench":
            module = benchmark(options.name)
            change(module.FULL if options.full else module.QUICK, rest, "bench")
        case "list":
            assert options.what in LISTS, options.what
        case "topics" if options.inner == "fit":
            run = dataclasses.replace(recipe("corpus-lda"), world=CorpusWorld(path=str(options.corpus)))
            if options.strategy is not None:
                run = dataclasses.replace(run, strategy=strategy(options.strategy)())
            change(run, full_names(rest), "topics fit")
        case _:
            if rest:
                raise Refusal(f"{options.verb} has no option {rest[0]}")


@pytest.mark.parametrize("command", ALL, ids=str)
def test_a_command_is_one(command: Shown) -> None:
    if len(command.words) == 1 and command.words[0] not in ("doctor", "secret"):
        assert command.words[0] in verbs()  # a sentence about the verb
    else:
        try:
            resolved(command.words)
        except MissingExtra as missing:  # dm_control has no build for Python 3.13
            pytest.skip(str(missing))


def test_commands_are_found() -> None:
    assert len(ALL) > 150  # of an empty list nothing would be tested


def verbs() -> list[str]:
    (verb,) = (action for action in cli._parser()._actions if action.dest == "verb")
    return list(verb.choices or ())


@pytest.mark.parametrize(
    "line",
    [
        "train cartpole-a2c --agent.learning-rates 1",
        "train cartpole-a2d",
        "train cartpole-a2c --replicas 2 --strategy gaal",
        "train cartpole-a2c --seeds 0-x",
        "tune cartpole-a2c --search agent.learning=1..2",
        "simulate cartpole-a2c --compute often:1 --los 1",
        "topics fit x --topic 3",
        "bench fuzzy",
        "list strategys",
        "report runs/x --pages 3",
        "evaluate runs/x",
    ],
)
def test_a_wrong_command_is_found(line: str) -> None:
    with pytest.raises((Refusal, AssertionError)):
        resolved(line.split())


def test_lines_are_joined_and_comments_left_out() -> None:
    text = "```bash\nA=1 murmurate train x \\\n    --seed 3 | tail  # why\n```\n\n    murmurate doctor\n"
    found = [(line, part) for line, words in numbered(text) for part in commands(shlex.split(words, True))]
    assert found == [(2, ("train", "x", "--seed", "3")), (6, ("doctor",))]
