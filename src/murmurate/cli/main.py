"""The command line: its verbs, their options and exit codes."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

from murmurate import __version__, plugins
from murmurate.cli import (
    completion,
    export_verb,
    fpga,
    machine_verbs,
    plan,
    result_verbs,
    run_verbs,
    topics_verbs,
    tune,
)
from murmurate.cli.help import Misused, asks_for_help, show_help, verbs_of
from murmurate.cli.terminal import escape_unknown_letters, outlive_terminal
from murmurate.errors import DISK_FULL, Refusal, RunFailed, cause_of, did_you_mean, file_limit, printable
from murmurate.fabric.processes.fork_server import end_fork_server
from murmurate.training.interrupts import hangup_terminates

# options that take no value, of the verbs that take a name
_WITHOUT_VALUE = frozenset(
    [
        "--apply",
        "--check",
        "--continue",
        "--dry-run",
        "--json",
        "--link",
        "--profile",
        "--skip-bad",
        "--transpose",
    ]
)
FAILED, REFUSED, INTERRUPTED, TERMINATED = 1, 2, 130, 143


class _Parser(argparse.ArgumentParser):
    """Takes no abbreviated options, and reports errors as a Refusal in one sentence."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        hint = ""
        if choice := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            hint = did_you_mean(choice[1], choice[2].replace("'", "").split(", "))
        raise Misused(f"{message}.{hint} See: {self.prog} --help")


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code: 0, or a constant above."""
    warnings.formatwarning = _format_warning  # type: ignore[assignment]
    # without a display MuJoCo's window library warns of it; a video is then refused, and a report has none
    warnings.filterwarnings("ignore", module="glfw")
    if arguments is not None:  # called from Python
        return _carry_out(list(arguments))
    signal.signal(signal.SIGTERM, _terminate)
    escape_unknown_letters()
    outlive_terminal()
    with hangup_terminates():
        return _carry_out(sys.argv[1:])


def _carry_out(words: list[str]) -> int:
    try:
        code = _act(_import_modules(words or ["--help"]))
        if sys.stdout is not None:  # it is None where the caller has closed it
            sys.stdout.flush()  # what cannot be written shall be reported here, and not after the exit code
    except Refusal as refusal:
        print(f"murmurate: {printable(str(refusal))}", file=sys.stderr)
        return REFUSED
    except RunFailed as failure:
        print(f"murmurate: {printable(str(failure))}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt as interrupt:
        kept = printable(f". {interrupt}") if interrupt.args else ""
        print(f"murmurate: interrupted{kept}", file=sys.stderr)
        return TERMINATED if isinstance(interrupt, _Terminated) else INTERRUPTED
    except BrokenPipeError:  # the reader of stdout (head, for example) has closed it
        _discard_unwritten()
        return FAILED
    except OSError as error:
        cause = printable(f"{error.filename or 'The system'}: {cause_of(error)}")
        is_of_file = error.filename and not file_limit(error)
        remedy = " Check that the file is there and can be written." if is_of_file else ""
        remedy = " Make room." if error.errno in DISK_FULL else remedy
        print(f"murmurate: {cause}.{remedy}", file=sys.stderr)
        _discard_unwritten()
        return FAILED
    finally:
        end_fork_server()
    return code


def _act(words: list[str]) -> int:
    if asks_for_help(words):
        return show_help(_parser(), words, _name_first)
    parser = _parser()
    options, rest = parser.parse_known_args(_name_first(words))
    verb = f"{options.verb} {options.inner}" if options.verb in ("topics", "fpga") else options.verb
    if rest and verb not in ("train", "tune", "resume", "simulate", "topics fit", "bench", "plan"):
        hint = _full_name(parser, verb, rest[0])
        raise Refusal(f"{verb} has no option {rest[0]}.{hint} See: murmurate {verb} --help")
    code: int = options.act(options, rest)
    return code


def _full_name(parser: argparse.ArgumentParser, verb: str, word: str) -> str:
    """A question with the option of ``verb`` of which ``word`` is the last part, as ``train`` takes it
    (``--skip-bad`` of ``--world.skip-bad``), after a space; empty if there is none."""
    for part in verb.split():
        parser = verbs_of(parser)[part]
    end = f".{word.partition('=')[0].removeprefix('--')}"
    known = (name for action in parser._actions for name in action.option_strings)
    return next((f" Did you mean {name}?" for name in known if name.endswith(end)), "")


def _discard_unwritten() -> None:
    """Give up what standard output does not take; Python would try again at its exit, and change the code."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Terminated(KeyboardInterrupt):
    """SIGTERM before or after a run (a run has its own handlers): end as at Ctrl-C, and clean up."""


