import copy
import gc
import io
import itertools
import sys
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from auxin import surgery
from auxin.errors import AuxinError, InputError, ModelChangedError, OptimizerError, StaleGraphError, WrapperError
from auxin.structure import Change, Count, Site, Slot
from auxin.surgery import apply, plain, scratch
from examples import examples
from helpers_surgery import MODELS, bits, build, change, conv_site, entries, linear_site, mlp, producer, snapshot, train

KINDS = list(MODELS)


def changes_of(model, sites, count=2, **more):
    return [change(model, site, count, **more) for site in sites]


def adam(model, **more):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, **more)


@pytest.mark.parametrize("kind", KINDS)
def test_zero_fan_out_keeps_the_output_and_objects(kind):
    model, sites, x = build(kind)
    model.eval()
    before, parameters = model(x), list(model.parameters())
    apply(model, changes_of(model, sites))
    torch.testing.assert_close(model(x), before)
    assert all(p is q for p, q in zip(parameters, model.parameters(), strict=True))
    assert [site.width for site in sites] == [width + 2 for width in {"mlp": [4], "deep": [4, 3]}.get(kind, [3])]


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_trains_afterwards(kind):
    model, sites, x = build(kind)
    optimizer = adam(model)
    kept_loss = train(model, x, optimizer)
    apply(model, changes_of(model, sites, quiet=False), [optimizer])
    before = [p.detach().clone() for p in model.parameters()]
    train(model, x, optimizer, steps=1)
    assert kept_loss.grad_fn is not None
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert parameter.shape == parameter.grad.shape
        changed = parameter != old
        assert changed.any()


def test_integer_attributes_follow():
    model, sites, _ = build("flat")
    apply(model, changes_of(model, sites, 2))
    assert (model[0].out_channels, model[3].in_features) == (5, 80)
    keep = Change(sites[0], 0, {}, keep=torch.tensor([0, 4]))
    apply(model, [keep])
    assert (model[0].out_channels, model[3].in_features) == (2, 32)
    model, sites, _ = build("conv")
    apply(model, changes_of(model, sites, 2))
    assert (model[0].out_channels, model[1].num_features, model[3].in_channels) == (5, 5, 5)


def test_new_neurons_stand_where_the_layout_says():
    model, sites, _ = build("flat")
    item = change(model, sites[0], 2, quiet=False)
    old = model[3].weight.detach().clone()
    apply(model, [item])
    weight = model[3].weight.detach()
    assert torch.equal(weight[:, :48], old)
    assert torch.equal(weight[:, 48:], item.new[sites[0].slots[-1]].flatten(1))


def test_outer_layout():
    model = nn.Sequential(nn.Linear(2, 3), nn.Flatten(), nn.Linear(4 * 3, 2))
    slots = (*producer("0"), Slot("2", "weight", 1, "fan_out", outer=4))
    site = linear_site(model, "0", "2")
    site = type(site)("0", ("0",), (), (), slots, (Count("0", "out_features"), Count("2", "in_features", 4)), {}, model)
    x = torch.randn(5, 4, 2)
    before = model(x)
    apply(model, [change(model, site, 2)])
    torch.testing.assert_close(model(x), before)
    assert model[2].in_features == 20


def test_update_keep_append_and_factor_in_that_order():
    model, (site,), _ = build("mlp")
    old = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    update, factor = torch.randn(3, 4), torch.tensor([[2.0], [0.5], [3.0]])
    keep = torch.tensor([2, 0])
    item = change(
        model, site, 1, quiet=False, updates={"2.weight": update}, factors={"2.weight": factor, "2.bias": factor[:, 0]}
    )
    item = Change(site, 1, item.new, item.updates, item.factors, keep)
    apply(model, [item])
    wanted = torch.cat([(old["2.weight"] + update)[:, keep], item.new[site.slots[2]].flatten(1)], 1) * factor
    torch.testing.assert_close(model[2].weight.detach(), wanted, rtol=0, atol=0)
    torch.testing.assert_close(model[2].bias.detach(), old["2.bias"] * factor[:, 0], rtol=0, atol=0)
    assert torch.equal(model[0].weight[:2], old["0.weight"][keep])


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("widths", [(4, 3), (1, 1)])
def test_corner_of_a_tensor_that_grows_on_both_sides_is_zero(order, widths):
    a, b = widths
    model = nn.Sequential(nn.Linear(5, a), nn.Tanh(), nn.Linear(a, b), nn.Tanh(), nn.Linear(b, 2))
    sites = [linear_site(model, "0", "2"), linear_site(model, "2", "4")]
    old = model[2].weight.detach().clone()
    items = [change(model, site, 2, quiet=False) for site in sites]
    update, factor = torch.randn(b, a), torch.full((b, 1), 2.0)
    items[0] = Change(sites[0], 2, items[0].new, updates={"2.weight": update}, factors={"2.weight": factor})
    apply(model, items[::order])
    weight = model[2].weight.detach()
    wanted = torch.zeros(b + 2, a + 2)
    wanted[:b] = torch.cat([old + update, items[0].new[sites[0].slots[2]].flatten(1)], 1) * 2
    wanted[b:, :a] = items[1].new[sites[1].slots[0]].flatten(0, 2)
    torch.testing.assert_close(weight, wanted)


