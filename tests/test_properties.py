"""Properties of every growth, over random models, data, types, optimizers and methods."""

import copy
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, event, given
from hypothesis import strategies as st
from torch import Tensor, nn

import auxin
from auxin.structure import Site, Slot
from examples import examples
from helpers_models import (
    ACTIVATIONS,
    METHODS,
    OPTIMIZERS,
    OUTPUTS,
    Case,
    Net,
    cases,
    make_step,
    optimizers_of,
    tensors_of,
)
from helpers_surgery import bits

AMPLITUDES = st.sampled_from([0.0, None, 0.5])

# How an entry of an optimizer's state follows a filter that is multiplied by s: times s to this power.
DEGREES = {
    "exp_avg": -1, "exp_inf": -1, "grad_avg": -1, "exp_avg_sq": -2, "max_exp_avg_sq": -2, "square_avg": -2, "sum": -2,
    "variance": -2, "row_var": -2, "col_var": -2, "acc_delta": 2,
}  # fmt: skip


# --- what stays ------------------------------------------------------------------------------------------------


@examples(200)
@given(case=cases(amplitudes=(0.0,)))
def test_amplitude_0_keeps_the_output_and_every_old_entry(case: Case) -> None:
    before, old = copy.deepcopy(case.model), entries(case.model)
    growth = case.grow()
    event(f"added: {min(growth.added, 3)}")
    sites = sites_of(case, growth)
    for name, tensor in tensors_of(case.model):
        kept = old_region(tensor.detach(), name, old[name].shape, sites, growth)
        assert torch.equal(kept, old[name]), f"{name} changed"
    for training in (False, True):
        wanted, seen = (outputs(model, case.example, training, torch.float64) for model in (before, case.model))
        assert relative(seen, wanted) < 1e-9
        wanted, seen, exact = (
            outputs(model, case.example, training, dtype)
            for model, dtype in ((before, None), (case.model, None), (before, torch.float64))
        )
        assert relative(seen, wanted) < rounding(case) + 10 * relative(wanted, exact)


@examples(200)
@given(case=cases())
def test_growth_keeps_objects_gradients_and_optimizer_state(case: Case) -> None:
    random = bits(torch.get_rng_state())
    objects = {name: id(tensor) for name, tensor in case.model.named_parameters()}
    formats = {name: is_channels_last(tensor) for name, tensor in tensors_of(case.model)}
    old, gradients, states = entries(case.model), gradients_of(case.model), states_of(case)
    growth = case.grow()
    assert bits(torch.get_rng_state()) == random
    assert {name: id(tensor) for name, tensor in case.model.named_parameters()} == objects
    assert all(is_channels_last(tensor) for name, tensor in tensors_of(case.model) if formats[name])
    sites = sites_of(case, growth)
    scales = scales_of(case, growth, old, sites)
    for name, parameter in case.model.named_parameters():
        region = (name, old[name].shape, sites, growth)
        if name in gradients:
            check_kept(parameter.grad, gradients[name], region, scales[name], -1)
        else:
            assert parameter.grad is None
        for key, value in states[name].items():
            if key == "step" and never_moved(states[name]):
                continue  # it starts anew
            degree = 0 if is_rms_momentum(case, parameter, key) else DEGREES.get(key, -1)
            check_kept(state_of(case, parameter)[key], value, region, scales[name], degree)


def check_kept(tensor: Tensor | None, old: Tensor, region: tuple, scale: Tensor | None, degree: int) -> None:
    """The old entries of a tensor beside a parameter, up to the parameter's rescaling; the new ones are finite."""
    assert tensor is not None
    kept = old_region(tensor, *region)
    assert bool(torch.isfinite(tensor).all())
    if scale is None:
        assert torch.equal(kept, old), f"{region[0]}: {kept} is not {old}"
    elif tensor.dtype != torch.bfloat16:
        factor = scale.reshape(-1, *[1] * (old.dim() - 1)) if old.dim() else 1.0
        factored = old.dim() > 1 and len(old) == 1 != len(scale)  # a mean over the filters has no one factor
        assert factored or torch.allclose(kept, (old * factor**degree).to(old), rtol=1e-4, atol=1e-30)


# --- what goes on ----------------------------------------------------------------------------------------------


