"""Writes the tables of ``README.md``, and the figures in prose, from ``results/*.json``.

``python benchmarks/render.py`` rewrites the pages. The newest result of each benchmark comes first. Results
are files named ``YYYY-MM-DD-<bench>.json`` that hold the last line of ``murmurate bench NAME --json``.

A figure in prose, on this page, in the README or in ``docs/``, is written as

    <!--figure 2026-11-21-topics ratio_gensim .1f-->10.2<!--end-->

with the name of the result's file, the path to the figure in it (where an item of a list is its number) and
Python's format. A factor before the format multiplies the figure (``100*.0f`` for per cent); ``path / path``
is a ratio of two figures. A figure that is null in the result is shown as "never reached".
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BEGIN, END = "<!-- results: written by render.py -->", "<!-- end of results -->"

# bench -> columns: (heading, path into the result)
COLUMNS: dict[str, list[tuple[str, str]]] = {
    "atari-throughput": [
        ("precision", "precision"),
        ("env steps / CPU s", "env_steps_per_cpu_second"),
        ("x SB3 A2C", "ratio_sb3_a2c"),
        ("of float32 limit", "ratio_limit_float32"),
        ("float32: env steps / CPU s", "by_precision.float32.env_steps_per_cpu_second.median"),
        ("float32: x SB3 A2C", "by_precision.float32.ratio_sb3_a2c.median"),
        ("float32: of limit", "by_precision.float32.ratio_limit_float32"),
        ("SB3 A2C", "sb3_env_steps_per_cpu_second"),
        ("limit float32", "limit_float32"),
        ("limit bfloat16", "limit_bfloat16"),
        ("share with 2 GALA learners", "per_learner_share_with_2_gossiping"),
        ("double buffer on: env steps / s", "double_buffer.env_steps_per_second_on.median"),
        ("off", "double_buffer.env_steps_per_second_off.median"),
    ],
    "control-throughput": [
        ("TD3: updates / CPU s", "td3_updates_per_cpu_second"),
        ("x SB3", "td3_ratio_sb3"),
        ("of limit", "td3_ratio_limit"),
        ("bfloat16: x SB3", "td3_bfloat16_ratio_sb3"),
        ("SAC: updates / CPU s", "sac_updates_per_cpu_second"),
        ("x SB3", "sac_ratio_sb3"),
        ("of limit", "sac_ratio_limit"),
        ("bfloat16: x SB3", "sac_bfloat16_ratio_sb3"),
        ("fastest peer", "fastest_peer"),
        ("x it", "ratio_fastest_peer"),
    ],
    "replay-service": [
        ("draws / CPU s", "draws_per_cpu_second.service.median"),
        ("of a learner's own replay", "draws_per_cpu_second.own.median"),
        ("share of that", "share_of_own"),
        ("samples per insert", "samples_per_insert_held.median"),
        ("kills", "kills"),
        ("inserts lost", "lost_inserts"),
        ("twice", "doubled_inserts"),
        ("draws lost", "lost_draws"),
        ("twice", "doubled_draws"),
    ],
    "vizdoom-throughput": [
        ("A2C: env steps / CPU s", "env_steps_per_cpu_second"),
        ("x Sample Factory", "ratio_sample_factory"),
        ("by wall time", "by_agent.a2c.ratio_sample_factory_wall.median"),
        ("float32: x Sample Factory", "by_agent.a2c float32.ratio_sample_factory.median"),
        ("IMPALA: env steps / CPU s", "by_agent.impala.env_steps_per_cpu_second.median"),
        ("x Sample Factory", "by_agent.impala.ratio_sample_factory.median"),
        ("by wall time", "by_agent.impala.ratio_sample_factory_wall.median"),
        ("float32: x Sample Factory", "by_agent.impala float32.ratio_sample_factory.median"),
    ],
    "resnet-throughput": [
        ("images / CPU s", "images_per_cpu_second"),
        ("x faster DDP loop", "ratio_ddp"),
        ("x DDP, our decoding", "ratios.ddp same"),
        ("x DDP, Pillow", "ratios.ddp pillow"),
        ("x Accelerate, our decoding", "ratio_accelerate"),
        ("loading: x DataLoader, Pillow", "ratio_loader"),
        ("loading: x DataLoader, our decoding", "loading.ratio_same_functions"),
    ],
    "image-loading": [
        ("images / CPU s", "images_per_cpu_second"),
        ("x DataLoader, Pillow", "ratio_pillow"),
        ("x DataLoader, our decoding", "ratio_same_functions"),
        ("by wall time: Pillow", "ratio_pillow_wall"),
        ("our decoding", "ratio_same_functions_wall"),
    ],
    "replicator-scaling": [
        ("step on one core (s)", "step_seconds"),
        ("gloo (bytes / s)", "gloo_bytes_per_second"),
        ("verdict", "verdict"),
    ],
    "resnet-parity": [
        ("first steps with equal losses, float64", "equal_steps"),
        ("plain loop perturbed in the last bit", "equal_steps_perturbed_plain"),
        ("difference over 20 steps, float64", "float64.ours.20"),
        ("perturbed", "float64.perturbed_plain.20"),
        ("accuracy: ours minus plain", "accuracy_difference"),
    ],
    "plan": [
        ("median error", "median_error"),
        ("worst error", "worst_error"),
        ("median of all of three recipes", "median_error_exhaustive"),
        ("worst of these", "worst_error_exhaustive"),
        ("best measured over first choice, minus 1", "choice_over_best"),
    ],
    "spatial": [
        ("largest error, float64", "largest_error_float64"),
        ("layers", "layers"),
        ("memory share of 2 parts", "memory_share_2"),
        ("speed-up of 2 parts", "speedup_2"),
        ("dilated", "speedup_2_dilated"),
        ("ResNet-18", "speedup_2_nets.resnet18"),
        ("U-Net", "speedup_2_nets.unet"),
    ],
    "topics": [
        ("documents / CPU s", "documents_per_second"),
        ("x gensim", "ratio_gensim"),
        ("x scikit-learn", "ratio_sklearn"),
        ("x scikit-learn in float32", "ratio_sklearn_float32"),
        ("perplexity", "perplexity"),
        ("gensim", "perplexity_gensim"),
        ("scikit-learn", "perplexity_sklearn"),
        ("own defaults", "perplexity_defaults"),
        (
            "x faster to the better one's final perplexity",
            "to_the_peers_perplexity.generated.ours.murmurate defaults.times_faster",
        ),
        (
            "DPSVI: CPU s to the sampler's perplexity",
            "dpsvi_and_the_sampler.generated.cpu_seconds_to_the_samplers",
        ),
        ("sampler: CPU s", "dpsvi_and_the_sampler.generated.sampler_cpu_seconds"),
    ],
    "topics-stream": [
        ("documents", "plan.documents"),
        ("words", "plan.vocabulary"),
        ("entries", "entries"),
        ("replicas", "plan.replicas"),
        ("seconds", "wall_seconds"),
        ("seconds of training", "training_seconds"),
        ("perplexity", "perplexity"),
        ("peak resident bytes of a process", "peak_resident_bytes_most"),
    ],
    "cartpole-throughput": [
        ("env steps / CPU s, 16", "env_steps_per_cpu_second"),
        ("x SB3 A2C, 16", "ratio_sb3_a2c"),
        ("env steps / CPU s, 8", "by_simulators.8_simulators.env_steps_per_cpu_second.median"),
        ("x SB3 A2C, 8", "by_simulators.8_simulators.ratio_sb3_a2c.median"),
    ],
    "dqn-throughput": [
        ("float32: env steps / CPU s", "env_steps_per_cpu_second"),
        ("x SB3 DQN", "ratio_sb3_dqn"),
        ("bfloat16", "by_kind.bfloat16.env_steps_per_cpu_second.median"),
        ("x SB3 DQN", "by_kind.bfloat16.ratio_sb3_dqn.median"),
        ("plain as SB3's, float32", "by_kind.uniform float32.env_steps_per_cpu_second.median"),
        ("x SB3 DQN", "by_kind.uniform float32.ratio_sb3_dqn.median"),
        ("plain, bfloat16", "by_kind.uniform bfloat16.env_steps_per_cpu_second.median"),
        ("x SB3 DQN", "by_kind.uniform bfloat16.ratio_sb3_dqn.median"),
        ("D = 2, float32", "by_kind.float32 ahead.env_steps_per_cpu_second.median"),
        ("SB3 DQN", "sb3_env_steps_per_cpu_second"),
        ("SB3 with 1 simulator", "sb3_1_simulator_env_steps_per_cpu_second"),
        ("bfloat16: x SB3 with 1", "by_kind.bfloat16.ratio_sb3_dqn_1_simulator.median"),
    ],
    "strategy-cost": [
        ("GALA, 2 members: copies", "strategies.gala.2_members.copies_when_heard.median"),
        ("4 members", "strategies.gala.4_members.copies_when_heard.median"),
        ("all-reduce, 2", "strategies.all-reduce.2_members.copies.median"),
        ("4", "strategies.all-reduce.4_members.copies.median"),
        ("local SGD (mean), 2", "strategies.local-sgd.2_members.copies_mean.median"),
        ("4", "strategies.local-sgd.4_members.copies_mean.median"),
        ("Hogwild, 2", "strategies.hogwild.2_members.copies.median"),
        ("4", "strategies.hogwild.4_members.copies.median"),
        ("GALA waits (share of time)", "gala_waiting_share"),
    ],
    "all-reduce-vs-ddp": [
        ("ours: updates / s", "ours.updates_per_second.median"),
        ("DDP: updates / s", "ddp.updates_per_second.median"),
        ("ratio", "ratio_updates_per_second"),
        ("ours: CPU s / update", "ours.cpu_seconds_per_update.median"),
        ("DDP", "ddp.cpu_seconds_per_update.median"),
        ("ratio", "ratio_updates_per_cpu_second"),
    ],
}

Rows = list[tuple[str, dict[str, Any]]]


def _strategies(result: dict[str, Any]) -> Rows:
    return list(result["strategies"].items())


def _learning(result: dict[str, Any]) -> Rows:
    """The result's facts by strategy."""
    facts = ("replicas", "seeds", "reached", "eval_return_mean", "env_steps", "wall_seconds")
    by_fact = {fact: result[fact] for fact in facts}
    return [
        (name, {fact: found[name] if isinstance(found, dict) else found for fact, found in by_fact.items()})
        for name in by_fact["reached"]
    ]


