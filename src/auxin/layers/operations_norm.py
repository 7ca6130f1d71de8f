"""Normalisations: carriers of a width where they treat every neuron (or whole groups) by itself."""

from typing import Any

from torch import Tensor

from auxin.layers.operations_base import Call, Carried, Flow, Refused, Rule, table
from auxin.structure import Carrier, Count, Slot


def _slots(call: Call, *tensors: Tensor | None) -> tuple[Slot, ...]:
    """Slots of the norm's tensors, which have to be those of the module that is running."""
    owners = [call.owner(tensor) for tensor in tensors if tensor is not None]
    if any(owner is None or owner[0] != call.module for owner in owners):
        raise Refused(f"normalised by {call.name} in {call.where} with tensors that are not that module's own")
    return tuple(Slot(owner[0], owner[1], 0, "carried") for owner in owners if owner is not None)


def _channels(call: Call) -> None:
    if not call.flow.alone(1):
        raise Refused(f"mixed over its neurons by {call.name} in {call.where}")


def batch_norm(
    call: Call,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Flow:
    """Batch norm over the channels."""
    _channels(call)
    full = all(tensor is not None for tensor in (running_mean, running_var, weight, bias))
    carrier = Carrier(call.module, "batch_norm" if full else "normaliser")
    slots = _slots(call, weight, bias, running_mean, running_var)
    return call.flow.with_carrier(Carried(carrier, slots, (Count(call.module, "num_features"),)))


def instance_norm(
    call: Call,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Flow:
    """Instance norm: every channel of every sample by itself."""
    _channels(call)
    slots = _slots(call, weight, bias, running_mean, running_var)
    carrier = Carrier(call.module, "normaliser")
    return call.flow.with_carrier(Carried(carrier, slots, (Count(call.module, "num_features"),)))


def group_norm(
    call: Call,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *args: Any,
) -> Flow:
    """Group norm, which whole new groups leave alone."""
    _channels(call)
    group = call.flow.width // num_groups
    carrier = Carrier(call.module, "normaliser", group)
    counts = (Count(call.module, "num_channels"), Count(call.module, "num_groups", per=group))
    return call.flow.with_carrier(Carried(carrier, _slots(call, weight, bias), counts))


def layer_norm(call: Call, input: Tensor, normalized_shape: Any, *args: Any, **kwargs: Any) -> Flow:
    """Layer or RMS norm over axes beside the width."""
    dims = len(call.flow.axes)
    call.not_over_width(list(range(dims - len(tuple(normalized_shape)), dims)), "normalised")
    return call.flow.with_carrier(Carried(Carrier(call.module, "normaliser")))


RULES: dict[Any, Rule] = {
    **table(batch_norm, "batch_norm"),
    **table(instance_norm, "instance_norm"),
    **table(group_norm, "group_norm"),
    **table(layer_norm, "layer_norm", "rms_norm"),
}
