"""For ``render.py``: tables of many members: speed, stragglers, faults, and the transport between."""

from __future__ import annotations

from typing import Any

from render_columns import Rows, Table


def _strategies(result: dict[str, Any]) -> Rows:
    return list(result["strategies"].items())


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


# benchmark, or "benchmark, part" -> its table
TABLES: dict[str, Table] = {
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
