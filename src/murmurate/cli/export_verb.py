"""``murmurate export``: a run's model for other programs, and its record as a table."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from murmurate.cli.result_verbs import add_checkpoint, add_env_in_place
from murmurate.errors import Refusal, quoted


def add_verb(verbs: Any) -> None:
    export = verbs.add_parser(
        "export",
        help="the model of a run for other programs, or its record as a table",
        description="Writes the trained model (--to), or the record of the run (--csv, --parquet).",
    )
    export.add_argument("folder", type=Path, help="a run folder")
    export.add_argument(
        "--to",
        type=Path,
        metavar="FILE",
        help="policy.onnx, .pt2 (torch.export) or .safetensors (weights); a program maps observations to "
        "greedy actions, and is compared with the model on random observations",
    )
    export.add_argument(
        "--best",
        action="store_true",
        help="with --to: the best checkpoint instead of the last (of runs on simulators only)",
    )
    add_checkpoint(export)
    add_env_in_place(export)
    export.add_argument("--csv", type=Path, metavar="FILE", help="a row for each record of metrics.jsonl")
    export.add_argument("--parquet", type=Path, metavar="FILE", help="the same, for data frames")
    export.add_argument("--json", action="store_true", help="print what was written, as one JSON object")
    export.set_defaults(act=act)


def act(options: argparse.Namespace, rest: list[str]) -> int:
    written: dict[str, Any] = {}
    lines: list[str] = []
    if options.to is None and options.csv is None and options.parquet is None:
        raise Refusal(
            f"Say what to write, as in: murmurate export {quoted(options.folder)} --to policy.onnx "
            "(.pt2, .safetensors), --csv record.csv or --parquet record.parquet"
        )
    of_model = [f"--{name}" for name in ("best", "checkpoint", "env") if getattr(options, name)]
    if of_model and options.to is None:
        raise Refusal(
            f"{of_model[0]} is for the model that --to exports, and a record has none. Leave it out."
        )
    files = [path.absolute() for path in (options.to, options.csv, options.parquet) if path is not None]
    if len(set(files)) < len(files):
        raise Refusal("--to, --csv and --parquet name the same file twice. Give each a file of its own.")
    if options.to is not None:
        from murmurate.api.export import check_path
        from murmurate.api.loading import load

        check_path(options.to)
        model = load(options.folder, best=options.best, checkpoint=options.checkpoint, env=options.env)
        exported = model.export(options.to)
        written |= {**dataclasses.asdict(exported), "path": str(exported.path)}
        lines.append(f"{exported.path}: {_contents(exported)}")
    for name in ("csv", "parquet"):
        if (path := getattr(options, name)) is not None:
            from murmurate.record import table

            rows = {"csv": table.write_csv, "parquet": table.write_parquet}[name](options.folder, path)
            written[name] = {"path": str(path), "rows": rows}
            lines.append(f"{path}: {rows:,} records")
    print(json.dumps(written) if options.json else "\n".join(lines))
    return 0


def _contents(exported: Any) -> str:
    if not exported.inputs:
        return f"{len(exported.outputs)} tensors"
    inputs, outputs = ", ".join(exported.inputs), ", ".join(exported.outputs)
    return f"({inputs}) to ({outputs}); differs from the model by at most {exported.max_error:.2g}"
