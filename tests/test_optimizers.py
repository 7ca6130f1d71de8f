import copy

import pytest
import torch
from torch import nn

from auxin import optimizers
from auxin.errors import OptimizerError
from auxin.optimizers import FIRST, as_optimizers, check, register
from auxin.structure import Change
from auxin.surgery import apply
from helpers_surgery import build, change, linear_site, mlp, snapshot, train

OPTIM = torch.optim
CASES = {
    "SGD plain": (OPTIM.SGD, {}),
    "SGD momentum": (OPTIM.SGD, {"momentum": 0.9}),
    "SGD nesterov": (OPTIM.SGD, {"momentum": 0.9, "nesterov": True}),
    "SGD foreach": (OPTIM.SGD, {"momentum": 0.9, "foreach": True}),
    "SGD fused": (OPTIM.SGD, {"momentum": 0.9, "fused": True}),
    "Adam": (OPTIM.Adam, {}),
    "Adam amsgrad": (OPTIM.Adam, {"amsgrad": True}),
    "Adam foreach": (OPTIM.Adam, {"foreach": True}),
    "Adam fused": (OPTIM.Adam, {"fused": True}),
    "Adam tensor lr": (OPTIM.Adam, {"lr": torch.tensor(0.01)}),
    "AdamW": (OPTIM.AdamW, {}),
    "AdamW amsgrad": (OPTIM.AdamW, {"amsgrad": True}),
    "NAdam": (OPTIM.NAdam, {}),
    "RAdam": (OPTIM.RAdam, {}),
    "Adamax": (OPTIM.Adamax, {}),
    "Adagrad": (OPTIM.Adagrad, {}),
    "RMSprop": (OPTIM.RMSprop, {}),
    "RMSprop centered": (OPTIM.RMSprop, {"centered": True, "momentum": 0.9}),
    "Adadelta": (OPTIM.Adadelta, {}),
    "Adafactor": (OPTIM.Adafactor, {}),
    "ASGD": (OPTIM.ASGD, {}),
    "Rprop": (OPTIM.Rprop, {}),
}


# What stands where neurons are new, and the power of s that a state takes when its parameter is multiplied by s.
EXPECTED = {
    (OPTIM.SGD, "momentum_buffer"): ("zero", -1),
    (OPTIM.Adam, "exp_avg"): ("zero", -1),
    (OPTIM.Adam, "exp_avg_sq"): ("mean", -2),
    (OPTIM.Adam, "max_exp_avg_sq"): ("mean", -2),
    (OPTIM.AdamW, "exp_avg"): ("zero", -1),
    (OPTIM.AdamW, "exp_avg_sq"): ("mean", -2),
    (OPTIM.AdamW, "max_exp_avg_sq"): ("mean", -2),
    (OPTIM.NAdam, "exp_avg"): ("zero", -1),
    (OPTIM.NAdam, "exp_avg_sq"): ("mean", -2),
    (OPTIM.RAdam, "exp_avg"): ("zero", -1),
    (OPTIM.RAdam, "exp_avg_sq"): ("mean", -2),
    (OPTIM.Adamax, "exp_avg"): ("zero", -1),
    (OPTIM.Adamax, "exp_inf"): ("mean", -1),
    (OPTIM.Adagrad, "sum"): ("mean", -2),
    (OPTIM.RMSprop, "square_avg"): ("mean", -2),
    (OPTIM.RMSprop, "grad_avg"): ("zero", -1),
    (OPTIM.RMSprop, "momentum_buffer"): ("zero", 0),
    (OPTIM.Adadelta, "square_avg"): ("mean", -2),
    (OPTIM.Adadelta, "acc_delta"): ("mean", 2),
    (OPTIM.Adafactor, "row_var"): ("mean", -2),
    (OPTIM.Adafactor, "col_var"): ("mean", -2),
    (OPTIM.Adafactor, "variance"): ("mean", -2),
    (OPTIM.ASGD, "ax"): ("own", 1),
    (OPTIM.Rprop, "prev"): ("zero", -1),
    (OPTIM.Rprop, "step_size"): ("mean", 1),
}


def make(case, parameters):
    kind, options = CASES[case]
    return kind(parameters, **{"lr": 0.01, **options})


