"""Operations that combine positions: pooling, means and sums, interpolation."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from auxin.layers.operations_base import Apply, Call, Flow, Refused, Rule, table

_AVERAGE: dict[int, Callable[..., Tensor]] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
_ADAPTIVE: dict[int, Callable[..., Tensor]] = {
    1: F.adaptive_avg_pool1d,
    2: F.adaptive_avg_pool2d,
    3: F.adaptive_avg_pool3d,
}


def _pooled(call: Call, dims: int, step: Apply, padded: bool = False) -> Flow:
    positions = list(range(len(call.flow.axes) - dims, len(call.flow.axes)))
    call.not_over_width(positions, "pooled")
    axes, renewed = call.flow.renewed(positions, call.shape)
    return call.flow.then(Apply(step.function, step.args, step.options, renewed), axes, call.flow.used + dims, padded)


def max_pool(
    dims: int,
    call: Call,
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Flow:
    """Max pooling has no linearisation at 0: the average of the same windows stands for it."""
    if any(d != 1 for d in _several(dilation)):
        raise Refused(f"passed through a dilated max pooling in {call.where}")
    options = {"stride": stride or kernel_size, "padding": padding, "ceil_mode": ceil_mode, "count_include_pad": False}
    return _pooled(call, dims, Apply(_AVERAGE[dims], (kernel_size,), tuple(options.items())))


def average_pool(
    dims: int,
    call: Call,
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Flow:
    """Average pooling, as it is."""
    options = {"stride": stride or kernel_size, "padding": padding, "ceil_mode": ceil_mode}
    options |= {"count_include_pad": count_include_pad}
    options |= {} if divisor_override is None else {"divisor_override": divisor_override}
    padded = any(_several(padding)) and (count_include_pad or divisor_override is not None)
    return _pooled(call, dims, Apply(_AVERAGE[dims], (kernel_size,), tuple(options.items())), padded)


def adaptive_pool(dims: int, call: Call, input: Tensor, output_size: Any, return_indices: bool = False) -> Flow:
    """Adaptive pooling to fixed sizes, as an average."""
    return _pooled(call, dims, Apply(_ADAPTIVE[dims], (output_size,)))


def reduce(
    function: Callable[..., Tensor], call: Call, input: Tensor, dim: Any = None, keepdim: bool = False, **kwargs: Any
) -> Flow:
    """A mean (or maximum, as a mean) or sum over positions."""
    dim = kwargs.get("axis", dim)
    count = len(call.flow.axes)
    dims = tuple(d % count for d in _several(dim)) if dim is not None and _several(dim) else tuple(range(count))
    call.not_over_width(list(dims), "reduced")
    axes = tuple(() if i in dims else axis for i, axis in enumerate(call.flow.axes) if keepdim or i not in dims)
    return call.flow.then(Apply(function, (dims, keepdim)), axes)


def maximum(call: Call, input: Tensor, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Flow:
    """The largest over one axis of positions, or the larger of two tensors."""
    if torch.is_tensor(dim):
        raise Refused(f"compared with another tensor by {call.name} in {call.where}")
    return reduce(torch.mean, call, input, dim, keepdim, **kwargs)


def interpolate(
    call: Call,
    input: Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Flow:
    """Interpolation by a factor; a fixed size would be that of the example."""
    if scale_factor is None:
        raise Refused(f"interpolated to a fixed size in {call.where}")
    positions = list(range(2, len(call.flow.axes)))
    call.not_over_width(positions, "interpolated")
    axes, renewed = call.flow.renewed(positions, call.shape)
    options = {"mode": mode, "align_corners": align_corners, "antialias": antialias}
    options |= {"recompute_scale_factor": recompute_scale_factor}
    step = Apply(F.interpolate, (None, scale_factor), tuple(options.items()), renewed)
    return call.flow.then(step, axes, call.flow.used + len(positions))


def _several(value: Any) -> Sequence[Any]:
    return tuple(value) if isinstance(value, (tuple, list, torch.Size)) else (value,)


def _by_dimension(rule: Callable[..., Flow], *patterns: str) -> dict[Any, Rule]:
    rules: dict[Any, Rule] = {}
    for dims in (1, 2, 3):
        rules |= table(partial(rule, dims), *(pattern.format(dims) for pattern in patterns))
    return rules


RULES: dict[Any, Rule] = {
    **_by_dimension(max_pool, "max_pool{}d", "max_pool{}d_with_indices"),
    **_by_dimension(average_pool, "avg_pool{}d"),
    **_by_dimension(adaptive_pool, "adaptive_avg_pool{}d", "adaptive_max_pool{}d"),
    **table(partial(reduce, torch.mean), "mean", "amax"),
    **table(partial(reduce, torch.sum), "sum"),
    **table(maximum, "max"),
    **table(interpolate, "interpolate", "upsample"),
}
