"""A grown model in one file: safetensors, with the growth history as JSON in its header, and no pickle.

The file holds every parameter and persistent buffer once. Its header's metadata has `auxin`, the format's version;
`history`, the History as JSON; `layout`, as JSON, the memory formats other than the usual one and the tied names.
"""

import json
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from auxin.edits import blank
from auxin.errors import AuxinError, CheckpointError
from auxin.history import Growth, History, Record, as_history
from auxin.structure import Change, Count, Site, Slot, memory_format, slot_tensor
from auxin.surgery import plain, replay

FORMAT = "1"

_FORMATS = {"channels_last": torch.channels_last, "channels_last_3d": torch.channels_last_3d}
_Path = str | os.PathLike[str]
_Part = TypeVar("_Part")


@dataclass(frozen=True)
class _File:
    """What a checkpoint holds: tensors in their memory format, ties (name: name it is stored under), the history."""

    tensors: dict[str, Tensor]
    ties: dict[str, str]
    history: History


@dataclass
class _Span:
    """Sizes of one axis of one tensor, before and after a history."""

    first: int
    last: int


def save(path: _Path, model: nn.Module, history: History | Growth | Sequence[Growth]) -> None:
    """Write a model and how it grew to one file, whole or not at all.

    `history` is a History, or what `grow` returned, or a list of that. Parameters and persistent buffers are stored.
    """
    target = _path(path)
    model = plain(model)
    tensors, ties = _contents(model)
    events = as_history(history)
    buffers = dict(model.named_buffers(remove_duplicate=False))
    _check_history(_spans(events), {**buffers, **dict(model.named_parameters(remove_duplicate=False))}, "the model")
    formats = {name: str(memory_format(tensor)).removeprefix("torch.") for name, tensor in tensors.items()}
    layout = {"formats": {n: f for n, f in formats.items() if f in _FORMATS}, "ties": ties}
    metadata = {"auxin": FORMAT, "history": events.to_json(), "layout": json.dumps(layout)}
    _write(target, {name: _storable(tensor) for name, tensor in tensors.items()}, metadata)


def _path(path: object) -> Path:
    if not isinstance(path, (str, os.PathLike)):
        raise CheckpointError(f"path is {path!r}; accepted: a file name or a Path")
    return Path(path)


def load(path: _Path, seed_model: nn.Module) -> nn.Module:
    """Grow a seed model, in place, as the file's history says, give it the file's values, and return it.

    `seed_model` is the model as it was built before its first growth; its Parameters stay the same objects. On any
    error it is left as it was.
    """
    model = plain(seed_model)
    try:
        with torch.inference_mode(False):  # a Parameter filled with inference tensors could not be trained
            _load(Path(path), model)
    except (AuxinError, OSError, AttributeError, TypeError, LookupError) as error:
        raise CheckpointError(f"cannot load {os.fspath(path)}: {error}") from error
    return seed_model


def _load(path: Path, model: nn.Module) -> None:
    file = _read(path)
    spans = _spans(file.history)
    stored = {**file.tensors, **{name: file.tensors[first] for name, first in file.ties.items()}}
    known = {key: span for key, span in spans.items() if key[0] in stored}  # buffers may not be persistent
    _check_history(known, stored, "the tensors in the file")
    _check_seed(model, file, spans)
    replay(model, list(_changes(model, file.history)), file.tensors)