@examples(200)
@given(case=cases(), again=st.sampled_from(METHODS), amplitude=st.sampled_from([None, 0.0, 0.1]))
def test_a_grown_model_trains_and_saves_like_one_that_was_built_so(
    case: Case, again: str, amplitude: float | None
) -> None:
    """Its steps are those of a copy with a fresh optimizer of the same state; it grows again, and files hold it."""
    growth = case.grow()
    same_as_a_copy(case)
    old_graph_is_refused(case, growth)
    grown_before = {site: record.width_after for site, record in records(growth)}
    second = case.grow(method=again, neurons=2, amplitude=amplitude)
    for site, record in records(second):
        assert record.width_before == grown_before.get(site, record.width_before)
        assert record.added == record.width_after - record.width_before
    same_as_a_copy(case)
    survives_a_file(case, [growth, second])


def same_as_a_copy(case: Case) -> None:
    """A few steps, beside those of a deep copy whose optimizers were built anew and loaded with the state."""
    twin = copy.deepcopy(case.model)
    names = {id(p): name for name, p in case.model.named_parameters()}
    parameters = dict(twin.named_parameters())
    fresh = []
    for optimizer in case.optimizers:
        groups = [
            {**group, "params": [parameters[names[id(p)]] for p in group["params"]]} for group in optimizer.param_groups
        ]
        fresh.append(type(optimizer)(groups))
        # Its load_state_dict would round NAdam's mu_product to the type of the parameter.
        for p, state in optimizer.state.items():
            fresh[-1].state[parameters[names[id(p)]]] = copy.deepcopy(state)
    for index in range(2):
        wanted = make_step(case, twin, fresh, index)
        loss = make_step(case, case.model, case.optimizers, index)
        assert bits(loss) == bits(wanted)
    for name, tensor in tensors_of(case.model):
        assert bits(tensor) == bits(dict(tensors_of(twin))[name]), name
    for optimizer in case.optimizers:
        learning = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        assert all(p.grad is not None and p.grad.shape == p.shape for p in learning)
        for parameter in learning:
            shapes = [v.shape for v in optimizer.state[parameter].values() if torch.is_tensor(v) and v.dim()]
            assert all(s == n or s == 1 for shape in shapes for s, n in zip(shape, parameter.shape, strict=True))


def old_graph_is_refused(case: Case, growth: auxin.Growth) -> None:
    """The loss from before the growth can still be read; its backward pass is an error that leaves no gradient."""
    assert bool(torch.isfinite(case.stale))
    if growth.added == 0:
        return
    for optimizer in case.optimizers:
        optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"built before the model grew|modified by an inplace operation"):
        case.stale.backward()
    assert all(p.grad is None or p.grad.shape == p.shape for p in case.model.parameters())


