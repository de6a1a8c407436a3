"""Medians, ratios and limits from windows that were written by hand."""

from typing import Any, cast

import pytest
import torch

from murmurate.agents.a2c import A2C
from murmurate.bench import (
    _commands,
    _limit,
    all_reduce_vs_ddp,
    atari_throughput,
    cartpole_throughput,
    policy_learning,
    relaxed_loop,
    strategy_cost,
    vizdoom_throughput,
)
from murmurate.bench._racer import RaceWindow
from murmurate.bench._result import format_number, show, spread, version
from murmurate.recipes import recipe


def windows(*rates: float, cores: float = 1.0) -> list[RaceWindow]:
    """Two CPU seconds each at the given env steps per CPU second."""
    return [RaceWindow(int(2 * rate), 2.0, 2.0 / cores) for rate in rates]


def test_spread_is_median_extremes_and_quartiles() -> None:
    assert spread([5.0, 1.0, 2.0, 4.0, 3.0]) == {
        "median": 3.0,
        "least": 1.0,
        "greatest": 5.0,
        "quartiles": [2.0, 4.0],
        "repetitions": 5,
        "values": [5.0, 1.0, 2.0, 4.0, 3.0],
    }
    alone = spread([7.0])
    assert (alone["median"], alone["least"], alone["greatest"], alone["quartiles"]) == (7, 7, 7, [7, 7])


class _Run:
    """What a bench asks of a recorded run."""

    def __init__(self, evaluated: float, trained: float) -> None:
        self._facts = {"eval_return_mean": evaluated, "train_return_mean": trained}

    def fact(self, name: str) -> float:
        return self._facts.get(name, 1.0)


def test_cartpole_counts_evaluations_and_halfcheetah_the_returns_in_training() -> None:
    runs: list[Any] = [_Run(475.0, 0.0), _Run(474.9, 2000.0), _Run(2000.0, 1443.0)]
    assert policy_learning._figures("cartpole-ppo", runs)["reached"] == 2
    figures = policy_learning._figures("halfcheetah-ppo", runs)
    assert (figures["reached"], figures["seeds"]) == (2, 3)
    assert figures["train_return_mean"]["values"] == [0.0, 2000.0, 1443.0]


@pytest.mark.parametrize(
    ("value", "shown"),
    [(1234567, "1,234,567"), (1810.4, "1,810"), (0.74649, "0.7465"), (True, "True"), (None, "None")],
)
def test_numbers_for_people(value: object, shown: str) -> None:
    assert format_number(value) == shown


def test_a_shown_result_has_its_figures_spreads_texts_and_peers(capsys: pytest.CaptureFixture[str]) -> None:
    result = {
        "world": "a small one",
        "rate": spread([1000.0, 2000.0, 4000.0]),
        "by": {"size": {"ratio": 1.25}},
        "windows": {"x": [{"cpu_seconds": 98765.0}]},
        "peers": [{"peer": "somebody", "status": "not installed: pip install somebody"}],
    }
    show(result)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "world: a small one" in lines
    assert "rate 2,000 1,000 to 4,000 (3)" in lines
    assert "by.size.ratio 1.25" in lines
    assert "peer somebody: not installed: pip install somebody" in lines
    assert "98,765" not in " ".join(lines)


def test_a_narrow_terminal_cuts_no_figure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    name = "limit_parts_seconds.widened bfloat16.bootstrap"
    show({name: 0.000012345, "rate": spread([1.0, 2.0])})
    out = capsys.readouterr().out
    assert name in out
    assert "1.234e-05" in out
    assert "1 to 2 (2)" in out


def test_versions_of_what_is_absent() -> None:
    assert version("no-such-package-anywhere") == "not installed"
    assert (
        version("torch").split("+")[0] == torch.__version__.split("+")[0]
    )  # metadata may lack what it was built for


def test_the_limit_is_one_over_the_sum_of_its_parts_per_env_step() -> None:
    # 16 games step in 4 ms; 16 frames act in 1.6 ms; 80 are learned in 16 ms; 16 bootstrap 80 in 1.6 ms
    rate, parts = _limit.limit({"acting": 1.6e-3, "learning": 16e-3, "bootstrap": 1.6e-3}, 4e-3)
    assert parts == pytest.approx(
        {"simulator": 0.25e-3, "acting": 0.1e-3, "learning": 0.2e-3, "bootstrap": 0.02e-3}
    )
    assert rate == pytest.approx(1 / 0.57e-3)


def limits() -> dict[str, dict[str, list[float]]]:
    slow = {"acting": [9.0, 1.6e-3], "learning": [16e-3, 9.0], "bootstrap": [1.6e-3, 9.0]}
    fast = {part: [s / 2 for s in seconds] for part, seconds in slow.items()}
    games = {"simulator": [4e-3, 5e-3]}
    plain = {"games": games, "float32": slow, "bfloat16": fast}
    return plain | {f"{kind} {p}": fast for kind in ("own", "widened") for p in ("float32", "bfloat16")}


