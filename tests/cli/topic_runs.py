"""Commands on runs of topics, and what such a run says at its end."""

from __future__ import annotations

import json

from murmurate.cli.main import main


def run(*arguments: object) -> int:
    return main([str(a) for a in arguments])


def summary(folder):
    return json.loads((folder / "summary.json").read_text())