def survives_a_file(case: Case, growths: list[auxin.Growth]) -> None:
    """Saved and loaded on the seed model, bit by bit."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        auxin.save(path, case.model, growths)
        loaded = auxin.load(path, copy.deepcopy(case.seed))
    found = dict(tensors_of(loaded))
    for name, tensor in tensors_of(case.model):
        assert bits(found[name]) == bits(tensor), name
        assert is_channels_last(found[name]) == is_channels_last(tensor), name
    again = auxin.History([auxin.Growth.from_dict(growth.to_dict()) for growth in growths])
    assert auxin.History.from_json(again.to_json()) == auxin.History(growths)
    assert bits(outputs(loaded, case.example, False)) == bits(outputs(case.model, case.example, False))


# --- every new entry trains ------------------------------------------------------------------------------------


@examples(200)
@given(case=cases())
def test_every_new_entry_gets_a_gradient(case: Case) -> None:
    """Within a few steps, in exact arithmetic: what has one where its neuron has a random way out."""
    growth = case.grow()
    assume(growth.added > 0)
    sites = sites_of(case, growth)
    copied = exact_copy(case.model)
    reached = gradient_sizes(case, copied, steps=4)
    for name, record in records(growth):
        if record.added:
            check_entries(case, copied, sites[name], sites, growth, reached)
            check_alive(case, copied, sites[name], sites, growth)


def check_entries(
    case: Case,
    model: nn.Module,
    site: Site,
    sites: dict[str, Site],
    growth: auxin.Growth,
    reached: dict[str, Tensor],
) -> None:
    """Entries of new neurons with a gradient once the way out is random are reached, behind live consumers."""
    record = growth[site.name]
    ways_out = [slot for slot in site.slots if slot.role == "fan_out"]
    outward = torch.cat([by_neuron(reached[slot.name], slot) for slot in ways_out], dim=1).amax(1)
    live_reader = any(bool(reached[slot.name].any()) for slot in ways_out)
    sizes = gradient_sizes(case, with_random(model, site, sites, growth, "fan_out"), steps=1)
    # A bias before a norm has rounding alone, and so has everything where the loss has no slope.
    least = max(1e-9 * max(float(size.max()) for size in sizes.values()), 1e-12)
    for slot in (s for s in site.slots if s.name in sizes and s.role != "fan_out"):
        # What a new neuron reads of new ones starts with zeros, and may live at positions where all else is dead.
        of_old = ~new_elsewhere(sizes[slot.name], slot, site, sites, growth)
        wanted, found = by_neuron((sizes[slot.name] > least) & of_old, slot), by_neuron(reached[slot.name], slot) > 0
        missed = (wanted & ~found & (outward > least)[:, None])[record.width_before :]
        assert not bool(missed.any()), f"{slot.name}: no gradient at {missed.nonzero().tolist()}"
    weight = next(slot for slot in site.slots if slot.role == "fan_in")
    of_old = (sizes[weight.name] > least) & ~new_elsewhere(sizes[weight.name], weight, site, sites, growth)
    inward = by_neuron(reached[weight.name], weight).amax(1)
    unread = ~torch.cat([by_neuron(model.get_parameter(slot.name), slot) for slot in ways_out], dim=1).any(1)
    stuck = (by_neuron(of_old, weight).any(1) & unread & (inward == 0) & (outward == 0))[record.width_before :]
    assert not (live_reader and bool(stuck.any())), f"{site.name}: zero on both sides at {stuck.nonzero().tolist()}"


def by_neuron(tensor: Tensor, slot: Slot) -> Tensor:
    """The entries of each neuron along a slot, (width, entries)."""
    axis = slot.axis
    split = tensor.unflatten(axis, (slot.outer, -1, slot.inner))
    return split.movedim(axis + 1, 0).flatten(1)


def check_alive(case: Case, model: nn.Module, site: Site, sites: dict[str, Site], growth: auxin.Growth) -> None:
    """A new neuron without a gradient has its opposite on the live side of a kink, or random ones are as dead."""
    method, amplitude = case.request["method"], case.request["amplitude"]
    if method in ("tiny", "random") and amplitude != 0.0:
        return  # their scale has no bound, and so they may saturate
    if case.far and (method != "sprout" or model.get_submodule(site.name).bias is None):
        return  # nobody centres the fan-in
    if method == "gradmax" and site.normalised:
        return  # beside a fan-in of next to nothing, the norm's own bias decides where the neuron starts
    record = growth[site.name]
    linked = with_random(model, site, sites, growth, "fan_out")
    name = next(slot.name for slot in site.slots if slot.role == "fan_in")
    # Which positions a max pooling or the next kink passes on hangs on the fan-outs: one draw may hide a neuron.
    ways_out = [linked, *(with_random(model, site, sites, growth, "fan_out", seed) for seed in range(1, 6))]
    dead = torch.ones(record.added, dtype=torch.bool)
    for tried in ways_out:
        dead &= ~alive(case, tried, name, record) if bool(dead.any()) else dead
    if not bool(dead.any()):
        return
    opposite = copy.deepcopy(linked)
    for slot in (s for s in site.slots if s.role == "fan_in" or s.tensor in ("bias", "running_mean")):
        tensors = dict(tensors_of(opposite))
        tensors[slot.name].data[record.width_before :] *= -1
    randoms = [with_random(linked, site, sites, growth, "fan_in", seed) for seed in range(0, 16, 2)]
    living = torch.stack([alive(case, other, name, record, 1e-9) for other in randoms])
    hopeless = ~living.any(0)
    fine = alive(case, opposite, name, record) | hopeless
    fan_in = linked.get_parameter(name).detach()[record.width_before :].flatten(1)
    fine &= hopeless | fan_in.any(1)
    assert bool(fine[dead].all()), f"{site.name}: dead on arrival: {fan_in[dead & ~fine]}"


def alive(case: Case, model: nn.Module, name: str, record: auxin.Record, least: float = 0.0) -> Tensor:
    """Which of the new rows of a producer's weight have a gradient, above `least` times the model's largest one."""
    sizes = gradient_sizes(case, model, 1)
    largest = max(float(size.max()) for size in sizes.values())
    return sizes[name][record.width_before :].flatten(1).amax(1) > least * largest


def exact_copy(model: nn.Module) -> nn.Module:
    """A copy in float64 and without dropout, in which a gradient is 0 only where it has to be."""
    model = copy.deepcopy(model).double()
    silence_dropout(model)
    model.zero_grad()
    return model


def gradient_sizes(case: Case, model: nn.Module, steps: int) -> dict[str, Tensor]:
    """The largest absolute gradient of every entry over some steps of a copy."""
    model = copy.deepcopy(model)
    found = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)  # no kink is crossed
    for index in range(steps):
        optimizer.zero_grad()
        x, y = case.batches[index % len(case.batches)]
        case.loss(model(x.double()), y.double() if y.is_floating_point() else y).backward()
        optimizer.step()
        found.update({n: found[n].maximum(p.grad.abs()) for n, p in model.named_parameters() if p.grad is not None})
    return found


def with_random(
    model: nn.Module, site: Site, sites: dict[str, Site], growth: auxin.Growth, role: str, seed: int = 0
) -> nn.Module:
    """A copy in which the new neurons' entries of a role are random, but for what new neurons read of new ones.

    Seeds 2 k and 2 k + 1 give opposite entries.
    """
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed // 2)
    for slot in (slot for slot in site.slots if slot.role == role):
        parameter = model.get_parameter(slot.name)
        mask = kept_mask(parameter, slot, growth[site.name]) | new_elsewhere(parameter, slot, site, sites, growth)
        draw = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        parameter.data = torch.where(mask, parameter.data, draw * (-1) ** seed)
    return model


# --- regions of tensors ----------------------------------------------------------------------------------------


def records(growth: auxin.Growth) -> list[tuple[str, auxin.Record]]:
    return [(record.site, record) for record in growth]


def sites_of(case: Case, growth: auxin.Growth) -> dict[str, Site]:
    """The sites of the growth's records."""
    found = auxin.find_sites(case.model, case.example)
    lost = [refusal for refusal in found.refused if refusal.name in dict(records(growth))]
    assert not lost, f"refused after growth: {lost}"
    return {record.site: found[record.site] for record in growth}