def _jin(result: dict[str, Any]) -> Rows:
    """The rows of ``jin-table``, with the figures of each seed as text."""

    def seeds(returns: list[float]) -> str:
        return ", ".join(f"{value:.2f}" for value in returns)

    return [
        (
            f"{row['task']}: {row['agent']}",
            {**row, "evaluations": seeds(row["returns"]), "training": seeds(row["train_returns"])},
        )
        for row in result["rows"]
    ]


def _faulted(result: dict[str, Any]) -> Rows:
    return [(name, {**row, "count": len(row["faults"])}) for name, row in _strategies(result)]


def _scaling(result: dict[str, Any]) -> Rows:
    """By scheme: data points per second by number of nodes, and virtual seconds to scores. Results from
    before there were fixed scores have one seed, and the time to one reference, the greatest return of B =
    1."""
    earlier = {n: one["seconds_to_reference"] for n, one in result.get("time_to_reference", {}).items()}
    scores = result.get("time_to_score", {})
    return [
        (
            name,
            {
                "points": points,
                "seconds": {n: reached[name] for n, reached in earlier.items() if name in reached},
                "score": {n: schemes[name] for n, schemes in scores.items() if name in schemes},
            },
        )
        for name, points in result["data_points_per_second"].items()
    ]


def _speedups(result: dict[str, Any]) -> Rows:
    """By step rule and case."""
    return [
        (f"{rule}: {row['workers']}, {row['threads']}, {row['local_updates']}, {row['batch']}", row)
        for rule, found in result["rules"].items()
        for row in found["cases"]
    ]


