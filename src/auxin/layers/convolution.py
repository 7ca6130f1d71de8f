"""Convolutions of one, two and three dimensions: a row is an output pixel, its features the unfolded patch."""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from auxin.layers.base import Rule, computing, has_bias, register, weight_of
from auxin.linalg import convolution_n, read_counts
from auxin.statistics import gram_sum
from auxin.structure import Reading

Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d


class ConvolutionRule(Rule):
    """`nn.Conv1d`, `nn.Conv2d` and `nn.Conv3d` with every stride, padding, padding mode and dilation."""

    kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d)

    def virtual(self, module: nn.Module, inputs: Tensor) -> Tensor:
        """(n, F0, *grid), its memory laid out channels last."""
        return patch_grid(cast(Conv, module), computing(inputs), has_bias(module)).movedim(-1, 1)

    def rows(self, module: nn.Module, inputs: Tensor) -> Tensor:
        """(pixels, F1): the unfolded patches."""
        return patch_grid(cast(Conv, module), computing(inputs), has_bias(module)).flatten(0, -2)

    def output_rows(self, outputs: Tensor) -> Tensor:
        """(pixels, M)."""
        return computing(outputs).movedim(1, -1).flatten(0, -2)

    def neuron_rows(self, module: nn.Module, reading: Reading, inputs: Tensor) -> Tensor:
        """(pixels, k, O): the patches of k channels."""
        patches = patch_grid(cast(Conv, module), computing(inputs))
        return patches.flatten(0, -2).unflatten(-1, (inputs.shape[1], -1))

    def offsets(self, module: nn.Module, reading: Reading) -> int:
        """Every entry of the kernel is one."""
        return weight_of(module).shape[2:].numel()

    def read(
        self, module: nn.Module, reading: Reading, virtual: Tensor, v: Tensor, constant: bool = False
    ) -> tuple[Tensor, Tensor]:
        """A pixel weighs by the number of pairs that read it; N is the weight gradient of a convolution."""
        conv = cast(Conv, module)
        padded, padding = with_borders(conv, virtual)
        geometry = conv.kernel_size, conv.stride, padding, conv.dilation
        weights = read_counts(padded.shape[2:], *geometry).to(padded).flatten().repeat(len(padded))
        rows, used = padded.movedim(1, -1).flatten(0, -2), weights > 0
        gram = gram_sum(rows, weights) if bool(used.all()) else gram_sum(rows[used], weights[used])
        return gram, convolution_n(padded, v, *geometry)

    def response(self, module: nn.Module, delta: Tensor, inputs: Tensor) -> Tensor:
        """(n, M, *grid)."""
        new = self.update(module, delta)
        return cast(Conv, module)._conv_forward(computing(inputs), new["weight"], new.get("bias"))


def pad_borders(conv: Conv, inputs: Tensor) -> Tensor:
    """`inputs` with the borders that the layer would add, whatever its padding mode."""
    borders = conv._reversed_padding_repeated_twice
    if not any(borders):
        return inputs
    mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
    return F.pad(inputs, borders, mode=mode)


def with_borders(conv: Conv, inputs: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Inputs and the zeros still to be padded: borders are made here only where they are not equal zeros."""
    if conv.padding_mode == "zeros" and isinstance(conv.padding, tuple):
        return inputs, conv.padding
    return pad_borders(conv, inputs), (0,) * len(conv.stride)


def patch_grid(conv: Conv, inputs: Tensor, constant: bool = False) -> Tensor:
    """The patches that the layer reads: (n, *grid, channels * offsets), and a constant 1 at the end where wanted."""
    padded = pad_borders(conv, inputs)
    n, channels, *sizes = padded.shape
    geometry = list(zip(sizes, conv.kernel_size, conv.stride, conv.dilation, strict=True))
    grid = [(size - dilation * (kernel - 1) - 1) // stride + 1 for size, kernel, stride, dilation in geometry]
    steps = padded.stride()
    strides = [
        steps[0],
        *(step * stride for step, stride in zip(steps[2:], conv.stride, strict=True)),
        steps[1],
        *(step * dilation for step, dilation in zip(steps[2:], conv.dilation, strict=True)),
    ]
    view = padded.as_strided([n, *grid, channels, *conv.kernel_size], strides, padded.storage_offset())
    patches = padded.new_empty(n, *grid, channels * torch.Size(conv.kernel_size).numel() + constant)
    if constant:
        patches[..., -1] = 1.0
    patches[..., : patches.shape[-1] - constant].unflatten(-1, (channels, *conv.kernel_size)).copy_(view)
    return patches


register(ConvolutionRule())