def test_entries_for_the_present_size_are_taken_as_they_are():
    model, sites, _ = build("deep")
    first = change(model, sites[0], 2)
    grown = scratch(model)
    apply(grown, [first])
    second = Change(sites[1], 1, {slot: entries(grown, slot, 1) for slot in sites[1].slots})
    apply(model, [first, second])
    assert torch.equal(model[2].weight[3:], second.new[sites[1].slots[0]].flatten(0, 2))


def test_keep_in_one_change_and_new_entries_for_the_old_size_in_the_next():
    model, sites, _ = build("deep")
    keep = torch.tensor([3, 1])
    second = change(model, sites[1], 1, quiet=False)
    apply(model, [Change(sites[0], 0, {}, keep=keep), second])
    assert torch.equal(model[2].weight[3:], second.new[sites[1].slots[0]].flatten(0, 2)[:, keep])


def test_a_second_growth_and_growth_from_zero():
    with pytest.warns(UserWarning, match="zero-element"):
        model = mlp(0)
    site, x = linear_site(model, "0", "2"), torch.randn(6, 5)
    optimizer = torch.optim.Adam(model.parameters())
    model(x).sum().backward()
    optimizer.step()
    for width in (1, 3):
        apply(model, [change(model, site, width - site.width)], [optimizer])
        assert site.width == width
        train(model, x, optimizer, steps=1)


def test_best_update_alone_writes_in_place():
    model, (site,), x = build("mlp")
    view, update = model[2].weight.view(-1), torch.randn(3, 4)
    expected = model[2].weight.detach() + update
    loss = model(x).square().mean()
    apply(model, [Change(site, 0, {}, updates={"2.weight": update})])
    assert torch.equal(view.view(3, 4), expected)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        loss.backward()


# Graphs, hooks, views


@pytest.mark.parametrize("kind", KINDS)
def test_a_backward_pass_through_an_old_graph_is_an_error(kind):
    model, sites, x = build(kind)
    loss = model(x).square().mean()
    apply(model, changes_of(model, sites))
    with pytest.raises(RuntimeError, match=r"model grew|modified by an inplace"):
        loss.backward()
    model.zero_grad()
    model(x).square().mean().backward()
    assert all(p.grad.shape == p.shape for p in model.parameters())


def test_the_error_names_the_parameter():
    model, sites, x = build("mlp")
    first = model[0](x).sum()  # its backward pass needs no weight, only the accumulator
    apply(model, changes_of(model, sites))
    with pytest.raises(StaleGraphError, match=r"0\.(weight|bias) has another shape"):
        first.backward()
    assert model[0].weight.grad is None


def test_nothing_stays_on_the_parameters(monkeypatch):
    model, sites, x = build("mlp")
    alarms = []

    class Watched(surgery._Alarm):
        def __init__(self):
            super().__init__()
            alarms.append(weakref.ref(self))

    monkeypatch.setattr(surgery, "_Alarm", Watched)
    loss = model(x).sum()
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    apply(model, changes_of(model, sites))
    model(x).sum().backward()
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert all(not vars(p) and not p._backward_hooks for p in model.parameters())
    assert alarms[0]() is not None
    del loss
    gc.collect()
    assert alarms[0]() is None


