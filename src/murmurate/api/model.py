"""A trained model, to act, predict, evaluate and export."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from murmurate.api.export import Exported, check_path, description, export_program, export_weights
from murmurate.api.fields import in_float32, integer
from murmurate.api.observations import array_of, documents_of, mask_of, pair_hint, without_tensors
from murmurate.api.program import ClassProbabilities, GreedyPolicy
from murmurate.errors import Refusal
from murmurate.ranges import Seed
from murmurate.replica.state_dict import tensors_of, write_values
from murmurate.replica.vector import Replica
from murmurate.replicator.learner import Context
from murmurate.spec import EnvSpec, derive_generator
from murmurate.training.data_record import read_fingerprint
from murmurate.training.evaluate import figures
from murmurate.training.run import Run
from murmurate.training.threads import keeping_threads
from murmurate.worlds.interface import Formats, SimulatorWorld
from murmurate.worlds.viewed import rescaled


class TrainedModel:
    """A trained model. ``murmurate.load`` makes it.

    An agent has ``act``; a classifier, a mixture and a topic model have ``predict``; all have ``evaluate``
    and ``export``. A recurrent agent, or one that sees a stack of observations, remembers the past between
    calls of ``act``: call ``reset`` where an episode begins.

    Attributes:
        run: how it was trained, a ``Run``.
        folder: folder of the run.
    """

    def __init__(self, run: Run, folder: Path, checkpoint_folder: Path, learner: Any) -> None:
        self.run = run
        self.folder = folder.absolute()  # the process may change its directory
        self._checkpoint = checkpoint_folder.absolute()
        self._learner = learner
        for replica in self._learner.replicas.values():
            replica.module.eval()
        self._generator = derive_generator(run.seed, "acting")
        self._memory: Tensor | None = None  # [B, M]
        self._stack: npt.NDArray[Any] | None = None  # [B, *observation_shape]
        self._first: npt.NDArray[np.bool_] | None = None  # [B], whether an episode begins; None: all begin

    def __repr__(self) -> str:
        return f"<TrainedModel {self.run.recipe} of {self._checkpoint}>"

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy has the present parameters, and remembers the past that this model does. Only what is asked
        of its run or data (``evaluate``, ``classes``, ``vocabulary``) reads the folder."""
        replicas = self._learner.replicas.items()
        values = {name: {key: x.clone() for key, x in tensors_of(each).items()} for name, each in replicas}
        clocks = {name: each.clock for name, each in replicas}
        state = {key: getattr(self, key) for key in ("spec", "_generator", "_memory", "_stack", "_first")}
        return _rebuilt, (self.run, self.folder, self._checkpoint, self.spec, values, clocks), state

    @cached_property
    def spec(self) -> EnvSpec:
        """Shapes and types of observations and actions, as the model knows them."""
        return self.run.world.spec(read_fingerprint(self.folder))

    @cached_property
    def classes(self) -> list[str]:
        """The names of a classifier's classes, in the order of ``predict_proba``; empty for other models."""
        return list((read_fingerprint(self.folder) or {}).get("classes", ()))

    @cached_property
    def vocabulary(self) -> list[str]:
        """The words of a topic model, in the order of counts; empty for other models, and without names."""
        return list((read_fingerprint(self.folder) or {}).get("vocabulary") or ())

    @cached_property
    def module(self) -> GreedyPolicy | ClassProbabilities:
        """What ``export`` writes: a function of observations [B, ...] (and memory).

        It returns actions and the nets' outputs. It is in float32 on the CPU, and shares this model's
        parameters. Raises Refusal for models without such a function.
        """
        if self._acts:
            return GreedyPolicy(self._learner, self.spec, *(self._rescaled_bounds or (None, None)))
        if (program := getattr(self._learner, "program", None)) is None:
            raise Refusal(
                f"{self.run.learner.name} has no program (.pt2, .onnx). Export its weights: --to "
                "weights.safetensors (export('weights.safetensors') in Python)."
            )
        return ClassProbabilities(program(), self.spec)

    # -- agents -------------------------------------------------------------------------------------

    @torch.no_grad()
    def act(self, observation: Any, greedy: bool = True) -> Any:
        """Choose actions.

        Args:
            observation: one, or a batch [B, ...], as NumPy arrays or tensors, in the environment's own
                format. Where the model sees a stack of observations, the newest alone is enough: the model
                remembers the others.
            greedy: take the most likely actions; else draw them as in training.

        Returns:
            For one observation, an action of the environment; for a batch, an array of actions (a list,
            where actions are no arrays).

        Raises:
            Refusal: for a model without actions, and observations of another shape.
        """
        if not self._acts:
            others = "predict, or evaluate" if self._predicts else "evaluate"
            raise Refusal(f"{self.run.learner.name} takes no actions. Use {others}.")
        rows, is_single = self._rows(observation)
        begins = np.ones(len(rows), np.bool_) if self._first is None else self._first
        if len(begins) != len(rows):
            raise Refusal(
                f"there are {len(rows)} observations after {len(begins)} before, which this model remembers. "
                "Call reset() where other episodes begin."
            )
        stacked = torch.from_numpy(self._stacked(rows, begins))
        memory = self._learner.initial_memory(len(rows)) if self._memory is None else self._memory
        output = self._learner.act(stacked, memory, torch.from_numpy(begins), self._generator, greedy=greedy)
        self._memory = output.memory
        needs_stack = rows.shape[1:] != tuple(self.spec.observation_shape)
        self._first = np.zeros(len(rows), np.bool_) if needs_stack or output.memory is not None else None
        actions = self._environment_actions(output.action.numpy())
        return actions[0] if is_single else actions

    def reset(self, ended: Any = None) -> None:
        """Forget the past: the next observations begin episodes.

        ended: [B] bool, for which rows of a batch; None: for all, and the size of the batch may change.
        """
        if ended is None or self._first is None:
            self._memory = self._stack = self._first = None
        else:
            self._first = self._first | mask_of(ended, len(self._first))

    @property
    def _acts(self) -> bool:
        return hasattr(self._learner, "act")

    @property
    def _has_estimate(self) -> bool:
        return hasattr(self._learner, "estimate")

    @property
    def _predicts(self) -> bool:
        return self._has_estimate or hasattr(self._learner, "program")

    @cached_property
    def _formats(self) -> Formats | None:
        return cast(SimulatorWorld, self.run.world).formats()

    @cached_property
    def _rescaled_bounds(self) -> Any:
        return cast(SimulatorWorld, self.run.world).rescaled_bounds()

    @cached_property
    def _single_shape(self) -> tuple[int, ...]:
        """The shape of a single observation of the stack that the model sees."""
        full_shape = tuple(self.spec.observation_shape)
        if self._formats is not None:
            return tuple(self._formats.shape)
        return (self.spec.channels, *full_shape[1:]) if self.spec.stacked else full_shape

    def _rows(self, observation: Any) -> tuple[npt.NDArray[Any], bool]:
        """(Observations [B, ...] as the model reads them, perhaps only the newest of a stack; whether one was
        given without B)."""
        full_shape, single_shape = tuple(self.spec.observation_shape), self._single_shape
        observation = without_tensors(observation)
        given = array_of(observation)
        if given is not None and not given.size:
            raise Refusal("there is no observation in the batch.")
        # n numbers, each a discrete observation, are not taken for one one-hot vector
        if given is not None and not self._are_numbers(given):
            for shape in (full_shape, single_shape):
                if given.shape[-len(shape) :] == shape and given.ndim - len(shape) in (0, 1):
                    is_single = given.ndim == len(shape)
                    return self._typed(given[None] if is_single else given), is_single
        if (formats := self._formats) is None:
            kind = type(observation).__name__ if given is None else f"of shape {list(given.shape)}"
            raise Refusal(
                f"the observation is {kind}, and the model reads {list(full_shape)}, or a batch of these."
                f"{pair_hint(observation)}"
            )
        singles = formats.split(observation)
        try:
            if singles is not None:
                return self._typed(np.stack([formats.observe(each) for each in singles])), False
            return self._typed(np.asarray(formats.observe(observation))[None]), True
        except (ValueError, TypeError, KeyError, IndexError) as problem:
            try:
                rows = [formats.observe(each) for each in observation]
            except (ValueError, TypeError, KeyError, IndexError):
                raise Refusal(
                    f"the observation is not one of {self.run.world.name}: {str(problem).rstrip('.')}. It "
                    f"takes {formats.about}, or a batch of these.{pair_hint(observation)}"
                ) from problem
        return self._typed(np.stack(rows)), False

    def _are_numbers(self, given: npt.NDArray[Any]) -> bool:
        """Whether each item of ``given`` is an observation: a whole number of the environment's own."""
        if self._formats is None or not np.issubdtype(given.dtype, np.integer):
            return False
        try:
            self._formats.observe(given.flat[0])
        except (ValueError, TypeError, KeyError, IndexError):
            return False
        return True

    def _typed(self, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        kind: Any = np.float64 if self._has_estimate else np.float32
        if self.spec.observation_dtype == torch.uint8:
            kind = np.uint8
        if kind == np.uint8 and rows.dtype != np.uint8:
            raise Refusal(f"the observation is of {rows.dtype}, and the model reads images of uint8.")
        if rows.dtype.kind not in "biuf":
            raise Refusal(f"the observation holds {rows.dtype}, and the model reads numbers.")
        with np.errstate(over="ignore"):  # what overflows is not finite
            typed = np.array(rows, kind)
        if not np.isfinite(typed).all():
            raise Refusal("the observation holds numbers that are not finite.")
        return typed

    def _stacked(self, rows: npt.NDArray[Any], begins: npt.NDArray[np.bool_]) -> npt.NDArray[Any]:
        """The whole stacks that end with ``rows``; where an episode begins, filled as the world does."""
        full_shape = tuple(self.spec.observation_shape)
        if rows.shape[1:] == full_shape:
            return rows
        size = rows.shape[1]
        earlier = rows * (not cast(SimulatorWorld, self.run.world).begins_with_zeros)
        begun = np.concatenate([earlier] * (full_shape[0] // size - 1) + [rows], 1)
        if self._stack is None:
            self._stack = begun
        else:
            shifted = np.concatenate([self._stack[:, size:], rows], 1)
            self._stack = np.where(begins.reshape(-1, *[1] * len(full_shape)), begun, shifted)
        return self._stack.copy()

    def _environment_actions(self, action: npt.NDArray[Any]) -> Any:
        """The learner's actions in the environment's own format."""
        if self._formats is not None:
            return self._formats.act(action)
        if not self.spec.action_shape:
            return action
        shape = (-1, *self.spec.action_shape)
        low, high = (np.reshape(bound, shape[1:]) for bound in (self.spec.action_low, self.spec.action_high))
        clipped = np.clip(action.reshape(shape), low, high).astype(np.float32)
        if self._rescaled_bounds is None:
            return clipped
        low, high = self._rescaled_bounds
        return rescaled(clipped, low, high - low)

    # -- all models ---------------------------------------------------------------------------------

    def predict(self, observation: Any) -> Any:
        """The most probable class, component or topic of each observation, [B] int64, or an integer for one.

        Its arguments and errors are those of ``predict_proba``.
        """
        return self.predict_proba(observation).argmax(-1)

    def predict_proba(self, observation: Any) -> npt.NDArray[Any]:
        """The probabilities of the classes [B, K], or [K] for one image; of the components, for a mixture; a
        document's shares of the topics, for a topic model.

        observation: uint8 images [B, C, H, W] or one [C, H, W], rows [B, D] or one [D], or counts [B, V] or
            [V] of the words of the run's vocabulary, NumPy or a tensor. For a topic model also a text or a
            list of texts, or a sparse matrix of counts (scipy's); a document without a word of the vocabulary
            has the mean of the prior.
        Raises Refusal for a model that predicts nothing, and observations of another shape.
        """
        if not self._predicts:
            is_what = "an agent. Use act." if self._acts else "no classifier. Use evaluate, or export."
            raise Refusal(f"{self.run.learner.name} is {is_what}")
        shape = tuple(self.spec.observation_shape)
        world: Any = self.run.world
        if hasattr(world, "texts"):
            documents = documents_of(observation, self.vocabulary, shape[0], world.bigrams)
            if documents is not None:
                shares: npt.NDArray[Any] = self.estimate().transform(documents)
                return shares[0] if isinstance(observation, str) else shares
        given = array_of(without_tensors(observation))
        if given is None or given.shape[-len(shape) :] != shape or given.ndim - len(shape) not in (0, 1):
            kind = type(observation).__name__ if given is None else f"of shape {list(given.shape)}"
            from_files = self.run.world.has_image_files
            hint = " model.run.world.images(files) reads image files." if from_files else ""
            raise Refusal(
                f"the observation is {kind}, and the model reads {list(shape)}, or a batch of these.{hint}"
            )
        is_single = given.ndim == len(shape)
        rows = self._typed(given[None] if is_single else given)
        probabilities: npt.NDArray[Any]
        if self._has_estimate:
            probabilities = self.estimate().probabilities(rows)
        else:
            probabilities = cast(ClassProbabilities, self.module).in_batches(torch.from_numpy(rows)).numpy()
        return probabilities[0] if is_single else probabilities

    def estimate(self) -> Any:
        """The posterior of a mixture (``workloads.mixture.Mixture``) or of topics
        (``workloads.topics.Topics``). Raises Refusal for other models."""
        if not self._has_estimate:
            raise Refusal(f"{self.run.learner.name} has no posterior: only mixtures and topic models do.")
        return self._learner.estimate()

    def evaluate(
        self,
        episodes: int | None = None,
        seed: int | None = None,
        sample: bool = False,
        images: str | os.PathLike[str] | None = None,
    ) -> dict[str, Any]:
        """The figures of ``murmurate eval``, of this model as it is: for agents ``eval_return_mean``,
        ``eval_return_stderr``, ``episodes``, ``returns`` (with ``sample``: ``eval_sampled_return_mean``
        ...); for classifiers ``accuracy`` and so on.

        Args:
            episodes: number of games (or documents, or test images, which are drawn at random); None: as many
                as the run's option says, or all.
            seed: seed of the games, or of the draw; None: one that was not used in training.
            sample: draw actions from the policy, instead of the most probable ones.
            images: for classifiers of image files, a folder with a folder of each class, whose images are
                classified in place of the run's test images.

        Raises:
            Refusal: for fewer than one game, a negative seed, ``sample`` for a model that takes no actions,
                ``images`` for another model or with a folder named after none of the run's classes, and
                where the data are gone.
        """
        episodes, seed = integer("episodes", episodes, int), integer("seed", seed, Seed)
        with keeping_threads():
            result = figures(
                self.run,
                self._checkpoint,
                count=episodes,
                seed=seed,
                sample=sample,
                learner=self._learner,
                of=self.folder,
                images=images,
            )
        result.pop("best_eval_return_mean", None)  # it compares two checkpoints
        return result

    def export(self, path: str | os.PathLike[str]) -> Exported:
        """Write the model to ``path``, and compare what was written with it on random observations.

        ``.safetensors``: all parameters and buffers, ``<replica>.<name>``, with the run and the shapes as
        JSON in the metadata "murmurate". ``.pt2`` (``torch.export.load(path).module()`` runs it) and
        ``.onnx`` (extra ``export``): ``module``, for batches of any size; normalised observations and
        rescaled actions are part of it.

        Raises:
            Refusal: for another ending, and models that are no function of one observation.
            MissingExtra: for ``.onnx``, where its packages are not installed.
            RunFailed: if what was written computes something else; then there is no file.
        """
        target = Path(path).expanduser()
        check_path(target)
        metadata = description(self.run, self._checkpoint.name, self.spec, self.classes)
        if target.suffix == ".safetensors":
            return export_weights(target, self._tensors(), metadata)
        program = self.module
        if isinstance(program, GreedyPolicy):
            program.refuse_random()
        return export_program(target, program, metadata)

    def _tensors(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for name, replica in self._learner.replicas.items():
            tensors |= {f"{name}.{key}": values for key, values in tensors_of(replica).items()}
        return tensors


def _rebuilt(
    run: Run,
    folder: Path,
    checkpoint_folder: Path,
    spec: EnvSpec,
    values: dict[str, dict[str, Tensor]],
    clocks: dict[str, int],
) -> TrainedModel:
    """The model of a pickle. values, clocks: parameters and buffers, and the updates, by replica."""
    learner = in_float32(run).learner.build(Context(spec, Replica, run.seed, torch.device("cpu")))
    for name, replica in learner.replicas.items():
        write_values(replica, values[name])
        replica.clock = clocks[name]
    return TrainedModel(run, folder, checkpoint_folder, learner)