def _real_speedups(result: dict[str, Any]) -> Rows:
    """By numbers of threads and workers; no rows for results with single runs (before 2026-11-22)."""
    real = result["real"] or {}
    figures = ("documents_per_second", "speed_over_one_node", "speedup", "tsp_serial")
    if "speed_over_one_node" not in real:
        return []
    return [
        (name, {figure: real[figure].get(name) for figure in figures})
        for name in real["documents_per_second"]
    ]


_REPLAYS = ("torchrl", "cpprb", "tianshou", "flashbax")


def _replay(result: dict[str, Any]) -> Rows:
    """By case."""
    return [(row["label"], row) for row in result["cases"]]


def _image_strategies(result: dict[str, Any]) -> Rows:
    """By strategy, over seeds."""
    return [
        (
            row["strategy"],
            {
                **row,
                "seeds": len(row["accuracies"]),
                "least": min(row["accuracies"]),
                "greatest": max(row["accuracies"]),
                "test_loss": statistics.fmean(row["test_losses"]),
                "staleness": max(row["staleness_max"]),
                "seconds": statistics.fmean(row["wall_seconds"]),
            },
        )
        for row in result["rows"]
    ]


def _topics(result: dict[str, Any]) -> Rows:
    """By corpus and library, then the step rules."""
    parts = {**result["corpora"], "step rules": result["step_rules"]}
    return [(f"{part}: {row['label']}", row) for part, rows in parts.items() for row in rows]


