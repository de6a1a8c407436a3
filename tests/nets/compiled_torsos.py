"""What tests of the compiled torso share."""

import pytest

compiled = pytest.mark.usefixtures("compiled_for")


def twin(torso, observation):
    laid = torso.blocks(observation, torso.linear.weight.dtype)
    return torso._forward_in_torch(laid)
