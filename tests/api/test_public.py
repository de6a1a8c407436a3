"""The public names: documented, cheap to import, and typed so that wrong scripts are found."""

from __future__ import annotations

import inspect
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import murmurate


@pytest.mark.parametrize("name", sorted(murmurate.__all__))
def test_every_public_name_is_there_and_documented(name: str) -> None:
    found = getattr(murmurate, name)
    assert inspect.getdoc(type(found) if name == "STOP" else found), name
    if inspect.isclass(found) and found.__module__.startswith("murmurate.") and name != "Run":
        for method, member in inspect.getmembers(found, callable):
            own = (getattr(member, "__module__", None) or "").startswith("murmurate.")
            assert method.startswith("_") or not own or inspect.getdoc(member), f"{name}.{method}"
    assert name in dir(murmurate)


def test_the_package_imports_no_torch() -> None:
    code = "import sys, murmurate; murmurate.Refusal; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


_RIGHT = """
    from collections.abc import Mapping

    import gymnasium
    import numpy as np

    import murmurate


    class Print(murmurate.Callback):
        def on_record(self, record: Mapping[str, object]) -> None:
            print(record)

        def on_end(self, result: murmurate.Result) -> None:
            print(result.folder)


    def make_env() -> gymnasium.Env[object, object]:
        return gymnasium.make("CartPole-v1")


    def main(replicator: murmurate.OwnLoop) -> int:
        return 3


    if __name__ == "__main__":
        run: murmurate.Run = murmurate.recipe("cartpole-a2c")
        result = murmurate.train(
            run, strategy="gala", replicas=4, env_steps=500_000, out="runs/x", simulators=16,
            agent={"learning_rate": 1e-3}, callbacks=[Print()],
        )
        murmurate.train(env=make_env, algorithm="a2c", minutes=0.5)
        agent = murmurate.load(result.folder, best=True)
        action = agent.act(np.zeros(4))
        error: float = agent.export("policy.onnx").max_error
        mean: float = agent.evaluate(episodes=10)["eval_return_mean"]
        murmurate.run(main, replicas=4, strategy="all-reduce")
"""
_WRONG = """
    from collections.abc import Mapping

    import murmurate


    class Print(murmurate.Callback):
        def on_record(self, record: int) -> None:  # wrong
            print(record)


    def main(number: int) -> int:
        return number


    murmurate.train("cartpole-a2c", replicas="4")  # wrong
    murmurate.train("cartpole-a2c", env_steps=1.5)  # wrong
    murmurate.train("cartpole-a2c", agent=[1e-3])  # wrong
    murmurate.train("cartpole-a2c", callbacks=Print())  # wrong
    murmurate.train(3)  # wrong
    agent = murmurate.load("runs/x")
    agent.act(1, greedy="no")  # wrong
    agent.evaluate(episodes="ten")  # wrong
    agent.fly()  # wrong
    agent.export("policy.onnx").error  # wrong
    murmurate.run(main)  # wrong
    murmurate.lode("runs/x")  # wrong
"""


@pytest.mark.slow
def test_mypy_finds_wrong_types_in_a_users_script(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    for name, code in (("right", _RIGHT), ("wrong", _WRONG)):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(code))
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", tmp_path / "cache", "right.py", "wrong.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    found = {tuple(line.split(":")[:2]) for line in checked.stdout.splitlines() if ": error:" in line}
    lines = (tmp_path / "wrong.py").read_text().splitlines()
    expected = {("wrong.py", str(n)) for n, line in enumerate(lines, 1) if line.endswith("# wrong")}
    assert found == expected, checked.stdout
