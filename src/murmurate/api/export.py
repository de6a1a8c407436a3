"""Exports of a trained model: weights (.safetensors), a torch program (.pt2), ONNX (.onnx)."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import logging
import math
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from murmurate.api.program import ClassProbabilities, GreedyPolicy
from murmurate.errors import MissingExtra, Refusal, RunFailed, cause_of
from murmurate.nets.action_mask import LOWEST
from murmurate.spec import EnvSpec
from murmurate.training.host import versions
from murmurate.training.run import Run
from murmurate.training.run_folder import plain

SUFFIXES = (".safetensors", ".pt2", ".onnx")
_METADATA = "murmurate"
_BATCHES = (1, 3, 16)  # sizes of the batches by which an export is compared with the model
_TOLERANCE = 1e-4  # greatest error of an output, relative to 1 + its largest number

Function = Callable[[Sequence[Tensor]], list[Tensor]]
Program = GreedyPolicy | ClassProbabilities


@dataclass(frozen=True)
class Exported:
    """What was written. inputs, outputs: names of a program's inputs and outputs, in order; for weights
    no inputs, and the names of the tensors as outputs.

    max_error: the greatest difference from the model itself over random observations; 0 for weights, which
    were compared too.
    """

    path: Path
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    max_error: float


def check_path(path: Path) -> None:
    """Raise Refusal for an ending that is none of ``SUFFIXES``, MissingExtra where ONNX is not installed."""
    if path.suffix not in SUFFIXES:
        torch_program = " Use .pt2 for torch." if path.suffix in (".pt", ".pth") else ""
        raise Refusal(
            f"{path} has the ending '{path.suffix}'; an export is {', '.join(SUFFIXES)}.{torch_program}"
        )
    if path.suffix == ".onnx":
        for package in ("onnx", "onnxscript", "onnxruntime"):
            if importlib.util.find_spec(package) is None:
                raise MissingExtra(package, "export", "An export to ONNX")


def description(run: Run, checkpoint: str, spec: EnvSpec, classes: Sequence[str]) -> dict[str, Any]:
    """The metadata of an export, as values for JSON: the run, the versions of packages, what the model reads
    and returns."""
    return {
        "run": plain(run),
        "versions": versions(),
        "checkpoint": checkpoint,
        "observation_shape": list(spec.observation_shape),
        "observation_parts": [[*place, list(shape)] for *place, shape in spec.parts],
        "observation_stack": spec.observation_shape[0] // spec.channels if spec.stacked else spec.history,
        "observation_dtype": str(spec.observation_dtype).removeprefix("torch."),
        "actions": spec.actions,
        "classes": list(classes),
        "action_shape": list(spec.action_shape),
        # null for an action without a bound: JSON has no infinity
        "action_low": [x if math.isfinite(x) else None for x in spec.action_low],
        "action_high": [x if math.isfinite(x) else None for x in spec.action_high],
    }


def export_weights(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> Exported:
    """Write named tensors, with ``metadata`` as JSON under the key "murmurate", and read them again.

    Raises Refusal if the file cannot be made, RunFailed if it cannot be written or holds something else.
    """
    from safetensors import safe_open
    from safetensors.torch import save

    contiguous = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    with _replacing(path) as temporary:
        Path(temporary).write_bytes(save(contiguous, {_METADATA: json.dumps(metadata)}))
        with safe_open(temporary, "pt") as file:
            if not all(torch.equal(file.get_tensor(name), tensor) for name, tensor in contiguous.items()):
                raise RunFailed(f"{path} does not hold the weights that were written to it. Check the disk.")
    return Exported(path, (), tuple(contiguous), 0.0)


def export_program(path: Path, program: Program, metadata: Mapping[str, Any]) -> Exported:
    """Write ``program`` as a file that runs without this package, for batches of any size.

    Raises, with no file written, Refusal if torch cannot trace it or the file cannot be made, RunFailed if
    the file cannot be written or does not compute the same.
    """
    traced = _traced(program)
    with _replacing(path) as temporary:
        if path.suffix == ".pt2":
            content = io.BytesIO()  # torch ends the process where the disk is full
            torch.export.save(traced, content, extra_files={f"{_METADATA}.json": json.dumps(metadata)})
            Path(temporary).write_bytes(content.getbuffer())
            error = largest_error(program, _torch_function(temporary))
        else:
            _write_onnx(traced, program, temporary, metadata)
            error = largest_error(program, _onnx_function(temporary, program.signature.inputs))
    return Exported(path, program.signature.inputs, program.signature.outputs, error)


def _traced(program: Program) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch", min=1)
    example = program.example(2, torch.Generator().manual_seed(2))
    # one tuple: ``forward`` takes its inputs as *inputs
    dynamic = (tuple({0: batch} for _ in example),)
    with torch.no_grad(), _quietly():
        try:
            traced = torch.export.export(program, example, dynamic_shapes=dynamic, strict=False)
        except Exception as problem:
            cause = str(problem).strip().splitlines()[0]
            raise Refusal(
                f"torch.export cannot trace this model for batches of any size ({cause}). An agent's act, or "
                "a net, may branch on numbers in its tensors, or use len(observation) for "
                "observation.shape[0]. Its weights can be exported: .safetensors."
            ) from problem
    # parameters are views of one flat vector, and each would be written with the whole vector
    for tensors in (traced.state_dict, traced.constants):
        for name, tensor in tensors.items():
            if isinstance(tensor, Tensor):
                copy = tensor.detach().clone(memory_format=torch.contiguous_format)
                tensors[name] = nn.Parameter(copy, False) if isinstance(tensor, nn.Parameter) else copy
    return traced


def _write_onnx(
    traced: torch.export.ExportedProgram, program: Program, path: str, metadata: Mapping[str, Any]
) -> None:
    import onnx

    signature = program.signature
    with _quietly():
        torch.onnx.export(
            traced,
            (),
            path,
            input_names=list(signature.inputs),
            output_names=list(signature.outputs),
            external_data=False,
            dynamo=True,
            verbose=False,
        )
    model = onnx.load(path)
    # torch names the size of a batch after its own symbol
    sizes = [
        size
        for value in (*model.graph.input, *model.graph.output, *model.graph.value_info)
        for size in value.type.tensor_type.shape.dim
    ]
    symbol = re.escape(model.graph.input[0].type.tensor_type.shape.dim[0].dim_param)
    for size in sizes:
        if size.dim_param:
            size.dim_param = re.sub(rf"\b{symbol}\b", "batch", size.dim_param)
    onnx.helper.set_model_props(model, {_METADATA: json.dumps(metadata)})
    onnx.save(model, path)


def _torch_function(path: str) -> Function:
    module = torch.export.load(path).module()
    return lambda inputs: list(module(*inputs))


def _onnx_function(path: str, names: Sequence[str]) -> Function:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def run(inputs: Sequence[Tensor]) -> list[Tensor]:
        feeds = {name: tensor.numpy() for name, tensor in zip(names, inputs, strict=True)}
        return [torch.from_numpy(out) for out in session.run(None, feeds)]

    return run


def largest_error(program: Program, function: Function) -> float:
    """The greatest difference between the outputs of ``function`` and of ``program`` over random inputs.

    Raises RunFailed for a difference above the tolerance, another shape, or other discrete actions.
    """
    worst = 0.0
    names = program.signature.outputs
    for size in _BATCHES:
        inputs = program.example(size, torch.Generator().manual_seed(size))
        with torch.no_grad():
            expected = program(*inputs)
        for name, reference, exported in zip(names, expected, function(inputs), strict=True):
            if reference.shape != exported.shape:
                raise RunFailed(
                    f"the export gives {name} {list(exported.shape)}, and the model {list(reference.shape)}."
                )
            error = float((reference.double() - exported.double()).abs().max())
            size = reference.double().abs()
            scale = 1.0 + float(size.masked_fill(size > -LOWEST / 2, 0.0).max())  # not of illegal actions
            if not error <= (_TOLERANCE * scale if reference.is_floating_point() else 0.0):
                raise RunFailed(f"the export gives another {name} than the model, by up to {error:.3g}.")
            worst = max(worst, error)
    return worst


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[str]:
    """The name of a file that takes ``path``'s place at the end, if nothing is raised; where ``path`` is a
    link, the place of the file that it leads to.

    Raises Refusal where no file can be made, RunFailed where its content cannot be written.
    """
    target = os.path.realpath(path)
    try:
        folder = tempfile.TemporaryDirectory(prefix=".export-", dir=os.path.dirname(target))
    except OSError as error:
        raise Refusal(f"{path} cannot be written: {cause_of(error)}. Choose another folder.") from error
    with folder as name:
        temporary = os.path.join(name, path.name)
        try:
            yield temporary
            os.replace(temporary, target)
        except OSError as error:
            raise RunFailed(
                f"{path} cannot be written: {cause_of(error)}. Choose another file, or make room."
            ) from error


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Suppress what torch's exporters log, warn of and write to stderr (whole graphs)."""
    previous_level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous_level)
