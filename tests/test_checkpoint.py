import json
import os
from dataclasses import asdict, replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from auxin.checkpoint import load, save
from auxin.errors import CheckpointError, WrapperError
from auxin.history import Growth, History
from auxin.structure import Change, Count, Slot
from helpers_surgery import (
    MODELS,
    SITES,
    bits,
    build,
    change,
    conv,
    deep,
    grow,
    linear_site,
    make_site,
    mlp,
    producer,
    snapshot,
    train,
)


def content(model):
    return {name: (bits(t), t.stride(), t.dtype) for name, t in model.state_dict(keep_vars=True).items()}


def grown(kind, events=2, keep=None):
    """A model that grew several times with training in between, its history, and an input."""
    model, sites, x = build(kind)
    optimizer, history = torch.optim.Adam(model.parameters()), History()
    for _ in range(events):
        train(model, x, optimizer)
        history.append(grow(model, [change(model, site, 2, quiet=False) for site in sites], (optimizer,)))
    if keep is not None:
        history.append(grow(model, [Change(sites[0], 0, {}, keep=torch.tensor(keep))], (optimizer,)))
    train(model, x, optimizer)
    return model, history, x


@pytest.mark.parametrize("keep", [None, [4, 0, 2]])
@pytest.mark.parametrize("kind", MODELS)
def test_replay_on_a_fresh_seed_is_bitwise(kind, keep, tmp_path):
    model, history, x = grown(kind, keep=keep)
    save(tmp_path / "model", model, history)
    torch.manual_seed(7)
    seed = MODELS[kind]()
    parameters, rng = list(seed.parameters()), torch.get_rng_state()
    loaded = load(str(tmp_path / "model"), seed)
    assert loaded is seed
    assert all(p is q for p, q in zip(parameters, loaded.parameters(), strict=True))
    assert content(loaded) == content(model)
    assert torch.equal(rng, torch.get_rng_state())
    model.eval()
    loaded.eval()
    assert torch.equal(model(x), loaded(x))
    assert [repr(module) for module in loaded.modules()] == [repr(module) for module in model.modules()]
    optimizer = torch.optim.Adam(loaded.parameters())
    train(loaded, x, optimizer)
    grow(loaded, [change(loaded, site, 1) for site in SITES[kind](loaded)], (optimizer,))


def test_the_values_do_not_hang_on_the_file(tmp_path):
    model, history, _ = grown("conv")
    save(tmp_path / "model", model, history)
    loaded = load(tmp_path / "model", conv())
    wanted = content(loaded)
    with (tmp_path / "model").open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(bytes(100))
    (tmp_path / "model").unlink()
    assert content(loaded) == wanted


def test_a_growth_a_list_and_a_history_are_accepted(tmp_path):
    model, sites, _ = build("mlp")
    growth = grow(model, [change(model, sites[0], 2)])
    for given in (growth, [growth], History([growth])):
        save(tmp_path / "model", model, given)
        assert content(load(tmp_path / "model", mlp())) == content(model)
    with safe_open(tmp_path / "model", framework="pt") as file:
        assert History.from_json(file.metadata()["history"]) == History([growth])


def test_a_seed_that_never_grew_and_records_that_added_nothing(tmp_path):
    model, sites, _ = build("mlp")
    save(tmp_path / "model", model, History())
    assert content(load(tmp_path / "model", mlp())) == content(model)
    growth = grow(model, [change(model, sites[0], 1)])
    nothing = replace(growth[0], added=0, width_before=5, width_after=5, slots=(), counts=())
    save(tmp_path / "model", model, [growth, Growth((nothing,))])
    assert content(load(tmp_path / "model", mlp())) == content(model)


class Odd(nn.Module):
    """Tensors of every kind that a file must hold."""

    def __init__(self):
        super().__init__()
        self.layers = mlp()
        self.head = nn.Linear(5, 3, bias=False)
        self.same_head = self.head
        self.twin = nn.Linear(5, 3)
        self.twin.weight = self.head.weight
        self.register_buffer("the_flag", torch.tensor([True, False]))
        self.register_buffer("the_steps", torch.tensor(3))
        self.register_buffer("the_empty", torch.zeros(0, 4))
        self.register_buffer("the_half", torch.randn(3).bfloat16())
        self.register_buffer("the_turned", torch.randn(3, 4).t())
        self.register_buffer("the_part", torch.randn(10)[2:5])
        self.register_buffer("the_spread", torch.randn(1, 3).expand(2, 3))
        self.register_buffer("the_nan", torch.tensor([float("nan"), -0.0, float("inf")]))
        self.register_buffer("the_none", None)
        self.register_buffer("the_hidden", torch.randn(3), persistent=False)
        self.table = nn.Parameter(torch.tensor(2.0))