def states(model, optimizer):
    """State tensors by (parameter name, key)."""
    return {
        (name, key): value.clone()
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
        if torch.is_tensor(value)
    }


@pytest.mark.parametrize("kind", ["mlp", "conv"])
@pytest.mark.parametrize("case", CASES)
def test_old_state_stays_and_new_state_is_filled_by_its_kind(case, kind):
    model, (site,), x = build(kind)
    optimizer = make(case, model.parameters())
    loss = train(model, x, optimizer)
    before, keys = states(model, optimizer), list(optimizer.state)
    apply(model, [change(model, site, 2, quiet=False)], [optimizer])
    after = states(model, optimizer)
    assert before.keys() == after.keys()
    assert all(a is b for a, b in zip(keys, optimizer.state, strict=True))
    rules = optimizers.rules_of(optimizer)
    for (name, key), old in before.items():
        new = after[name, key]
        corner = tuple(slice(size) for size in old.shape)
        torch.testing.assert_close(new[corner], old, rtol=0, atol=0)
        if rules[key] is not None:
            assert tuple(new.shape) == rules[key].shape(model.get_parameter(name))
            check_fill(EXPECTED[type(optimizer), key][0], old, new, corner, model.get_parameter(name))
    assert loss.grad_fn is not None
    old = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(model, x, optimizer)
    still = [name for name, p in model.named_parameters() if torch.equal(p, old[name])]
    assert set(still) <= ({"0.bias"} if kind == "conv" else set())  # the norm behind it takes a bias away


def check_fill(fill, old, new, corner, parameter):
    fresh = torch.ones_like(new, dtype=torch.bool)
    fresh[corner] = False
    wanted = {"zero": torch.zeros_like(new), "mean": old.mean().expand_as(new), "own": parameter.detach()}[fill]
    torch.testing.assert_close(new[fresh], wanted[fresh])


def test_muon():
    model = nn.Sequential(nn.Linear(5, 4, bias=False), nn.ReLU(), nn.Linear(4, 3, bias=False))
    site = linear_site(model, "0", "2")
    site = type(site)("0", ("0",), (), (), tuple(s for s in site.slots if s.tensor == "weight"), site.counts, {}, model)
    optimizer, x = torch.optim.Muon(model.parameters(), lr=0.01), torch.randn(6, 5)
    train(model, x, optimizer)
    old = states(model, optimizer)["2.weight", "momentum_buffer"]
    apply(model, [change(model, site, 2)], [optimizer])
    new = states(model, optimizer)["2.weight", "momentum_buffer"]
    assert torch.equal(new, torch.cat([old, torch.zeros(3, 2)], 1))
    train(model, x, optimizer)


def test_adafactor_factors_grow_along_their_own_axis():
    model, (site,), x = build("mlp")
    optimizer = torch.optim.Adafactor(model.parameters())
    train(model, x, optimizer)
    apply(model, [change(model, site, 2)], [optimizer])
    first, second = optimizer.state[model[0].weight], optimizer.state[model[2].weight]
    assert (tuple(first["row_var"].shape), tuple(first["col_var"].shape)) == ((6, 1), (1, 5))
    assert (tuple(second["row_var"].shape), tuple(second["col_var"].shape)) == ((3, 1), (1, 6))


@pytest.mark.parametrize("case", CASES)
def test_state_follows_a_factor_by_its_power(case):
    model, (site,), x = build("mlp")
    optimizer = make(case, model.parameters())
    train(model, x, optimizer)
    before = states(model, optimizer)
    apply(model, [Change(site, 0, {}, factors={"2.weight": torch.tensor(4.0)})], [optimizer])
    for (name, key), value in states(model, optimizer).items():
        power = EXPECTED[type(optimizer), key][1] if value.dim() and name == "2.weight" else 0
        torch.testing.assert_close(value, before[name, key] * 4.0**power)


