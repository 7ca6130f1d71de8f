"""What happened to a model: frozen records that go to JSON and come back equal."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, overload

from rich.table import Table

from auxin.errors import CheckpointError, InputError, unknown
from auxin.tables import as_text, figure, table

FORMAT = 1


@dataclass(frozen=True)
class Record:
    """One site at one growth.

    `predicted` and `measured` are falls of the loss: to first order at the chosen amplitude on the samples of the
    estimate, and on the held-out samples. `rate` is the first-order slope of the fall at amplitude 0, split in
    `rate_neurons` and `rate_update`; `bottleneck` is Psi before the growth. `slots` and `counts` say which tensors
    and attributes grew, so that a file can be replayed on a seed model.
    """

    site: str
    asked: int
    added: int
    width_before: int
    width_after: int
    singular_values: tuple[float, ...] = ()
    bottleneck: float | None = None
    rate_neurons: float | None = None
    rate_update: float | None = None
    predicted: float | None = None
    measured: float | None = None
    amplitude: float | None = None
    parameters_before: int = 0
    parameters_after: int = 0
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
    details: dict[str, float] = field(default_factory=dict)
    slots: tuple[dict[str, Any], ...] = ()
    counts: tuple[dict[str, Any], ...] = ()
    kept: tuple[int, ...] | None = None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Record":
        """The record that `dataclasses.asdict` and JSON made `data` from."""
        known = {f.name for f in fields(cls)}
        if not known >= set(data):
            raise CheckpointError(f"a growth record has unknown fields {sorted(set(data) - known)}")
        lists = {name: tuple(value) for name, value in data.items() if isinstance(value, list)}
        return cls(**{**data, **lists})


@dataclass(frozen=True)
class Growth(Sequence[Record]):
    """One call of `grow`: a record for every site that was looked at, in the order of application."""

    records: tuple[Record, ...]
    method: str = ""
    seconds: float = 0.0
    samples: int = 0
    samples_held_out: int = 0
    loss_before: float | None = None
    loss_after: float | None = None
    notes: tuple[str, ...] = ()
    call: int | None = None
    metric: float | None = None

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    @overload
    def __getitem__(self, key: str) -> Record: ...
    @overload
    def __getitem__(self, key: int) -> Record: ...
    @overload
    def __getitem__(self, key: slice) -> tuple[Record, ...]: ...
    def __getitem__(self, key: str | int | slice) -> Record | tuple[Record, ...]:
        if isinstance(key, str):
            found = next((record for record in self.records if record.site == key), None)
            if found is None:
                raise unknown("site", key, [record.site for record in self.records])
            return found
        return self.records[key]

    def __rich__(self) -> Table:
        """A row a site."""
        columns = ("site", "width", "predicted fall", "measured fall", "amplitude", "notes")
        rows = [
            (
                record.site,
                f"{record.width_before} → {record.width_after}",
                figure(record.predicted),
                figure(record.measured),
                figure(record.amplitude),
                "; ".join(record.notes),
            )
            for record in self.records
        ]
        before, after = figure(self.loss_before), figure(self.loss_after)
        return table(f"Growth by {self.method}: {self.added} neurons, loss {before} → {after}", columns, rows)

    def __str__(self) -> str:
        return as_text(self)

    @property
    def added(self) -> int:
        """Neurons added over all sites."""
        return sum(record.added for record in self.records)

    @property
    def changed(self) -> bool:
        """Whether anything was changed: neurons, or old weights alone."""
        return any(
            record.added or record.kept is not None or record.amplitude or record.details.get("amplitude_update")
            for record in self.records
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, numbers and strings, ready for JSON."""
        return {**asdict(self), "records": [asdict(record) for record in self.records]}

    def to_json(self) -> str:
        """The growth as one JSON document."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Growth":
        """The growth that `to_dict` made `data` from."""
        records = tuple(Record.from_dict(record) for record in data["records"])
        return cls(**{**data, "records": records, "notes": tuple(data.get("notes", ()))})


@dataclass
class History(Sequence[Growth]):
    """Every growth of a model, oldest first."""

    events: list[Growth] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.events)

    @overload
    def __getitem__(self, key: int) -> Growth: ...
    @overload
    def __getitem__(self, key: slice) -> list[Growth]: ...
    def __getitem__(self, key: int | slice) -> Growth | list[Growth]:
        return self.events[key]

    def append(self, growth: Growth) -> None:
        """Add the newest growth."""
        self.events.append(growth)

    def widths(self) -> dict[str, int]:
        """The last recorded width of every site that ever changed."""
        return {record.site: record.width_after for growth in self.events for record in growth}

    def to_json(self) -> str:
        """The whole history as one JSON document."""
        return json.dumps({"format": FORMAT, "events": [growth.to_dict() for growth in self.events]})

    @classmethod
    def from_json(cls, text: str) -> "History":
        """The history that `to_json` wrote."""
        try:
            data = json.loads(text)
            if data["format"] != FORMAT:
                raise CheckpointError(f"history of format {data['format']!r}; this version reads {FORMAT}")
            return cls([Growth.from_dict(event) for event in data["events"]])
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"not a history that auxin wrote: {error!r}") from error


def as_history(history: "History | Growth | Sequence[Growth]") -> History:
    """A History from whatever `save` accepts: a History, a Growth or a list of Growths."""
    if isinstance(history, History):
        return history
    events = [history] if isinstance(history, Growth) else history
    if not isinstance(events, Sequence) or not all(isinstance(event, Growth) for event in events):
        raise InputError(f"history is a {type(history).__name__}; accepted: a History, a Growth or a list of Growths")
    return History(list(events))
