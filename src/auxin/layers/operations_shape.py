"""Operations that move entries: reshapes, permutations, indexing, padding."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from auxin.layers.operations_base import WIDTH, Apply, Atom, Axis, Call, Flow, Refused, Reshape, Rule, table


def take(tensor: Tensor, index: tuple[Any, ...]) -> Tensor:
    """`tensor[index]`."""
    return tensor[index]


def reshape(call: Call, *args: Any, **kwargs: Any) -> Flow:
    """Any regrouping of axes that leaves the width in one piece, read off the shape of the result."""
    if call.out.dtype != call.tensor.dtype:
        raise Refused(f"viewed as another type by {call.name} in {call.where}")
    if not call.flow.width:
        raise Refused(f"reshaped at a width of 0 by {call.name} in {call.where}")
    atoms = [atom for axis in call.flow.axes for atom in axis]
    axes, splits = regrouped(atoms, call.shape, call.flow.used, call)
    return _regrouped_flow(call.flow, axes, splits)


def _regrouped_flow(flow: Flow, axes: tuple[Axis, ...], splits: tuple[tuple[int, int, int, int], ...] = ()) -> Flow:
    step = Reshape(tuple(tuple(atom.name for atom in axis) for axis in axes), splits)
    return flow.reshaped(step, axes, flow.used + 2 * len(splits), splits=splits)


def regrouped(
    atoms: list[Atom], shape: torch.Size, used: int, call: Call
) -> tuple[tuple[Axis, ...], tuple[tuple[int, int, int, int], ...]]:
    """Atoms parted among axes of the sizes `shape`; atoms of size 1 that are left over stay with the last axis."""
    rest = list(reversed(atoms))
    axes: list[list[Atom]] = []
    splits: list[tuple[int, int, int, int]] = []
    for size in shape:
        taken: list[Atom] = []
        left = size
        while rest and (left > 1 or (size == 1 and not taken and rest[-1].size == 1)):
            atom = rest.pop()
            if left % atom.size:
                first, second = split_atom(atom, left, used + 2 * len(splits), call)
                splits.append((atom.name, first.name, second.name, second.size))
                rest.append(second)
                atom = first
            taken.append(atom)
            left //= atom.size
        axes.append(taken)
    axes[-1].extend(reversed(rest))
    return tuple(map(tuple, axes)), tuple(splits)


def split_atom(atom: Atom, size: int, name: int, call: Call) -> tuple[Atom, Atom]:
    """`atom` as an outer factor of `size` and an inner one."""
    if atom.name == WIDTH:
        raise Refused(f"split into groups by {call.name} in {call.where}")
    if atom.size % size:
        raise Refused(f"mixed with positions by {call.name} in {call.where}")
    return Atom(name, size), Atom(name + 1, atom.size // size)


def flatten(call: Call, input: Tensor, start_dim: int = 0, end_dim: int = -1) -> Flow:
    """Consecutive axes become one."""
    axes = call.flow.axes
    start, end = start_dim % len(axes), end_dim % len(axes)
    merged = tuple(atom for axis in axes[start : end + 1] for atom in axis)
    return _regrouped_flow(call.flow, (*axes[:start], merged, *axes[end + 1 :]))


def unsqueeze(call: Call, input: Tensor, dim: int) -> Flow:
    """A new axis of size 1."""
    at = dim % (len(call.flow.axes) + 1)
    return _regrouped_flow(call.flow, (*call.flow.axes[:at], (), *call.flow.axes[at:]))


def permute(call: Call, input: Tensor, *args: Any, **kwargs: Any) -> Flow:
    """Any reordering of axes, found by trying the function on a tensor whose sizes are all different."""
    sizes = range(2, 2 + len(call.flow.axes))
    result = call.function(torch.empty(*sizes, device="meta"), *args, **kwargs)
    order = tuple(sizes.index(size) for size in result.shape)
    if order == tuple(range(len(order))):
        return call.flow
    return call.flow.then(Apply(torch.permute, (order,)), tuple(call.flow.axes[i] for i in order))


def index(call: Call, input: Tensor, key: Any) -> Flow:
    """Integers and slices on axes other than the width's, and new axes."""
    items = key if isinstance(key, tuple) else (key,)
    plain = all(item is None or item is Ellipsis or isinstance(item, (int, slice)) for item in items)
    if not plain or any(isinstance(item, bool) for item in items):
        raise Refused(f"indexed by a tensor or a list in {call.where}")
    return _taken(call, _full_index(items, len(call.flow.axes)))