def old_indices(outer: int, inner: int, record: auxin.Record) -> Tensor:
    """Where the old neurons stand on an axis, written out entry by entry."""
    width = record.width_after
    return torch.tensor(
        [(a * width + j) * inner + b for a in range(outer) for j in range(record.width_before) for b in range(inner)],
        dtype=torch.int64,
    )


def old_region(tensor: Tensor, name: str, shape: torch.Size, sites: dict[str, Site], growth: auxin.Growth) -> Tensor:
    """The entries that were there before the growth; `shape` is the parameter's shape then."""
    for site, record in records(growth):
        for slot in sites[site].slots:
            if slot.name == name and tensor.dim() == len(shape) and tensor.shape[slot.axis] != 1:
                tensor = tensor.index_select(slot.axis, old_indices(slot.outer, slot.inner, record))
    return tensor


def kept_mask(tensor: Tensor, slot: Slot, record: auxin.Record) -> Tensor:
    """Whether each entry belongs to an old neuron along a slot."""
    mask = torch.zeros(tensor.shape[slot.axis], dtype=torch.bool)
    mask[old_indices(slot.outer, slot.inner, record)] = True
    return mask.reshape([-1 if i == slot.axis else 1 for i in range(tensor.dim())]).expand(tensor.shape)


def new_elsewhere(tensor: Tensor, slot: Slot, site: Site, sites: dict[str, Site], growth: auxin.Growth) -> Tensor:
    """Whether each entry of a slot's tensor belongs to a new neuron of another site."""
    mask = torch.zeros_like(tensor, dtype=torch.bool)
    for other in (s for s in sites.values() if s.name != site.name):
        for theirs in (s for s in other.slots if s.name == slot.name):
            mask |= ~kept_mask(tensor, theirs, growth[other.name])
    return mask


# --- readings --------------------------------------------------------------------------------------------------


def entries(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors_of(model)}


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def state_of(case: Case, parameter: nn.Parameter) -> dict[str, Tensor]:
    """What the optimizers keep for a parameter, tensors alone."""
    states = [optimizer.state.get(parameter, {}) for optimizer in case.optimizers]
    return {key: value for state in states for key, value in state.items() if torch.is_tensor(value)}