def test_atari_ratios_are_taken_round_by_round_and_parts_by_their_fastest_window() -> None:
    done = {
        "float32": windows(1000, 1100, 1500),
        "bfloat16": windows(2000, 2000, 2000),
        "sb3": windows(500, 1000, 1000),
    }
    figures = atari_throughput.main_figures(done, limits(), "float32")
    assert figures["env_steps_per_cpu_second"] == 1100
    assert figures["ratio_sb3_a2c"] == pytest.approx(1.5)  # of 2.0, 1.1, 1.5: not 1100 / 1000
    assert figures["sb3_env_steps_per_cpu_second"] == 1000
    assert figures["limit_float32"] == pytest.approx(1 / 0.57e-3)
    assert figures["limit_bfloat16"] == pytest.approx(1 / 0.41e-3)
    assert figures["ratio_limit_float32"] == pytest.approx(1100 * 0.57e-3)
    assert figures["by_precision"]["bfloat16"]["ratio_limit"] == pytest.approx(2000 * 0.41e-3)
    assert figures["by_precision"]["bfloat16"]["ratio_limit_float32"] == pytest.approx(2000 * 0.57e-3)
    assert figures["limit_parts_seconds"]["bfloat16"]["learning"] == pytest.approx(0.1e-3)
    bfloat16 = atari_throughput.main_figures(done, limits(), "bfloat16")
    assert bfloat16["env_steps_per_cpu_second"] == 2000
    assert bfloat16["ratio_sb3_a2c"] == pytest.approx(2.0)


def test_atari_without_the_peer_says_null_and_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_commands.importlib.util, "find_spec", lambda name: None)
    done = {"float32": windows(1000), "bfloat16": windows(2000)}
    assert atari_throughput.main_figures(done, limits(), "float32")["ratio_sb3_a2c"] is None
    assert atari_throughput.sb3_entry(done)["status"] == "not installed: pip install 'murmurate[bench]'"


def test_a_gossiping_learners_share_is_per_cpu_second_and_double_buffering_per_wall_second() -> None:
    done = {
        "float32": windows(1000, 1000, 2000, 2000),
        "gossip": windows(900, 950, cores=2),
        "buffered": windows(800, 800, cores=2),
    }
    figures = atari_throughput.side_figures(done, "float32")
    assert figures["per_learner_share_with_2_gossiping"] == pytest.approx(0.925)
    assert figures["gossiping"]["env_steps_per_second_of_both"]["median"] == pytest.approx(1850)
    assert figures["double_buffer"]["env_steps_per_second_on"]["median"] == 1600
    assert figures["double_buffer"]["env_steps_per_second_off"]["median"] == 1000


def test_cartpole_headline_is_16_simulators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_commands, "missing", lambda *_: None)
    done = {
        "ours-8": windows(8000, 8000),
        "sb3-8": windows(4000, 2000),
        "ours-16": windows(20000, 20000),
        "sb3-16": windows(10000, 20000),
    }
    figures = cartpole_throughput.figures(done)
    assert figures["env_steps_per_cpu_second"] == 20000
    assert figures["ratio_sb3_a2c"] == pytest.approx(1.5)
    assert figures["by_simulators"]["8_simulators"]["ratio_sb3_a2c"]["median"] == pytest.approx(3.0)


def test_on_cartpole_the_peer_makes_as_many_updates_as_the_recipe() -> None:
    pytest.importorskip("stable_baselines3")
    from murmurate.bench._sb3 import learner

    ours, theirs = cast(A2C, recipe("cartpole-a2c").learner), learner("cartpole", 2)
    assert (theirs.n_steps, theirs.gae_lambda) == (ours.steps, ours.gae_lambda)


def test_a_strategys_cost_is_its_excess_over_the_update_in_copies() -> None:
    times = [
        {"copy": [1.0, 1.0, 9.0], "update": [3, 3, 30], "step": [5, 6, 33]},
        {"copy": [2.0, 2.0, 2.0], "update": [4, 4, 4], "step": [4, 4, 10]},
    ]
    heard = [[True, True, False], [False, False, True]]
    figures = strategy_cost.figures([{"times": t, "heard": h} for t, h in zip(times, heard, strict=True)])
    assert figures["copies"]["values"] == [3.0, 0.0]
    assert figures["copies_mean"]["values"] == pytest.approx([8 / 3, 1.0])
    assert figures["copies_when_heard"]["values"] == [2.5, 3.0]
    assert figures["share_of_steps_that_heard_others"] == 0.5


def test_a_member_that_heard_nobody_has_no_cost_of_hearing() -> None:
    times = {"copy": [1.0, 1.0], "update": [3.0, 3.0], "step": [5.0, 6.0]}
    heard = {"times": times, "heard": [True, False]}
    alone = {"times": times, "heard": [False, False]}
    assert strategy_cost.figures([heard, alone])["copies_when_heard"]["values"] == [2.0]
    assert strategy_cost.figures([alone, alone])["copies_when_heard"] is None