def _full_index(items: tuple[Any, ...], dims: int) -> tuple[Any, ...]:
    """The index with its Ellipsis spelt out."""
    given = sum(item is not None and item is not Ellipsis for item in items)
    at = next((i for i, item in enumerate(items) if item is Ellipsis), len(items))
    return (*items[:at], *[slice(None)] * (dims - given), *items[at + 1 :])


def _taken(call: Call, items: tuple[Any, ...]) -> Flow:
    flow, name = call.flow, call.flow.used
    axes: list[Axis] = []
    renewed, rest = [], iter(enumerate(flow.axes))
    for item in items:
        if item is None:
            axes.append(())
            continue
        at, axis = next(rest)
        if item == slice(None):
            axes.append(axis)
        elif at == flow.axis:
            raise Refused(f"indexed along its neurons in {call.where}")
        elif isinstance(item, slice):
            renewed.append((len(axes), name))
            axes.append((Atom(name, call.shape[len(axes)]),))
            name += 1
    return flow.then(Apply(take, (items,), (), tuple(renewed)), tuple(axes), name)


def select(call: Call, input: Tensor, dim: int, index: int) -> Flow:
    """One index of one axis."""
    dim %= len(call.flow.axes)
    return _taken(call, tuple(index if i == dim else slice(None) for i in range(len(call.flow.axes))))


def narrow(call: Call, input: Tensor, dim: int, start: int, length: int) -> Flow:
    """A slice of one axis."""
    dim %= len(call.flow.axes)
    part = slice(start, start + length)
    return _taken(call, tuple(part if i == dim else slice(None) for i in range(len(call.flow.axes))))


def pad(call: Call, input: Tensor, pad: Any, mode: str = "constant", value: float | None = None) -> Flow:
    """Padding of positions: with zeros, or with what is there."""
    pairs = [tuple(pad[i : i + 2]) for i in range(0, len(pad), 2)]
    dims = len(call.flow.axes)
    touched = [dims - 1 - i for i, pair in enumerate(pairs) if any(pair)]
    call.not_over_width(touched, "padded")
    if mode == "constant" and value:
        raise Refused(f"padded with {value} in {call.where}")
    axes, renewed = call.flow.renewed(touched, call.shape)
    zeros = mode == "constant" and any(size > 0 for pair in pairs for size in pair)
    step = Apply(F.pad, (tuple(pad), mode), (), renewed)
    return call.flow.then(step, axes, call.flow.used + len(touched), zeros)


def whole(call: Call, input: Tensor, *args: Any, **kwargs: Any) -> Flow:
    """Splitting that leaves one piece."""
    if len(call.out) == 1 and call.out[0].shape == input.shape:
        return call.flow
    raise Refused(f"split by {call.name} in {call.where}")


def expand(call: Call, input: Tensor, *args: Any, **kwargs: Any) -> Flow:
    """Expansion to the shape that is there already."""
    if call.shape == input.shape:
        return call.flow
    raise Refused(f"expanded by {call.name} in {call.where}")


RULES: dict[Any, Rule] = {
    **table(reshape, "reshape", "view", "unflatten", "squeeze", "view_as", "reshape_as"),
    **table(flatten, "flatten"),
    **table(unsqueeze, "unsqueeze"),
    **table(permute, "permute", "transpose", "movedim", "moveaxis", "swapaxes", "swapdims", "t", "adjoint"),
    **table(index, "__getitem__"),
    **table(select, "select"),
    **table(narrow, "narrow"),
    **table(pad, "pad"),
    **table(whole, "chunk", "split", "tensor_split"),
    **table(expand, "expand", "expand_as", "broadcast_to"),
    **{getattr(torch.Tensor, name).__get__: permute for name in ("T", "mT", "H", "mH")},
}
