"""The replicator of a script with a loop of its own (TF-Replicator's ``Replicator``, section 3)."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from murmurate.errors import Refusal
from murmurate.fabric.interface import Capability, Fabric, FabricError, ranks_across, ranks_within
from murmurate.replica.vector import Exchange, MakeOptimizer, Replica
from murmurate.replicator.collectives import Group, Reduction
from murmurate.replicator.gather import TensorExchange
from murmurate.replicator.input_split import InputSource, ReplicaIndex, Split, inputs, split_leading
from murmurate.replicator.model_parallel import ModelParallelReplica
from murmurate.replicator.optimizer_wrapper import (
    ParameterModule,
    WrappedOptimizer,
    maker,
    parameter_module,
    refuse_what_cannot_be_flat,
    watch_rates,
)
from murmurate.replicator.replicator import Replicator, check_capabilities, check_common_rounds
from murmurate.spec import derive_generator, derive_seed
from murmurate.strategies.interface import FINAL_DRAIN, Strategy

_DRAIN_SECONDS = 10.0
_LOOK_SECONDS = 0.1


class CentreEnded(BaseException):
    """Ends the script on the member that served as the centre."""


class OwnLoop(Replicator):
    """Everything a script needs in order to be one of several replicas.

    All members run the same script and make the same replicas and optimizers, in the same order, before
    their first step. Under a strategy with a centre the last member runs the script up to its first step or
    first input, serves there until the others have ended, and leaves.

    Args:
        seed: of this run; ``seed_for`` and ``generator`` derive from it.
        workers: the replicas are dealt to so many workers (hosts, say) in blocks of equal size.
        devices: of one replica; ``device(k)`` is the k-th, and ``device()`` the first.
        collectives: whether the script uses them; checked at once.

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
    ) -> None:
        check_capabilities(strategy, fabric.capabilities, "this fabric", devices)
        super().__init__(strategy, fabric)
        if collectives:
            check_common_rounds(strategy, "collectives")
        self.seed = seed
        self.size = fabric.size - strategy.centre
        if self.size < 1:
            raise Refusal(
                f"{strategy.name} needs one more member for its centre, and there is only one: add one"
            )
        self.rank = fabric.rank
        self.is_centre = strategy.centre and fabric.rank == self.size
        if workers < 1 or self.size % workers:
            raise Refusal(f"{self.size} replicas cannot be dealt evenly to {workers} workers")
        self._index = ReplicaIndex(self.rank, self.size, self.rank // (self.size // workers), workers)
        self._devices = tuple(torch.device(d) for d in devices)
        self._modules: dict[str, nn.Module] = {}
        self._begun = self._finished = False
        # opened on all members at the same point, before any collective
        self._wire = TensorExchange(fabric) if strategy.common_rounds else None
        self._wires: dict[tuple[int, ...], TensorExchange] = {}  # of groups of replicas
        self._ends = (
            fabric.channel("ends", torch.zeros(1)) if Capability.REGISTER in fabric.capabilities else None
        )

    # -- rank and devices ----------------------------------------------------------------------------

    @property
    def is_main(self) -> bool:
        """Whether this is the lowest replica that did not die, which prints and saves."""
        here = set(self.fabric.living())
        if self._ends is not None:  # members that ended may count as dead, and were still the lowest
            here |= {r for r in range(self.rank) if self._ends.version(r) > 0}
        return self.rank == min(here)

    @property
    def worker(self) -> int:
        return self._index.worker

    @property
    def workers(self) -> int:
        return self._index.workers

    def device(self, k: int = 0) -> torch.device:
        """The k-th device of this replica; ``with replicator.device(1):`` makes tensors there.

        TF-Replicator's ``logical_device``. Raises IndexError naming how many there are.
        """
        if not 0 <= k < len(self._devices):
            raise IndexError(
                f"a replica has {len(self._devices)} devices, there is no {k}: give more devices"
            )
        return self._devices[k]

    def seed_for(self, purpose: str) -> int:
        """A seed from (run seed, purpose, rank): other noise on every replica."""
        return derive_seed(self.seed, purpose, self.rank)

    def generator(self, purpose: str) -> torch.Generator:
        """A generator from (run seed, purpose, rank), on the first device."""
        return derive_generator(self.seed, purpose, self.rank, self.device())

    def print(self, *values: Any, **options: Any) -> None:
        """Print once, not once a replica."""
        if self.is_main:
            builtins.print(*values, **options)

    # -- replicas -----------------------------------------------------------------------------------

    def replicate(
        self, name: str, module: nn.Module, make_optimizer: MakeOptimizer, **options: Any
    ) -> Replica:
        """A Replica whose ``descend`` and ``follow`` are the strategy's step (see ``Replicator``)."""
        if self._begun:
            raise Refusal(f"'{name}' comes after the first step: make all replicas and optimizers before it")
        replica = super().replicate(name, module, make_optimizer, **options)
        self._modules.setdefault(name, module)
        agree = replica.exchange

        def step(stepping: Replica) -> Exchange:
            self._begin()
            return agree(stepping)

        replica.exchange = step
        return replica

    def wrap_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        module: nn.Module | None = None,
        *,
        name: str = "",
        clip: float | None = None,
        schedule: Callable[[int], float] | None = None,
    ) -> WrappedOptimizer:
        """``optimizer`` of a plain script, its ``step`` now the strategy's.

        module: whose parameters it steps; saved and exported tensors then bear its names.
        clip, schedule: as of ``Replica``: after averaging. A learning-rate scheduler of torch works too, but
            where the centre steps, under a parameter server: there it must be ``schedule``.

        Raises Refusal for optimizers that cannot step one flat vector.
        """
        refuse_what_cannot_be_flat(optimizer)
        label = name or f"optimizer {sum(1 for n in self.bound_replicas if n.startswith('optimizer '))}"
        groups = [dict(g) for g in optimizer.param_groups]
        replica = self.replicate(
            label,
            parameter_module(optimizer, module),
            maker(optimizer),
            groups=lambda _: groups,
            clip=clip,
            schedule=schedule,
        )
        if module is not None:
            self._modules[label] = module
        wrapped = WrappedOptimizer(optimizer, replica)
        if self.strategy.centre and self.strategy.counts_all and schedule is None:
            watch_rates(replica, optimizer, self.strategy.name)
        return wrapped

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

        placed: parameter name -> which of the devices; None goes by where the parameters are.
        clip: largest norm of the gradient over all devices.

        Raises Refusal for ``clip`` where the centre steps: there each device's gradient arrives alone.
        """
        if clip is not None and self.strategy.centre and self.strategy.counts_all:
            raise Refusal(
                f"under {self.strategy.name} the centre clips, one device's gradient at a time. Leave out "
                "clip, or use a strategy whose replicas step themselves, such as all-reduce."
            )
        shares: dict[int, list[tuple[str, nn.Parameter]]] = {}
        for label, parameter in module.named_parameters():
            if parameter.requires_grad:
                k = self._devices.index(parameter.device) if placed is None else placed(label)
                shares.setdefault(k, []).append((label, parameter))
        shards = []
        for k, own in sorted(shares.items()):
            wrong = [label for label, p in own if p.device != self.device(k)]
            if wrong:
                raise Refusal(f"'{wrong[0]}' is not on device {k} ({self.device(k)}): move it before")
            parameters = ParameterModule.of(dict(own))
            shards.append(self.replicate(f"{name}.{k}", parameters, make_optimizer, schedule=schedule))
            self._modules[f"{name}.{k}"] = module
        return ModelParallelReplica(name, shards, clip)

    # -- inputs and steps ---------------------------------------------------------------------------

    def inputs(
        self,
        source: InputSource,
        *,
        per: Literal["worker", "replica"] = "worker",
        split: Split = split_leading,
    ) -> Iterator[Any]:
        """The batches of this replica.

        source: batches, the same on all members; or a function of the worker's (or replica's) number that
            gives them. Of the former, workers (or replicas) take whole batches in turn, and an
            incomplete last round is left out. Of the latter each has its own; replicas in common rounds end
            together, when the first has no more, and others each on its own.
        per: "worker" splits each batch among the replicas of a worker, so that all together see what the
            plain script sees; "replica" gives each whole batches of its own.
        split: (batch, shares, index) -> share; ``split_along(1)`` is for time-major sequences. A batch
            with fewer rows than shares is left out.
        """
        self._begin()
        yield from inputs(source, self._index, per=per, split=split, all_have=self._all_have)

    def run(self, step: Callable[[Any], Any], batches: InputSource, **how: Any) -> Iterator[Any]:
        """``step(batch)`` for each of the ``inputs``: what it gives, merged over replicas.

        Every tensor of ``step``'s nested result gets a first dimension: [k, ...], by rank; without common
        rounds there is only the own one, k = 1. Raises FabricError if steps give different structures.
        """
        for batch in self.inputs(batches, **how):
            result = step(batch)
            with torch.no_grad():
                if self.strategy.common_rounds:
                    yield self.everyone.gather(pytree.tree_map(_detached, result))
                else:
                    yield pytree.tree_map(lambda leaf: _detached(leaf).unsqueeze(0), result)

    def _all_have(self, here: bool) -> bool:
        if self._wire is None:
            return here
        return bool(self.everyone.reduce(torch.tensor(here, dtype=torch.uint8), "min"))

    # -- collectives --------------------------------------------------------------------------------

    @property
    def everyone(self) -> Group:
        """All replicas. Raises Refusal under a strategy without common rounds."""
        return self._group(range(self.size), "a collective")

    @property
    def within(self) -> Group:
        """The replicas of the own worker."""
        ranks = ranks_within(self.rank, self._index.per_worker)
        return self._group(ranks, "a collective within workers")

    @property
    def across(self) -> Group:
        """The replicas with the own place in every worker."""
        ranks = ranks_across(self.rank, self._index.per_worker, self.size)
        return self._group(ranks, "a collective across workers")

    def _group(self, ranks: Sequence[int], what: str) -> Group:
        check_common_rounds(self.strategy, what)
        if self._wire is None:
            raise RuntimeError("the wire is made with the replicator")
        group = tuple(ranks)
        if len(group) == self._wire.size:
            return Group(self._wire)
        if group not in self._wires:
            self._wires[group] = TensorExchange(self.fabric, group)
        return Group(self._wires[group])

    def mean(self, x: Any) -> Any:
        """See ``Group.mean``; over all replicas, as the six that follow."""
        return self.everyone.mean(x)

    def sum(self, x: Any) -> Any:
        return self.everyone.sum(x)

    def reduce(self, x: Any, operation: Reduction) -> Any:
        return self.everyone.reduce(x, operation)

    def gather(self, x: Any, join: bool = False) -> Any:
        return self.everyone.gather(x, join)

    def broadcast(self, x: Any, root: int = 0) -> Any:
        return self.everyone.broadcast(x, root)

    def map_reduce(self, function: Callable[[Any], Any], items: Sequence[Any], operation: Reduction) -> Any:
        return self.everyone.map_reduce(function, items, operation)

    def map_gather(self, function: Callable[[Any], Any], items: Sequence[Any]) -> Any:
        return self.everyone.map_gather(function, items)

    # -- the end ------------------------------------------------------------------------------------

    def agreed(self, name: str | None = None) -> dict[str, Tensor]:
        """Named tensors that stand for all replicas, for ``load_state_dict`` or to be saved.

        The consensus of the strategy as of now; of floating-point buffers (batch statistics) the mean under
        common rounds, in which all call this together, and the own ones elsewhere. ``name``: of one replica,
        or None for all that were made. Raises KeyError for an unknown name.
        """
        found: dict[str, Tensor] = {}
        for label in self.bound_replicas if name is None else [name]:
            bound = self.bound_replicas[label]
            with torch.no_grad():
                vector = bound.strategy.consensus(bound.replica, bound.channel)
                found |= {k: v.clone() for k, v in bound.replica.named_views(vector)}
                buffers = {k: b.detach().clone() for k, b in self._modules[label].named_buffers()}
                smooth = {k: b for k, b in buffers.items() if b.is_floating_point()}
                if self.strategy.common_rounds and smooth:
                    smooth = self.everyone.mean(smooth)
                found |= buffers | smooth
        return found

    def finish(self, deadline_seconds: float = 0.0) -> bool:
        """No more steps: show the others what this replica ended with; ``run`` does it after the script.

        With a deadline, wait for the others to end too, so that ``agreed`` is of what all ended with. False
        if not all living ones did in time.
        """
        if not self._finished and not self.is_centre:
            self._finished = True
            self.drain(FINAL_DRAIN, _DRAIN_SECONDS)
            self.publish()
            if self._ends is not None:
                self._ends.publish(torch.ones(1))
        if deadline_seconds <= 0 or self._ends is None:
            return True
        others = [r for r in range(self.fabric.size) if r != self.rank]
        return self._ends.wait_newer(others, [0] * len(others), deadline_seconds)

    def __enter__(self) -> OwnLoop:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if kind is None and self.is_centre:
            self._serve()  # its script never stepped; others may
        elif kind is None:
            self.finish()
        return kind is CentreEnded

    @property
    def bytes_exchanged(self) -> int:
        wires = [wire for wire in (self._wire, *self._wires.values()) if wire is not None]
        return super().bytes_exchanged + sum(wire.bytes for wire in wires)

    # -- the centre ---------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._begun = True
        if self.is_centre:
            self._serve()
            raise CentreEnded

    def _serve(self) -> None:
        """Until every living replica has ended; then take in what they sent last, and publish that."""
        if self._ends is None:
            raise FabricError("a centre needs a register, to see that the others have ended")
        self.serve_until(self._all_ended)
        self.drain(FINAL_DRAIN, _DRAIN_SECONDS)
        self.publish()
        self._ends.publish(torch.ones(1))

    def _all_ended(self) -> bool:
        ends = self._ends
        return ends is None or all(ends.version(r) > 0 for r in ends.living() if r != self.rank)


def _detached(leaf: Any) -> Tensor:
    return leaf.detach() if isinstance(leaf, Tensor) else torch.as_tensor(leaf)
