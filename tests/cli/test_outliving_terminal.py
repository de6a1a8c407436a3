"""Prints to a terminal that has been closed, and to what takes no more."""

from __future__ import annotations

import io
import os
import pty
import sys
from pathlib import Path

import pytest

from murmurate.cli.main import main
from murmurate.cli.terminal import escape_unknown_letters, outlive_terminal


def test_a_closed_terminal_swallows_what_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    master, terminal = pty.openpty()
    with open(terminal, "w", buffering=1) as plain:
        monkeypatch.setattr(sys, "stdout", plain)
        monkeypatch.setattr(sys, "stderr", None)
        outlive_terminal()
        print("ü before")
        assert os.read(master, 100).decode() == "ü before\r\n"
        os.close(master)
        print("after")
        sys.stdout.flush()
        with pytest.raises(OSError, match="Input/output"):
            print("after", file=plain)
        with pytest.raises(OSError, match="Input/output"):
            plain.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), terminal)  # so that closing the stream can flush it


def test_letters_that_an_encoding_lacks_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    for encoding, printed in (("ascii", b"a \\u2014 \\udce9"), ("utf-8", b"a \xe2\x80\x94 \\udce9")):
        written = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding))
        escape_unknown_letters()
        print("a \N{EM DASH} \udce9", end="", flush=True)
        assert written.getvalue() == printed


def test_what_is_no_terminal_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    with open(write, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        outlive_terminal()
        assert sys.stdout is pipe
    os.close(read)


def test_a_reader_that_has_gone_ends_the_command_in_silence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as pipe:  # closing it writes what is left, as Python does at its exit
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(["secret"]) == 1
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_output_to_a_full_disk_is_an_error_of_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["secret"]) == 1
    assert capsys.readouterr().err == "murmurate: The system: No space left on device. Make room.\n"