def states_of(case: Case) -> dict[str, dict[str, Tensor]]:
    return {
        name: {key: value.clone() for key, value in state_of(case, parameter).items()}
        for name, parameter in case.model.named_parameters()
    }


def is_rms_momentum(case: Case, parameter: nn.Parameter, key: str) -> bool:
    """RMSprop's momentum is of gradients over their own size; counters have no scale either."""
    return key in ("step", "mu_product") or (
        key == "momentum_buffer" and isinstance(case.optimizers[0], torch.optim.RMSprop)
    )


def scales_of(
    case: Case, growth: auxin.Growth, old: dict[str, Tensor], sites: dict[str, Site]
) -> dict[str, Tensor | None]:
    """By what a filter was multiplied, read off its old entries, where a batch norm behind it makes up for that."""
    scales: dict[str, Tensor | None] = dict.fromkeys(name for name, _ in case.model.named_parameters())
    for site in sites.values():
        for reading in site.readings:
            name = f"{reading.consumer}.weight"
            if reading.norm is None or case.request["method"] != "sprout":
                continue
            weight = case.model.get_parameter(name).detach()
            kept = old_region(weight, name, old[name].shape, sites, growth)
            ratio = (kept / old[name]).flatten(1).nanmedian(1).values
            scales[name] = torch.where(torch.isfinite(ratio), ratio, torch.ones_like(ratio))
            scales[f"{reading.consumer}.bias"] = scales[name]
    return scales


def never_moved(state: dict[str, Tensor]) -> bool:
    """Whether every second moment is 0."""
    return not any(bool(value.any()) for key, value in state.items() if DEGREES.get(key) == -2)


def is_channels_last(tensor: Tensor) -> bool:
    wanted = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    usual = torch.empty(tensor.shape, device="meta").stride()
    return wanted is not None and tensor.is_contiguous(memory_format=wanted) and tensor.stride() != usual


def silence_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0


def outputs(model: nn.Module, x: Tensor, training: bool, dtype: torch.dtype | None = None) -> Tensor:
    """A copy's output without dropout, whose masks depend on the width."""
    model = copy.deepcopy(model).train(training)
    silence_dropout(model)
    if dtype is not None:
        model, x = model.to(dtype), x.to(dtype)
    if training and len(x) == 1:
        model.apply(lambda m: m.eval() if isinstance(m, nn.modules.batchnorm._BatchNorm) else m)
    with torch.no_grad():
        return model(x)


def relative(tensor: Tensor, other: Tensor) -> float:
    """The largest difference, relative to the largest entry."""
    return float((tensor.double() - other.double()).abs().max() / other.double().abs().max().clamp(min=1e-30))


def rounding(case: Case) -> float:
    return {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 2e-2}[case.example.dtype]


# --- the rest --------------------------------------------------------------------------------------------------


@st.composite
def empty_cases(draw: st.DrawFn) -> Case:
    """A perceptron with a hidden width of 0, after two steps."""
    torch.manual_seed(draw(st.integers(0, 10**6)))
    kind, dtype = draw(st.sampled_from(ACTIVATIONS)), draw(st.sampled_from([torch.float32, torch.float64]))
    deep = draw(st.booleans())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch initialises an empty weight
        body = [nn.Linear(4, 0, bias=draw(st.booleans())), kind()]
        body += [nn.Linear(0, 3), nn.ReLU()] if deep else []
        model = Net(body, [nn.Linear(3 if deep else 0, OUTPUTS)]).to(dtype)
    x, y = torch.randn(12, 4, dtype=dtype), torch.randn(12, OUTPUTS, dtype=dtype)
    names = sorted(OPTIMIZERS.keys() - {"adafactor"})  # it divides by the number of entries
    optimizers = optimizers_of(draw(st.sampled_from(names)), model, draw(st.booleans()))
    number = draw(st.sampled_from([1, 2, "auto"]))
    request = {"method": draw(st.sampled_from(METHODS)), "neurons": number, "amplitude": draw(AMPLITUDES)}
    case = Case(model, [(x, y)], F.mse_loss, optimizers, request, copy.deepcopy(model), torch.zeros(()))
    for index in range(2):
        make_step(case, model, optimizers, index)
    case.stale = F.mse_loss(model(x), y)
    return case


