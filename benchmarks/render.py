"""Writes the tables of ``README.md`` from ``results/*.json``: ``python benchmarks/render.py``.

For each bench the newest result and hardware come first. Results are files named
``YYYY-MM-DD-<bench>.json`` that hold what ``murmurate bench NAME --json`` printed as its last line.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
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
        ("share with 2 gossiping", "per_learner_share_with_2_gossiping"),
        ("double buffer on: env steps / s", "double_buffer.env_steps_per_second_on.median"),
        ("off", "double_buffer.env_steps_per_second_off.median"),
    ],
    "cartpole-throughput": [
        ("env steps / CPU s, 16", "env_steps_per_cpu_second"),
        ("x SB3 A2C, 16", "ratio_sb3_a2c"),
        ("env steps / CPU s, 8", "by_simulators.8_simulators.env_steps_per_cpu_second.median"),
        ("x SB3 A2C, 8", "by_simulators.8_simulators.ratio_sb3_a2c.median"),
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


def at(result: Any, path: str) -> Any:
    for key in path.split("."):
        if not isinstance(result, dict) or key not in result:
            return None
        result = result[key]
    return result


def cell(value: Any) -> str:
    if value is None:
        return "not measured"
    if isinstance(value, str):
        return value
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def tables(results: Iterable[dict[str, Any]]) -> str:
    """One table a bench, newest result first."""
    by_bench: dict[str, list[dict[str, Any]]] = {}
    for result in sorted(results, key=lambda r: str(r["date"]), reverse=True):
        by_bench.setdefault(result["bench"], []).append(result)
    out = []
    for bench, columns in COLUMNS.items():
        if bench not in by_bench:
            out.append(f"### {bench}\n\nNo result yet.\n")
            continue
        heads = ["date", "hardware", *(heading for heading, _ in columns)]
        lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
        for result in by_bench[bench]:
            machine = result["hardware"]
            cores = [result["date"][:10], f"{machine['cores']} x {machine['cpu']}"]
            lines.append("| " + " | ".join([*cores, *(cell(at(result, path)) for _, path in columns)]) + " |")
        out.append(f"### {bench}\n\n" + "\n".join(lines) + "\n")
    return "\n".join(out)


def rewrite(page: str, fresh: str) -> str:
    """``page`` with what stands between the two marks replaced."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{fresh}\n{END}{after}"


def main(folder: Path) -> None:
    results = [json.loads(path.read_text()) for path in sorted((folder / "results").glob("*.json"))]
    page = folder / "README.md"
    page.write_text(rewrite(page.read_text(), tables(r for r in results if "bench" in r)))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
