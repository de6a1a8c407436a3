"""Whole nets of a user's own: what they compute, and what is said of wrong ones."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from murmurate.nets.own_network import (
    OwnActorCritic,
    action_value_net,
    checked_network,
    policy_value_net,
    refuse_low_precision,
)
from murmurate.nets.torso import build_torso, checked_torso
from murmurate.spec import EnvSpec, derive_generator

SPEC = EnvSpec("world", (3,), torch.float32, actions=2)
VECTORS = EnvSpec("world", (3,), torch.float32, actions=0, action_shape=(4,))


class Both(nn.Module):
    def __init__(self, spec: EnvSpec, hidden: object) -> None:
        super().__init__()
        self.policy = nn.Linear(3, spec.actions or 8)
        self.value = nn.Linear(3, 1)

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        return self.policy(observation), self.value(observation)


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LazyLinear(3)

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        out = self.layer(observation)
        return out[:, :2], out[:, 2]


class Sum(nn.Module):
    """Its memory is the sum of an episode's observations, and its policy and value are that sum."""

    def __init__(self, spec: EnvSpec, hidden: object) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def initial_memory(self, batch: int) -> Tensor:
        return torch.zeros(batch, 3)

    def forward(self, observation: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        total = memory + self.weight * observation
        return total[:, :2], total[:, 2], total


class Pair(Sum):
    """Its memory is a pair of tensors, as an LSTM's is."""

    def initial_memory(self, batch: int) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return torch.zeros(batch, 3), torch.zeros(batch, 3)


class Raises(Sum):
    def initial_memory(self, batch: int) -> Tensor:
        raise KeyError("size")


class Layers(Sum):
    """Its memory is that of each of several layers."""

    def initial_memory(self, batch: int) -> Tensor:
        return torch.zeros(batch, 1, 3)


class Single(Sum):
    def initial_memory(self, batch: int) -> Tensor:
        return torch.zeros(1, 3)


class Forgetful(Sum):
    def forward(self, observation: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        return observation[:, :2], observation[:, 2], None


class Blind(Both):
    """Reads only observations of another size."""

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(observation.repeat(1, 2))


class Counting(Both):
    def __init__(self, spec: EnvSpec, hidden: object) -> None:
        super().__init__(spec, hidden)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(self.norm(observation))


def _q(spec: EnvSpec, hidden: object) -> nn.Module:
    return nn.Linear(3, spec.actions)


@pytest.fixture(autouse=True)
def own_module(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("their_nets")
    for name, value in {
        "Both": Both, "Sum": Sum, "q": _q, "Blind": Blind, "Counting": Counting, "Pair": Pair,
        "Forgetful": Forgetful, "Raises": Raises, "Layers": Layers, "Single": Single,
        "Wide": lambda spec, hidden: nn.Linear(3, 5),
        "single": lambda spec, hidden: nn.Linear(3, 2),
        "narrow": lambda spec, hidden: Both(VECTORS, hidden),
        "lazy": lambda spec, hidden: Lazy(),
        "number": lambda spec, hidden: 3,
        "broken": lambda spec: None,
    }.items():  # fmt: skip
        setattr(module, name, value)
    monkeypatch.setitem(sys.modules, "their_nets", module)


def _net(name: str, spec: EnvSpec = SPEC, **options: object) -> OwnActorCritic:
    generator = derive_generator(0, "network")
    net = policy_value_net(spec, network=name, generator=generator, **options)  # type: ignore[arg-type]
    assert isinstance(net, OwnActorCritic)
    return net


def test_a_net_without_memory_is_called_once_for_a_rollout() -> None:
    net = _net("their_nets:Both")
    observation = torch.randn(5, 4, 3)
    policy, value, memory = net.unroll(observation, None, torch.zeros(5, 4, dtype=torch.bool))
    torch.testing.assert_close(policy, net.network.policy(observation))  # type: ignore[operator]
    torch.testing.assert_close(value, net.network.value(observation)[..., 0])  # type: ignore[operator]
    assert memory is None
    assert net.initial_memory(4) is None
    assert _net("their_nets:Both", VECTORS)(observation[0])[0].shape == (4, 8)


def test_weights_are_drawn_from_the_seed_alone() -> None:
    first = _net("their_nets:Both").state_dict()
    torch.rand(1)
    for name, values in _net("their_nets:Both").state_dict().items():
        assert torch.equal(values, first[name])


def test_layers_that_draw_weights_in_the_first_call_draw_them_from_the_seed() -> None:
    first, second = (_net("their_nets:lazy").state_dict() for _ in range(2))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_memory_is_that_of_the_episode() -> None:
    net = _net("their_nets:Sum")
    observation = torch.randn(6, 2, 3)
    first = torch.zeros(6, 2, dtype=torch.bool)
    first[0], first[3, 1] = True, True
    policy, value, memory = net.unroll(observation, torch.full((2, 3), 9.0), first)
    expected = torch.stack([observation[:, 0].sum(0), observation[3:, 1].sum(0)])
    torch.testing.assert_close(memory, expected)
    torch.testing.assert_close(policy[-1], expected[:, :2])
    torch.testing.assert_close(value[2, 1], observation[:3, 1].sum(0)[2])
    with pytest.raises(ValueError, match="recurrent"):
        net(observation[0])


def test_the_memory_follows_the_net_to_its_device() -> None:
    net = _net("their_nets:Sum").to("meta")
    first = torch.zeros(5, 4, dtype=torch.bool, device="meta")
    memory = net.unroll(torch.zeros(5, 4, 3, device="meta"), net.initial_memory(4), first)[2]
    assert memory is not None
    assert memory.is_meta


def test_observations_are_normalised_before_the_net_reads_them() -> None:
    net = _net("their_nets:Both", normalize=True)
    assert net.normalizer is not None
    net.normalizer.moments.mean.fill_(5.0)  # type: ignore[operator, union-attr]
    torch.testing.assert_close(net(torch.full((1, 3), 5.0))[1], net.network.value(torch.zeros(1, 3))[:, 0])  # type: ignore[operator]


def test_action_values() -> None:
    net = action_value_net(SPEC, network="their_nets:q", generator=derive_generator(0, "network"))
    assert net(torch.zeros(7, 3)).shape == (7, 2)
    with pytest.raises(
        ValueError, match=r"must return action values \[B, 2\].*returns \(\[2, 2\], \[2, 1\]\)"
    ):
        action_value_net(SPEC, network="their_nets:Both", generator=derive_generator(0, "network"))


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("their_nets:single", r"must return \(parameters of the policy, values\), and it returns \[2, 2\]"),
        (
            "their_nets:narrow",
            r"must return parameters \[B, 2\] and values \[B\].*returns \(\[2, 8\], \[2, 1\]\)",
        ),
        ("their_nets:Raises", "initial_memory of the net their_nets:Raises raised KeyError: 'size'"),
        ("their_nets:Layers", r"initial_memory .* \[B, M\], and for B = 2 it returns \[2, 1, 3\]"),
        ("their_nets:Single", r"initial_memory .* \[B, M\], and for B = 2 it returns \[1, 3\]"),
        ("their_nets:Pair", r"initial_memory .* must return a tensor \[B, M\], .* \(\[2, 3\], \[2, 3\]\)"),
        (
            "their_nets:Forgetful",
            r"must return \(parameters, values, memory\), and it returns \(\[2, 2\], \[2\], NoneType\)",
        ),
        ("their_nets:number", "is of type int, and must be a torch.nn.Module"),
        ("their_nets:broken", "raised TypeError"),
        (
            "their_nets:Blind",
            r"the net their_nets:Blind raised RuntimeError on observations \[2, 3\] of float32: mat1",
        ),
        ("their_nets:missing", "no class or function 'missing' in the module their_nets"),
        ("no_nets:Both", "cannot be imported"),
        ("no_nets.py:Both", "there is no file no_nets.py"),
    ],
)
def test_wrong_nets_are_refused_with_what_is_wrong(name: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        _net(name)


def test_the_trial_changes_no_statistics() -> None:
    net = _net("their_nets:Counting").network
    assert net.norm.num_batches_tracked == 0  # type: ignore[union-attr]
    assert net.training


def test_settings_that_contradict_one_another_are_refused() -> None:
    with pytest.raises(ValueError, match="leave one out"):
        _net("their_nets:Both", recurrent=8)
    with pytest.raises(ValueError, match="use float32"):
        refuse_low_precision("their_nets:Both", "bfloat16")
    refuse_low_precision("", "bfloat16")
    with pytest.raises(ValueError, match="there is no net called 'Both'"):
        checked_network("Both")


def test_a_file_in_the_working_folder_is_found_from_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wide.py").write_text(
        "from torch import nn\nclass Wide(nn.Linear):\n    out_features = 5\n"
        "    def __init__(self, spec, hidden):\n        super().__init__(3, 5)\n"
    )
    assert checked_torso("wide:Wide") == checked_network("wide.py:Wide") == f"{tmp_path}/wide.py:Wide"
    monkeypatch.chdir("/")
    assert build_torso(SPEC, f"{tmp_path}/wide.py:Wide", (8,)).out_features == 5
    assert checked_torso("their_nets:Wide") == "their_nets:Wide"
    assert build_torso(SPEC, "their_nets:Wide", (8,)).out_features == 5
