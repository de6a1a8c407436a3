"""A notebook as a user of docs/replicator.md writes it, executed by Jupyter's own client."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(600)

MODULE = """%%writefile my_training.py
import torch
from torch import nn

def main(replicator):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = replicator.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    source = torch.Generator().manual_seed(1)
    batches = [torch.randn(8, 4, generator=source) for _ in range(20)]
    for batch in replicator.inputs(batches):
        optimizer.zero_grad()
        (model(batch) - batch.sum(1, keepdim=True)).pow(2).mean().backward()
        optimizer.step()
    print("trained by", replicator.size)
    return replicator.agreed()["weight"].flatten().tolist()
"""
CELLS = {
    "write": MODULE,
    "import": "import murmurate\nfrom my_training import main",
    "inline": 'one = murmurate.run(main, replicas=2, strategy="all-reduce", launcher="inline")',
    "local": 'other = murmurate.run(main, replicas=2, strategy="all-reduce")\nprint(one == other, one[0])',
    "in a cell": "def train(replicator):\n    return main(replicator)",
    "inline from a cell": 'print(murmurate.run(train, replicas=2, launcher="inline") == one)',
    "local from a cell": (
        "try:\n    murmurate.run(train, replicas=2)\n"
        "except murmurate.errors.Refusal as refusal:\n    print(refusal)"
    ),
}


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each cell prints."""
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    folder = tmp_path_factory.mktemp("notebook")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS.values()])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PATH", str(kernel(folder)))
        client = nbclient.NotebookClient(
            notebook, kernel_name="this", timeout=500, resources={"metadata": {"path": str(folder)}}
        )
        client.execute()
    return {
        name: "".join(output.get("text", "") for output in cell.outputs)
        for name, cell in zip(CELLS, notebook.cells, strict=True)
    }


def kernel(folder: Path) -> Path:
    """A kernel of this interpreter, whatever is installed for the user."""
    spec: dict[str, Any] = {
        # in a test, a kernel would not pass on what its processes print
        "argv": [
            "env",
            "-u",
            "PYTEST_CURRENT_TEST",
            sys.executable,
            "-m",
            "ipykernel_launcher",
            "-f",
            "{connection_file}",
        ],
        "display_name": "this",
        "language": "python",
        "env": {"OMP_NUM_THREADS": "1"},
    }
    place = folder / "jupyter" / "kernels" / "this"
    place.mkdir(parents=True)
    (place / "kernel.json").write_text(json.dumps(spec))
    return folder / "jupyter"


def test_a_module_runs_inline_and_in_processes_with_the_same_result(printed: dict[str, str]) -> None:
    assert printed["inline"] == "trained by 2\n"
    assert "True [" in printed["local"]
    # the kernel passes on what processes print when it reads their pipe, which may be in the next cell
    assert (printed["local"] + printed["inline from a cell"]).count("trained by 2\n") == 2


def test_a_function_of_a_cell_runs_inline_and_elsewhere_is_refused_with_the_remedy(
    printed: dict[str, str],
) -> None:
    assert printed["inline from a cell"].endswith("trained by 2\nTrue\n")
    assert printed["local from a cell"].startswith("train was defined in a notebook or at a prompt")
    assert "%%writefile" in printed["local from a cell"]
    assert "launcher='inline'" in printed["local from a cell"]
