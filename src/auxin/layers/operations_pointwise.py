"""Operations that work on every entry by itself: the layout stays, and a path passes them as the identity."""

from typing import Any

import torch
from torch import Tensor, nn

from auxin.layers.operations_base import Call, Carried, Flow, Refused, Rule, table, tensors_in
from auxin.structure import Carrier, Count, Slot

_MEETING = {
    "add": "added to", "sub": "added to", "rsub": "added to",
    "mul": "multiplied by", "div": "multiplied by",
}  # fmt: skip


def pointwise(call: Call, *args: Any, **kwargs: Any) -> Flow:
    """Activations and arithmetic; every other operand has the same layout or is the same for all neurons."""
    for other in tensors_in((args, kwargs)):
        if other is not call.tensor:
            _check_operand(call, other)
    if torch.is_tensor(call.out) and len(call.shape) != len(call.flow.axes):
        raise Refused(f"broadcast to more axes by {call.name} in {call.where}")
    if call.shape != tuple(_size(axis) for axis in call.flow.axes):
        raise Refused(f"broadcast to another shape by {call.name} in {call.where}")
    return call.flow


def _size(axis: tuple[Any, ...]) -> int:
    size = 1
    for atom in axis:
        size *= atom.size
    return size


def _check_operand(call: Call, other: Tensor) -> None:
    verb = _MEETING.get(call.name.strip("_").removeprefix("i"), f"combined by {call.name} with")
    stream = " (a residual stream)" if verb == "added to" else ""
    flow = call.flow_of(other)
    if flow is not None:
        if flow.group != call.flow.group:
            raise Refused(f"{verb} the output of {flow.group!r} in {call.where}{stream}")
        if (flow.axes, flow.push) != (call.flow.axes, call.flow.push):
            raise Refused(f"combined by {call.name} with itself in another layout in {call.where}")
        return
    if same_for_all_neurons(call.flow, other):
        return
    if isinstance(other, nn.Parameter):
        name = ".".join(filter(None, call.owner(other) or ("a parameter",)))
        raise Refused(f"{verb} the learnable tensor {name!r} of its size in {call.where}")
    channels = other.shape[call.flow.axis - len(call.flow.axes)]
    raise Refused(f"{verb} another tensor of {channels} channels in {call.where}{stream}")


def same_for_all_neurons(flow: Flow, other: Tensor) -> bool:
    """Whether a plain tensor broadcasts over the width.

    At a width of 1 shapes cannot tell a tensor as wide as the site from one that broadcasts: only scalars and
    masks over the samples are taken to broadcast.
    """
    behind = len(flow.axes) - flow.axis
    if other.dim() < behind:
        return True
    if flow.width != 1:
        return other.shape[-behind] == 1
    per_sample = other.dim() == len(flow.axes) and other.numel() == other.shape[0]
    return per_sample and flow.axis > 0 and not isinstance(other, nn.Parameter)


def prelu(call: Call, input: Tensor, weight: Tensor) -> Flow:
    """A parametrised activation with one slope, or one for every channel."""
    if weight.numel() == 1:
        return call.flow
    owner = call.owner(weight)
    if owner is None or owner[0] != call.module or not call.flow.alone(1):
        raise Refused(f"passed through a prelu with {weight.numel()} slopes in {call.where}, not one for each neuron")
    module, tensor = owner
    slots, counts = (Slot(module, tensor, 0, "carried"),), (Count(module, "num_parameters"),)
    return call.flow.with_carrier(Carried(Carrier(module, "elementwise"), slots, counts))


def converted(call: Call, *args: Any, **kwargs: Any) -> Flow:
    """A change of type or device."""
    return call.flow


_ACTIVATIONS = """
    relu relu6 gelu silu tanh sigmoid softplus leaky_relu elu selu celu hardtanh hardswish hardsigmoid mish rrelu
    threshold logsigmoid log_sigmoid softsign tanhshrink hardshrink softshrink abs absolute neg negative positive
    square sqrt rsqrt exp expm1 exp2 log log1p log2 log10 sin cos tan asin acos atan sinh cosh asinh acosh atanh erf
    erfc expit reciprocal sign sgn clamp clamp_min clamp_max clip pow float_power __pow__ __rpow__ nan_to_num round
    floor ceil trunc frac sinc zeros_like ones_like full_like rand_like
    randn_like bernoulli
    dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout feature_alpha_dropout
"""
_ARITHMETIC = """
    add sub mul div subtract multiply divide true_divide rsub floor_divide remainder fmod maximum minimum fmax fmin
    where masked_fill addcmul addcdiv lerp lt le gt ge eq ne less less_equal greater greater_equal not_equal
    logical_and logical_or logical_not isnan isinf isfinite copysign atan2
    __add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__ __truediv__ __rtruediv__ __rdiv__
    __itruediv__ __div__ __idiv__ __lt__ __le__ __gt__ __ge__ __eq__ __ne__ __neg__ __and__ __or__ __invert__
"""
_CONVERSIONS = """
    contiguous clone detach to type type_as float double half bfloat16 cpu cuda requires_grad alias bool int long
"""

RULES: dict[Any, Rule] = {
    **table(pointwise, *_ACTIVATIONS.split(), *_ARITHMETIC.split()),
    **table(converted, *_CONVERSIONS.split()),
    **table(prelu, "prelu"),
    torch.Tensor.data.__get__: converted,  # type: ignore[attr-defined]
}
