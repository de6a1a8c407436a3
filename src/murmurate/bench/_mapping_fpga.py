"""The FPGA's columns of ``mapping_table``: replay manager and learner on one LFE5U-85F, by their models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from murmurate.errors import Refusal
from murmurate.fpga.learner import FixedPointFormats
from murmurate.fpga.learner_area import slowest_unit
from murmurate.fpga.learner_model import BLOCK_RAM_BITS, LFE5U_85F_BLOCK_RAMS, choose, memory_bits
from murmurate.fpga.model import ReplayManagerModel
from murmurate.fpga.shape import TreeShape
from murmurate.spec import EnvSpec

FPGA = "fpga"


class FpgaModel:
    """The models of a replay manager of ``leaves`` leaves and of the learner beside it. clock: that of the
    replay manager, and how it is known. free_bytes: block RAM beside the replay manager.

    Raises Refusal for leaves outside the table of place and route.
    """

    def __init__(self, leaves: int) -> None:
        self._replay = ReplayManagerModel(TreeShape(leaves, 4, 16))
        self.clock = self._replay.clock
        self.free_bytes = (LFE5U_85F_BLOCK_RAMS - self._replay.block_rams) * BLOCK_RAM_BITS / 8

    def replay_seconds(self, batches: Sequence[int]) -> dict[int, tuple[float, float]]:
        """By batch, seconds of drawing it, and of setting its priorities."""
        return {b: (self._replay.sample_seconds(b), self._replay.update_seconds(b)) for b in batches}

    def train_seconds(self, spec: EnvSpec, config: Any, batch: int) -> tuple[float, float]:
        """(seconds of a gradient step of DDPG, bytes of block RAM that are left beside the learner).

        The pipeline is the chain of policy and critic; the observation goes past the policy to the critic. A
        gradient step is two passes of it: one for the critic's update, whose forward pass counts for that of
        the target nets, and one for the policy's. The design was not placed: its clock is assumed to be that
        of the slowest unit that was.

        Raises Refusal for images, for a batch whose gradients could overflow, and if weights and activations
        do not fit.
        """
        if spec.images:
            raise Refusal("its net has convolutions, and the FPGA's learner has none.")
        most = FixedPointFormats().largest_batch
        if batch > most:
            raise Refusal(f"the sums of gradients in its accumulators could overflow above {most} samples.")
        (observation,), (action,) = spec.observation_shape, spec.action_shape
        hidden = config.hidden
        layers = (observation, hidden, hidden, observation + action, hidden, hidden, 1)
        self._left(layers, batch, 1)  # to choose takes long for nets that are too large
        model = choose(layers, batch, clock_hz=slowest_unit()["mhz"] * 1e6)
        left = self._left(layers, batch, model.dp)
        return 2 * model.gradient_step_seconds(batch), left

    def _left(self, layers: tuple[int, ...], batch: int, pipelines: int) -> float:
        taken = memory_bits(layers, batch, pipelines) / 8
        if taken > self.free_bytes:
            raise Refusal(
                f"weights, gradients and activations take {taken:,.0f} bytes, and beside the replay manager "
                f"{self.free_bytes:,.0f} bytes of block RAM are free."
            )
        return self.free_bytes - taken
