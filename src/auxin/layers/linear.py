"""Linear layers: a row is whatever stands on the leading axes (a sample, a token, a position)."""

import torch.nn.functional as F
from torch import Tensor, nn

from auxin.layers.base import Rule, computing, has_bias, register, with_constant
from auxin.statistics import cross_sum, gram_sum
from auxin.structure import Reading


class LinearRule(Rule):
    """`nn.Linear` as producer and consumer; flattened positions are offsets."""

    kinds = (nn.Linear,)

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

    def read_gram(self, module: nn.Module, reading: Reading, virtual: Tensor) -> Tensor:
        """Every position is read once."""
        return gram_sum(self._positions(reading, virtual).flatten(0, 1))

    def read_cross(self, module: nn.Module, reading: Reading, virtual: Tensor, v: Tensor) -> Tensor:
        """The same v for every position."""
        positions, rows = self._positions(reading, virtual), self.output_rows(v)
        if positions.shape[1] == 1:
            return cross_sum(positions[:, 0], rows)
        count, offsets, features = positions.shape
        cross = cross_sum(positions.reshape(count, offsets * features), rows)
        return cross.reshape(offsets, features, -1).permute(1, 2, 0).flatten(1)

    def response(self, module: nn.Module, delta: Tensor, inputs: Tensor) -> Tensor:
        """(..., M)."""
        new = self.update(module, delta)
        return F.linear(computing(inputs), new["weight"], new.get("bias"))

    def _positions(self, reading: Reading, virtual: Tensor) -> Tensor:
        """(rows, O, F0) from (..., outer * F0 * inner)."""
        split = virtual.flatten(0, -2).unflatten(-1, (reading.outer, -1, reading.inner))
        return split.movedim(2, -1).flatten(1, 2)


register(LinearRule())