def _contents(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Every parameter and persistent buffer under its first name, and the other names of those that have several."""
    tensors: dict[str, Tensor] = {}
    ties: dict[str, str] = {}
    names: dict[int, str] = {}
    for name, tensor in _persistent(model):
        first = names.setdefault(id(tensor), name)
        if first == name:
            tensors[name] = tensor
        else:
            ties[name] = first
    return tensors, ties


def _persistent(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, module in model.named_modules(remove_duplicate=False):
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise CheckpointError(
                f"module {path!r} keeps extra state (get_extra_state), which a file of tensors cannot hold; register "
                "it as a buffer, or use torch.save"
            )
        buffers = {n: b for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set}
        for name, tensor in {**module._parameters, **buffers}.items():
            if tensor is None:
                continue
            full = f"{path}.{name}" if path else name
            if is_lazy(tensor) or tensor.is_meta:
                raise CheckpointError(f"{full} has no values yet (lazy, or on the meta device); initialise it first")
            yield full, tensor


def _storable(tensor: Tensor) -> Tensor:
    """A contiguous tensor on the CPU with storage of its own, as safetensors demands."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write beside the target, bring it to the disk, then put it in the target's place."""
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise CheckpointError(f"cannot write {path}: the folder {target.parent} does not exist; create it first")
    if target.is_dir():
        raise CheckpointError(f"cannot write {path}: it is a folder; give the name of a file")
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        save_file(tensors, temporary, metadata)
        os.chmod(temporary, 0o666 & ~_umask())
        _sync(temporary)
        os.replace(temporary, target)
        if os.name == "posix":  # elsewhere a folder cannot be opened
            _sync(target.parent)
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(f"cannot write {path}: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def _umask() -> int:
    """The process's mask for new files; it can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(path: Path) -> _File:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if "auxin" not in metadata:
                raise CheckpointError("it was not written by auxin.save: its header has no history")
            if metadata["auxin"] != FORMAT:
                raise CheckpointError(f"it has format {metadata['auxin']}; this version of auxin reads {FORMAT}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except SafetensorError as error:
        raise CheckpointError(f"it is no safetensors file, or a damaged one: {error}") from error
    return _decoded(metadata, tensors)


def _decoded(metadata: dict[str, str], tensors: dict[str, Tensor]) -> _File:
    try:
        layout = json.loads(metadata["layout"])
        formats = {name: _FORMATS[memory] for name, memory in layout["formats"].items() if tensors[name].dim() > 3}
        own = {name: _copy(tensor, formats.get(name)) for name, tensor in tensors.items()}
        ties = {name: first for name, first in layout["ties"].items() if tensors[first] is not None}
        return _File(own, ties, History.from_json(metadata["history"]))
    except (AuxinError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"its header is damaged: {error!r}; save the model again") from error


def _copy(tensor: Tensor, memory: torch.memory_format | None) -> Tensor:
    """A copy that no longer depends on the file, which may be mapped into memory."""
    return torch.empty_like(tensor, memory_format=memory or torch.contiguous_format).copy_(tensor)


def _spans(history: History) -> dict[tuple[str, int], _Span]:
    """For every axis that a history changed, its size before and after, by tensor name and axis."""
    spans: dict[tuple[str, int], _Span] = {}
    for record in (record for growth in history for record in growth):
        kept = record.width_before if record.kept is None else len(record.kept)
        if record.width_after != kept + record.added or (_changes_width(record) and not record.slots):
            raise CheckpointError(f"the record of site {record.site!r} does not say how {_widths(record)} came about")
        for slot in _parts(Slot, record.slots, record):
            block = slot.outer * slot.inner
            size = record.width_before * block
            span = spans.setdefault((slot.name, slot.axis), _Span(size, size))
            if span.last != size:
                raise CheckpointError(
                    f"the history does not hang together: {slot.name} has size {span.last} along axis {slot.axis} "
                    f"where site {record.site!r} went {_widths(record)}; pass every growth since the seed, in order"
                )
            span.last = record.width_after * block
    return spans


def _changes_width(record: Record) -> bool:
    return record.added > 0 or record.kept is not None


def _widths(record: Record) -> str:
    return f"from {record.width_before} to {record.width_after} neurons"


def _parts(kind: type[_Part], items: Iterable[dict[str, Any]], record: Record) -> tuple[_Part, ...]:
    try:
        return tuple(kind(**item) for item in items)
    except TypeError as error:
        raise CheckpointError(f"the record of site {record.site!r} is damaged: {error}") from error


def _check_history(spans: dict[tuple[str, int], _Span], tensors: Mapping[str, Tensor], whose: str) -> None:
    """The sizes that a history ends with must be those of the tensors."""
    wrong = [
        f"{name} ({span.last} along axis {axis}, not {_shape(tensors[name]) if name in tensors else 'there'})"
        for (name, axis), span in spans.items()
        if name not in tensors or tensors[name].shape[axis : axis + 1 or None] != (span.last,)
    ]
    if wrong:
        raise CheckpointError(
            f"the history does not fit {whose}: it ends with {', '.join(wrong)}; pass the history of this very model, "
            "every growth since the seed"
        )


def _check_seed(model: nn.Module, file: _File, spans: dict[tuple[str, int], _Span]) -> None:
    """The seed model must have the file's tensors, in the shapes that they had before the history."""
    tensors, ties = _contents(model)
    ours, theirs = {*tensors, *ties}, {*file.tensors, *file.ties}
    problems = [f"{name} is not in the file" for name in sorted(ours - theirs)]
    problems += [f"{name} is not in the model" for name in sorted(theirs - ours)]
    for name in sorted(file.tensors.keys() & tensors.keys()):
        wanted = _seed_shape(name, file, spans), file.tensors[name].dtype
        if wanted != (tuple(tensors[name].shape), tensors[name].dtype):
            problems.append(f"{name} is {_shape(tensors[name])}, expected {wanted[0]} {wanted[1]}")
    if not problems and ties != file.ties:
        problems = [f"tied tensors are {ties}, expected {file.ties}"]
    if problems:
        raise CheckpointError(
            "it does not fit this seed model; pass a model built like the one that was saved, before its first "
            "growth:\n  " + "\n  ".join(problems)
        )


def _shape(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"


def _seed_shape(name: str, file: _File, spans: dict[tuple[str, int], _Span]) -> tuple[int, ...]:
    shape = list(file.tensors[name].shape)
    for (grown, axis), span in spans.items():
        if file.ties.get(grown, grown) == name:
            shape[axis] = span.first
    return tuple(shape)


def _changes(model: nn.Module, history: History) -> Iterator[Change]:
    """The history as changes that add zeros: only shapes matter, values follow."""
    for record in (record for growth in history for record in growth if _changes_width(record)):
        slots = _parts(Slot, record.slots, record)
        site = Site(record.site, (), (), (), slots, _parts(Count, record.counts, record), {}, model)
        new = {slot: blank(slot_tensor(model, slot), slot, record.added) for slot in slots}
        keep = None if record.kept is None else torch.tensor(record.kept, dtype=torch.int64)
        yield Change(site, record.added, new, keep=keep)