@examples(60)
@given(case=empty_cases())
def test_a_linear_layer_grows_from_width_0(case: Case) -> None:
    before = outputs(case.model, case.example, False)
    growth = case.grow()
    record = growth["body.0"]
    assert record.width_before == 0
    assert case.model.get_submodule("body.0").out_features == record.added
    if case.request["amplitude"] == 0.0:
        assert relative(outputs(case.model, case.example, False), before) < rounding(case)
    if case.request["method"] in ("sprout", "random") and case.request["neurons"] != "auto":
        assert record.added == case.request["neurons"]
    same_as_a_copy(case)
    old_graph_is_refused(case, growth)
    survives_a_file(case, [growth])


# --- what the properties found ---------------------------------------------------------------------------------


def trained_case(model: nn.Module, x: Tensor, **request: object) -> Case:
    """A case of one's own, after one step of Adam."""
    torch.manual_seed(0)
    y = torch.randn(model(x).shape, dtype=x.dtype)
    optimizers = [torch.optim.Adam(model.parameters(), lr=1e-3)]
    case = Case(model, [(x, y)], F.mse_loss, optimizers, request, copy.deepcopy(model), torch.zeros(()))
    make_step(case, model, optimizers)
    return case


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("neurons", [1, "auto"])
@pytest.mark.parametrize("amplitude", [0.0, None])
def test_groups_of_a_group_norm_stay_whole(method: str, neurons: int | str, amplitude: float | None) -> None:
    torch.manual_seed(0)
    body = [nn.Conv1d(2, 6, 3), nn.GroupNorm(2, 6), nn.ReLU(), nn.Flatten()]
    case = trained_case(Net(body, [nn.Linear(24, 3)]), torch.randn(8, 2, 6))
    record = case.grow(method=method, neurons=neurons, amplitude=amplitude)["body.0"]
    norm = case.model.get_submodule("body.1")
    assert record.added % 3 == 0
    assert (norm.num_channels, norm.num_groups) == (6 + record.added, 2 + record.added // 3)


def test_a_group_that_is_not_filled_is_left_out_with_a_note() -> None:
    """One output gives one direction, and groups of two take none of it."""
    torch.manual_seed(0)
    case = trained_case(
        nn.Sequential(nn.Linear(3, 4), nn.GroupNorm(2, 4), nn.ReLU(), nn.Linear(4, 1)), torch.randn(8, 3)
    )
    with pytest.warns(UserWarning, match="there are 1 directions"):
        record = case.grow(method="tiny", neurons=1)["0"]
    assert record.added == 0
    assert any("groups of 2" in note for note in record.notes)


@pytest.mark.parametrize("method", METHODS)
def test_a_fixed_amplitude_needs_no_pass_before_the_method(method: str) -> None:
    """A method that measures nothing makes its first pass where gradients were switched off."""
    torch.manual_seed(0)
    case = trained_case(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(8, 3))
    assert case.grow(method=method, neurons=1, amplitude=0.3)["0"].amplitude == 0.3


def behind_a_norm(running: float) -> Case:
    torch.manual_seed(0)
    body = [nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), nn.BatchNorm1d(2)]
    case = trained_case(Net(body, [nn.Linear(2, 2)]).double().eval(), torch.randn(8, 3).double())
    case.model.get_buffer("body.3.running_var").fill_(running)
    return case


@pytest.mark.parametrize("variance", [0.0, 1e-12])
def test_a_running_variance_of_0_takes_no_rescaling(variance: float) -> None:
    """s^2 (variance + eps) - eps is below 0 for a smaller s: the filter then keeps its growth."""
    case = behind_a_norm(variance)
    case.grow(method="sprout", neurons={"body.0": 2}, amplitude=1.0)
    assert torch.equal(case.model.get_buffer("body.3.running_var"), torch.full((2,), variance, dtype=torch.float64))


def test_zero_fan_out_moves_no_weight_behind_a_norm() -> None:
    """Two ways to sum a norm differ in their last bit, which must not become a rescaling."""
    case = behind_a_norm(1.0)
    old = entries(case.model)
    case.grow(method="sprout", neurons={"body.0": 2}, amplitude=0.0)
    assert torch.equal(case.model.get_parameter("body.2.weight")[:, :4], old["body.2.weight"])


def test_random_fan_ins_of_sprout_stay_in_reach_of_inputs_far_from_0() -> None:
    torch.manual_seed(0)
    case = trained_case(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(16, 3) + 100)
    assert case.grow(method="sprout", neurons=6, amplitude=0.0)["0"].added == 6
    hidden = case.model[1](case.model[0](case.example))[:, 4:]
    assert bool((hidden.std(0) > 1e-2).all())


