"""``murmurate completion``: a script that completes verbs, options, recipes, strategies and run folders."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from murmurate.cli.help import Fields, add_fields, verbs_of

SHELLS = ("bash", "zsh")
# by an argument's name, the shell function that lists its possible values
_FUNCTIONS = {"recipe": "recipes", "strategy": "strategies", "what": "lists", "name": "benches"}
_FOLDERS = ("folder", "folders", "out")  # arguments that take run folders


def add_verb(verbs: Any, parser: Callable[[], argparse.ArgumentParser]) -> None:
    """Add ``completion``. parser: makes the parser of the whole command line."""
    completion = verbs.add_parser(
        "completion",
        help="print a script that completes commands in bash or zsh",
        description="Print the script. In bash: murmurate completion bash > "
        "~/.local/share/bash-completion/completions/murmurate. In zsh: murmurate completion zsh > "
        "a file called _murmurate in a folder of $fpath.",
    )
    completion.add_argument("shell", choices=SHELLS, help="bash or zsh")
    completion.set_defaults(act=lambda options, rest: _print(options.shell, parser()))


def _print(shell: str, parser: argparse.ArgumentParser) -> int:
    import shtab

    _describe(parser)
    functions = {"bash": _bash, "zsh": _zsh}[shell](_names())
    print(shtab.complete(parser, shell=shell, preamble=functions))
    return 0


def _describe(parser: argparse.ArgumentParser) -> None:
    """Tell shtab how to complete the arguments of ``parser`` and of its verbs; add the fields that all
    recipes have."""
    fields_of: Callable[..., Fields] | None = parser.get_default("fields")
    if fields_of is not None:
        usage = parser.usage
        add_fields(parser, fields_of(None, []))
        parser.usage = usage
    for action in parser._actions:
        function = _FUNCTIONS.get(action.dest)
        if action.dest in _FOLDERS:
            function = "runs"
        if function is not None:
            action.complete = dict.fromkeys(SHELLS, f"_murmurate_{function}")  # type: ignore[attr-defined]
    for verb in verbs_of(parser).values():
        _describe(verb)


def _names() -> dict[str, list[str]]:
    from murmurate.bench import benches
    from murmurate.cli.listing import LISTS
    from murmurate.recipes import recipe_names
    from murmurate.strategies import strategies

    return {
        "recipes": recipe_names(),
        "strategies": sorted(strategies()),
        "lists": sorted(LISTS),
        "benches": sorted(benches()),
    }


def _bash(names: dict[str, list[str]]) -> str:
    functions = [
        f"_murmurate_{name}() {{ compgen -W '{' '.join(words)}' -- \"$1\"; }}"
        for name, words in names.items()
    ]
    return "\n".join([*functions, _BASH_RUNS])


def _zsh(names: dict[str, list[str]]) -> str:
    functions = [f"_murmurate_{name}() {{ compadd -- {' '.join(words)} }}" for name, words in names.items()]
    return "\n".join([*functions, _ZSH_RUNS])


# run folders in runs/, in this folder and, in bash, in what was typed so far; then any folder
_BASH_RUNS = """_murmurate_runs() {
  local file
  for file in runs/*/run.json */run.json "$1"*/run.json; do
    if [ -f "$file" ]; then
      case "${file%/run.json}" in "$1"*) echo "${file%/run.json}";; esac
    fi
  done
  compgen -d -- "$1"
}"""
_ZSH_RUNS = """_murmurate_runs() {
  local -a found
  found=(runs/*/run.json(N:h) */run.json(N:h))
  compadd -- $found
  _files -/
}"""