def _mapping(result: dict[str, Any]) -> Rows:
    """By environment and batch. Before 2026-11-30 the chosen rates were those of the CPU, and the thesis'
    devices were not in results."""
    earlier = {"how": "measured", "differs_from_thesis": "not compared"}
    return [(f"{cell['environment']}, {cell['batch']:,}", {**earlier, **cell}) for cell in result["cells"]]


def _targets(result: dict[str, Any]) -> Rows:
    """By recipe and target. Seconds are also of runs that missed the target; ``misses`` tells how many of the
    recipe's, of those of the plan's choice, and of those of the search's best."""
    rows = []
    for row in result["rows"]:
        named = ("as the recipe is", row["choice"], row["best"])
        misses = ", ".join(str(row["missed"][name]) for name in named)
        rows.append((f"{row['recipe']}, {row['target']:g}", {**row, "misses": misses}))
    return rows


# benchmark, or "benchmark, part" -> heading of the first column, function that returns the rows, and their
# columns as above; there is a table for each result (for a part, only if the result has it)
TABLES: dict[str, tuple[str, Callable[[dict[str, Any]], Rows], list[tuple[str, str]]]] = {
    "topics": (
        "corpus: library",
        _topics,
        [
            ("documents / CPU s", "documents_per_second.median"),
            ("perplexity at the end", "perplexity.median"),
            ("least", "perplexity.least"),
            ("greatest", "perplexity.greatest"),
            ("CPU s", "cpu_seconds.median"),
            ("repetitions", "perplexity.repetitions"),
        ],
    ),
    "fpga-learner": (
        "seed",
        lambda result: [(f"{seed}", run) for seed, run in enumerate(result["runs"])],
        [("mean return of the games", "return"), ("env steps", "env_steps")],
    ),
    "spatial-table": (
        "pixels, dilation, parts",
        lambda result: [
            (f"{row['size']} x {row['size']}, {row['dilation']}, {row['parts']}", row)
            for row in result["rows"]
        ],
        [
            ("forward, ms, whole", "whole_forward_ms"),
            ("in parts", "forward_ms"),
            ("backward, ms, whole", "whole_backward_ms"),
            ("in parts", "backward_ms"),
            ("memory share of a part", "memory_share"),
        ],
    ),
    "mapping-table": (
        "environment, batch",
        _mapping,
        [
            ("learner", "learner"),
            ("replay manager", "replay_manager"),
            ("storage", "storage"),
            ("differs from the thesis", "differs_from_thesis"),
            ("gradient steps / s", "steps_per_second"),
            ("these are", "how"),
            ("learner on the CPU, replay manager on the FPGA", "others.cpu-fpga"),
        ],
    ),
    "jin-table": (
        "task: agent",
        _jin,
        [
            ("env steps", "env_steps"),
            ("training return of each seed", "training"),
            ("evaluation of each seed", "evaluations"),
            ("hours", "hours"),
        ],
    ),
    "cartpole-learning": (
        "strategy",
        _learning,
        [
            ("replicas", "replicas"),
            ("seeds", "seeds"),
            ("seeds that reached 475, last or best", "reached"),
            ("evaluation, median", "eval_return_mean.median"),
            ("least", "eval_return_mean.least"),
            ("env steps", "env_steps.median"),
            ("seconds", "wall_seconds.median"),
        ],
    ),
    "every-strategy": (
        "strategy, replicas",
        lambda result: [(f"{row['strategy']}, {row['replicas']}", row) for row in result["rows"]],
        [
            ("CartPole: evaluation, median", "cartpole_eval_return.median"),
            ("least", "cartpole_eval_return.least"),
            ("waiting", "cartpole_waiting_share"),
            ("staleness, greatest", "cartpole_staleness_max.greatest"),
            ("disagreement at the end, greatest", "cartpole_disagreement_final.greatest"),
            ("Pong: env steps / s", "pong_env_steps_per_second"),
            ("waiting", "pong_waiting_share"),
            ("staleness, greatest", "pong_staleness_max"),
            ("bytes / update", "pong_bytes_per_update"),
        ],
    ),
    "replay": (
        "task",
        _replay,
        [
            ("ours, µs", "microseconds.murmurate.median"),
            *((peer, f"microseconds.{peer}.median") for peer in _REPLAYS),
            *((f"x {peer}", f"ratios.{peer}") for peer in _REPLAYS),
        ],
    ),
    "replay-gpu": (
        "case (n: leaves, b: batch)",
        _replay,
        [
            ("Triton, µs", "microseconds.triton.median"),
            ("torch on the GPU, µs", "microseconds.torch.median"),
            ("x torch", "ratio_torch.median"),
            ("least", "ratio_torch.least"),
            ("greatest", "ratio_torch.greatest"),
            ("x sums over all leaves", "ratio_sums.median"),
        ],
    ),
    "image-strategies": (
        "strategy",
        _image_strategies,
        [
            ("seeds", "seeds"),
            ("accuracy, mean", "accuracy"),
            ("deviation", "deviation"),
            ("least", "least"),
            ("greatest", "greatest"),
            ("test loss, mean", "test_loss"),
            ("greatest staleness", "staleness"),
            ("seconds, mean", "seconds"),
        ],
    ),
    "replay-shared": (
        "case",
        lambda result: [
            (case, {**measured, "share": result["share_of_alone"].get(case, 1.0)})
            for case, measured in result["cases"].items()
        ],
        [
            ("draws / CPU s of the learners", "draws_per_cpu_second.median"),
            ("over alone", "share"),
            ("draws / s", "draws_per_second.median"),
            ("inserts / s", "inserts_per_second.median"),
            ("records lost", "lost_records.greatest"),
        ],
    ),
    "value-learning": (
        "run",
        lambda result: [*result["recipes"].items(), *result["relaxed_loop"].items()],
        [
            ("seeds", "seeds"),
            ("seeds that reached 475", "reached"),
            ("evaluation, median", "eval_return_mean.median"),
            ("least", "eval_return_mean.least"),
            ("env steps", "env_steps.median"),
            ("updates / s", "updates_per_second.median"),
            ("seconds", "wall_seconds.median"),
        ],
    ),
    "policy-learning": (
        "run",
        lambda result: list(result["recipes"].items()),
        [
            ("seeds", "seeds"),
            ("seeds that reached the goal", "reached"),
            ("evaluation, median", "eval_return_mean.median"),
            ("least", "eval_return_mean.least"),
            ("training, median", "train_return_mean.median"),
            ("least", "train_return_mean.least"),
            ("env steps", "env_steps.median"),
            ("seconds", "wall_seconds.median"),
        ],
    ),
    "actor-learners": (
        "method",
        lambda result: [(row["method"], row) for row in result["rows"]],
        [
            ("seeds", "seeds"),
            ("evaluation, median", "eval_return_mean.median"),
            ("least", "eval_return_mean.least"),
            ("greatest", "eval_return_mean.greatest"),
            ("training, at equal env steps", "return_at_equal_env_steps.median"),
            ("at equal seconds", "return_at_equal_seconds.median"),
            ("least", "return_at_equal_seconds.least"),
            ("greatest", "return_at_equal_seconds.greatest"),
            ("env steps / s", "env_steps_per_second.median"),
            ("seconds", "wall_seconds.median"),
        ],
    ),
    "relaxed-loop": (
        "world, D",
        lambda result: [
            (f"{world}, {depth}", row)
            for world, by_depth in result["worlds"].items()
            for depth, row in by_depth.items()
        ],
        [
            ("env steps / s", "env_steps_per_second.median"),
            ("x D=0", "to_the_strict_loop.median"),
            ("least", "to_the_strict_loop.least"),
            ("greatest", "to_the_strict_loop.greatest"),
            ("env steps / CPU s", "env_steps_per_cpu_second.median"),
            ("x D=0", "to_the_strict_loop_per_cpu_second.median"),
        ],
    ),
    "control-learning": (
        "world, agent, env steps",
        lambda result: [
            (f"{row['world']}, {row['agent']}, {row['env_steps']:,}", row) for row in result["rows"]
        ],
        [
            ("mean", "mean"),
            ("deviation", "deviation"),
            ("published", "published.mean"),
            ("deviation", "published.deviation"),
            ("SB3 here", "sb3_mean"),
            ("Welch p", "welch_p"),
        ],
    ),
    "memr": (
        "task, agent, env steps",
        lambda result: [
            (f"{row['task']}, {row['agent']}, {row['env_steps']:,}", row) for row in result["rows"]
        ],
        [
            ("mean", "mean"),
            ("deviation", "deviation"),
            ("policy updates", "policy_updates"),
            ("imagined transitions", "imagined_transitions"),
        ],
    ),
    "spo-learning": (
        "world, learners, H",
        lambda result: [
            (f"{row['world']}, {row['learners']}, {row['period']}", row) for row in result["rows"]
        ],
        [("interquartile mean", "iqm"), ("deviation", "deviation"), ("hours", "hours")],
    ),
    "plan-target": (
        "recipe, target",
        _targets,
        [
            ("recipe's own, s", "default_seconds.median"),
            ("plan's choice, s", "choice_seconds.median"),
            ("search's best, s", "best_seconds.median"),
            ("own / choice", "default_over_choice"),
            ("choice / best", "choice_over_best"),
            ("missed the target: own, choice, best", "misses"),
            ("choice", "choice"),
            ("best", "best"),
        ],
    ),
    "spo-scaling": (
        "learners, H",
        lambda result: [(f"{row['learners']}, {row['period']}", row) for row in result["rows"]],
        [
            ("s / update", "update_seconds.median"),
            ("by the model", "predicted_seconds"),
            ("model / measured", "predicted_to_measured"),
            ("scaling factor", "scaling_factor"),
            ("over cores", "scaling_factor_of_cores"),
            ("by the model", "predicted_scaling_factor"),
        ],
    ),
    "topics-speedup": (
        "step rule: nW, p, B, M",
        _speedups,
        [
            ("speed-up over the panel's first case", "speedup"),
            ("TSP over the same rule with one replica", "tsp_serial"),
            ("TSP over SVI, batch 1024", "tsp_svi"),
            ("documents to the target", "documents"),
            ("folds to the target", "folds"),
            ("virtual s", "seconds"),
            ("documents / virtual s", "documents_per_second"),
        ],
    ),
    "topics-speedup, real processes": (
        "average, B = 15",
        _real_speedups,
        [
            ("documents / s", "documents_per_second.median"),
            ("x one node", "speed_over_one_node.median"),
            ("least", "speed_over_one_node.least"),
            ("greatest", "speed_over_one_node.greatest"),
            ("speed-up at equal perplexity", "speedup.median"),
            ("least", "speedup.least"),
            ("greatest", "speedup.greatest"),
            ("TSP over serial", "tsp_serial.median"),
            ("least", "tsp_serial.least"),
            ("greatest", "tsp_serial.greatest"),
        ],
    ),
    "straggler": (
        "strategy",
        _strategies,
        [
            ("blocked share of the fast replicas", "blocked_share.median"),
            ("updates / CPU s of all members", "updates_per_cpu_second.median"),
            ("updates / s of a fast replica", "updates_of_the_quick_per_second.median"),
            ("updates / s of the slow one", "updates_of_the_slow_per_second.median"),
        ],
    ),
    "straggler-simulated": (
        "strategy",
        _strategies,
        [
            *(
                (f"throughput kept by the others, {n}", f"{n}_replicas.others_kept")
                for n in (4, 32, 128, 1000)
            ),
            ("greatest staleness, 1000", "1000_replicas.staleness_max"),
            ("CartPole return after the same time", "learning.train_return_mean"),
            ("evaluation", "learning.eval_return_mean"),
            ("updates of all replicas", "learning.total_updates"),
        ],
    ),
    "chaos": (
        "strategy",
        _faulted,
        [
            ("faults", "count"),
            ("return / without faults", "return_ratio"),
            ("env steps / without faults", "throughput_ratio"),
            ("longest time without learning, s", "under_faults.longest_time_without_a_record_seconds"),
            ("processes left behind", "under_faults.left_processes"),
            ("files left behind", "under_faults.left_files"),
        ],
    ),
    "chaos-simulated": (
        "strategy",
        _strategies,
        [
            ("throughput kept", "kept"),
            ("died", "faults.died"),
            ("paused", "faults.paused"),
            ("connections broken", "faults.cut"),
            ("staleness, greatest", "staleness_max"),
            ("disagreement at the end", "disagreement_final"),
        ],
    ),
    "hsa2c-scaling": (
        "scheme",
        _scaling,
        [
            *((f"points / s, {n} nodes", f"points.{n}_nodes") for n in (1, 20, 30, 40, 60)),
            *((f"s to B = 1's best return, {n} nodes", f"seconds.{n}_nodes") for n in (8, 20)),
            *(
                (f"s to {score}, {n} nodes (median)", f"score.{n}_nodes.{score}.median")
                for n in (8, 20)
                for score in (50, 100, 195)
            ),
            *((f"seeds that reached 195, {n}", f"score.{n}_nodes.195.reached") for n in (8, 20)),
        ],
    ),
    "transport": (
        "size",
        lambda result: [(name.replace("_", " "), one["ratios"]) for name, one in result["sizes"].items()],
        [
            ("shared-memory register / memcpy", "shared_memory_register_over_memcpy"),
            ("mail / memcpy", "shared_memory_mail_over_memcpy"),
            ("loopback register / gloo", "loopback_plain_register_over_gloo"),
            ("mail / gloo", "loopback_plain_mail_over_gloo"),
            ("stream / gloo", "loopback_plain_stream_over_gloo"),
            ("waiting register / gloo", "loopback_plain_register_waiting_over_gloo"),
            ("waiting mail / gloo", "loopback_plain_mail_waiting_over_gloo"),
            ("TCP register / gloo", "tcp_plain_register_over_gloo"),
            ("TCP mail / gloo", "tcp_plain_mail_over_gloo"),
            ("TCP stream / gloo", "tcp_plain_stream_over_gloo"),
            ("TCP with AES, register / cipher", "tcp_aes_256_gcm_register_over_cipher"),
            ("TCP with AES, stream / cipher", "tcp_aes_256_gcm_stream_over_cipher"),
        ],
    ),
}


