"""The replicator for a script's own training loop (TF-Replicator's ``Replicator``, section 3)."""

from __future__ import annotations

import builtins
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from murmurate.errors import Refusal
from murmurate.fabric.interface import Capability, Fabric
from murmurate.replica.vector import Exchange, MakeOptimizer, Replica
from murmurate.replicator.agreed import agreed_tensors
from murmurate.replicator.collectives import Group, tensor_of
from murmurate.replicator.common_start import copy_from_lowest, not_stepped
from murmurate.replicator.comparison import require_equal_optimizers
from murmurate.replicator.first_steps import FirstSteps, hash_of
from murmurate.replicator.input_split import Batches, InputSource, Split, inputs, split_leading
from murmurate.replicator.last_steps import LastSteps
from murmurate.replicator.model_parallel import ModelParallelReplica, parameters_by_device
from murmurate.replicator.not_finite import FiniteGradients
from murmurate.replicator.optimizer_wrapper import (
    WrappedOptimizer,
    optimizer_factory,
    parameter_module,
    refuse_schedulers,
)
from murmurate.replicator.replica_parts import ONE_PART, ReplicaParts, SharedVector
from murmurate.replicator.replicator import check_capabilities, check_common_rounds
from murmurate.replicator.stopping import StoppableLoop, StopSignals
from murmurate.replicator.unique_names import by_unique_names
from murmurate.replicator.wrappable import check_can_be_wrapped
from murmurate.spec import derive_generator, derive_seed
from murmurate.strategies.interface import FINAL_DRAIN, Strategy

_DRAIN_SECONDS = 10.0
_NOTHING = (
    "nothing was exchanged: each replica trained alone, as main wrapped no optimizer. Write optimizer = "
    "replicator.wrap_optimizer(optimizer, model)."
)


class CentreEnded(BaseException):
    """Ends the script on the member that served as the centre."""


