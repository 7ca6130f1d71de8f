"""Linear layers: a row is whatever stands on the leading axes (a sample, a token, a position)."""

import torch.nn.functional as F
from torch import Tensor, nn

from auxin.layers.base import Rule, computing, has_bias, register, with_constant
from auxin.statistics import cross_sum, gram_and_cross, gram_sum
from auxin.structure import Reading


class LinearRule(Rule):
    """`nn.Linear` as producer and consumer; flattened positions are offsets."""

    kinds = (nn.Linear,)
    adds_constant = True

    def virtual(self, module: nn.Module, inputs: Tensor) -> Tensor:
        """(..., F0): the inputs themselves."""
        return with_constant(computing(inputs), has_bias(module))

    def rows(self, module: nn.Module, inputs: Tensor) -> Tensor:
        """(rows, F1): the inputs with their leading axes flattened."""
        return with_constant(computing(inputs).flatten(0, -2), has_bias(module))

    def output_rows(self, outputs: Tensor) -> Tensor:
        """(rows, M)."""
        return computing(outputs).flatten(0, -2)

    def neuron_rows(self, module: nn.Module, reading: Reading, inputs: Tensor) -> Tensor:
        """(rows, k, O) from inputs (..., outer * k * inner)."""
        split = computing(inputs).flatten(0, -2).unflatten(-1, (reading.outer, -1, reading.inner))
        return split.movedim(2, 1).flatten(2)

    def offsets(self, module: nn.Module, reading: Reading) -> int:
        """Every flattened position is one."""
        return reading.outer * reading.inner

    def read(
        self, module: nn.Module, reading: Reading, virtual: Tensor, v: Tensor, constant: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Every position is read once, with the same v."""
        rows, split = self.output_rows(v), virtual.flatten(0, -2).unflatten(-1, (reading.outer, -1, reading.inner))
        positions = split.movedim(2, -1).flatten(1, 2)
        count, offsets, features = positions.shape
        if offsets == 1:
            return gram_and_cross(positions[:, 0], rows, constant)
        cross = cross_sum(positions.reshape(count, offsets * features), rows)
        ordered = cross.reshape(offsets, features, -1).permute(1, 2, 0).flatten(1)
        return gram_sum(positions.flatten(0, 1)), ordered

    def response(self, module: nn.Module, delta: Tensor, inputs: Tensor) -> Tensor:
        """(..., M)."""
        new = self.update(module, delta)
        return F.linear(computing(inputs), new["weight"], new.get("bias"))


register(LinearRule())