def test_a_layer_that_reads_a_width_of_0_grows() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        model = nn.Sequential(nn.Linear(3, 0), nn.Tanh(), nn.Linear(0, 2), nn.Tanh(), nn.Linear(2, 2))
    case = trained_case(model, torch.randn(8, 3))
    growth = case.grow(method="sprout", neurons=2, amplitude=None)
    assert [record.width_after for record in growth] == [2, 4]


@pytest.mark.parametrize("method", METHODS)
def test_a_feature_too_faint_for_float32_counts_as_dead(method: str) -> None:
    """softplus(-100) is 4e-44, and the best update's weight for it would be infinite."""
    torch.manual_seed(0)
    body = [nn.Linear(3, 4), nn.Softplus(), nn.Linear(4, 3, bias=False), nn.Tanh()]
    case = trained_case(Net(body, [nn.Linear(3, 2)]), torch.randn(8, 3))
    with torch.no_grad():
        case.model.get_parameter("body.0.bias")[:2] = -100
        case.model.get_parameter("body.0.weight")[:2] = 0
    growth = case.grow(method=method, neurons=2, amplitude=None)
    assert all(bool(torch.isfinite(tensor).all()) for _, tensor in tensors_of(case.model))
    assert growth.loss_after <= growth.loss_before + 1e-3


def test_gradmax_takes_no_direction_that_is_rounding() -> None:
    """Cross-entropy over two classes gives gradients on a line: N has rank 1."""
    torch.manual_seed(0)
    case = trained_case(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(8, 3))
    x, y = case.example, torch.randint(0, 2, (8,))
    growth = auxin.grow(case.model, [(x, y)], F.cross_entropy, method="gradmax", neurons="auto")
    assert growth["0"].added <= 1
    assert len(growth["0"].singular_values) == 1


def test_a_model_whose_output_is_rounding_has_its_sites() -> None:
    """Batch norms bring what is left of constant inputs to 1e-15, and a wider model rounds otherwise."""
    torch.manual_seed(0)
    layers = [nn.Linear(1, 3, bias=False), nn.BatchNorm1d(3), nn.LeakyReLU(), nn.Linear(3, 3, bias=False)]
    layers += [nn.LeakyReLU(), nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3, affine=False), nn.LeakyReLU()]
    model = nn.Sequential(*layers, nn.Linear(3, 3, bias=False))
    assert len(auxin.find_sites(model, torch.zeros(5, 1))) == 3


def test_sprout_leaves_out_fan_ins_that_read_nothing() -> None:
    """Behind constant inputs the only direction is a bias, which no gradient would ever turn into weights."""
    torch.manual_seed(0)
    case = trained_case(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.zeros(8, 3))
    case.grow(method="sprout", neurons=3, amplitude=None)
    assert bool((case.model[0].weight[4:].norm(dim=1) > 0.1).all())


# --- what torch does with a grown model ------------------------------------------------------------------------


@pytest.fixture
def grown() -> Case:
    torch.manual_seed(0)
    body = [nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.PReLU(3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 4)]
    case = trained_case(Net([*body, nn.ReLU()], [nn.Linear(4, 2)]), torch.randn(6, 2, 6, 6))
    assert case.grow(method="sprout", neurons=2).added == 4
    case.model.eval()
    return case


def test_nothing_of_ours_stays_on_a_grown_model(grown: Case) -> None:
    built = Net([*grown.seed.body], [*grown.seed.heads])
    for module, plain in zip(grown.model.modules(), built.modules(), strict=True):
        assert vars(module).keys() == vars(plain).keys()
        hooks = [name for name, value in vars(module).items() if name.endswith("hooks") and value]
        assert not hooks
    assert all(type(p) is nn.Parameter and not p._backward_hooks for p in grown.model.parameters())


def test_a_grown_model_is_copied_pickled_and_exported(grown: Case, tmp_path: Path) -> None:
    wanted = outputs(grown.model, grown.example, False)
    torch.save(grown.model, tmp_path / "model.pt")
    torch.save(grown.model.state_dict(), tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    again = copy.deepcopy(grown.model)
    again.load_state_dict(torch.load(tmp_path / "state.pt"))
    exported = torch.export.export(grown.model, (grown.example,)).module()
    for model in (loaded, again, exported):
        assert torch.equal(model(grown.example), wanted)
