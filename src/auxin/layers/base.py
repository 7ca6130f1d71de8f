"""What every layer family tells the rest: how its rows look, and where its weights go.

Shapes: `n` samples, `F0` virtual channels (input features of a producer, and the constant 1 where it has a bias),
`F1` input features of a consumer (likewise), `M` outputs of a consumer, `O` offsets under which one output reads a
neuron. The columns of N and of a fan-out are ordered (m, o). Samples stand outermost on the first axis.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from auxin.errors import InputError
from auxin.structure import Reading

CHUNK = 2**20
"""Entries of the largest temporary made of virtual channels: larger ones are fresh memory each time, and slow."""


class Rule(ABC):
    """One layer family in its two roles, producer and consumer. It keeps no state."""

    kinds: tuple[type[nn.Module], ...]
    adds_constant = False
    """Whether `read` can take virtual channels without the bias's constant 1 and add it itself, saving a copy."""

    @abstractmethod
    def virtual(self, module: nn.Module, inputs: Tensor) -> Tensor:
        """Virtual channels: the input features of a producer in the layout of its output, F0 on the width's axis."""

    @abstractmethod
    def rows(self, module: nn.Module, inputs: Tensor) -> Tensor:
        """What a consumer's weight multiplies: (rows, F1), the bias's constant 1 last."""

    @abstractmethod
    def output_rows(self, outputs: Tensor) -> Tensor:
        """A consumer's outputs (or their gradients) as (rows, M), in the order of `rows`."""

    @abstractmethod
    def neuron_rows(self, module: nn.Module, reading: Reading, inputs: Tensor) -> Tensor:
        """What a consumer reads of k neurons that stand alone at its input: (rows, k, O)."""

    @abstractmethod
    def offsets(self, module: nn.Module, reading: Reading) -> int:
        """O: under how many offsets one output reads a neuron."""

    @abstractmethod
    def read(
        self, module: nn.Module, reading: Reading, virtual: Tensor, v: Tensor, constant: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Sums in float64 over every reading (q, o) of b0: of b0 b0^T, (F0, F0), and of b0 v_m^T, (F0, M * O).

        S of `eq:pseudo_S` before r / n, and N of `eq:pseudo_N` before 1 / n. `constant`: a 1 is still to be added to
        every row of b0 (only where `adds_constant`).
        """

    @abstractmethod
    def response(self, module: nn.Module, delta: Tensor, inputs: Tensor) -> Tensor:
        """What a change (M, F1) of a consumer's weight adds to its outputs, in their layout."""

    def outputs(self, module: nn.Module) -> int:
        """M: the number of outputs."""
        return weight_of(module).shape[0]

    def fan_in(self, module: nn.Module, alpha: Tensor) -> dict[str, Tensor]:
        """New rows of a producer's tensors, (1, k, 1, ...), from fan-ins (k, F0)."""
        weight = weight_of(module)
        features = weight[0].numel() if weight.shape[0] else weight.shape[1:].numel()
        new = {"weight": alpha[:, :features].reshape(1, len(alpha), 1, *weight.shape[1:])}
        if has_bias(module):
            new["bias"] = alpha[:, features:].reshape(1, -1, 1)
        return new

    def fan_out(self, module: nn.Module, reading: Reading, omega: Tensor) -> Tensor:
        """New columns of a consumer's weight, (M, outer, k, inner, ...), from fan-outs (k, M, O)."""
        kernel = weight_of(module).shape[2:]
        shape = (omega.shape[0], omega.shape[1], reading.outer, reading.inner, *kernel)
        return omega.reshape(shape).movedim(0, 2)

    def update(self, module: nn.Module, delta: Tensor) -> dict[str, Tensor]:
        """A change (M, F1) of a consumer's weight and bias, in the shapes of its tensors."""
        weight = weight_of(module)
        features = weight.shape[1:].numel()
        new = {"weight": delta[:, :features].reshape(len(delta), *weight.shape[1:])}
        if has_bias(module):
            new["bias"] = delta[:, features]
        return new

    def weight_rows(self, module: nn.Module) -> Tensor:
        """A consumer's weight (and bias) as (M, F1)."""
        rows = weight_of(module).detach().flatten(1)
        return torch.cat([rows, bias_of(module).detach()[:, None]], dim=1) if has_bias(module) else rows

    def neuron_columns(self, module: nn.Module, reading: Reading, neurons: Tensor) -> Tensor:
        """Indices in F1 of what `neurons` bring: (len(neurons), O)."""
        weight = weight_of(module)
        columns = torch.arange(weight.shape[1:].numel(), device=neurons.device)
        width = weight.shape[1] // (reading.outer * reading.inner)
        grid = columns.reshape(reading.outer, width, reading.inner, -1)
        return grid[:, neurons].movedim(1, 0).flatten(1)

    def usual_norm(self, module: nn.Module) -> float:
        """Norm of a fan-in (without the bias) at torch's usual initialisation, U(-1/sqrt(f), 1/sqrt(f))."""
        return 3.0**-0.5


_RULES: list[Rule] = []


def register(rule: Rule) -> Rule:
    """Make a layer family known; one call in the family's file."""
    _RULES.append(rule)
    return rule


def rule_for(module: nn.Module) -> Rule:
    """The rule of a module's family."""
    for rule in _RULES:
        if isinstance(module, rule.kinds):
            return rule
    names = sorted(kind.__name__ for rule in _RULES for kind in rule.kinds)
    raise InputError(f"no rule for a {type(module).__name__}; known are {', '.join(names)}")


def weight_of(module: nn.Module) -> Tensor:
    """The weight of a layer."""
    return module.get_parameter("weight")


def has_bias(module: nn.Module) -> bool:
    """Whether a layer has a bias."""
    return getattr(module, "bias", None) is not None


def bias_of(module: nn.Module) -> Tensor:
    """The bias of a layer that has one."""
    return module.get_parameter("bias")


def computing(tensor: Tensor) -> Tensor:
    """`tensor` in a type that products are exact enough in: half types as float32, others as they are."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def with_constant(rows: Tensor, wanted: bool) -> Tensor:
    """`rows` with a last feature 1 for the bias, where wanted."""
    return torch.cat([rows, rows.new_ones(*rows.shape[:-1], 1)], dim=-1) if wanted else rows
