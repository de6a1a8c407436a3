"""``murmurate plan`` as a user calls it: it measures once, predicts, and explains."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plans import Capture, without_measuring_threads

from murmurate.cli import plan
from murmurate.cli.main import main
from murmurate.cli.plan import PROFILE
from murmurate.errors import Refusal, RunFailed
from murmurate.mapping import exchange, learning, link, measure, rounds, search
from murmurate.mapping.lines import Line
from murmurate.mapping.profile import DeviceProfile, Link, key, load, save
from murmurate.recipes import recipe
from murmurate.strategies import strategy
from murmurate.strategies.interface import Strategy
from murmurate.training.run import Run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the profile that a first plan left. It measured one exchange, whose times all others have."""
    place = tmp_path_factory.mktemp("plan")
    lines: list[Line] = []
    measured = exchange.measure

    def measured_once(strategy: Strategy, replicas: int) -> Line:
        lines.append(lines[0] if lines else measured(strategy, replicas))
        return lines[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setattr(rounds, "_SECONDS", 0.15)
        patch.setattr(rounds, "_MOST_ROUNDS", 1)
        patch.setattr(exchange, "SIZES", (10_000, 100_000))
        patch.setattr(exchange, "measure", measured_once)
        assert main(["plan", "cartpole-a2c", "--page", "plan.html"]) == 0
    assert len(lines) > 1
    return place


@pytest.fixture(autouse=True)
def in_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    without_measuring_threads(monkeypatch)


def planned(capsys: Capture, *words: str) -> list[dict[str, Any]]:
    assert main(["plan", "cartpole-a2c", "--json", *words]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return rows


def measured_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is measured has the costs of the folder's profile."""
    costs = load(PROFILE)

    def known(profile: DeviceProfile, run: Run, log: Any, again: bool, keep: Callable[[], None]) -> bool:
        profile.recipes[key(run)] = next(iter(costs.recipes.values()))
        profile.exchange = costs.exchange
        keep()
        return True

    monkeypatch.setattr(measure, "add_variants", known)
    monkeypatch.setattr(measure, "add_exchange", lambda *_, **__: False)


def test_candidates_are_listed_best_first(capsys: Capture) -> None:
    rows = planned(capsys)
    assert len(rows) > 10
    assert all({"name", "predicted", "unit", "why"} <= set(row) for row in rows)
    values = [row["predicted"] for row in rows]
    assert values == sorted(values, reverse=True)
    assert rows[0]["why"].startswith("best")
    assert any(row["name"] == "as the recipe is" for row in rows)
    assert "--strategy" in " ".join(word for row in rows for word in row["changes"])


def test_own_options_are_part_of_the_command_and_a_new_profile_may_be_anywhere(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured_before(monkeypatch)
    own = ["--simulators", "4", "--strategy", "gala"]
    words = ["plan", "cartpole-a2c", *own, "--profile", "--on", "elsewhere.json"]
    assert main([*words, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert (folder / "elsewhere.json").is_file()
    for row in rows:
        has_another = row["name"].startswith("--strategy")
        kept = (
            ["--simulators", "4", "--strategy"]
            if has_another
            else ["--strategy", "gala", "--simulators", "4"]
        )
        assert row["changes"][: len(kept)] == kept
        assert row["changes"].count("--strategy") == 1
    assert main(words[:-3]) == 0
    command = r"murmurate train cartpole-a2c (--strategy gala --simulators 4|--simulators 4 --strategy)"
    assert re.search(command, capsys.readouterr().out)
    assert main(["plan", "cartpole-a2c", "--on", "nowhere.json"]) == 2
    assert "--profile --on FILE" in capsys.readouterr().err


def test_named_strategies_are_measured_and_compared(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    costs, asked = load(PROFILE), list[Strategy]()
    line = next(iter(costs.exchange.values()))
    monkeypatch.setattr(exchange, "measure", lambda strategy, replicas: asked.append(strategy) or line)
    save(costs, Path("named.json"))
    rows = planned(capsys, "--on", "named.json", "--strategies", "local-sgd:20,gala")
    assert asked, "the profile has the usual period's"
    assert all(each == strategy("local-sgd")(period=20) for each in asked)
    assert {tuple(row["changes"][1:4]) for row in rows if row["name"].startswith("--strategy")} == {
        ("local-sgd", "--strategy.period", "20"),
        ("gala", "--replicas", "2"),
    }
    assert main(["plan", "cartpole-a2c", "--strategies", "gala:20"]) == 2
    assert "gala has no period" in capsys.readouterr().err


def test_a_second_plan_measures_nothing(folder: Path, capsys: Capture) -> None:
    before = (folder / "runs" / "profile.json").read_bytes()
    assert main(["plan", "cartpole-a2c", "--json"]) == 0
    assert "measuring" not in capsys.readouterr().err
    assert (folder / "runs" / "profile.json").read_bytes() == before


def test_the_page_stands_alone(folder: Path) -> None:
    html = (folder / "plan.html").read_text()
    text, images = re.subn(r"data:image/png;base64,[A-Za-z0-9+/=]+", "", html)
    assert images == 3
    assert "http" not in text.replace("http-equiv", "")
    assert "simulate: one step of all simulators" in html


def test_energy_needs_the_power_of_a_core(capsys: Capture) -> None:
    assert main(["plan", "cartpole-a2c", "--objective", "energy"]) == 2
    assert "--watts" in capsys.readouterr().err
    rows = planned(capsys, "--objective", "energy", "--watts", "6")
    assert rows[0]["unit"] == "J per 1,000 env steps"
    assert load(PROFILE).watts == 6.0, "it is kept though nothing was measured"
    assert rows[0]["predicted"] == pytest.approx(
        6000 * rows[0]["busy_cores"] / rows[0]["env_steps_per_second"]
    )


def test_the_least_memory_is_an_objective_and_needs_nothing_more(capsys: Capture) -> None:
    rows = planned(capsys, "--objective", "memory")
    assert rows[0]["unit"] == "MiB"
    assert rows[0]["predicted"] == min(row["predicted"] for row in rows)
    assert rows[0]["memory_bytes"] / 2**20 == pytest.approx(rows[0]["predicted"], rel=0.005)


def test_a_profile_of_other_settings_is_refused(folder: Path, capsys: Capture) -> None:
    profile = load(folder / "runs" / "profile.json")
    profile.hardware["cpu"] = "another processor"
    save(profile, folder / "other.json")
    assert main(["plan", "cartpole-dqn", "--on", "other.json"]) == 2
    refusal = capsys.readouterr().err
    assert "holds the costs of cartpole a2c, and not of cartpole-dqn" in refusal  # in both precisions
    assert "with the same options: murmurate plan cartpole-dqn --profile --on FILE." in refusal
    assert (
        main(["plan", "cartpole-a2c", "--on", "other.json", "--json"]) == 0
    )  # another machine can be planned for
    capsys.readouterr()
    assert main(["plan", "cartpole-a2c", "--on", "other.json", "--profile"]) == 2
    assert "another machine" in capsys.readouterr().err
    assert main(["plan", "cartpole-a2c", "--on", "other.json", "--target", "300"]) == 2
    assert "--profile --target 300 --on FILE" in capsys.readouterr().err


def test_more_hosts_go_through_a_simulated_network(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(search, "_SIMULATED_CANDIDATES", 2)
    monkeypatch.setattr("murmurate.mapping.hosts._UPDATES", 10)
    rows = planned(capsys, "--hosts", "2", "--simulators", "4")
    assert all("--replicas" in row["name"] for row in rows)
    assert all(any("network is a guess" in sentence for sentence in row["advice"]) for row in rows)
    assert rows[0]["predicted"] > 0


def test_a_training_for_another_machine_is_refused(tmp_path: Path, capsys: Capture) -> None:
    profile = load(PROFILE)
    profile.hardware["cpu"] = "another one"
    save(profile, tmp_path / "other.json")
    words = ["plan", "cartpole-a2c", "--on", str(tmp_path / "other.json")]
    assert main([*words, "--apply", "--out", str(tmp_path / "run")]) == 2
    assert "of another machine" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_profile_that_cannot_be_written_is_told_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def cannot(profile: DeviceProfile, path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("murmurate.mapping.profile.save", cannot)
    monkeypatch.setattr(measure, "add_variants", lambda *_: pytest.fail("measured"))
    for options in (["--on", "locked.json"], []):  # a new one, and the folder's
        assert main(["plan", "cartpole-a2c", "--profile", *options]) == 2
        said = capsys.readouterr().err
        assert "cannot be written: Permission denied. Name another file with --on" in said


def test_costs_are_saved_before_the_runs_to_a_target(monkeypatch: pytest.MonkeyPatch) -> None:
    def missed(*_: Any, **__: Any) -> None:
        raise Refusal("did not reach it")

    measured_before(monkeypatch)
    monkeypatch.setattr(learning, "measure", missed)
    assert main(["plan", "cartpole-a2c", "--profile", "--on", "new.json", "--target", "300"]) == 2
    assert key(recipe("cartpole-a2c")) in load(Path("new.json")).recipes


def test_what_was_measured_is_kept_if_the_next_measurement_is_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: Any) -> bool:
        raise KeyboardInterrupt

    measured_before(monkeypatch)
    monkeypatch.setattr(measure, "add_exchange", interrupted)
    assert main(["plan", "cartpole-a2c", "--replicas", "2", "--profile", "--on", "kept.json"]) == 130
    assert key(recipe("cartpole-a2c")) in load(Path("kept.json")).recipes


def test_of_two_plans_in_a_folder_the_second_waits_and_keeps_the_costs_of_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, path = os.open(".", os.O_RDONLY), Path("both.json")
    fcntl.flock(first, fcntl.LOCK_EX)
    with contextlib.ExitStack() as until_it_ends:
        until_it_ends.callback(os.close, first)
        profile = load(PROFILE)
        profile.recipes = {"theirs": next(iter(profile.recipes.values()))}

        def said(line: str) -> None:
            if line.startswith("waiting for another plan"):
                save(profile, path)
                until_it_ends.close()

        monkeypatch.setattr(plan, "_say", said)
        measured_before(monkeypatch)
        assert main(["plan", "cartpole-a2c", "--profile", "--on", str(path)]) == 0
        assert load(path).recipes.keys() == {"theirs", key(recipe("cartpole-a2c"))}


def test_the_first_host_keeps_the_link_to_the_other_one(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    words = ["plan", "cartpole-a2c", "--link", "--on", "linked.json"]
    assert main(words) == 2
    assert "Give this on both" in capsys.readouterr().err
    save(load(PROFILE), Path("linked.json"))
    monkeypatch.setattr(link, "measure", lambda: None)  # at the other host
    assert main(words) == 0
    assert load(Path("linked.json")) == load(PROFILE)
    monkeypatch.setattr(link, "measure", lambda: Link(5e-5, 1.25e9))
    assert main(words) == 0
    assert "network: 50 us + bytes / 1.25 GB/s; the profile is linked.json" in capsys.readouterr().err
    kept = load(Path("linked.json"))
    assert (kept.links, kept.recipes) == ({"network": Link(5e-5, 1.25e9)}, load(PROFILE).recipes)


@pytest.mark.parametrize(
    "word", ["--watts=20", "--target=0", "--profile", "--hosts=2", "--simulators=4", "--json"]
)
def test_what_the_measurement_of_the_link_would_ignore_is_refused(
    word: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(link, "measure", lambda: None)
    assert main(["plan", "cartpole-a2c", "--link", word]) == 2
    assert f"makes no plan: leave out {word.partition('=')[0]}." in capsys.readouterr().err


def test_a_target_asks_for_the_time_to_it(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    run = recipe("cartpole-a2c")
    exponents = dict.fromkeys(learning.FACTORS, 0.5)
    known = learning.Learning(300.0, 1e5, exponents, 2, of=learning.learned_by(run))
    monkeypatch.setattr(learning, "measure", lambda *_, **__: known)
    monkeypatch.setattr(measure, "add_exchange", lambda *_: False)  # of shorter periods
    save(load(PROFILE), Path("target.json"))
    rows = planned(capsys, "--on", "target.json", "--target", "300")
    assert rows[0]["unit"] == "s to the target"
    rows = planned(capsys, "--on", "target.json", "--target", "300", "--objective", "throughput")
    assert rows[0]["unit"] == "env steps/s"


def test_other_programs_that_keep_the_cores_busy_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(measure, "in_rounds", lambda *_: [])
    monkeypatch.setattr(measure, "add_exchange", lambda *_: False)
    for share, expected in ((0.05, False), (0.6, True)):
        monkeypatch.setattr(measure.psutil, "cpu_percent", lambda *_, **__: [100 * share] * 4096)  # noqa: B023
        main(["plan", "cartpole-a2c", "--replicas", "1", "--profile", "--on", "busy.json", "--json"])
        assert ("other programs keep 60% of the cores busy" in capsys.readouterr().err) == expected


def test_a_check_names_the_fastest_and_its_training_is_started(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    names = [row["name"] for row in planned(capsys)]
    rates = iter([100.0, 50.0, 200.0] * 2)
    monkeypatch.setattr("murmurate.mapping.check.measured", lambda run: next(rates))
    trained = []
    monkeypatch.setattr("murmurate.cli.plan._apply", lambda best, options: trained.append(best.name) or 0)
    rows = planned(capsys, "--check", "--apply")
    assert trained == [names[2]]
    assert [row["measured"] for row in rows[:3]] == [100.0, 50.0, 200.0]
    assert main(["plan", "cartpole-a2c", "--check"]) == 0
    said = capsys.readouterr()
    assert f"fastest of the 3 that were run: {names[2]}, 200 env steps/s. A prediction is off" in said.err
    assert "Train with the fastest that was run: murmurate train cartpole-a2c" in said.out


def test_a_configuration_that_fails_when_it_is_run_costs_no_plan(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    rates: list[float | None] = [None, 50.0, 20.0] + 3 * [None]

    def measured(run: Run) -> float:
        if (rate := rates.pop(0)) is None:
            raise RunFailed("Traceback\n  of a replica\nRuntimeError: out of memory")
        return rate

    monkeypatch.setattr("murmurate.mapping.check.measured", measured)
    assert main(["plan", "cartpole-a2c", "--check", "--json"]) == 0
    said = capsys.readouterr()
    rows = json.loads(said.out)
    assert [row["measured"] for row in rows[:4]] == [None, 50.0, 20.0, None]
    assert f"{rows[0]['name']}: not measured: RuntimeError: out of memory" in said.err
    assert f"fastest of the 2 that were run: {rows[1]['name']}" in said.err
    trained = []
    monkeypatch.setattr("murmurate.cli.plan._apply", lambda best, options: trained.append(best.name) or 0)
    assert main(["plan", "cartpole-a2c", "--check", "--apply"]) == 0
    said = capsys.readouterr().out
    assert "Train with the first that did not fail: murmurate train cartpole-a2c" in said
    assert trained == [rows[3]["name"]]  # neither of the three that were run


def test_no_configuration_is_recommended_if_all_failed_when_they_were_run(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr("murmurate.cli.plan._MOST_CHECKED", 1000)
    monkeypatch.setattr("murmurate.mapping.check.measured", _raise_run_failed)
    assert main(["plan", "cartpole-a2c", "--check"]) == 1
    said = capsys.readouterr()
    assert "Every configuration failed when it was run" in said.err
    assert "Train with" not in said.out


def _raise_run_failed(run: Run) -> float:
    raise RunFailed("out of memory")


def test_with_json_a_training_says_nothing_on_standard_output(tmp_path: Path, capsys: Capture) -> None:
    out = str(tmp_path / "run")
    rows = planned(capsys, "--apply", "--simulators", "4", "--env-steps", "500", "--out", out)
    assert rows
    assert (tmp_path / "run" / "summary.json").is_file()
