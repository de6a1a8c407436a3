"""``Run``: the one value that describes a run (design, section 1)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from murmurate.agents.interface import AgentConfig, OnPolicy, Workload
from murmurate.errors import Refusal
from murmurate.replay.config import ReplayConfig, open_replay, replay_bytes
from murmurate.replicator.replicator import Replicate
from murmurate.sources.actor_source import Acted, Cast
from murmurate.sources.examples import DocumentSource
from murmurate.sources.replay_sampler import Drawing
from murmurate.sources.replay_source import Replayed
from murmurate.sources.rollouts import Rollouts, open_groups
from murmurate.spec import EnvSpec, Examples, Placement, derive_seed
from murmurate.strategies.interface import Strategy
from murmurate.worlds.interface import ExampleWorld, Simulators, Source, World, spec_of

_SLOW_DISK_BYTES_PER_SECOND = 50e6


@dataclass(frozen=True)
class Run:
    """All that a run depends on, resolved. A recipe is a function that returns one.

    world: what is learned in, or from. agent: who learns. strategy: how the replicas agree.
    replicas: number of learners.
    simulators: per learner.
    env_steps: total over the replicas at which the run ends (documents, where it learns from those).
        updates: per replica. minutes: of wall time. Whichever comes first; at least one is given.
    stop_at_return: also end once the mean return of the last 100 training episodes reaches this.
    seed: everything random derives from it.
    launcher: ``local`` (processes of this host), ``inline`` (one thread at a time, on a simulated fabric),
        ``torchrun`` or ``ray``.
    double_buffer: act for one half of the simulators while the other half steps in native threads.
    checkpoint_every_env_steps: total over the replicas between checkpoints.
    probe_every_updates: own updates between looks at disagreement and gradient cosines; 0 never looks.
    record_every_seconds: between two lines of a replica in ``metrics.jsonl``.
    eval_episodes: full games played by the final (and the best) parameters.
    restarts: how often each replica that died is started again, with a living peer's state (launcher
        ``local``). 0 goes on without it: what killed it, as too little memory does, may kill it again.
    compression: of vectors that go between hosts (launchers ``torchrun`` and ``ray``) by register and mail:
        ``bfloat16``, or ``int8`` with error feedback. Refused under a strategy that uses neither; where all
        members turn out to share one host's memory it has no effect, and an event says so.
    replay: what each learner keeps and how it draws from it, for agents that learn off-policy.
    actors: processes of each learner that share its simulators and play while it learns (Ape-X), for agents
        that learn off-policy; 0: it plays itself.
    """

    recipe: str
    world: World | ExampleWorld
    agent: AgentConfig | Workload
    strategy: Strategy
    replicas: int = 1
    simulators: int = 16
    env_steps: int | None = None
    updates: int | None = None
    minutes: float | None = None
    stop_at_return: float | None = None
    seed: int = 0
    launcher: str = "local"
    placement: Placement = field(default_factory=Placement)
    double_buffer: bool = False
    checkpoint_every_env_steps: int = 250_000
    probe_every_updates: int = 200
    record_every_seconds: float = 1.0
    eval_episodes: int = 10
    restarts: int = 0
    compression: Literal["none", "bfloat16", "int8"] = "none"
    replay: ReplayConfig | None = None
    actors: int = 0

    def validate(self) -> None:
        """Raise Refusal for values that make no sense."""
        if self.replicas < 1:
            raise Refusal(f"replicas is {self.replicas}; a run needs at least one. Use --replicas 1.")
        if self.simulators < 1 + self.double_buffer:
            halves = " for each half of a double buffer" if self.double_buffer else ""
            raise Refusal(f"simulators is {self.simulators}; a learner needs at least one{halves}.")
        for name in ("env_steps", "updates", "minutes"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                option = name.replace("_", "-")
                raise Refusal(f"{name} is {value}; give a positive number, as in --{option} 100000.")
        if self.env_steps is None and self.updates is None and self.minutes is None:
            raise Refusal("the run has no end: give --env-steps, --updates or --minutes.")
        least = {
            "checkpoint_every_env_steps": 1,
            "probe_every_updates": 0,
            "eval_episodes": 1,
            "seed": 0,
            "restarts": 0,
            "actors": 0,
        }
        for name, least_value in least.items():
            if getattr(self, name) < least_value:
                raise Refusal(f"{name} is {getattr(self, name)}; it must be at least {least_value}.")
        if not self.record_every_seconds > 0:
            raise Refusal("record_every_seconds must be above 0.")
        self._validate_diet()
        if self.placement.threads < 1 or not self.placement.devices:
            raise Refusal("a placement names at least one device, and at least one thread a process.")

    def _validate_diet(self) -> None:
        diet = self.agent.learns_from
        holds = self.world.holds if isinstance(self.world, ExampleWorld) else None
        if holds != (diet.of if isinstance(diet, Examples) else None):
            raise Refusal(f"{self.agent.name} cannot learn from the world '{self.world.name}'.")
        if isinstance(diet, Examples):
            if self.actors or self.replay is not None or self.stop_at_return is not None:
                raise Refusal(
                    f"{self.agent.name} learns from {diet.of}: there are no actors, no replay, no returns."
                )
            self.strategy.check(self.replicas, shrinks=diet.shrinks)
            return
        if self.actors > self.simulators:
            raise Refusal(
                f"{self.actors} actors share {self.simulators} simulators, and each needs one. Use --actors "
                f"{self.simulators}, or more simulators."
            )
        if isinstance(diet, OnPolicy):
            if self.actors:
                raise Refusal(
                    f"{self.agent.name} learns on-policy, from what it plays itself. Use --actors 0."
                )
            if self.replay is not None:
                raise Refusal(f"{self.agent.name} learns on-policy and has no replay. Leave the replay out.")
            if diet.steps < 1:
                raise Refusal(
                    f"agent.steps is {diet.steps}; a rollout has at least one. Use --agent.steps 5."
                )
            return
        if self.replay is None:
            raise Refusal(f"{self.agent.name} learns from a replay, and the run has none. Give it one.")
        self.replay.validate(diet.batch)
        self._check_learning(self.replay)
        if self.actors and self.double_buffer:
            raise Refusal("actors play while the learner learns, and need no double buffer. Leave one out.")
        if self.actors and self.launcher == "inline":
            raise Refusal("actors are processes, and the inline launcher has none. Use --launcher local.")

    def _check_learning(self, replay: ReplayConfig) -> None:
        """Refuse a run that ends before its learners begin to learn."""
        if self.env_steps is None or replay.learnable(own := self.env_steps // self.replicas):
            return
        first = f"each learner makes {own:,} env steps and begins to learn after"
        if own <= replay.learning_starts:
            raise Refusal(
                f"{first} {replay.learning_starts:,}. Use more --env-steps, or --replay.learning-starts 1000."
            )
        raise Refusal(
            f"{first} {replay.learning_starts + replay.fit_every:,}. Use more --env-steps, or a smaller "
            "--replay.fit-every."
        )

    @property
    def members(self) -> int:
        """Replicas, and the centre where the strategy has one: it is the last."""
        return self.replicas + self.strategy.centre

    def planned_updates(self) -> int | None:
        """Updates per replica over the whole run, for schedules; None if only time ends it."""
        if self.updates is not None:
            return self.updates
        if self.env_steps is None:
            return None
        diet, own = self.agent.learns_from, self.env_steps / self.replicas
        if isinstance(diet, Examples):
            return max(1, self.env_steps // (self.replicas * diet.batch))
        if isinstance(diet, OnPolicy):
            return max(1, self.env_steps // (self.replicas * self.simulators * diet.steps))
        if self.replay is None:
            raise ValueError("a run of an off-policy agent has a replay")
        return max(1, self.replay.planned_updates(own, diet.batch))

    @property
    def unit(self) -> str:
        """What ``env_steps`` counts."""
        diet = self.agent.learns_from
        return diet.of if isinstance(diet, Examples) else "env steps"

    def spec(self, groups: list[Simulators]) -> EnvSpec:
        """Of what was opened, or of the corpus."""
        return groups[0].spec if groups else spec_of(self.world)

    def learner(self, replicate: Replicate, rank: int, spec: EnvSpec) -> Any:
        """Who learns, of one replica: an ``Agent``, or a ``Learner`` where nobody acts."""
        planned = self.planned_updates()
        if planned is not None and self.strategy.counts_all:
            planned *= self.replicas
        more: dict[str, Any] = {}
        if isinstance(self.world, ExampleWorld):
            train, validation, _ = self.world.divided()
            more = {"corpus": train, "validation": validation if rank == 0 else None}
        return self.agent.build(
            spec,
            replicate,
            seed=self.seed,
            device=self.device(rank),
            updates=planned,
            **more,
        )

    def device(self, rank: int) -> torch.device:
        """Where ``rank`` works: a replica as the placement says, and a centre on the processor, where what
        is sent to it arrives."""
        return self.placement.device(rank) if rank < self.replicas else torch.device("cpu")

    @property
    def shares_banks(self) -> bool:
        """Whether learners tell one another what their replays hold."""
        return self.replay is not None and self.replay.weights == "all" and self.replicas > 1

    def source(self, rank: int, learner: Any, groups: list[Simulators]) -> Source:
        """Where one replica's batches come from."""
        if isinstance(self.world, ExampleWorld):
            return self._documents(rank, self.world)
        diet, seed = self.agent.learns_from, derive_seed(self.seed, "source", rank)
        device = self.device(rank)
        if isinstance(diet, Examples):
            raise ValueError("who learns from examples has a corpus")
        if isinstance(diet, OnPolicy):
            return Rollouts(groups, learner, diet.steps, seed=seed, device=device)
        if self.replay is None:
            raise ValueError("a run of an off-policy agent has a replay")
        planned = self.planned_updates()

        def progress() -> float:
            return 0.0 if planned is None else min(learner.clock / planned, 1.0)

        store = open_replay(
            self.replay,
            groups[0].spec,
            simulators=self.simulators,
            steps=diet.n_step,
            discount=diet.discount,
            seed=derive_seed(self.seed, "replay", rank),
            threads=self.placement.threads,
            rank=rank,
        )
        drawing = Drawing(store, self.replay, diet.batch, device, progress)
        if self.actors:
            for group in groups:
                group.close()  # it was opened to see what can be seen and done
            learner.seat(rank * self.simulators, self.replicas * self.simulators)
            cast = Cast(
                self.world, learner.config, self.actors, self.simulators, rank=rank, replicas=self.replicas
            )
            return Acted(cast, groups[0].spec, learner, drawing, seed=seed)
        return Replayed(
            groups,
            learner,
            drawing,
            seed=seed,
            seat=lambda low: learner.seat(rank * self.simulators + low, self.replicas * self.simulators),
        )

    def _documents(self, rank: int, world: ExampleWorld) -> DocumentSource:
        diet = self.agent.learns_from
        if not isinstance(diet, Examples):
            raise ValueError("who learns from documents says so")
        return DocumentSource(
            world.divided()[0], diet.batch, seed=self.seed, rank=rank, replicas=self.replicas
        )

    def replay_bytes(self) -> int:
        """Memory, and disk in a checkpoint, of one learner's replay. Raises Refusal for one that can give no
        batch."""
        diet = self.agent.learns_from
        if self.replay is None or isinstance(diet, OnPolicy | Examples):
            return 0
        spec = spec_of(self.world)
        return replay_bytes(
            self.replay, spec, simulators=self.simulators, steps=diet.n_step, batch=diet.batch
        )

    def saving_seconds(self) -> float:
        """How long all replays may take to be written to a slow disk, beyond what anything else may."""
        if self.replay is None or not self.replay.saved:
            return 0.0
        return self.replicas * self.replay_bytes() / _SLOW_DISK_BYTES_PER_SECOND

    def open_simulators(self) -> list[Simulators]:
        """What a learner plays itself; one, for its spec, where actors do."""
        if isinstance(self.world, ExampleWorld):
            return []
        own = 1 if self.actors else self.simulators
        return open_groups(self.world, own, training=True, double_buffer=self.double_buffer)