def test_gradients_of_an_accumulation_are_padded():
    model, sites, x = build("conv")
    model(x).square().mean().backward()
    old = {name: p.grad.clone() for name, p in model.named_parameters()}
    apply(model, changes_of(model, sites))
    for name, parameter in model.named_parameters():
        corner = tuple(slice(size) for size in old[name].shape)
        assert torch.equal(parameter.grad[corner], old[name])
        assert parameter.grad.shape == parameter.shape
        assert parameter.grad.count_nonzero() == old[name].count_nonzero()
    model(x).square().mean().backward()


def test_gradients_follow_a_factor():
    model, (site,), x = build("mlp")
    model(x).square().mean().backward()
    old = model[2].weight.grad.clone()
    apply(model, [Change(site, 0, {}, factors={"2.weight": torch.full((3, 1), 4.0)})])
    torch.testing.assert_close(model[2].weight.grad, old / 4)


def test_hooks_of_the_user_survive():
    model, sites, x = build("mlp")
    weight, seen = model[0].weight, []
    weight.register_hook(lambda gradient: seen.append(("pre", tuple(gradient.shape))))
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(("post", tuple(p.grad.shape))))
    kept = model(x).sum()
    apply(model, changes_of(model, sites))
    model(x).sum().backward()
    assert seen == [("pre", (6, 5)), ("post", (6, 5))]
    assert kept.grad_fn is not None


def test_views_and_weak_references_of_the_user():
    model, sites, _ = build("mlp")
    weight = model[0].weight
    view, detached, reference = weight.view(-1), weight.detach(), weakref.ref(weight)
    weight.tag = "mine"
    old = weight.detach().clone()
    apply(model, changes_of(model, sites))
    assert reference() is model[0].weight
    assert model[0].weight.tag == "mine"
    assert torch.equal(detached, old)
    assert torch.equal(view, old.flatten())


def test_frozen_parameters_and_their_old_graphs():
    model, sites, x = build("mlp")
    model.requires_grad_(False)
    leaf = x.clone().requires_grad_()
    loss = model(leaf).square().mean()
    apply(model, changes_of(model, sites), [])
    assert not any(p.requires_grad for p in model.parameters())
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        loss.backward()


@pytest.mark.filterwarnings("ignore:Complex modules")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_types(dtype):
    model, sites, x = build("mlp")
    model.to(dtype)
    if dtype.is_complex:
        model[1] = nn.Tanh()
    x = x.to(dtype)
    loss = model(x).abs().sum()
    item = changes_of(model, sites)[0]
    apply(model, [Change(sites[0], 2, item.new, updates={"2.weight": torch.full((3, 4), 2.0**-9)})])
    assert all(p.dtype == dtype for p in model.parameters())
    model(x).abs().sum().backward()
    assert all(p.grad.shape == p.shape and p.grad.dtype == dtype for p in model.parameters())
    with pytest.raises(RuntimeError, match=r"model grew|modified by an inplace"):
        loss.backward()


@pytest.mark.parametrize("kernel", [1, 3])
def test_channels_last_is_kept(kernel):
    model = nn.Sequential(nn.Conv2d(2, 1, kernel), nn.BatchNorm2d(1), nn.ReLU(), nn.Conv2d(1, 4, kernel))
    model = model.to(memory_format=torch.channels_last)
    site, optimizer = conv_site(model), adam(model)
    x = torch.randn(2, 2, 6, 6).contiguous(memory_format=torch.channels_last)
    train(model, x, optimizer)
    apply(model, [change(model, site, 3)], [optimizer])
    for parameter in (model[0].weight, model[3].weight):
        assert parameter.stride()[1] == 1
        state = optimizer.state[parameter]["exp_avg"]
        assert state.is_contiguous(memory_format=torch.channels_last)
    train(model, x, optimizer)


def test_buffers_keep_their_persistence():
    model, (site,), _ = build("conv")
    model[1].register_buffer("scale", torch.ones(3), persistent=False)
    model[1].register_buffer("twin", model[1].running_mean)
    slots = (*site.slots, Slot("1", "scale", 0, "carried"))
    site = type(site)("0", ("0",), (), (), slots, site.counts, {}, model)
    apply(model, [change(model, site, 2)])
    assert model[1].scale.shape == (5,)
    assert model[1].twin is model[1].running_mean
    assert "1.scale" not in model.state_dict()
    assert "1.running_mean" in model.state_dict()