NOT_MEASURED, NEVER_REACHED = "not measured", "never reached"
# what a null means in a result: a time to a goal that was not reached is a finding, not a gap
NULLS = {
    "hsa2c-scaling": NEVER_REACHED,
    "topics-speedup": NEVER_REACHED,
    "topics": NEVER_REACHED,
    "plan-target": NEVER_REACHED,  # a ratio to or of runs that missed the target
    "every-strategy": "one replica",  # and so no disagreement
}


def at(result: Any, path: str) -> Any:
    """The figure at a path; None where the result has null, and "not measured" where it has no such path."""
    for key in path.split("."):
        if not isinstance(result, dict) or key not in result:
            return NOT_MEASURED
        result = result[key]
    return result


def cell(value: Any, null: str = NOT_MEASURED) -> str:
    if value is None:
        return null
    if isinstance(value, str):
        return value
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def tables(results: Iterable[dict[str, Any]]) -> str:
    """A table for each benchmark of COLUMNS, with a line for each result, and for each result of TABLES a
    table; the newest first."""
    by_bench: dict[str, list[dict[str, Any]]] = {}
    for result in sorted(results, key=lambda r: str(r["date"]), reverse=True):
        by_bench.setdefault(result["bench"], []).append(result)
    out = []
    for bench, columns in COLUMNS.items():
        if bench not in by_bench:
            out.append(f"### {bench}\n\nNo result yet.\n")
            continue
        null = NULLS.get(bench, NOT_MEASURED)
        heads = ["date", "hardware", *(heading for heading, _ in columns)]
        cells = [
            [result["date"][:10], _machine(result), *_cells(result, columns, null)]
            for result in by_bench[bench]
        ]
        out.append(f"### {bench}\n\n{_markdown(heads, cells)}")
    for bench, (first, rows, columns) in TABLES.items():
        out.append(f"### {bench}\n")
        name, _, part = bench.partition(", ")
        found = [(result, rows(result)) for result in by_bench.get(name, [])]
        shown = [(result, lines) for result, lines in found if lines or not part]
        out.extend(_table(result, first, lines, columns) for result, lines in shown)
        if not shown:
            out.append("No result yet.\n")
    return "\n".join(out)