@pytest.mark.parametrize("case", ["SGD momentum", "Adam amsgrad", "Adamax", "Adafactor", "RMSprop centered", "Adagrad"])
def test_a_factor_leaves_the_state_that_the_scaled_parameter_would_have(case):
    """A parameter s times as large has gradients 1/s times as large: the state after a step with those is right."""
    s = torch.tensor([[2.0], [0.5], [4.0]])
    plain, scaled = (model_with_state(case, factor) for factor in (torch.ones(3, 1), s))
    apply(plain[0], [Change(linear_site(plain[0], "0", "2"), 0, {}, factors={"2.weight": s})], [plain[1]])
    for key, value in plain[1].state[plain[0][2].weight].items():
        if key != "col_var":  # a mean over rows that are scaled apart is known for their average factor alone
            torch.testing.assert_close(value, scaled[1].state[scaled[0][2].weight][key], rtol=1e-4, atol=1e-12)


def model_with_state(case, factor):
    """A model and its optimizer after one step along a fixed gradient, divided by the factor."""
    model = mlp()
    optimizer = make(case, model.parameters())
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    model[2].weight.grad /= factor
    optimizer.step()
    return model, optimizer


def test_kept_neurons_keep_their_state():
    model, (site,), x = build("conv")
    optimizer, keep = torch.optim.Adam(model.parameters()), torch.tensor([2, 0])
    train(model, x, optimizer)
    old = states(model, optimizer)
    apply(model, [Change(site, 0, {}, keep=keep)], [optimizer])
    new = states(model, optimizer)
    for key in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(new["0.weight", key], old["0.weight", key][keep])
        assert torch.equal(new["1.bias", key], old["1.bias", key][keep])
        assert torch.equal(new["3.weight", key], old["3.weight", key][:, keep])
    train(model, x, optimizer)


def test_second_moments_of_a_width_of_zero_are_zero():
    with pytest.warns(UserWarning, match="zero-element"):
        model = mlp(0)
    site, optimizer, x = linear_site(model, "0", "2"), torch.optim.Adam(model.parameters()), torch.randn(6, 5)
    model(x).square().sum().backward()
    optimizer.step()
    apply(model, [change(model, site, 2)], [optimizer])
    assert optimizer.state[model[0].weight]["exp_avg_sq"].count_nonzero() == 0
    train(model, x, optimizer)


def test_state_that_does_not_exist_yet():
    model, (site,), x = build("mlp")
    optimizer = torch.optim.Adam(model.parameters())
    apply(model, [change(model, site, 2)], [optimizer])
    assert len(optimizer.state) == 0
    train(model, x, optimizer)


def test_several_optimizers_groups_and_a_scheduler():
    model, (site,), x = build("mlp")
    first = torch.optim.SGD([{"params": model[0].weight, "lr": 0.1}, {"params": model[0].bias}], lr=0.2, momentum=0.9)
    second = torch.optim.AdamW(model[2].parameters())
    schedule = torch.optim.lr_scheduler.StepLR(first, 1)
    train(model, x, first, second)
    schedule.step()
    groups = [[(id(p), group["lr"]) for p in group["params"]] for group in first.param_groups]
    counted = schedule.state_dict()
    apply(model, [change(model, site, 2)], [first, second])
    assert [[(id(p), group["lr"]) for p in group["params"]] for group in first.param_groups] == groups
    assert schedule.state_dict() == counted
    assert first.state[model[0].weight]["momentum_buffer"].shape == (6, 5)
    assert second.state[model[2].weight]["exp_avg"].shape == (3, 6)
    train(model, x, first, second)
    schedule.step()


def test_state_dict_round_trip_after_growth():
    model, (site,), x = build("mlp")
    optimizer = torch.optim.Adam(model.parameters())
    train(model, x, optimizer)
    apply(model, [change(model, site, 2)], [optimizer])
    other = copy.deepcopy(model)
    twin = torch.optim.Adam(other.parameters())
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, x, optimizer)
    train(other, x, twin)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_gradient_scaler_keeps_working():
    model, (site,), x = build("mlp")
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), torch.amp.GradScaler("cpu")
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        apply(model, [change(model, site, 1)], [optimizer])
    assert optimizer.state[model[0].weight]["momentum_buffer"].shape == (7, 5)


