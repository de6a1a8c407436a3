"""Policies and critics of the user's own for vector actions: ``module:NAME`` or ``FILE.py:NAME``.

``NAME`` is a class or function. From (spec, hidden) it makes an object with two torch modules, which share no
parameter:

- ``policy`` maps observations [B, ...] to [B, D], whose tanh is the scaled action; for a squashed Gaussian to
  [B, 2 D], mean and log standard deviation side by side;
- ``critic`` maps (observations, scaled actions [B, D] in [-1, 1]) to values [B] or [B, 1].

D is the number of components of an action. Of several critics each is the ``critic`` of another object, with
initial weights of its own. Observations are of the world's dtype.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from murmurate.nets.own_network import made_by
from murmurate.nets.torso import described, in_evaluation_mode, seeded_by, trial_result
from murmurate.spec import EnvSpec, derive_generator

_ALL = slice(None)


class OwnNets(nn.Module):
    """Nets of the user's own, called as the members of a ``BatchedMLP`` are: [E, B, F + D] to [E, B, out].

    F numbers are the flat observation; the others, which a policy has not, are the scaled action.
    normalized: whether the observations have been normalised, and are no longer of the world's dtype.
    """

    def __init__(self, nets: Sequence[nn.Module], spec: EnvSpec, normalized: bool) -> None:
        super().__init__()
        self.nets, self.members = nn.ModuleList(nets), len(nets)
        self.observed = math.prod(spec.observation_shape)
        self._shape = spec.observation_shape
        self._dtype = torch.float32 if normalized else spec.observation_dtype

    def forward(self, x: Tensor) -> Tensor:
        """Inputs [B, F + D], the same for all nets, or [E, B, F + D]."""
        x = x if x.ndim == 3 else x.expand(self.members, *x.shape)
        return self.results(x[..., : self.observed], x[..., self.observed :])

    def results(self, observation: Tensor, action: Tensor, members: slice = _ALL) -> Tensor:
        """[E, B, out] from flat observations [E, B, F] and scaled actions [E, B, D]; D is 0 for a policy.
        members: the nets to evaluate, E in number."""
        rows = zip(list(self.nets)[members], observation, action, strict=True)
        return torch.stack([self._result(net, *inputs) for net, *inputs in rows])

    def _result(self, net: nn.Module, observation: Tensor, action: Tensor) -> Tensor:
        seen = observation.view(-1, *self._shape)
        if self._dtype == torch.uint8:  # beside an action it has become a float
            seen = seen.to(torch.uint8)
        result: Tensor = net(seen, action) if action.shape[1] else net(seen)
        return result.reshape(observation.shape[0], -1).to(torch.promote_types(result.dtype, torch.float32))


class OwnPasses:
    """Passes through ``OwnNets`` by autograd, with the methods of ``Passes``.

    gradient: for each parameter by name, the tensor that ``backward`` writes its gradient into; None for nets
    that never learn.
    """

    def __init__(self, net: OwnNets, gradient: Mapping[str, Tensor] | None = None) -> None:
        self._net, self._gradient = net, gradient
        # a replica may move the parameters' memory, but never replaces the parameters
        parameters = dict(net.named_parameters())
        self._parameters = [parameters[name] for name in gradient or ()]

    def forward(self, x: Tensor, members: slice = _ALL) -> list[Tensor]:
        """From the input [E, B, F + D]: the scaled actions and the result, both with their graph, followed by
        the result [E, B, out] without it."""
        observation, action = x[..., : self._net.observed], x[..., self._net.observed :]
        if self._gradient is None:
            result = self._net.results(observation, action, members)
            return [action, result, result]
        with torch.enable_grad():
            action = action.detach().requires_grad_(action.is_floating_point())  # a policy has none
            result = self._net.results(observation, action, members)
        return [action, result, result.detach()]

    def result(self, x: Tensor) -> Tensor:
        """The result [E, B, out] alone, for no ``backward``."""
        result: Tensor = self._net(x)
        return result

    def rows(self, activations: list[Tensor], rows: slice) -> list[Tensor]:
        """What ``backward`` needs for some rows of a batch. The others have no gradient."""
        with torch.enable_grad():
            return [activation[:, rows] for activation in activations[:2]]

    def backward(self, activations: list[Tensor], slope: Tensor) -> None:
        """Write the gradients with respect to all parameters. slope: the gradient of the loss with respect to
        the result, [E, B, out]."""
        assert self._gradient is not None
        slopes = torch.autograd.grad(activations[1], self._parameters, slope, allow_unused=True)
        for target, found in zip(self._gradient.values(), slopes, strict=True):
            target.zero_() if found is None else target.copy_(found)

    def input_slope(
        self, activations: list[Tensor], slope: Tensor, members: slice = _ALL, inputs: slice = _ALL
    ) -> Tensor:
        """The gradient [E, B, D] with respect to the scaled actions."""
        return torch.autograd.grad(activations[1], activations[0], slope)[0]

    def slope_of_chosen(self, activations: list[Tensor], chosen: Tensor, inputs: slice) -> Tensor:
        """The gradient [B, D] of ``sum_b f_chosen[b](x_b)`` with respect to the scaled actions."""
        members = torch.arange(len(activations[1]), device=chosen.device)
        weights = (members[:, None] == chosen).to(activations[1].dtype)
        return self.input_slope(activations, weights[..., None]).sum(0)


def own_nets(
    spec: EnvSpec,
    network: str,
    hidden: Sequence[int],
    critics: int,
    *,
    deterministic: bool,
    normalized: bool,
    generator: torch.Generator,
) -> tuple[OwnNets, OwnNets]:
    """(policy, ``critics`` critics), made by ``network``, with the initial weights that it draws.

    Raises ValueError if there is no such class or function, if it raises, if its modules return other shapes,
    if policy and critics share parameters, and if the critic does not depend on the action.
    """
    dimensions = math.prod(spec.action_shape)
    size = dimensions if deterministic else 2 * dimensions
    seed = generator.initial_seed()
    generators = [generator, *(derive_generator(seed, "critic", member) for member in range(1, critics))]
    made = [_modules(spec, network, hidden, size, each) for each in generators]
    policy, first = made[0]
    nets = policy, *(critic for _, critic in made)
    parameters = [id(parameter) for net in nets for parameter in net.parameters()]
    if len({*parameters}) < len(parameters):
        raise ValueError(
            f"the policy and the critics of {network} share parameters, and each learns by itself: make new "
            "layers for each, in every call"
        )
    action = torch.zeros(2, dimensions, requires_grad=True)
    observation = torch.zeros(2, *spec.observation_shape, dtype=spec.observation_dtype)
    with in_evaluation_mode(first), torch.enable_grad():
        value = first(observation, action).sum()
    if not value.requires_grad or torch.autograd.grad(value, action, allow_unused=True)[0] is None:
        raise ValueError(f"the critic of {network} ignores the action, and the policy follows its gradient")
    return OwnNets([policy], spec, normalized), OwnNets([critic for _, critic in made], spec, normalized)


def _modules(
    spec: EnvSpec, network: str, hidden: Sequence[int], size: int, generator: torch.Generator
) -> tuple[nn.Module, nn.Module]:
    """(policy, critic) of a new object. size: numbers that the policy returns for an observation."""
    with seeded_by(generator):
        made = made_by(network, spec, hidden)
        policy, critic = getattr(made, "policy", None), getattr(made, "critic", None)
        if not (isinstance(policy, nn.Module) and isinstance(critic, nn.Module)):
            raise ValueError(
                f"{network} must make an object with the torch modules policy and critic, and it makes one "
                f"of type {type(made).__name__}"
            )
        output = trial_result(f"the policy of {network}", policy, spec)
        action = torch.zeros(2, math.prod(spec.action_shape))
        value = trial_result(f"the critic of {network}", critic, spec, action)
    if not isinstance(output, Tensor) or output.shape != (2, size):
        raise ValueError(
            f"the policy of {network} must return [B, {size}], and for 2 observations it returns "
            f"{described(output)}"
        )
    if not isinstance(value, Tensor) or value.shape not in ((2,), (2, 1)):
        raise ValueError(
            f"the critic of {network} must return values [B], and for 2 observations and actions it returns "
            f"{described(value)}"
        )
    return policy, critic
