"""On Windows: a sentence that says so, on a path that imports nothing that Windows lacks."""

import subprocess
import sys

import pytest

# an interpreter that says it is on Windows, and has none of the modules that only other systems have
PREPARATION = """
import sys

class Nowhere:
    def find_spec(self, name, path=None, target=None):
        if name in ("fcntl", "resource", "termios", "tty", "pty", "pwd", "grp", "_winapi"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Nowhere())
for name in ("fcntl", "resource", "termios", "pwd", "grp"):
    sys.modules.pop(name, None)
sys.platform = "win32"
"""


def on_windows(code: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", PREPARATION + code]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    "code",
    [
        "import runpy; runpy.run_module('murmurate', run_name='__main__')",
        "from murmurate.__main__ import main; sys.exit(main())",  # as the installed command does
    ],
)
def test_a_command_says_so(code: str) -> None:
    done = on_windows(f"sys.argv = ['murmurate', 'train', 'cartpole-a2c']; {code}")
    assert done.returncode == 2
    assert done.stderr.startswith("murmurate: murmurate does not run on Windows")
    assert "WSL 2" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_package_can_be_imported_and_refuses_to_run() -> None:
    done = on_windows(
        "import murmurate\nprint(murmurate.__version__)\n"
        "try:\n    murmurate.run\nexcept Exception as error:\n    print(type(error).__name__, error)"
    )
    assert done.returncode == 0, done.stderr
    version, refusal = done.stdout.splitlines()
    assert version[0].isdigit()
    assert refusal.startswith("Refusal murmurate does not run on Windows")


def test_the_preparation_hides_what_windows_lacks() -> None:
    done = on_windows("import fcntl")
    assert "No module named 'fcntl'" in done.stderr
