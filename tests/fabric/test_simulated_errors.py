"""The simulated fabric names what is wrong: deadlocks, calls that do not match, values that make no sense."""

from __future__ import annotations

import pytest
import torch

from fabric.simulated_members import N, door_to, fill
from murmurate.fabric.interface import Capability, FabricError
from murmurate.fabric.simulated.fabric import MailFaults, Partition, SimulatedFabric


def test_a_deadlock_names_each_member_and_its_wait():
    def meets(member):
        door_to(member).mean_(fill(0))

    def leaves(member):
        pass

    with pytest.raises(FabricError, match=r"rank 0 waits for mean #1 of \[0, 1, 2\], has \[0, 1\]") as caught:
        SimulatedFabric(3, 0).run([meets, meets, leaves])
    assert "rank 1 waits for mean #1" in str(caught.value)
    assert "finished: [2]" in str(caught.value)


def test_crossed_waits_are_a_deadlock_too():
    def role(member):
        fabric = door_to(member)
        fabric.wait(f"to {member.rank}", float("inf"))
        fabric.send(1 - member.rank, f"to {1 - member.rank}", fill(0))

    with pytest.raises(FabricError, match=r"rank 0 waits for mail 'to 0'; rank 1 waits for mail 'to 1'"):
        SimulatedFabric(2, 0).run([role, role])


def test_a_deadline_turns_the_deadlock_into_the_members_own_error():
    def meets(member):
        try:
            door_to(member).mean_(fill(0))
        except FabricError as error:
            return str(error)

    fabric = SimulatedFabric(3, 0, collective_deadline_seconds=7.0)
    messages = fabric.run([meets, meets, lambda member: None])
    assert all("ranks [2] did not call it within 7 s" in message for message in messages[:2])
    assert fabric.virtual_seconds == pytest.approx(7.0, rel=0.01)


@pytest.mark.parametrize("second", ["gather", "broadcast", "root"])
def test_calls_that_do_not_match_are_an_error(second):
    def first(member):
        if second == "root":
            return door_to(member).broadcast_(fill(0), 0)
        return door_to(member).mean_(fill(0))

    def other(member):
        fabric = door_to(member)
        calls = {
            "gather": lambda: fabric.gather(fill(0)),
            "broadcast": lambda: fabric.broadcast_(fill(0), 1),
            "root": lambda: fabric.broadcast_(fill(0), 1),
        }
        calls[second]()

    for seed in range(4):
        with pytest.raises(FabricError, match=r"#1 of .* same calls everywhere"):
            SimulatedFabric(2, seed).run([first, other])


def test_broadcasts_from_different_roots_are_told_apart():
    roles = [lambda m, root=root: door_to(m).broadcast_(fill(0), root) for root in range(2)]
    with pytest.raises(FabricError) as caught:
        SimulatedFabric(2, 0).run(roles)
    assert all(f"broadcast from rank {root}" in str(caught.value) for root in range(2))


def test_a_roles_error_stops_the_others_wherever_they_are():
    unwound = []

    def fails(member):
        member.compute(1e-3)  # the others have begun by then
        raise ZeroDivisionError("mine")

    def polls(member):
        fabric = door_to(member)
        try:
            while True:
                fabric.receive("never")
        finally:
            unwound.append(member.rank)

    def waits(member):
        try:
            door_to(member).wait("never", float("inf"))
        finally:
            unwound.append(member.rank)

    with pytest.raises(ZeroDivisionError, match="mine"):
        SimulatedFabric(3, 2).run([fails, polls, waits])
    assert sorted(unwound) == [1, 2]


