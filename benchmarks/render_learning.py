"""For ``render.py``: tables of what runs learned, and of the parts of a learner."""

from __future__ import annotations

import statistics
from typing import Any

from render_columns import Rows, Table


def _learning(result: dict[str, Any]) -> Rows:
    """The result's facts by strategy."""
    facts = ("replicas", "seeds", "reached", "eval_return_mean", "env_steps", "wall_seconds")
    by_fact = {fact: result[fact] for fact in facts}
    return [
        (name, {fact: found[name] if isinstance(found, dict) else found for fact, found in by_fact.items()})
        for name in by_fact["reached"]
    ]


def _diverged(row: dict[str, Any]) -> str:
    """For the label of a row: how many of its seeds diverged."""
    return f", {row['diverged']} diverged" if row.get("diverged") else ""


def _jin(result: dict[str, Any]) -> Rows:
    """The rows of ``jin-table``, with the figures of each seed as text."""

    def seeds(returns: list[float | None]) -> str:  # None: no episode ended
        return ", ".join("none" if value is None else f"{value:.2f}" for value in returns)

    return [
        (
            f"{row['task']}: {row['agent']}{_diverged(row)}",
            {**row, "evaluations": seeds(row["returns"]), "training": seeds(row["train_returns"])},
        )
        for row in result["rows"]
    ]


_REPLAYS = ("torchrl", "cpprb", "tianshou", "flashbax")


def _replay(result: dict[str, Any]) -> Rows:
    """By case."""
    return [(row["label"], row) for row in result["cases"]]


def _image_strategies(result: dict[str, Any]) -> Rows:
    """By strategy, over seeds that did not diverge."""
    return [
        (
            f"{row['strategy']}{_diverged(row)}",
            {
                **row,
                "seeds": len(row["accuracies"]),
                "least": min(row["accuracies"], default=None),
                "greatest": max(row["accuracies"], default=None),
                "test_loss": statistics.fmean(row["test_losses"]) if row["test_losses"] else None,
                "staleness": max(row["staleness_max"], default=None),
                "seconds": statistics.fmean(row["wall_seconds"]),
            },
        )
        for row in result["rows"]
    ]


def _gan(result: dict[str, Any]) -> Rows:
    """By total batch; statistics are the kinds of batch statistics (one replica has only its own)."""
    return [
        (
            f"{row['total_batch']}{_diverged(row)}",
            {
                **row,
                "statistics": ", ".join(row["batch_norm"]) if row["replicas"] > 1 else "one replica",
                "distances": ", ".join(f"{value:.3g}" for value in row["frechet_distance"]["of_seeds"]),
            },
        )
        for row in result["rows"]
    ]


def _jin_images(result: dict[str, Any]) -> Rows:
    """By number of members and method; the members of ``real`` are processes."""
    kinds = {"members": result["rows"], "processes": result["real"]}
    return [
        (
            f"{row['members']} {kind}: {row['method']}",
            {**row, "accuracy": statistics.fmean(row["accuracies"]) if row["accuracies"] else None},
        )
        for kind, rows in kinds.items()
        for row in rows
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


# benchmark -> its table
TABLES: dict[str, Table] = {
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
    "jin-imagenet": (
        "members: method",
        _jin_images,
        [
            ("seeds", "seeds"),
            ("virtual seconds", "seconds"),
            ("validation loss while the step is large", "early_loss"),
            ("test loss at the end", "test_loss"),
            ("accuracy", "accuracy"),
        ],
    ),
    "gan-batch": (
        "total batch",
        _gan,
        [
            ("batch statistics over", "statistics"),
            ("Fréchet distance, mean", "frechet_distance.mean"),
            ("of each seed", "distances"),
            ("test images", "frechet_distance_test"),
            ("class score", "class_score.mean"),
            ("class agreement", "class_agreement.mean"),
            ("hours", "hours"),
        ],
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
}
