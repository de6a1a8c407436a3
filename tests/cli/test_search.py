"""The search space of ``murmurate tune``: ``--search`` and the defaults."""

from __future__ import annotations

import pytest

from murmurate.cli.main import main
from murmurate.cli.options import change
from murmurate.cli.search import search_space
from murmurate.errors import Refusal
from murmurate.recipes import recipe
from murmurate.tuning.space import Dimension, words


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("agent.learning-rate=1e-4..1e-2:log", Dimension("agent.learning-rate", 1e-4, 1e-2, log=True)),
        ("learning_rate=0.1..0.2", Dimension("agent.learning-rate", 0.1, 0.2)),
        ("agent.steps=4..32", Dimension("agent.steps", 4, 32, whole=True)),
        ("agent.torso=mlp,nature2015", Dimension("agent.torso", choices=("mlp", "nature2015"))),
        ("replicas=1,2", Dimension("replicas", choices=("1", "2"))),
        ("initial=../a,runs/b", Dimension("initial", choices=("../a", "runs/b"))),
    ],
)
def test_searches(text: str, found: Dimension) -> None:
    assert search_space(recipe("cartpole-a2c"), [text], "murmurate tune") == [found]


def test_a_field_is_named_once_and_what_is_named_counts_before_the_default() -> None:
    run = recipe("cartpole-a2c")
    with pytest.raises(Refusal, match=r"--search agent.steps is given twice"):
        search_space(run, ["agent.steps=4,8", "steps=16,32"], "murmurate tune")
    for texts in (["default", "agent.steps=3,5"], ["agent.steps=3,5", "default"]):
        space = {each.name: each for each in search_space(run, texts, "murmurate tune")}
        assert space["agent.steps"].choices == ("3", "5")
        assert "agent.learning-rate" in space


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("agent.lerning-rate=1..2", "Did you mean --agent.learning-rate"),
        ("agent.torso=1..2", "no number"),
        ("agent.discount=0.5..1.5", "from 0 to 1"),
        ("agent.steps=1.5..3", "is an integer"),
        ("agent.steps=8..4", "below the second"),
        ("agent.learning-rate=0..1:log", "above 0"),
        ("agent.learning-rate=1..2:cubic", "no scale 'cubic'"),
        ("agent.learning-rate=low..high", "no two numbers"),
        ("agent.steps=four,8", "takes integer"),
        ("agent.steps=4,,8", "empty value"),
        ("agent.steps", "names no values"),
    ],
)
def test_what_cannot_be_searched_is_refused(text: str, cause: str) -> None:
    with pytest.raises(Refusal) as refused:
        search_space(recipe("cartpole-a2c"), [text], "murmurate tune")
    assert cause in str(refused.value)


def test_a_name_of_several_fields_is_refused() -> None:
    with pytest.raises(Refusal, match=r"--epsilon may be --agent\.epsilon or --replay\.epsilon"):
        search_space(recipe("cartpole-dqn"), ["epsilon=0.1..0.2"], "murmurate tune")


@pytest.mark.parametrize(
    "name", ["cartpole-a2c", "cartpole-ppo", "cartpole-dqn", "cartpole-trpo", "cartpole-impala"]
)
def test_defaults_surround_the_recipe_and_are_values_that_it_takes(name: str) -> None:
    run = recipe(name)
    space = {one.name: one for one in search_space(run, [], "")}
    rate = space.get("agent.learning-rate") or space["agent.value-learning-rate"]
    own = getattr(run.learner, rate.name.removeprefix("agent.").replace("-", "_"))
    assert rate.log
    assert (rate.low * rate.high) ** 0.5 == pytest.approx(own)
    assert "agent.discount" in space
    lowest = {one.name: one.choices[0] if one.choices else one.low for one in space.values()}
    changed = change(run, words(list(space.values()), lowest), "")
    assert getattr(changed.learner, rate.name.removeprefix("agent.").replace("-", "_")) == rate.low


@pytest.mark.parametrize(
    "words", [["--agent.learning-rate", "0.1"], ["--agent.learning_rate=0.1"], ["--learning-rate", "0.1"]]
)
def test_a_searched_field_cannot_be_given_too(tmp_path, capsys, words) -> None:
    pytest.importorskip("optuna")
    command = ["tune", "cartpole-a2c", *words, "--out", str(tmp_path / "x")]
    assert main(command) == 2
    assert "--agent.learning-rate is searched" in capsys.readouterr().err
    assert main([*command[:2], "--sampler", "best", *command[-2:]]) == 2
    assert "no sampler called 'best'" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_help_shows_what_is_searched(capsys) -> None:
    assert main(["tune", "cartpole-a2c", "--help"]) == 0
    assert "--search agent.learning-rate=0.0004..0.04:log" in capsys.readouterr().out
    assert main(["tune", "--help"]) == 0