def test_an_error_inside_an_injected_latency_comes_out():
    def latency(sender, receiver, generator):
        return -1.0

    with pytest.raises(ValueError, match="in the past"):
        SimulatedFabric(2, 0, latency=latency).run([lambda m: door_to(m).publish(fill(0))] * 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SimulatedFabric(0, 0), "size must be at least 1"),
        (lambda: SimulatedFabric(2, 0, crashes={2: 1}), "ranks from 0 to below"),
        (lambda: SimulatedFabric(2, 0, partitions=[Partition(((0, 5),))]), "ranks from 0 to below"),
        (lambda: SimulatedFabric(2, 0).member(2), "no rank 2"),
        (lambda: SimulatedFabric(2, 0).run([print]), "1 functions for 2 members"),
        (lambda: MailFaults(loss=1.5), "not a probability"),
        (lambda: MailFaults(loss=1.0), "reliable=False"),
        (lambda: MailFaults(resend_seconds=-0.1), "resend_seconds=-0.1"),
        (lambda: SimulatedFabric(2, 0).cut(Partition(island=frozenset({2}))), "ranks from 0 to below"),
        (lambda: SimulatedFabric(2, 0, latency=(-1.0, 0.0)), "latency from -1.0 to 0.0"),
        (lambda: SimulatedFabric(1, 0).run([lambda m: door_to(m).publish(torch.zeros(N + 1))]), r"\[3\]"),
        (lambda: SimulatedFabric(1, 0).run([lambda m: door_to(m).peek(1)]), "no rank 1"),
    ],
)
def test_what_makes_no_sense_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_missing_capability_is_an_error():
    def role(member):
        assert member.capabilities == {Capability.REGISTER}
        fabric = door_to(member)
        fabric.publish(fill(0))
        refused = []
        for verb in (
            lambda: fabric.mean_(fill(0)),
            lambda: fabric.broadcast_(fill(0), 0),
            lambda: fabric.gather(fill(0)),
            lambda: fabric.send(0, "t", fill(0)),
            lambda: fabric.wait("t", 0.0),
            lambda: fabric.shared("k", fill(0)),
        ):
            with pytest.raises(FabricError, match="without") as caught:
                verb()
            refused.append(str(caught.value).split(" without ")[1].split(":")[0])
        return refused

    fabric = SimulatedFabric(1, 0, capabilities=frozenset({Capability.REGISTER}))
    assert fabric.run([role]) == [["collective"] * 3 + ["mail"] * 2 + ["shared memory"]]


@pytest.mark.parametrize("other", [torch.zeros(3), torch.zeros(2, dtype=torch.float64)], ids=str)
def test_members_with_different_models_get_an_error(other):
    roles = [lambda m: m.channel("x", torch.zeros(2)), lambda m: m.channel("x", other)]
    with pytest.raises(FabricError, match="same model"):
        SimulatedFabric(2, 0).run(roles)


@pytest.mark.parametrize("count", [0, N + 1])
def test_a_message_that_no_real_fabric_takes_is_refused(count):
    with pytest.raises(ValueError, match=f"a message has 1 to {N} numbers, this one {count}"):
        SimulatedFabric(1, 0).run([lambda m: door_to(m).send(0, "t", torch.zeros(count))])


@pytest.mark.parametrize(
    ("tag", "x", "message"),
    [
        ("t" * 64, fill(0), "a tag has at most 63 bytes"),
        ("\N{LATIN SMALL LETTER E WITH ACUTE}" * 32, fill(0), "has 64"),
        ("t", torch.zeros(N - 1, dtype=torch.float64), "a short message is not converted"),
    ],
    ids=["long tag", "tag of long characters", "short of another type"],
)
def test_mail_that_no_real_fabric_takes_is_refused(tag, x, message):
    with pytest.raises(ValueError, match=message):
        SimulatedFabric(1, 0).run([lambda m: door_to(m).send(0, tag, x)])


class MeanInBackward(torch.autograd.Function):
    """Its gradient is the members' mean."""

    @staticmethod
    def forward(ctx, x, fabric):
        ctx.fabric = fabric
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        mean = grad.clone()
        ctx.fabric.mean_(mean)
        return mean, None


def mean_in_backward(member):
    x = fill(1.0).requires_grad_()
    (MeanInBackward.apply(x, door_to(member)) * (1 + member.rank)).sum().backward()
    return x.grad.tolist()


def test_collectives_inside_a_backward_pass_want_threads_and_say_so():
    assert SimulatedFabric(3, seed=0, coroutines="threads").run([mean_in_backward] * 3) == [[2.0] * N] * 3
    with pytest.raises(FabricError, match="coroutines='threads'"):
        SimulatedFabric(3, seed=0).run([mean_in_backward] * 3)