class OwnLoop(StoppableLoop):
    """Makes a script one of several replicas.

    All members run the same script and make the same replicas and optimizers, in the same order, before
    their first step. Under a strategy with a centre the last member runs the script up to its first step or
    first input, serves there until the others have ended, and leaves.

    Args:
        seed: seed of this run, for ``seed_for`` and ``generator``.
        workers: number of workers (hosts, for example) to which the replicas belong, in blocks of equal size.
        devices: devices of one replica; ``device(k)`` is the k-th, and ``device()`` the first.
        collectives: whether the script uses collectives; if so, the strategy is checked at once.
        parts: parts of this replica; if several, ``replica_parts.role_of`` gave ``strategy`` and ``fabric``.
        signals: of this process, for ``stopping``; by default this object's own.

    Raises Refusal if the fabric lacks what the strategy needs, for workers that do not divide the replicas,
    and for ``collectives`` under a strategy without common rounds.
    """

    def __init__(
        self,
        strategy: Strategy,
        fabric: Fabric,
        *,
        seed: int = 0,
        workers: int = 1,
        devices: Sequence[str] = ("cpu",),
        collectives: bool = False,
        parts: ReplicaParts = ONE_PART,
        signals: StopSignals | None = None,
    ) -> None:
        check_capabilities(strategy, fabric.capabilities, "this fabric", devices)
        if collectives:
            check_common_rounds(strategy, "collectives")
        size = fabric.size - strategy.centre
        if size < 1:
            raise Refusal(f"{strategy.name} needs one more member, for its centre: add one")
        if workers < 1 or size % workers:
            raise Refusal(f"{size} replicas cannot be divided evenly among {workers} workers")
        super().__init__(strategy, fabric, workers)
        self.seed, self._own_signals = seed, StopSignals()
        self.signals = self._own_signals if signals is None else signals
        self.is_centre = strategy.centre and self.rank == size
        self.worker, self.workers = self._index.worker, workers
        self._devices = tuple(torch.device(d) for d in devices)
        self._modules: dict[str, nn.Module] = {}
        self._shared: dict[str, SharedVector] = {}  # by replica, where it has several parts
        self.parts, self._begun, self._finished = parts, False, False
        self._ends = LastSteps(fabric, size, strategy.common_rounds)
        self._first_steps = FirstSteps(fabric, size)
        self._finite = FiniteGradients(self.rank, self.bound_replicas)
        self._at_wrapping: dict[str, float] = {}  # hashes of the parameters whose optimizer was wrapped

    # -- rank and devices ----------------------------------------------------------------------------

    @property
    def is_main(self) -> bool:
        """Whether this is the first part of the lowest replica that did not die: it prints and saves."""
        members = set(self.fabric.living())
        members |= set(self._ends.ended(range(self.rank)))  # they may count as dead
        return self.rank == min(members) and self.parts.rank == 0

    def device(self, k: int = 0) -> torch.device:
        """The k-th device of this replica; ``with replicator.device(1):`` creates tensors on it.

        TF-Replicator's ``logical_device``. Raises IndexError with the number of devices.
        """
        if not 0 <= k < len(self._devices):
            raise IndexError(
                f"a replica has {len(self._devices)} devices, there is no {k}: give more devices"
            )
        return self._devices[k]

    def seed_for(self, purpose: str) -> int:
        """A seed from (run seed, purpose, rank), which differs between replicas."""
        return derive_seed(self.seed, purpose, self.rank)

    def generator(self, purpose: str) -> torch.Generator:
        """A generator from (run seed, purpose, rank), on the first device."""
        return derive_generator(self.seed, purpose, self.rank, self.device())

    def print(self, *values: Any, **options: Any) -> None:
        """Print on one replica only."""
        if self.is_main:
            builtins.print(*values, **options)

    # -- replicas -----------------------------------------------------------------------------------

    def replicate(
        self, name: str, module: nn.Module, make_optimizer: MakeOptimizer, **options: Any
    ) -> Replica:
        """A Replica whose ``descend`` and ``follow`` are the strategy's step (see ``Replicator``).

        Frozen parameters and buffers of ``module`` become those of the lowest rank, too.
        """
        replica = self._bind(name, module, make_optimizer, **options)
        self._equalise(name, module)
        return replica

    def _bind(self, name: str, module: nn.Module, make_optimizer: MakeOptimizer, **options: Any) -> Replica:
        if self._begun:
            raise Refusal(f"'{name}' comes after the first step: make all replicas and optimizers before it")
        replica = super().replicate(name, module, make_optimizer, **options)
        self._modules.setdefault(name, module)
        if self.strategy.averages_gradients and self.size > 1:
            require_equal_optimizers(self._exchange(range(self.size)), replica, self.strategy.name)
        exchange = replica.exchange
        if self.parts.size > 1:
            self._shared[name] = self.parts.share(replica)
            exchange = functools.partial(self._shared[name].exchange, step=replica.exchange)

        def step(stepping: Replica) -> Exchange:
            self._begin()
            self._first_steps.step(stepping)
            if self.size > 1:
                self._finite.step(stepping)
            made = exchange(stepping)
            self._ends.step()
            return made

        replica.exchange = step
        return replica

    def _equalise(self, name: str, module: nn.Module) -> None:
        tensors = not_stepped(module, self._stepped())
        if tensors and self.fabric.size > 1 and Capability.COLLECTIVE in self.fabric.capabilities:
            copy_from_lowest(self._exchange(range(self.fabric.size)), name, tensors)

    def _stepped(self) -> set[int]:
        """The ids of all replicas' parameters."""
        return {id(p) for bound in self.bound_replicas.values() for p in bound.replica.own_parameters()}

    def wrap_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        module: nn.Module | None = None,
        *,
        name: str = "",
        clip: float | None = None,
        schedule: Callable[[int], float] | None = None,
    ) -> WrappedOptimizer:
        """Wrap a script's optimizer, so that its ``step`` is the strategy's.

        module: has the parameters that it steps; its names are used for saved and exported tensors. What it
            has besides, frozen parameters and buffers, becomes that of the lowest rank.
        clip, schedule: see ``Replica``; applied after averaging. A learning-rate scheduler of torch works
            too, except under a parameter server, where the centre steps: there ``schedule`` is required.

        Raises Refusal for optimizers that cannot step one flat vector, that are wrapped already, or whose
        parameters are not ``module``'s; and, where the replicas average their gradients, on all of them if
        their optimizers differ in class or hyper-parameters.
        """
        check_can_be_wrapped(optimizer, module, self._stepped())
        label = name or f"optimizer {sum(1 for n in self.bound_replicas if n.startswith('optimizer '))}"
        groups = [dict(g) for g in optimizer.param_groups]
        replica = self._bind(
            label,
            parameter_module(optimizer, module),
            optimizer_factory(optimizer),
            groups=lambda _: groups,
            clip=clip,
            schedule=schedule,
        )
        if module is not None:
            self._modules[label] = module
            self._equalise(label, module)
        wrapped = WrappedOptimizer(optimizer, replica, module, self.strategy.synchronous, self.parts.size)
        if not self.is_centre:
            wrapped.refuse_plain_steps()
        if self.strategy.centre and schedule is None:
            refuse_schedulers(replica, optimizer, self.strategy.name)
        # in shared memory they also change by the steps of replicas that began earlier
        if self.strategy.needs and (self.size == 1 or Capability.SHARED_MEMORY not in self.strategy.needs):
            self._at_wrapping[label] = hash_of(replica.params)
        return wrapped

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self._at_wrapping.clear()

    def replicate_over_devices(
        self,
        name: str,
        module: nn.Module,
        make_optimizer: MakeOptimizer,
        *,
        placed: Callable[[str], int] | None = None,
        clip: float | None = None,
        schedule: Callable[[int], float] | None = None,
    ) -> ModelParallelReplica:
        """A model-parallel replica: one flat vector for each device that ``module`` has parameters on.

        placed: from a parameter's name to the number of its device; None: the device that holds it.
        clip: largest norm of the gradient over all devices.

        Raises Refusal for ``clip`` if a centre makes the updates: it gets each device's gradient separately.
        """
        if self.parts.size > 1:
            raise Refusal("a replica has either several parts or several devices: give each part one device")
        if clip is not None and self.strategy.centre_steps:
            raise Refusal(
                f"under {self.strategy.name} the centre clips, one device's gradient at a time. Leave out "
                "clip, or use a strategy whose replicas step themselves, such as all-reduce."
            )
        shards = []
        for k, parameters in parameters_by_device(module, self._devices, placed).items():
            shards.append(self._bind(f"{name}.{k}", parameters, make_optimizer, schedule=schedule))
            self._modules[f"{name}.{k}"] = module
        self._equalise(name, module)
        return ModelParallelReplica(name, shards, clip)

    # -- inputs and steps ---------------------------------------------------------------------------

    def inputs(
        self,
        source: InputSource,
        *,
        per: Literal["worker", "replica"] = "worker",
        split: Split = split_leading,
        compare: bool = True,
    ) -> Batches:
        """The batches of this replica, for a loop in each epoch. They have a ``len`` if ``source`` has one.

        source: batches, the same on all members, or a function from the worker's (or replica's) number to its
            own batches. In the first case workers (or replicas) take whole batches in turn, and an incomplete
            last round is dropped. In the second, under strategies with common rounds all replicas end when
            the first has no more; otherwise each ends independently.
        per: "worker" splits each batch among the replicas of a worker, so that together they see the same
            batches as the plain script; "replica" gives each replica whole batches.
        split: (batch, shares, index) -> share; ``split_along(1)`` is for time-major sequences. A batch
            with fewer rows than shares is dropped, with the rest of its round if workers take turns.
        compare: whether the first batches of the first call are compared with the other replicas'.

        Raises Refusal if ``source`` gives the replicas different batches.
        """

        def batches() -> Iterator[Any]:
            self._begin()
            watched = self._first_steps.watched(source, compare)
            yield from inputs(watched, self._index, per=per, split=split, all_have=self._all_have)

        return Batches(batches, source, self.workers if per == "worker" else self.size)

    def run(self, step: Callable[[Any], Any], batches: InputSource, **options: Any) -> Iterator[Any]:
        """The results of ``step(batch)`` for each of ``inputs(batches, **options)``, merged over replicas.

        Every tensor of ``step``'s nested result gets a first dimension, [k, ...], by rank; without common
        rounds it has this replica's result alone, k = 1. Raises FabricError if results differ in structure.
        """
        for batch in self.inputs(batches, **options):
            result = step(batch)
            with torch.no_grad():
                if self.strategy.common_rounds:
                    yield self.everyone.gather(result)
                else:
                    yield pytree.tree_map(lambda leaf: tensor_of(leaf).detach().unsqueeze(0), result)

    def _all_have(self, has_batch: bool) -> bool:
        if not self.strategy.common_rounds:
            return has_batch
        everyone = Group(self._exchange(range(self.size)))
        return bool(everyone.reduce(torch.tensor(has_batch, dtype=torch.uint8), "min"))

    # -- the end ------------------------------------------------------------------------------------

    def agreed(self, name: str | None = None) -> dict[str, Tensor]:
        """The consensus of all replicas as named tensors, for ``load_state_dict`` or to be saved.

        Frozen parameters and buffers are included where the module is known. Floating-point buffers (batch
        statistics) are averaged under strategies with common rounds, where all members must call this;
        otherwise they are this replica's own. name: name of one replica; None: all (see ``by_unique_names``).
        Raises KeyError for an unknown name.
        """
        agreed: dict[str, dict[str, Tensor]] = {}
        for label in self.bound_replicas if name is None else [name]:
            bound, module = self.bound_replicas[label], self._modules[label]
            with torch.no_grad():
                vector = bound.strategy.consensus(bound.replica, bound.channel)
                if label in self._shared:
                    self._shared[label].broadcast(vector)
                tensors, others = agreed_tensors(bound.replica, vector, module, self._stepped())
                named = module.named_buffers(remove_duplicate=False)
                buffers = {k for k, b in named if b.is_floating_point()}
                floating = {k: x for k, x in others.items() if k in buffers}
                mean = self.everyone.mean(floating) if self.strategy.common_rounds and floating else {}
                agreed[label] = others | mean | tensors
        return by_unique_names(agreed, self._modules)

    def finish(self, deadline_seconds: float = 0.0) -> bool:
        """End this replica's training and publish its parameters; ``murmurate.run`` does so at the end.

        With a deadline, wait for the others to end too, so that ``agreed`` includes their last updates.
        Returns False if a living member did not end in time. Raises FabricError if the centre, under a
        strategy that has one, was lost before it had ended.
        """
        if not self._finished and not self.is_centre:
            self._finished = True
            self.drain(FINAL_DRAIN, _DRAIN_SECONDS)
            self.publish()
            self._ends.publish()
        ended = deadline_seconds <= 0 or self._ends.wait(deadline_seconds)
        if self.strategy.centre and not self.is_centre:
            self._ends.require_centre()
        return ended

    def __enter__(self) -> OwnLoop:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        self._own_signals.end()
        if kind is None and self.is_centre:
            self._serve()  # this script made no step, but others may
        elif kind is None:
            if not self.bound_replicas and not self._has_collectives and self.size > 1 and self.is_main:
                warnings.warn(_NOTHING, stacklevel=3)
            self.finish()
        return kind is CentreEnded

    # -- the centre ---------------------------------------------------------------------------------

    def _begin(self) -> None:
        if not self._begun:
            self._refuse_other_values()
        self._begun = True
        if self.is_centre:
            self._serve()
            raise CentreEnded

    def _refuse_other_values(self) -> None:
        for name, values in self._at_wrapping.items():
            if hash_of(self.bound_replicas[name].replica.params) != values:
                raise Refusal(
                    f"the parameters of '{name}' were changed (by load_state_dict, for example) after its "
                    f"optimizer was wrapped, when {self.strategy.name} had taken over the earlier ones. "
                    "Change them before wrapping; or restore a saved run by replicator.load and resumed."
                )

    def _serve(self) -> None:
        """Serve until each replica has ended or is lost; process the last messages; publish the result."""
        self._ends.require_register()
        self.serve_until(self._ends.all_ended)
        self.drain(FINAL_DRAIN, _DRAIN_SECONDS)
        self.publish()
        self._ends.publish()
        self._ends.warn_if_stepped(self.no_update_warning)
