"""The table of operations that a width may pass through on its way from producer to consumer.

An operation that is not listed refuses every width that enters it.
"""

from collections.abc import Callable
from typing import Any

import torch

from auxin.layers import operations_norm, operations_pointwise, operations_pool, operations_shape
from auxin.layers.operations_base import Call, Flow, Refused, Rule, named

RULES: dict[Any, Rule] = {
    **operations_pointwise.RULES,
    **operations_shape.RULES,
    **operations_pool.RULES,
    **operations_norm.RULES,
}

_ASKING = """
    size dim ndimension numel nelement stride storage_offset is_contiguous is_floating_point is_complex element_size
    __len__ get_device data_ptr untyped_storage storage is_pinned is_same_size result_type is_tensor __hash__
    new_empty new_zeros new_ones new_full empty_like
    __repr__ __str__ __format__ is_inference is_signed sym_size sym_numel ndim dim_order is_nonzero_static
"""
_ASKING_FUNCTIONS = frozenset(named(*_ASKING.split()))
_TENSOR_PROPERTIES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag", "grad"})

_WHY = {
    "cat": "concatenated", "concat": "concatenated", "concatenate": "concatenated", "stack": "stacked",
    "hstack": "concatenated", "vstack": "concatenated", "dstack": "concatenated",
    "softmax": "normalised over its neurons or positions", "log_softmax": "normalised over its neurons or positions",
    "matmul": "multiplied as a matrix", "bmm": "multiplied as a matrix", "einsum": "multiplied as a matrix",
    "__matmul__": "multiplied as a matrix", "baddbmm": "multiplied as a matrix", "mm": "multiplied as a matrix",
    "scaled_dot_product_attention": "read by attention", "multi_head_attention_forward": "read by attention",
    "item": "read out as numbers", "tolist": "read out as numbers", "numpy": "read out as numbers",
    "__array__": "read out as numbers", "__setitem__": "written into another tensor",
    "copy_": "written into another tensor", "unbind": "taken apart", "__iter__": "taken apart", "glu": "split",
    "linear": "multiplied by a weight that is not a layer's own",
    "pixel_shuffle": "split into groups", "channel_shuffle": "split into groups",
}  # fmt: skip


def name_of(function: Callable[..., Any]) -> str:
    """What a torch function is called."""
    name = getattr(function, "__name__", None) or type(function).__name__
    return str(getattr(getattr(function, "__self__", None), "__name__", name)) if name == "__get__" else str(name)


def only_asks(function: Callable[..., Any]) -> bool:
    """Whether the result of a function depends on nothing but shapes, types and the like."""
    if getattr(function, "__name__", None) == "__get__":
        return name_of(function) not in _TENSOR_PROPERTIES
    return function in _ASKING_FUNCTIONS


def follow(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Flow:
    """The flow of the result of a call, or `Refused` with the reason."""
    rule = RULES.get(call.function)
    if rule is None or torch.is_tensor(kwargs.get("out")):
        why = _WHY.get(call.name, f"passed to {call.name}, which is not supported,")
        raise Refused(f"{why} in {call.where}" if call.name not in _WHY else f"{why} ({call.name}) in {call.where}")
    if "input" in kwargs:
        args, kwargs = (kwargs["input"], *args), {k: v for k, v in kwargs.items() if k != "input"}
    if rule is not operations_pointwise.pointwise and (not args or args[0] is not call.tensor):
        raise Refused(f"passed to {call.name} beside its input in {call.where}")
    try:
        return rule(call, *args, **kwargs)
    except (TypeError, ValueError, IndexError, StopIteration) as error:
        raise Refused(f"passed to {call.name} in a way that is not recognised in {call.where}: {error}") from error
