"""The servers of benchmarks: what they print beside answers, and how the end of their process is told."""

from __future__ import annotations

import shlex
import sys

import pytest

from murmurate.bench._server import Server
from murmurate.errors import RunFailed

_NUMBERS_THEN_ANSWER = """
print('{"version": "1.2"}', flush=True)
for line in iter(input, ""):
    print(3.5, "null", '{"asked": ' + line + "}", sep="\\n", flush=True)
"""


def test_lines_that_are_json_but_no_object_are_not_taken_for_an_answer() -> None:
    with Server.run([sys.executable, "-c", _NUMBERS_THEN_ANSWER], pinned=False) as server:
        assert server.version == "1.2"
        assert server.ask({"task": 1}) == {"asked": {"task": 1}}


def test_a_request_to_a_process_that_has_ended_is_a_failed_run() -> None:
    command = [sys.executable, "-c", "print('{}')"]
    with Server.run(command, pinned=False) as server:
        server.process.wait()
        with pytest.raises(RunFailed) as failure:
            server.ask({})
    assert str(failure.value).startswith(f"{shlex.join(command)} ended unexpectedly")