def test_tensors_of_every_kind(tmp_path):
    torch.manual_seed(0)
    model = Odd()
    site = linear_site(model, "layers.0", "layers.2")
    growth = grow(model, [change(model, site, 3)])
    save(tmp_path / "model", model, growth)
    torch.manual_seed(1)
    seed = Odd()
    seed.the_steps.zero_()
    hidden = seed.the_hidden.clone()
    load(tmp_path / "model", seed)
    assert {n: b for n, (b, _, _) in content(seed).items()} == {n: b for n, (b, _, _) in content(model).items()}
    assert seed.twin.weight is seed.head.weight
    assert torch.equal(seed.the_hidden, hidden)
    stored = load_file(tmp_path / "model")
    assert {"twin.weight", "same_head.weight", "the_hidden"}.isdisjoint(stored)


def test_a_tied_tensor_that_grew_under_its_second_name(tmp_path):
    def tied():
        model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3), nn.Linear(4, 3))
        model[2].weight = model[1].weight
        return model

    model = tied()
    slots = (*producer("0"), Slot("2", "weight", 1, "fan_out"))
    counts = (Count("0", "out_features"), Count("1", "in_features"), Count("2", "in_features"))
    site = make_site(model, "0", slots, counts)
    save(tmp_path / "model", model, grow(model, [change(model, site, 2, quiet=False)]))
    assert content(load(tmp_path / "model", tied())) == content(model)


def test_memory_formats(tmp_path):
    model, history, _ = grown("conv")
    model.to(memory_format=torch.channels_last)
    save(tmp_path / "model", model, history)
    loaded = load(tmp_path / "model", conv())
    assert content(loaded) == content(model)
    assert loaded[0].weight.is_contiguous(memory_format=torch.channels_last)
    plain, history, _ = grown("conv")
    save(tmp_path / "plain", plain, history)
    loaded = load(tmp_path / "plain", conv().to(memory_format=torch.channels_last))
    assert content(loaded) == content(plain)


def test_growth_from_zero_and_back_to_zero(tmp_path):
    with pytest.warns(UserWarning, match="zero-element"):
        model, seed, fresh = mlp(0), mlp(0), mlp(0)
    site = linear_site(model, "0", "2")
    first = grow(model, [change(model, site, 2, quiet=False)])
    save(tmp_path / "model", model, first)
    assert content(load(tmp_path / "model", seed)) == content(model)
    second = grow(model, [Change(site, 0, {}, keep=torch.arange(0))])
    save(tmp_path / "model", model, [first, second])
    assert content(load(tmp_path / "model", fresh)) == content(model)


def test_compiled_models(tmp_path):
    model, history, x = grown("mlp")
    save(tmp_path / "model", torch.compile(model, backend="eager"), history)
    seed = torch.compile(mlp(), backend="eager")
    seed(x)
    assert load(tmp_path / "model", seed) is seed
    assert torch.equal(seed(x), model(x))


# Bad input


def assert_refused(path, seed, *texts):
    before = snapshot(seed)
    with pytest.raises(CheckpointError) as caught:
        load(path, seed)
    assert snapshot(seed) == before
    for text in (os.path.basename(path), *texts):
        assert text in str(caught.value)


def test_a_wrong_seed_model_is_refused_with_all_its_tensors(tmp_path):
    model, history, _ = grown("deep")
    save(tmp_path / "model", model, history)
    wrong = deep()
    wrong[0] = nn.Linear(6, 4)
    wrong[4] = nn.Linear(3, 2, bias=False)
    wrong.append(nn.Linear(1, 1))
    shape = "0.weight is (4, 6) torch.float32, expected (4, 5)"
    assert_refused(tmp_path / "model", wrong, shape, "4.bias is not in the model", "5.weight is not in the file")
    assert_refused(tmp_path / "model", model, "0.bias is (8,)", "before its first growth")
    assert_refused(tmp_path / "model", deep().double(), "torch.float64")
    load(tmp_path / "model", deep())