def test_the_slowest_member_sets_the_pace_of_a_round() -> None:
    plan = all_reduce_vs_ddp.DDPPlan(updates=10)
    answers = [
        {"ours": [(1.0, 0.5), (2.0, 0.5)], "ddp": [(2.0, 1.0), (2.0, 1.0)]},
        {"ours": [(2.0, 0.3), (1.0, 0.3)], "ddp": [(4.0, 1.0), (2.0, 1.0)]},
    ]
    figures = all_reduce_vs_ddp.figures(answers, plan)
    assert figures["ours"]["updates_per_second"]["values"] == [5.0, 5.0]
    assert figures["ddp"]["updates_per_second"]["values"] == [2.5, 5.0]
    assert figures["ratio_updates_per_second"] == pytest.approx(1.5)
    assert figures["ratio_updates_per_cpu_second"] == pytest.approx(1.0 / 0.4)


def test_plain_net_own_net_and_the_peers_net_are_one_architecture() -> None:
    def size(parameters: object) -> int:
        return sum(p.numel() for p in parameters)  # type: ignore[attr-defined]

    convolutions = 16 * (4 * 64 + 1) + 32 * (16 * 16 + 1)
    expected = convolutions + 256 * (32 * 81 + 1) + 7 * 257
    plain = _limit.PlainNature(torch.float32)
    assert size(plain.parameters()) == expected
    assert size(_limit.own_net("float32")[1]) == expected
    sb3 = pytest.importorskip("stable_baselines3")
    import gymnasium

    from murmurate.bench._sb3 import extractor

    frames = gymnasium.spaces.Box(0, 255, (4, 84, 84), dtype="uint8")
    policy = sb3.common.policies.ActorCriticCnnPolicy(
        frames,
        gymnasium.spaces.Discrete(6),
        lambda _: 7e-4,
        net_arch=[],
        features_extractor_class=extractor(),
        features_extractor_kwargs={"features_dim": 256},
    )
    assert size({id(p): p for p in policy.parameters()}.values()) == expected


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_learning_passes_touch_every_parameter_and_acting_none(precision: str) -> None:
    few, many = (torch.randint(0, 256, (n, 4, 84, 84), dtype=torch.uint8) for n in (2, 3))
    plain = _limit.PlainNature(getattr(torch, precision))
    for net, parameters in ((plain, list(plain.parameters())), _limit.own_net(precision)):
        for parameter in parameters:
            parameter.grad = None
        parts = _limit.passes(net, parameters, few, many)
        assert parts["acting"]().shape == (2, 7)
        assert all(p.grad is None for p in parameters)
        parts["learning"]()
        assert all(p.grad is not None and bool(p.grad.any()) for p in parameters)


def test_a_relaxed_loop_is_compared_with_the_strict_one_of_its_round() -> None:
    found = relaxed_loop.figures(
        {"D=0": windows(100.0, 50.0, cores=1.0), "D=1": windows(90.0, 60.0, cores=2.0)}
    )
    # two cores: twice the rate of the clock for the same CPU seconds
    assert found["D=1"]["to_the_strict_loop"]["values"] == pytest.approx([1.8, 2.4])
    assert found["D=1"]["to_the_strict_loop_per_cpu_second"]["values"] == pytest.approx([0.9, 1.2])
    assert found["D=0"]["to_the_strict_loop"]["values"] == [1.0, 1.0]


def test_vizdoom_headline_is_a2c_against_the_faster_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vizdoom_throughput._peers, "absent", lambda name: None)
    done = {
        "a2c": windows(1000, 1200, 1400),
        "a2c float32": windows(800, 800, 800),
        "impala": windows(900, 900, 900, cores=2),
        "impala float32": windows(500, 500, 500),
        "async": windows(400, 400, 400, cores=2),
        "serial": windows(500, 600, 700),
    }
    figures = vizdoom_throughput.figures(done)
    assert figures["env_steps_per_cpu_second"] == 1200
    assert figures["sample_factory_mode"] == "serial"
    assert figures["ratio_sample_factory"] == 2.0
    impala = figures["by_agent"]["impala"]
    assert impala["ratio_sample_factory"]["median"] == 1.5
    assert impala["ratio_sample_factory_wall"]["median"] == 900 / 400, "of two cores: async is faster there"
    assert figures["peers"][0]["serial"]["env_steps_per_second"]["median"] == 600


def test_vizdoom_without_its_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vizdoom_throughput._peers, "absent", lambda name: "not installed")
    figures = vizdoom_throughput.figures({label: windows(1000) for label in vizdoom_throughput._OURS})
    assert figures["env_steps_per_cpu_second"] == 1000
    assert figures["ratio_sample_factory"] is None
    assert figures["peers"] == [{"peer": "sample-factory", "status": "not installed"}]