def _machine(result: dict[str, Any]) -> str:
    machine = result["hardware"]
    return ", ".join([f"{machine['cores']} x {machine['cpu']}", *machine.get("gpus", ())])


def _table(result: dict[str, Any], first: str, rows: Rows, columns: list[tuple[str, str]]) -> str:
    null = NULLS.get(result["bench"], NOT_MEASURED)
    cells = [[label, *_cells(row, columns, null)] for label, row in rows]
    source = f"{result['date'][:10]}, {_machine(result)}: `{result['command']}`"
    return f"{source}\n\n{_markdown([first, *(heading for heading, _ in columns)], cells)}"


def _cells(figures: Any, columns: list[tuple[str, str]], null: str) -> list[str]:
    return [cell(at(figures, path), null) for _, path in columns]


def _markdown(heads: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in (heads, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(heads), *lines[1:]]) + "\n"


def rewrite(page: str, fresh: str) -> str:
    """``page`` with the text between the two marks replaced."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{fresh}\n{END}{after}"


_FIGURE = re.compile(
    r"(?P<begin><!--figure\s+(?P<file>\S+)\s+(?P<path>(?:(?!-->).)+?)\s+"
    r"(?:(?P<factor>[\d.e+-]+)\*)?(?P<format>[^\s>]+?)-->)"
    r"(?:(?!<!--figure).)*?(?P<end><!--end-->)",
    re.DOTALL,
)


def pages(root: Path) -> list[Path]:
    """The pages of a checkout whose figures are rendered."""
    return [root / "README.md", root / "benchmarks" / "README.md", *sorted((root / "docs").rglob("*.md"))]


def with_figures(page: str, results: Path) -> str:
    """``page`` with every figure as its result has it.

    Raises FileNotFoundError for a result that is not there, KeyError or IndexError for a figure that its
    result lacks, and ValueError for a mark that does not end, or whose format does not fit the figure.
    """

    def figure(match: re.Match[str]) -> str:
        result = json.loads((results / f"{match['file']}.json").read_text())
        value, *over = (_figure_at(result, path) for path in match["path"].split(" / "))
        if value is None or None in over:
            return match["begin"] + NEVER_REACHED + match["end"]
        for divisor in over:
            value /= divisor
        factor = float(match["factor"] or 1)
        text = format(value * factor if factor != 1 else value, match["format"])
        return match["begin"] + text + match["end"]

    rendered, count = _FIGURE.subn(figure, page)
    if count != page.count("<!--figure"):
        raise ValueError(f"{page.count('<!--figure')} figures begin, and only {count} end with <!--end-->")
    return rendered


def _figure_at(result: Any, path: str) -> Any:
    """The figure at a path. Raises KeyError or IndexError if there is none."""
    for key in path.split("."):
        result = result[int(key)] if isinstance(result, list) else result[key]
    return result


def main(folder: Path) -> None:
    results = [json.loads(path.read_text()) for path in sorted((folder / "results").glob("*.json"))]
    page = folder / "README.md"
    page.write_text(rewrite(page.read_text(), tables(r for r in results if "bench" in r)))
    for prose in pages(folder.parent):
        if prose.exists():
            prose.write_text(with_figures(prose.read_text(), folder / "results"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Rewrite the tables and figures of the pages from the results."
    )
    parser.add_argument(
        "folder", nargs="?", type=Path, default=HERE, help="folder with README.md and results/"
    )
    main(parser.parse_args().folder)