def test_tied_parameters_grow_once():
    model, (site,), x = build("mlp")
    model.append(model[2])
    twin = (*site.slots, Slot("3", "weight", 1, "fan_out"))
    counts = (*site.counts, Count("3", "in_features"))
    site = type(site)("0", ("0",), (), (), twin, counts, {}, model)
    apply(model, [change(model, site, 2)])
    assert model[2].weight.shape == (3, 6)
    assert model[2].in_features == 6
    model[:3](x).sum().backward()


def test_afterwards_the_model_is_plain_pytorch(tmp_path):
    model, sites, x = build("conv")
    model.eval()
    apply(model, changes_of(model, sites, quiet=False))
    wanted = model(x)
    torch.testing.assert_close(copy.deepcopy(model)(x), wanted)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    torch.testing.assert_close(torch.load(buffer, weights_only=False)(x), wanted)
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), wanted)
    other, other_sites, _ = build("conv")
    apply(other, changes_of(other, other_sites))
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other.eval()(x), wanted)
    torch.testing.assert_close(torch.func.functional_call(model, dict(model.named_parameters()), x), wanted)


def test_compiled_models_are_compiled_anew():
    model, sites, x = build("mlp")
    graphs = []
    compiled = torch.compile(model, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    assert plain(compiled) is model
    for _ in range(10):
        compiled(x)
        apply(compiled, changes_of(model, sites, 1))
    torch.testing.assert_close(compiled(x), model(x))
    assert len(graphs) == 11


def test_dynamo_is_not_loaded_for_our_sake(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    model, sites, _ = build("mlp")
    apply(model, changes_of(model, sites))
    assert "torch._dynamo" not in sys.modules


def test_inference_mode_leaves_no_inference_tensors():
    model, sites, x = build("conv")
    with torch.inference_mode():
        apply(model, changes_of(model, sites))
    assert not any(t.is_inference() for t in [*model.parameters(), *model.buffers()])
    train(model, x, adam(model))


def test_gradients_of_an_old_graph_by_name_are_refused():
    model, sites, x = build("mlp")
    loss = model(x).sum()
    apply(model, changes_of(model, sites))
    with pytest.raises(RuntimeError):
        torch.autograd.grad(loss, list(model.parameters()))


@examples(60)
@given(
    shape=st.lists(st.integers(1, 3), min_size=0, max_size=3),
    axis=st.integers(0, 3),
    outer=st.integers(1, 3),
    inner=st.integers(1, 3),
    width=st.integers(0, 4),
    count=st.integers(0, 3),
    data=st.data(),
)
def test_layout_against_a_loop(shape, axis, outer, inner, width, count, data):
    axis = min(axis, len(shape))
    slot = Slot("", "tensor", axis - len(shape) - 1 if data.draw(st.booleans()) else axis, "carried", outer, inner)
    model = nn.Module()
    model.tensor = nn.Parameter(torch.randn(*shape[:axis], outer * width * inner, *shape[axis:]))
    new = torch.randn(*shape[:axis], outer, count, inner, *shape[axis:])
    keep = data.draw(st.none() | st.permutations(range(width)).map(lambda p: torch.tensor(p[: width // 2], dtype=int)))
    old = model.tensor.detach().clone().movedim(axis, 0)
    kept = list(range(width)) if keep is None else keep.tolist()
    site = Site("", ("",), (), (), (slot,), (), {}, model)
    apply(model, [Change(site, count, {slot: new}, keep=keep)])
    got = model.tensor.detach().movedim(axis, 0)
    total = len(kept) + count
    assert len(got) == outer * total * inner
    fresh = new.movedim((axis, axis + 1, axis + 2), (0, 1, 2))
    for a, n, b in itertools.product(range(outer), range(total), range(inner)):
        wanted = old[(a * width + kept[n]) * inner + b] if n < len(kept) else fresh[a, n - len(kept), b]
        assert torch.equal(got[(a * total + n) * inner + b], wanted)


# All or nothing

STAGES = [
    "_width",
    "_check",
    "_draft",
    "_count",
    "_gradient",
    "_install",
    "_write",
    "_swap",
    "_rebind",
    "_other_type",
    "_set_gradient",
    "_set_count",
    "_set_state",
    "_forget_compiled",
    "_outdate",
]
# Called a single time in the case below, so that they cannot fail at a later call.
ONCE = {"_width", "_check", "_draft", "_count", "_write", "_forget_compiled", "_outdate"}


def grown_case():
    model, (site,), x = build("conv")
    optimizer = adam(model, amsgrad=True)
    train(model, x, optimizer)
    model(x).square().mean().backward()
    item = change(
        model,
        site,
        2,
        quiet=False,
        updates={"3.weight": torch.randn(4, 3, 3, 3), "3.bias": torch.randn(4)},
        factors={"3.weight": torch.rand(4, 1, 1, 1) + 0.5},
    )
    return model, optimizer, x, item


@pytest.mark.parametrize(
    ("stage", "when"), [(s, w) for s in STAGES for w in ("before", "after", "later") if w != "later" or s not in ONCE]
)
def test_an_exception_at_any_stage_leaves_everything_as_it_was(stage, when, monkeypatch):
    model, optimizer, x, item = grown_case()
    loss = model(x).square().mean()
    before, original, calls = snapshot(model, optimizer), getattr(surgery, stage), []

    def faulty(*arguments):
        calls.append(stage)
        if when == "later" and len(calls) == 1:
            return original(*arguments)
        result = original(*arguments) if when == "after" else None
        raise KeyboardInterrupt(result)

    monkeypatch.setattr(surgery, stage, faulty)
    with pytest.raises(KeyboardInterrupt):
        apply(model, [item], [optimizer])
    assert calls
    assert snapshot(model, optimizer) == before
    monkeypatch.undo()
    if (stage, when) != ("_outdate", "after"):  # the version counters cannot be set back
        loss.backward()
    apply(model, [item], [optimizer])
    train(model, x, optimizer)


def test_an_old_graph_can_be_used_after_a_growth_that_was_taken_back(monkeypatch):
    model, (site,), x = build("mlp")
    loss, original = model[0](x).sum(), surgery._outdate

    def faulty(*arguments):
        original(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(surgery, "_outdate", faulty)
    with pytest.raises(KeyboardInterrupt):
        apply(model, [change(model, site, 2)])
    loss.backward()
    assert model[0].weight.grad.shape == (4, 5)


def test_an_interrupt_at_any_line_leaves_all_or_nothing():
    model, optimizer, _, item = grown_case()
    before = snapshot(model, optimizer)
    finished = scratch_of_case(item)
    outcomes = []
    for line in range(10_000):
        if interrupted_at(line, lambda: apply(model, [item], [optimizer])):
            now = snapshot(model, optimizer)
            if now != before:
                break
            outcomes.append(line)
        else:
            break
    assert len(outcomes) > 300
    assert {name: bits(p) for name, p in model.state_dict().items()} == finished


def scratch_of_case(item):
    model, optimizer, _, _ = grown_case()
    apply(model, [item], [optimizer])
    return {name: bits(p) for name, p in model.state_dict().items()}


def interrupted_at(number, action):
    """Run `action`, with a KeyboardInterrupt at the n-th line of the surgery's own files; whether it came so far."""
    left = [number]

    def trace(frame, event, _):
        if frame.f_globals.get("__name__") not in {"auxin.surgery", "auxin.optimizers", "auxin.edits"}:
            return None
        if event == "line":
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
        return trace

    others = sys.gettrace()  # a coverage tool's
    sys.settrace(trace)
    try:
        action()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(others)
    return False


def bad_inputs(model, site):
    good = change(model, site, 2)
    short = {slot: tensor[..., :1, :] for slot, tensor in good.new.items()}
    moved = Slot("2", "weight", 0, "fan_in")
    return {
        "negative": (Change(site, -1, {}), InputError),
        "missing": (Change(site, 2, {}), InputError),
        "count": (Change(site, 3, good.new), InputError),
        "shape": (Change(site, 2, short), InputError),
        "foreign slot": (Change(site, 2, {**good.new, moved: torch.zeros(1)}), InputError),
        "keep range": (Change(site, 0, {}, keep=torch.tensor([0, 9])), InputError),
        "keep twice": (Change(site, 0, {}, keep=torch.tensor([1, 1])), InputError),
        "keep type": (Change(site, 0, {}, keep=torch.tensor([True, False])), InputError),
        "update": (Change(site, 2, good.new, updates={"2.weight": torch.zeros(7, 7)}), InputError),
        "factor 0": (Change(site, 2, good.new, factors={"2.weight": torch.zeros(3, 1)}), InputError),
        "unknown tensor": (Change(site, 2, good.new, updates={"9.weight": torch.zeros(1)}), ModelChangedError),
        "no tensor": (Change(site, 2, good.new, updates={"2.in_features": torch.zeros(1)}), ModelChangedError),
    }


@pytest.mark.parametrize("case", bad_inputs(mlp(), linear_site(mlp(), "0", "2")))
def test_bad_input_changes_nothing(case):
    model, (site,), x = build("mlp")
    optimizer = adam(model)
    train(model, x, optimizer)
    before = snapshot(model, optimizer)
    item, kind = bad_inputs(model, site)[case]
    with pytest.raises(kind) as caught:
        apply(model, [change(model, site, 1), item] if case == "factor 0" else [item], [optimizer])
    assert isinstance(caught.value, AuxinError)
    assert len(str(caught.value)) > 30
    assert snapshot(model, optimizer) == before


def test_a_changed_model_is_refused():
    model, (site,), _ = build("mlp")
    item = change(model, site, 2)
    model[2] = nn.Linear(7, 3)
    with pytest.raises(ModelChangedError, match="disagree on its width"):
        apply(model, [item])
    model[2] = nn.ReLU()
    with pytest.raises(ModelChangedError, match=r"2\.weight"):
        apply(model, [item])
    model, (site,), _ = build("mlp")
    model[0].out_features = None
    with pytest.raises(ModelChangedError, match="out_features"):
        apply(model, [change(model, site, 2)])


def test_counts_by_groups():
    model, (site,), _ = build("mlp")
    model[1].groups = 2
    site = type(site)("0", ("0",), (), (), site.slots, (Count("1", "groups", 1, per=2),), {}, model)
    with pytest.raises(InputError, match="multiples of 2"):
        apply(model, [change(model, site, 3)])
    apply(model, [change(model, site, 4), Change(site, 0, {}, keep=torch.arange(6))])
    assert model[1].groups == 3


def test_sparse_gradients_are_refused():
    model, sites, _ = build("mlp")
    model[0].weight.grad = torch.zeros(4, 5).to_sparse()
    with pytest.raises(InputError, match="sparse"):
        apply(model, changes_of(model, sites))


# Copies and wrappers


def test_scratch_shares_nothing_and_changes_nothing():
    model, sites, x = build("conv")
    model.kept = [model(x).sum(), {"deeper": model[0].weight * 2}]
    model(x).sum().backward()
    before = snapshot(model)
    copied = scratch(model)
    own = {t.data_ptr() for t in [*copied.parameters(), *copied.buffers(), copied.kept[0], copied.kept[1]["deeper"]]}
    theirs = {t.data_ptr() for t in [*model.parameters(), *model.buffers(), model.kept[0], model.kept[1]["deeper"]]}
    assert own.isdisjoint(theirs)
    assert torch.equal(copied.kept[1]["deeper"], model.kept[1]["deeper"])
    apply(copied, changes_of(model, sites))
    copied(x)
    assert snapshot(model) == before
    assert copied[0].out_channels == 5


def test_scratch_keeps_ties():
    model, _, _ = build("mlp")
    model.append(model[2])
    copied = scratch(model)
    assert copied[2] is copied[3]


def test_a_model_that_cannot_be_copied_is_refused_with_the_reason(tmp_path):
    model, _, _ = build("mlp")
    with (tmp_path / "log").open("w") as file:
        model.log = file
        with pytest.raises(InputError, match=r"cannot be copied .*TextIOWrapper"):
            scratch(model)


def test_wrappers():
    model, sites, _ = build("mlp")
    wrapped = nn.DataParallel(model)
    for action in (plain, scratch, lambda m: apply(m, changes_of(model, sites))):
        with pytest.raises(WrapperError, match=r"model\.module"):
            action(wrapped)
    with pytest.raises(WrapperError, match="submodule '0'"):
        plain(nn.Sequential(wrapped))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_models_are_refused():
    with pytest.raises(WrapperError, match="ScriptModule"):
        plain(torch.jit.trace(mlp(), torch.randn(2, 5)))


def test_the_optimizer_must_hold_what_grows():
    model, sites, x = build("mlp")
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
    train(model, x, optimizer)
    before = snapshot(model, optimizer)
    with pytest.raises(OptimizerError, match=r"2\.weight"):
        apply(model, changes_of(model, sites), [optimizer])
    assert snapshot(model, optimizer) == before
