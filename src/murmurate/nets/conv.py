"""Convolutional torsos for stacks of frames: the nets of the two DQN papers, and Jin's for Doom.

Milliseconds of ``nature2013`` in one thread of a core with AVX-512 and AMX (least of 150 interleaved runs,
on a busy machine). forward: forward pass of a batch of 16. both: forward and backward pass of a batch of 80.

                                         float32           bfloat16
                                         forward   both    forward   both
    contiguous (``channels_last=False``) 1.68      23.8    1.39      11.6
    channels last                        2.00      16.6    1.09       9.4
    channels last, in blocks             2.09      14.9    1.07       7.2
    the same with compiled kernels       1.81      13.2    0.39       3.8

The last line is what this module does where it can.

``_Blocks`` explains the blocks, and ``native/torso.hpp`` the compiled version: a kernel rearranges frames
into blocks, and in bfloat16 one kernel computes all layers on processors with AMX or AVX512_BF16.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from murmurate.nets import _conv_kernels
from murmurate.nets._images import check_images, for_images

_SUPPORTED = ((0, 0), (1, 1), 1)  # the only padding, dilation and groups of the compiled kernels


class Convolution(NamedTuple):
    """One layer: ``channels`` filters of ``kernel`` x ``kernel`` pixels with this stride, without padding."""

    channels: int
    kernel: int
    stride: int


# Mnih et al. 2013, section 4.1; Mnih et al. 2015, Methods; Jin 2018, section 2.5, for Doom
NATURE_2013 = (Convolution(16, 8, 4), Convolution(32, 4, 2))
NATURE_2015 = (Convolution(32, 8, 4), Convolution(64, 4, 2), Convolution(64, 3, 1))
JIN_2018 = (Convolution(32, 8, 4), Convolution(32, 4, 2), Convolution(32, 3, 1))


class ConvTorso(nn.Module):
    """Convolutions and one fully connected layer, each with a ReLU.

    Frames are uint8; the division by 255 is folded into the first layer's weights, which gives the same
    function without a pass over the frames. The last feature map is flattened in the order (row, column,
    channel), which is its order in memory.

    Args:
        shape: (C, H, W) of an observation.
        layers: the convolutions.
        width: width of the fully connected layer.
        channels_last: use ``torch.channels_last`` for weights and activations (faster on a CPU and
            on tensor cores; the same function up to rounding).

    Raises:
        ValueError: if the frames are smaller than the filters.
    """

    def __init__(
        self,
        shape: Sequence[int],
        layers: Sequence[Convolution] = NATURE_2013,
        width: int = 256,
        *,
        channels_last: bool = True,
    ) -> None:
        super().__init__()
        channels, rows, columns = shape
        self.shape = torch.Size(shape)
        self.out_features = width
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.blocks = _Blocks(shape, layers[0]) if channels_last and _Blocks.fits(shape, layers[0]) else None
        self.convolutions = nn.ModuleList()
        for layer in layers:
            self.convolutions.append(nn.Conv2d(channels, layer.channels, layer.kernel, layer.stride))
            channels = layer.channels
            rows = (rows - layer.kernel) // layer.stride + 1
            columns = (columns - layer.kernel) // layer.stride + 1
            if min(rows, columns) < 1:
                raise ValueError(f"frames of {list(shape)} are too small for filters {list(layers)}")
        for convolution in self.convolutions.parameters():
            if convolution.dim() == 4:
                convolution.data = convolution.data.contiguous(memory_format=self.memory_format)
        self.linear = nn.Linear(channels * rows * columns, width)
        self.layers_in_blocks = None if self.blocks is None else _in_blocks(shape, layers)

    def preprocess(self, observation: Tensor) -> Tensor:
        """uint8 [B, C, H, W] rearranged into blocks, as the first layer reads them, so that several nets of
        this shape can share the work; ``forward`` accepts observations in either form.

        Raises:
            ValueError: on another shape or dtype.
        """
        check_images(observation, self.shape)
        return observation if self.blocks is None else self._to_blocks(self.blocks, observation)

    def _to_blocks(self, blocks: _Blocks, observation: Tensor) -> Tensor:
        dtype = self.linear.weight.dtype
        compiled: Tensor | None = _conv_kernels.to_blocks(observation, dtype)
        return blocks(observation, dtype) if compiled is None else compiled

    def forward(self, observation: Tensor) -> Tensor:
        """uint8 [B, C, H, W], or the result of ``preprocess``, to features [B, width] of the parameters'
        dtype.

        Raises:
            ValueError: on another shape or dtype.
        """
        observation, parameters = self._as_read(observation), self._plain_parameters()
        computed = None if parameters is None else self._compiled(observation, parameters)
        return self._forward_in_torch(observation) if computed is None else computed

    def _as_read(self, observation: Tensor) -> Tensor:
        """The observation as the first layer reads it: rearranged into blocks if it is not yet."""
        if torch.compiler.is_exporting():  # the blocks' view as 32-bit words cannot be exported
            check_images(observation, self.shape)
            return observation
        in_blocks = self.blocks is not None and observation.shape[1:] == self.blocks.shape
        return observation if in_blocks else self.preprocess(observation)

    def _compiled(self, blocks: Tensor, parameters: list[Tensor]) -> Tensor | None:
        layers = self.layers_in_blocks
        return None if layers is None else _conv_kernels.run(layers, blocks, parameters)

    def _plain_parameters(self) -> list[Tensor] | None:
        """Weight and bias of each layer for the kernels; None where the kernels do not apply, or if a layer
        was replaced, changed, or given hooks."""
        blocks = self.layers_in_blocks
        # read from the dictionaries: nn.Module's attribute access would take most of this method's time
        modules: dict[str, Any] = vars(self)["_modules"]
        weight = modules["linear"]._parameters.get("weight")
        if blocks is None or weight is None or not _conv_kernels.has_kernels_for(weight.dtype):
            return None
        layers = [*modules["convolutions"]._modules.values(), modules["linear"]]
        if len(layers) != len(blocks) + 1 or _has_any_global_hook():  # type: ignore[no-untyped-call]
            return None
        parameters: list[Any] = []
        for layer, block in zip(layers, (*blocks, None), strict=True):
            if not _conv_kernels.is_plain(layer, nn.Linear if block is None else nn.Conv2d):
                return None
            if block is not None and (
                layer.stride != (block.block, block.block)
                or (layer.padding, layer.dilation, layer.groups) != _SUPPORTED
            ):
                return None
            # a plain tensor in a parameter's place is not in ``_parameters``
            parameters += [layer._parameters.get("weight"), layer._parameters.get("bias")]
        return None if any(parameter is None for parameter in parameters) else parameters

    def _forward_in_torch(self, x: Tensor) -> Tensor:
        """``forward`` in torch, of the observation as the first layer reads it."""
        blocks = None if torch.compiler.is_exporting() else self.blocks
        first, *rest = cast("list[nn.Conv2d]", list(self.convolutions))
        weight = first.weight * (1.0 / 255.0)
        if blocks is None:
            x = x.contiguous(memory_format=self.memory_format).to(weight.dtype)
            x = F.conv2d(x, weight, first.bias, first.stride)
        else:
            x = F.conv2d(x, blocks.weight(weight), first.bias)
        x = x.relu_()
        for convolution in rest:
            x = convolution(x).relu_()
        features: Tensor = self.linear(x.permute(0, 2, 3, 1).flatten(1))
        return features.relu_()


def _in_blocks(shape: Sequence[int], layers: Sequence[Convolution]) -> tuple[_conv_kernels.Layer, ...] | None:
    """``layers`` as convolutions with stride 1 over blocks of stride x stride pixels; None if a filter does
    not consist of whole blocks."""
    channels, height, width = shape
    block_layers = []
    for layer in layers:
        s = layer.stride
        if layer.kernel % s:
            return None
        height, width, side = height // s, width // s, layer.kernel // s
        block_layers.append(_conv_kernels.Layer(height, width, channels * s * s, side, layer.channels, s))
        channels, height, width = layer.channels, height - side + 1, width - side + 1
    return tuple(block_layers)


class _Blocks(nn.Module):
    """Rearranges frames into blocks of 4 x 4 pixels, so that a filter with stride 4 gets stride 1.

    A convolution with kernel 4k and stride 4 over C channels is the convolution with kernel k and
    stride 1 over the 16 C channels of blocks, with the weights in another order. This is faster: four pixels
    of a row are adjacent in both layouts, so frames are rearranged as 32-bit words and not byte by byte; only
    the rearranged bytes are converted to floating point; and a convolution over 64 channels uses the vector
    and matrix units better than one over 4.
    """

    word: Tensor

    def __init__(self, shape: Sequence[int], layer: Convolution) -> None:
        super().__init__()
        c, h, w = shape
        self.rows, self.columns, self.kernel = h // 4, w // 4, layer.kernel // 4
        self.shape = torch.Size((16 * c, self.rows, self.columns))
        # the index of each 32-bit word: from [C, row of blocks, row in block, column of blocks]
        # to [row of blocks, column of blocks, C, row in block]
        word = torch.arange(c * h * w // 4).view(c, self.rows, 4, self.columns)
        self.register_buffer("word", word.permute(1, 3, 0, 2).reshape(1, -1), persistent=False)

    @staticmethod
    def fits(shape: Sequence[int], layer: Convolution) -> bool:
        """Whether whole blocks tile both the frames and the filters."""
        return layer.stride == 4 and layer.kernel % 4 == 0 and shape[1] % 4 == 0 and shape[2] % 4 == 0

    def forward(self, observation: Tensor, dtype: torch.dtype) -> Tensor:
        """uint8 [B, C, H, W] to ``dtype`` [B, 16 C, H / 4, W / 4], channels last."""
        batch = observation.shape[0]
        words = _conv_kernels.rows_of(observation).view(torch.int32)
        words = words.gather(1, self.word.expand(batch, -1))
        blocks = words.view(torch.uint8).view(batch, self.rows, self.columns, -1)
        return blocks.to(dtype).permute(0, 3, 1, 2)

    def weight(self, weight: Tensor) -> Tensor:
        """The weight [O, C, 4k, 4k] as that over blocks, [O, 16 C, k, k], channels last."""
        o, c, k = weight.shape[0], weight.shape[1], self.kernel
        blocks = weight.reshape(o, c, k, 4, k, 4).permute(0, 2, 4, 1, 3, 5)
        return blocks.reshape(o, k, k, c * 16).permute(0, 3, 1, 2)


TORSOS = {
    "nature2013": for_images("nature2013", partial(ConvTorso, layers=NATURE_2013, width=256)),
    "nature2015": for_images("nature2015", partial(ConvTorso, layers=NATURE_2015, width=512)),
    "jin2018": for_images("jin2018", partial(ConvTorso, layers=JIN_2018, width=1024)),
}
