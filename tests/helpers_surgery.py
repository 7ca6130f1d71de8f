"""Small models with sites written out by hand, so that surgery is tested without the finder."""

from dataclasses import asdict

import torch
from torch import Tensor, nn

from auxin.history import Growth, Record
from auxin.structure import Change, Count, Site, Slot, slot_tensor

BATCH = {"mlp": (6, 5), "deep": (6, 5), "conv": (3, 2, 6, 6), "flat": (3, 2, 4, 4)}


def mlp(width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(5, width), nn.ReLU(), nn.Linear(width, 3))


def deep() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def conv() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 4, 3))


def flat() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 16, 2))


MODELS = {"mlp": mlp, "deep": deep, "conv": conv, "flat": flat}


def producer(name: str) -> tuple[Slot, ...]:
    return Slot(name, "weight", 0, "fan_in"), Slot(name, "bias", 0, "fan_in")


def make_site(model: nn.Module, name: str, slots: tuple[Slot, ...], counts: tuple[Count, ...]) -> Site:
    return Site(name, (name,), (), (), slots, counts, {}, model)


def linear_site(model: nn.Module, name: str, consumer: str) -> Site:
    counts = (Count(name, "out_features"), Count(consumer, "in_features"))
    return make_site(model, name, (*producer(name), Slot(consumer, "weight", 1, "fan_out")), counts)


def conv_site(model: nn.Module) -> Site:
    norm = tuple(Slot("1", tensor, 0, "carried") for tensor in ("weight", "bias", "running_mean", "running_var"))
    counts = (Count("0", "out_channels"), Count("1", "num_features"), Count("3", "in_channels"))
    return make_site(model, "0", (*producer("0"), *norm, Slot("3", "weight", 1, "fan_out")), counts)


def flat_site(model: nn.Module) -> Site:
    counts = (Count("0", "out_channels"), Count("3", "in_features", times=16))
    return make_site(model, "0", (*producer("0"), Slot("3", "weight", 1, "fan_out", inner=16)), counts)


SITES = {
    "mlp": lambda model: [linear_site(model, "0", "2")],
    "deep": lambda model: [linear_site(model, "0", "2"), linear_site(model, "2", "4")],
    "conv": lambda model: [conv_site(model)],
    "flat": lambda model: [flat_site(model)],
}


def entries(model: nn.Module, slot: Slot, count: int, seed: int = 0) -> Tensor:
    """Random new entries for a slot: (..., outer, count, inner, ...)."""
    tensor = slot_tensor(model, slot)
    axis = slot.axis % tensor.dim()
    shape = (*tensor.shape[:axis], slot.outer, count, slot.inner, *tensor.shape[axis + 1 :])
    generator = torch.Generator().manual_seed(seed + 17 * axis + len(slot.name))
    return torch.rand(shape, generator=generator) + 0.1


def change(model: nn.Module, site: Site, count: int, quiet: bool = True, **more: object) -> Change:
    """A change by `count` neurons, with zero fan-out where `quiet`."""
    new = {slot: entries(model, slot, count) for slot in site.slots}
    if quiet:
        new = {slot: tensor * (slot.role != "fan_out") for slot, tensor in new.items()}
    return Change(site, count, new, **more)


def build(kind: str) -> tuple[nn.Module, list[Site], Tensor]:
    """A model, its sites and an input, the same at every call."""
    torch.manual_seed(0)
    model = MODELS[kind]()
    return model, SITES[kind](model), torch.randn(BATCH[kind])


def train(model: nn.Module, x: Tensor, *optimizers: torch.optim.Optimizer, steps: int = 3) -> Tensor:
    """A few steps on a fixed loss; the last loss, whose graph is alive."""
    loss = torch.zeros(())
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    return loss


def grow(model: nn.Module, changes: list[Change], optimizers: tuple = ()) -> Growth:
    """Apply changes, and the growth that records them."""
    from auxin.surgery import apply

    before = [item.site.width for item in changes]
    apply(model, changes, optimizers)
    return Growth(tuple(_record(item, width) for item, width in zip(changes, before, strict=True)))


def _record(item: Change, width: int) -> Record:
    site, keep = item.site, item.keep
    return Record(
        site.name,
        item.count,
        item.count,
        width,
        site.width,
        slots=tuple(asdict(slot) for slot in site.slots),
        counts=tuple(asdict(count) for count in site.counts),
        kept=None if keep is None else tuple(keep.tolist()),
    )


def snapshot(model: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, object]:
    """Everything that a failed change must leave as it was, bit by bit and object by object."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        "bits": {name: bits(tensor) for name, tensor in named.items()},
        "objects": {name: id(tensor) for name, tensor in named.items()},
        "storage": {name: (tensor.data_ptr(), tensor.stride()) for name, tensor in named.items()},
        "grads": {name: (id(tensor.grad), bits(tensor.grad)) for name, tensor in named.items()},
        "attributes": {name: _integers(module) for name, module in model.named_modules()},
        "state": [_state(optimizer) for optimizer in optimizers],
        "rng": bits(torch.get_rng_state()),
    }


def bits(tensor: Tensor | None) -> tuple | None:
    if tensor is None:
        return None
    flat = tensor.detach().cpu().contiguous().flatten()
    return tuple(tensor.shape), tensor.dtype, flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _integers(module: nn.Module) -> dict[str, int]:
    return {name: value for name, value in vars(module).items() if type(value) is int}


def _state(optimizer: torch.optim.Optimizer) -> list:
    return [
        (id(parameter), {key: bits(value) if torch.is_tensor(value) else value for key, value in state.items()})
        for parameter, state in optimizer.state.items()
    ]