class Signed(torch.optim.Optimizer):
    """An optimizer of the user's own, with a state that nobody knows."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            slow = self.state[parameter].setdefault("slow", torch.zeros_like(parameter))
            slow.lerp_(parameter.grad, 0.1)
            parameter -= 0.1 * slow.sign()


class Counting(torch.optim.Adam):
    """A subclass with a state key more."""

    def step(self, closure=None):
        super().step(closure)
        for state in self.state.values():
            state["calls"] = state.get("calls", 0) + 1


class Renamed(torch.optim.Adam):
    """A subclass with the same state."""


@pytest.mark.parametrize(("kind", "text"), [(Signed, "state of Signed"), (Counting, "'calls'")])
def test_unknown_state_is_refused_before_anything_changes(kind, text, monkeypatch):
    model, (site,), x = build("mlp")
    optimizer = kind(model.parameters())
    train(model, x, optimizer)
    before = snapshot(model, optimizer)
    with pytest.raises(OptimizerError, match=text):
        apply(model, [change(model, site, 2)], [optimizer])
    assert snapshot(model, optimizer) == before
    monkeypatch.setattr(optimizers, "STATES", dict(optimizers.STATES))
    register(kind, {**optimizers.STATES[torch.optim.Adam], "slow": FIRST, "calls": None})
    apply(model, [change(model, site, 2)], [optimizer])
    train(model, x, optimizer)


def test_a_subclass_with_the_same_state_is_known():
    model, (site,), x = build("mlp")
    optimizer = Renamed(model.parameters())
    train(model, x, optimizer)
    apply(model, [change(model, site, 2)], [optimizer])
    train(model, x, optimizer)


def test_state_of_an_unexpected_shape_is_refused():
    model, (site,), x = build("mlp")
    optimizer = torch.optim.Adam(model.parameters())
    train(model, x, optimizer)
    optimizer.state[model[0].weight]["exp_avg"] = torch.zeros(7)
    before = snapshot(model, optimizer)
    with pytest.raises(OptimizerError, match=r"'exp_avg' of shape \(7,\) for 0\.weight"):
        apply(model, [change(model, site, 2)], [optimizer])
    assert snapshot(model, optimizer) == before


def test_check():
    model, sites, _ = build("deep")
    other = copy.deepcopy(model)
    check(model, sites, [])
    check(model, sites, [torch.optim.SGD(model.parameters(), lr=0.1)])
    with pytest.raises(OptimizerError, match="holds no parameter of this model"):
        check(model, sites, [torch.optim.SGD(other.parameters(), lr=0.1)])
    part = torch.optim.SGD([*model[0].parameters(), *model[2].parameters()], lr=0.1)
    with pytest.raises(OptimizerError, match=r"no optimizer holds 4\.weight,"):
        check(model, sites, [part])
    check(model, sites[:1], [part])
    model[4].weight.requires_grad_(False)
    check(model, sites, [part])
    model[4].weight.requires_grad_(True)
    part.add_param_group({"params": model[4].parameters()})
    check(model, [change(model, site, 1) for site in sites], [part])


def test_what_is_no_optimizer_is_refused():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert as_optimizers(None) == ()
    assert as_optimizers(optimizer) == as_optimizers([optimizer]) == (optimizer,)
    for wrong in (torch.optim.lr_scheduler.StepLR(optimizer, 1), torch.amp.GradScaler("cpu"), "adam", [model]):
        with pytest.raises(OptimizerError, match=r"is not a torch\.optim\.Optimizer"):
            as_optimizers(wrong)
    with pytest.raises(OptimizerError, match="LBFGS"):
        as_optimizers(torch.optim.LBFGS(model.parameters()))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"capturable": True}])
def test_on_an_accelerator(options):
    model, (site,), x = build("conv")
    model.to("cuda", memory_format=torch.channels_last)
    x = x.to("cuda")
    optimizer, scaler = torch.optim.AdamW(model.parameters(), **options), torch.amp.GradScaler("cuda")
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        apply(model, [change(model, site, 2, factors={"3.weight": torch.rand(4, 1, 1, 1) + 0.5})], [optimizer])
    assert all(t.is_cuda for t in [*model.parameters(), *model.buffers()])
    assert all(state["exp_avg"].shape == p.shape for p, state in optimizer.state.items())