def _terminate(number: int, frame: object) -> NoReturn:
    raise _Terminated


def _format_warning(message: Warning | str, category: type[Warning], *_: object) -> str:
    """A warning in the form of the command line's messages, without the line of code."""
    return f"murmurate: warning: {printable(str(message))}\n"


def _import_modules(arguments: Sequence[str]) -> list[str]:
    """Import what ``--import MODULE`` names, wherever it stands; returns the other arguments."""
    rest: list[str] = []
    names: list[str] = []
    words = iter(arguments)
    for word in words:
        if word == "--import":
            names.append(next(words, ""))
        elif word.startswith("--import="):
            names.append(word.removeprefix("--import="))
        else:
            rest.append(word)
    if "" in names:
        raise Refusal(
            "--import names a module or a file: --import my_module, or --import path/to/my_module.py"
        )
    if names:
        plugins.add_imports(names)
    return rest


def _name_first(arguments: Sequence[str]) -> list[str]:
    """``train --seed 1 pong-gala`` as ``train pong-gala --seed 1``: an option may stand before the name."""
    verb, *rest = arguments
    if verb == "topics" and rest[:1] == ["fit"]:
        return [verb, *_name_first(rest)]
    if verb == "topics":
        return [verb, *topics_verbs.with_values(rest)]
    if verb not in ("train", "tune", "resume", "simulate", "plan", "fit"):
        return [verb, *rest]
    if verb not in ("resume", "fit", "plan") and any(word.partition("=")[0] == "--env" for word in rest):
        # an empty recipe, because argparse would take an unknown option's value for the recipe
        return [verb, "", *rest]
    index = 0
    while index < len(rest) and rest[index].startswith("-"):
        alone = "=" in rest[index] or rest[index] in _WITHOUT_VALUE
        # an option that another one follows has no value either, as in --double-buffer --seed 1
        index += 1 if alone or " ".join(rest[index + 1 :]).startswith("--") else 2
    while index and index + 1 < len(rest) and not rest[index + 1].startswith("-"):
        index += 1  # an option may have several values, as --agent.hidden 64 64
    name = rest[index : index + 1]
    if not name and verb != "plan" and any(word.partition("=")[0] == "--algorithm" for word in rest):
        name = [""]  # for the same reason
    return [verb, *name, *rest[:index], *rest[index + 1 :]]


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="murmurate",
        description="Write the learner once; how its replicas agree is a part you swap.",
        epilog="With every verb, --import MODULE (repeatable; or MURMURATE_IMPORT) adds the strategies, "
        "agents, worlds, recipes and the like of a module, or of a file path/to/module.py.",
    )
    parser.add_argument("--version", action="version", version=f"murmurate {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    run_verbs.add_verbs(verbs)
    tune.add_verb(verbs)
    result_verbs.add_verbs(verbs)
    export_verb.add_verb(verbs)
    machine_verbs.add_verbs(verbs)
    topics = verbs.add_parser("topics", help="topic models: fit, show, transform, evaluate")
    topics_verbs.add_verbs(topics.add_subparsers(dest="inner", required=True, metavar="VERB"))
    plan.add_verb(verbs)
    completion.add_verb(verbs, _parser)
    hardware = verbs.add_parser(
        "fpga", help="a replay's manager as hardware: Verilog, simulation, area and clock"
    )
    fpga.add_verbs(hardware.add_subparsers(dest="inner", required=True, metavar="VERB"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