def test_other_ties_are_refused(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    save(tmp_path / "model", model, History())
    seed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    seed[1].weight = seed[0].weight
    assert_refused(tmp_path / "model", seed, "tied")


def test_attributes_that_the_history_does_not_know(tmp_path):
    model, history, _ = grown("mlp")
    save(tmp_path / "model", model, history)
    seed = mlp()
    seed[0].out_features = "four"
    assert_refused(tmp_path / "model", seed, "out_features")


def test_truncated_and_foreign_files(tmp_path):
    model, history, _ = grown("mlp")
    path = tmp_path / "model"
    save(path, model, history)
    whole = path.read_bytes()
    for size in (0, 5, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert_refused(path, mlp(), "safetensors")
    path.write_bytes(os.urandom(4000))
    assert_refused(path, mlp(), "safetensors")
    torch.save(model.state_dict(), path)
    assert_refused(path, mlp(), "safetensors")
    save_file({"0.weight": torch.zeros(2)}, path)
    assert_refused(path, mlp(), "not written by auxin")
    assert_refused(tmp_path / "absent", mlp(), "No such file")
    assert_refused(tmp_path, mlp())


def rewritten(path, **changed):
    with safe_open(path, framework="pt") as file:
        metadata = {**file.metadata(), **changed}
    save_file(load_file(path), path, metadata)


def test_damaged_headers(tmp_path):
    model, history, _ = grown("mlp")
    path = tmp_path / "model"
    layouts = ["{", "[]", json.dumps({"formats": {"x": "channels_last"}, "ties": {}}), json.dumps({"ties": {"a": "b"}})]
    bad = [({"layout": text}, "layout" if text is None else "damaged") for text in layouts]
    bad += [({"history": "{}"}, "damaged"), ({"history": "nothing"}, "damaged"), ({"auxin": "99"}, "format 99")]
    for changed, text in bad:
        save(path, model, history)
        rewritten(path, **changed)
        assert_refused(path, mlp(), text)


def edited(history, **changed):
    """The history with its last record edited."""
    last = history[-1]
    return History([*history[:-1], replace(last, records=(replace(last.records[0], **changed),))])


def slot_dict(**changed):
    return {**asdict(Slot("0", "weight", 0, "fan_in")), **changed}


WRONG = {
    "an event is missing": (lambda h: History(h[1:]), "0.weight"),
    "the last is missing": (lambda h: History(h[:-1]), "0.weight (6 along axis 0"),
    "twice": (lambda h: History([*h, h[-1]]), "does not hang together"),
    "widths": (lambda h: edited(h, width_after=7), "from 6 to 7 neurons"),
    "no slots": (lambda h: edited(h, slots=()), "from 6 to 8 neurons"),
    "unknown tensor": (lambda h: edited(h, slots=(slot_dict(module="9"),)), "9.weight"),
    "unknown axis": (lambda h: edited(h, slots=(slot_dict(axis=5),)), "axis 5"),
    "unknown field": (lambda h: edited(h, slots=(slot_dict(colour=1),)), "colour"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_history_that_does_not_fit_is_refused(case, tmp_path):
    model, history, _ = grown("mlp")
    path = tmp_path / "model"
    wrong = WRONG[case][0](history)
    if case != "an event is missing":
        with pytest.raises(CheckpointError, match=WRONG[case][1].split("(")[0]):
            save(path, model, wrong)
        assert not path.exists()
    save(path, model, history)
    rewritten(path, history=wrong.to_json())
    assert_refused(path, mlp())


def test_saving_is_whole_or_not_at_all(tmp_path, monkeypatch):
    model, history, _ = grown("mlp")
    path = tmp_path / "model"
    save(path, model, history)
    old = path.read_bytes()
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(CheckpointError, match="disk full"):
        save(path, grown("mlp", events=1)[0], grown("mlp", events=1)[1])
    assert path.read_bytes() == old
    assert os.listdir(tmp_path) == ["model"]


def test_where_a_file_cannot_be_written(tmp_path):
    model, history, _ = grown("mlp")
    with pytest.raises(CheckpointError, match=r"folder .*nowhere does not exist"):
        save(tmp_path / "nowhere" / "model", model, history)
    with pytest.raises(CheckpointError, match="it is a folder"):
        save(tmp_path, model, history)


def test_models_that_a_file_cannot_hold(tmp_path):
    path = tmp_path / "model"

    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"anything": object()}

    for model, text in (
        (nn.Sequential(Extra(2, 2)), "extra state"),
        (nn.Sequential(nn.LazyLinear(2)), r"0\.weight has no values"),
        (nn.Linear(2, 2, device="meta"), "weight has no values"),
    ):
        with pytest.raises(CheckpointError, match=text):
            save(path, model, History())
    with pytest.raises(WrapperError, match=r"model\.module"):
        save(path, nn.DataParallel(mlp()), History())
    assert not path.exists()


def test_loading_in_inference_mode(tmp_path):
    model, history, x = grown("conv")
    save(tmp_path / "model", model, history)
    seed = conv()
    with torch.inference_mode():
        loaded = load(tmp_path / "model", seed)
        assert_refused(tmp_path / "model", conv(), "inference_mode")
    train(loaded, x, torch.optim.Adam(loaded.parameters()))
