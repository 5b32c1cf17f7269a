"""Recipe files: what they stand for, what they refuse, and that they can be written down again."""

import tomllib
from dataclasses import fields, is_dataclass, replace
from math import inf, nan
from pathlib import Path
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dla.models import DLAConfig, DLAForCausalLM
from dla.models.config import Range
from dla.names import check_known, nearest
from dla.training.recipe import Data, Optimizer, Recipe, Schedule, Source
from dla.training.recipe.read import check, model_config, read_recipe, write_recipe
from dla.training.recipe.schema import MODEL, TYPES, typed_tree
from dla.typed import LARGEST, convert, literal

RECIPES = Path(__file__).parents[3] / "recipes"
BASES = ["paper/base", "cpu/base", "stdlib/base"]
NAMES = [str(path.relative_to(RECIPES).with_suffix("")) for path in sorted(RECIPES.rglob("*.toml"))]
RUNS = [name for name in NAMES if name not in BASES]
PRESET = '[model]\npreset = "gdn-tiny"\n'
GOOD = Recipe(model={"preset": "gdn-tiny"})


@pytest.fixture
def read(tmp_path):
    """A reader of a recipe that is given as text."""

    def read(text="", *overrides, model=PRESET):
        file = tmp_path / "some.toml"
        file.write_text(f"{text}\n{model}")
        return read_recipe(file, overrides)

    return read


def refusal(call, *args, **options):
    """The message that a call is refused with, which is one line."""
    with pytest.raises(ValueError) as caught:
        call(*args, **options)
    message = str(caught.value)
    assert len(message.splitlines()) == 1, message
    return message


# The recipes of the repository


def test_all_recipes_are_there():
    models = [f"{m}-{k}" for m in ("gdn-1.3b", "mamba2-780m", "mamba2-802m") for k in MEMORIES]
    assert [f"paper/{name}" for name in sorted([*models, "base", "transformer-778m"])] == [
        name for name in NAMES if name.startswith("paper/")
    ]
    assert {f"cpu/{name}" for name in (*MEMORIES, "base", "transformer")} <= set(NAMES)


MEMORIES = {  # of a recipe's name: what its model must be
    "single": ("single", False),
    "log_linear": ("log_linear", False),
    "dynamic": ("dynamic", False),
    "recommended": ("dynamic", True),
}
MILLIONS = {"mamba2-780m": 780, "mamba2-802m": 802, "gdn-1.3b": 1390, "transformer-778m": 778}
ADDED = {"mamba2-780m": 48 * 48 * 1537, "mamba2-802m": 21 * 48 * 1537, "gdn-1.3b": 21 * 6 * 2049}  # a slot or level


@pytest.mark.parametrize("name", RUNS)
def test_recipes_of_the_repository(name):
    recipe = read_recipe(RECIPES / f"{name}.toml")
    config = model_config(recipe)
    kind = name.rpartition("/")[2].rpartition("-")[2]
    assert (config.memory, config.routed) == MEMORIES.get(kind, ("single", False))
    assert config.temperature is None
    assert config.max_position_embeddings >= recipe.data.length
    assert recipe.run == f"out/{name}"
    if config.memory == "dynamic":
        capacity = 16 if name.startswith("cpu/") else 30
        assert (recipe.model["capacity"], recipe.model["tau"], recipe.model["merge"]) == (capacity, 0.6, "density")


@pytest.mark.parametrize("name", [name for name in RUNS if name.startswith("paper/")])
def test_recipes_of_the_paper(name):
    recipe = read_recipe(RECIPES / f"{name}.toml")
    assert recipe.data.length * recipe.batch.sequences == 524288
    assert recipe.schedule == Schedule(steps=95368, warmup=1024, final=0.1)
    assert recipe.optimizer == Optimizer(lr=3e-4, betas=(0.9, 0.95), eps=1e-15, weight_decay=0.1, clip=1.0)
    assert (recipe.compute.dtype, recipe.compute.recompute, recipe.batch.micro) == ("bfloat16", True, 4)
    assert (recipe.data.length, recipe.data.documents) == (16384, "packed")
    assert recipe.data.train == (Source("hf:togethercomputer/Long-Data-Collections"),)
    config = model_config(recipe)
    neox = recipe.data.tokenizer == "EleutherAI/gpt-neox-20b"
    assert config.vocab_size == (50288 if neox else 32000)
    assert neox or recipe.data.tokenizer == "mistralai/Mistral-7B-v0.1"
    assert config.initializer_range == 0.006


@pytest.mark.parametrize("name", ["mamba2-780m", "mamba2-802m", "gdn-1.3b", "transformer-778m"])
def test_parameters(name):
    kinds = [f"{name}-single", f"{name}-log_linear", f"{name}-dynamic"] if name in ADDED else [name]
    for kind, width in zip(kinds, (0, 15, 30), strict=False):
        with torch.device("meta"):
            model = DLAForCausalLM(model_config(read_recipe(RECIPES / f"paper/{kind}.toml")))
        count = sum(weight.numel() for weight in model.parameters())
        assert count - width * ADDED.get(name, 0) == pytest.approx(MILLIONS[name] * 1e6, rel=0.01)


def test_recipes_for_a_cpu_differ_in_the_model_alone():
    recipes = [read_recipe(RECIPES / f"cpu/{name}.toml") for name in (*MEMORIES, "transformer")]
    assert len({recipe.run for recipe in recipes}) == 5
    first = recipes[0]
    assert all(replace(recipe, run=first.run, model=first.model) == first for recipe in recipes)
    assert (first.data.train, first.data.tokenizer) == ((Source("stdlib"),), "bytes")


# Reading


def test_what_a_file_leaves_out_has_its_default(read):
    assert read() == GOOD
    assert read("[optimizer]\nlr = 1") == replace(GOOD, optimizer=Optimizer(lr=1.0))
    assert type(read("[optimizer]\nlr = 1").optimizer.lr) is float


@pytest.mark.parametrize(
    ("text", "sources"),
    [
        ('train = "a"', (Source("a"),)),
        ('train = ["a", "b"]', (Source("a"), Source("b"))),
        ('[[data.train]]\npath = "a"\nweight = 2\n[[data.train]]\npath = "b"\nfield = "x"', None),
        ('train = [{ path = "a", weight = 2.0 }, { path = "b", field = "x" }]', None),
        ('train = [{ path = "a", weight = 2.0, split = "train" }, { path = "b", field = "x", subset = "" }]', None),
    ],
)
def test_sources(read, text, sources):
    expected = sources or (Source("a", weight=2.0), Source("b", field="x"))
    assert read(f"[data]\n{text}").data.train == expected
    assert read(f"[data]\n{text.replace('train', 'validation', 1)}".replace("[[data.train", "[[data.validation"))


def test_none_stands_for_none_in_the_model(read):
    model = read(model=PRESET + 'memory = "dynamic"\ncapacity = "none"\nblock = "none"').model
    assert model == {"preset": "gdn-tiny", "memory": "dynamic", "capacity": None, "block": None}
    assert model_config(replace(GOOD, model=model)).capacity is None


UNKNOWN = [
    ("sed = 3", "'sed' is not known; the nearest is 'seed'"),
    ("extend = 'base.toml'", "'extend' is not known; the nearest is 'extends'"),
    ("lr = 3e-4", "'lr' is not known; the nearest is 'optimizer.lr'"),
    ("[optimiser]\nlr = 1.0", "'optimiser' is not known; the nearest is 'optimizer'"),
    ("[optimizer]\nlrr = 1.0", "'optimizer.lrr' is not known; the nearest is 'optimizer.lr'"),
    ("[optimizer]\nsteps = 1", "'optimizer.steps' is not known; the nearest is 'schedule.steps'"),
    ("[data]\ntrain = [{ pth = 'a' }]", "'data.train[0].pth' is not known; the nearest is 'data.train[0].path'"),
    ("[data]\nvalidation = ['a', { path = 'b', wieght = 1 }]", "'data.validation[1].wieght' is not known; the nearest"),
    ('"a\\nb" = 1', r"'a\nb' is not known"),
    ('[gate]\n"a\\nb" = 1', r"'gate.a\nb' is not known; the nearest is 'gate."),
]


@pytest.mark.parametrize(("text", "expected"), UNKNOWN)
def test_unknown_keys(read, text, expected):
    message = refusal(read, text)
    assert expected in message
    assert "some.toml: " in message


@pytest.mark.parametrize("section", [field.name for field in fields(Recipe) if is_dataclass(field.type)])
def test_unknown_keys_in_every_section(read, section):
    for field in fields(get_type_hints(Recipe)[section]):
        typo = field.name + "x"
        expected = f"'{section}.{typo}' is not known; the nearest is '{section}.{field.name}'"
        assert expected in refusal(read, f"[{section}]\n{typo} = 1")


def test_unknown_options_of_the_model(read):
    near = "'model.memroy' is not known; the nearest is 'model.memory'"
    assert near in refusal(read, model=PRESET + 'memroy = "dynamic"')
    assert "some.toml: model.preset: 'gdn-tin' is not known; the nearest is 'gdn-tiny'" in refusal(
        read, model='[model]\npreset = "gdn-tin"'
    )
    for inherited in ("architectures", "dtype", "id2label"):  # transformers' own are no business of a recipe
        assert f"'model.{inherited}' is not known" in refusal(read, model=f"{PRESET}{inherited} = 1")


WRONG = [
    ("seed = 1.0", "seed must be an integer >= 0, got 1.0"),
    ("seed = true", "seed must be an integer >= 0, got True"),
    ("run = 3", "run must be a text that is not empty, got 3"),
    ("optimizer = 3", "optimizer must be a table, got 3"),
    ("[[optimizer]]\nlr = 1.0", "optimizer must be a table, got [{'lr': 1.0}]"),
    ("[optimizer]\nlr = '1e-3'", "optimizer.lr must be a finite number > 0, got '1e-3'"),
    ("[optimizer]\nlr = false", "optimizer.lr must be a finite number > 0, got False"),
    ("[optimizer]\nbetas = 0.9", "optimizer.betas must be a list of 2 numbers, got 0.9"),
    ("[optimizer]\nbetas = [0.9]", "optimizer.betas must be a list of 2 numbers, got [0.9]"),
    ("[optimizer]\nbetas = [0.9, 'x']", "optimizer.betas[1] must be a number, got 'x'"),
    ("[compute]\nrecompute = 1", "compute.recompute must be true or false, got 1"),
    ("[compute]\ndtype = 'float16'", "compute.dtype must be one of 'float32', 'bfloat16', 'float64', got 'float16'"),
    ("[gate]\nkind = 1", "gate.kind must be one of 'soft', 'hard', got 1"),
    ("[gate]\nkind = ['soft']", "gate.kind must be one of 'soft', 'hard', got ['soft']"),
    ("[schedule]\nsteps = 'none'", "schedule.steps must be an integer >= 1, got 'none'"),
    ("[schedule]\nsteps = 1979-05-27", "schedule.steps must be an integer >= 1, got datetime.date(1979, 5, 27)"),
    ("[data]\ntrain = 3", "data.train must be a text or a list of texts or tables, got 3"),
    ("[data]\ntrain = ['a', 3]", "data.train[1] must be a text or a table, got 3"),
    ("[data]\ntrain = [{ weight = 1.0 }]", "data.train[0].path is missing"),
    ("[data]\ntrain = [{ path = 'a', weight = 'x' }]", "data.train[0].weight must be a finite number > 0, got 'x'"),
    ("[optimizer]\nlr = 1" + "0" * 400, "optimizer.lr must be a finite number > 0, got an integer that is too large"),
    ("extends = 3", "extends must be a text, got 3"),
    ('extends = "a\\u0000b"', "extends must be a text, got 'a\\x00b'"),
    ("model" + ".a" * 100_000 + " = 1", "is not valid TOML: a key has more than a hundred parts"),
    ('"model"' + ' . "a"' * 50_000 + " = 1", "is not valid TOML: a key has more than a hundred parts"),
    ("[model" + ".a" * 100_000 + "]", "is not valid TOML: a key has more than a hundred parts"),
    (
        "[optimizer]\nlr" + ".a" * 90 + " = 1",
        "optimizer.lr must be a finite number > 0, got {'a': {'a': {'a': {'a': {'a': {'a': {...}",
    ),
    (f"seed = '{'a' * 10_000}'", "seed must be an integer >= 0, got 'aaaaaaaaaaaaaa"),
    ("seed = ", "is not valid TOML: Invalid value"),
]


@pytest.mark.parametrize(("text", "expected"), WRONG)
def test_wrong_types(read, text, expected):
    message = refusal(read, text)
    assert expected in message
    assert "some.toml" in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tau = 'x'", "model.tau must be a finite number >= 0, got 'x'"),
        ("tau = 'none'", "model.tau must be a finite number >= 0, got 'none'"),
        ("capacity = 1.5", 'model.capacity must be an integer >= 2 or "none", got 1.5'),
        ("layers = 'mamba2'", "model.layers must be a list of texts or \"none\", got 'mamba2'"),
        (
            "eos_token_id = 'x'",
            "model.eos_token_id must be an integer >= 0 or a list of integers >= 0 or \"none\", got 'x'",
        ),
        ("time_step_limit = [0, 'x']", "model.time_step_limit[1] must be a number, got 'x'"),
        ("routed = 1", "model.routed must be true or false, got 1"),
        ("memory = 'dynamc'", "model.memory must be one of"),
        ("temperature = 0.1", "model.temperature must be left out, as [gate] sets it, got 0.1"),
        ("gate_temperature = 0.1", "model.gate_temperature must be left out"),
        ("max_position_embeddings = 2047", "must be at least data.length = 2048, got 2047"),
        ("load = 'x'", "model.load takes a model as it was saved, so leave out model.preset"),
    ],
)
def test_wrong_models(read, text, expected):
    message = refusal(read, model=PRESET + text)
    assert expected in message
    assert "some.toml: model" in message


# One file extending another


def write_files(folder, **texts):
    for name, text in texts.items():
        (folder / f"{name}.toml").write_text(text)


def test_extends(tmp_path):
    (tmp_path / "deeper").mkdir()
    write_files(
        tmp_path,
        a='run = "a"\nseed = 1\n[model]\npreset = "gdn-tiny"\ntau = 0.5\n[data]\ntrain = ["a", "b"]\nlength = 64',
        b='extends = "a.toml"\nrun = "b"\n[optimizer]\nlr = 1.0\nclip = 2.0\n[data]\ntrain = "c"',
    )
    write_files(
        tmp_path / "deeper", c='extends = "../b.toml"\nseed = 3\n[optimizer]\nlr = 5.0\n[model]\nmemory = "dynamic"'
    )
    recipe = read_recipe(tmp_path / "deeper" / "c.toml")
    assert (recipe.run, recipe.seed) == ("b", 3)
    assert recipe.model == {"preset": "gdn-tiny", "tau": 0.5, "memory": "dynamic"}
    assert recipe.data == Data(train=(Source("c"),), length=64)
    assert recipe.optimizer == Optimizer(lr=5.0, clip=2.0)


def test_a_preset_can_be_taken_back(tmp_path):
    write_files(tmp_path, a=PRESET, b='extends = "a.toml"\n[model]\npreset = "none"\nload = "out/model"')
    assert read_recipe(tmp_path / "b.toml").model == {"load": "out/model"}


def test_mistakes_name_the_file_they_are_in(tmp_path):
    write_files(tmp_path, a="[optimizer]\nlrr = 1", b='extends = "a.toml"\n' + PRESET, c='extends = "d.toml"', e="[x")
    assert refusal(read_recipe, tmp_path / "b.toml").startswith(f"{tmp_path / 'a.toml'}: 'optimizer.lrr'")
    missing = f"there is no recipe file {tmp_path / 'd.toml'}, which {tmp_path / 'c.toml'} extends"
    assert refusal(read_recipe, tmp_path / "c.toml") == missing
    assert refusal(read_recipe, tmp_path / "d.toml") == f"there is no recipe file {tmp_path / 'd.toml'}"
    assert "e.toml is not valid TOML" in refusal(read_recipe, str(tmp_path / "e.toml"))
    assert f"the recipe file {tmp_path} cannot be read" in refusal(read_recipe, tmp_path)
    (tmp_path / "f.toml").write_bytes(b'run = "\xff"')
    assert "f.toml is not valid TOML" in refusal(read_recipe, tmp_path / "f.toml")


def test_circles(tmp_path):
    write_files(
        tmp_path, a='extends = "b.toml"', b='extends = "c.toml"', c='extends = "a.toml"', d='extends = "d.toml"'
    )
    message = refusal(read_recipe, tmp_path / "a.toml")
    assert "extends goes round in a circle" in message
    assert [part in message for part in ("a.toml -> ", "b.toml -> ", "c.toml -> ")] == [True] * 3
    assert "in a circle" in refusal(read_recipe, tmp_path / "d.toml")
    write_files(tmp_path, e=f'extends = "../{tmp_path.name}/e.toml"')  # the same file by another way
    assert "in a circle" in refusal(read_recipe, tmp_path / "e.toml")


# Options of the command line


@pytest.mark.parametrize(
    ("options", "key", "value"),
    [
        (["--optimizer.lr", "1e-3"], "optimizer.lr", 1e-3),
        (["--optimizer.lr=1"], "optimizer.lr", 1.0),
        (["--lr", "1e-3"], "optimizer.lr", 1e-3),
        (["--lr", "1e-3", "--optimizer.lr=1e-4"], "optimizer.lr", 1e-4),
        (["--optimizer.weight-decay", "0"], "optimizer.weight_decay", 0.0),
        (["--steps", "200"], "schedule.steps", 200),
        (["--run=out/x=y"], "run", "out/x=y"),
        (["--run", "3"], "run", "3"),
        (["--seed", "7"], "seed", 7),
        (["--compute.recompute", "true"], "compute.recompute", True),
        (["--export", "False"], "checkpoint.export", False),
        (["--gate.kind", "hard"], "gate.kind", "hard"),
        (["--betas", "0.5,0.6"], "optimizer.betas", (0.5, 0.6)),
        (["--betas", "[0.5, 0.6]"], "optimizer.betas", (0.5, 0.6)),
        (["--data.train", "a.txt, b.txt"], "data.train", (Source("a.txt"), Source("b.txt"))),
        (["--train", "a.txt"], "data.train", (Source("a.txt"),)),
        (["--data.train", '[{ path = "a,b", weight = 2 }]'], "data.train", (Source("a,b", weight=2.0),)),
        (["--data.validation="], "data.validation", ()),
    ],
)
def test_overrides(read, options, key, value):
    section, _, name = key.rpartition(".")
    recipe = read('[data]\nvalidation = ["x"]', *options)
    found = getattr(getattr(recipe, section) if section else recipe, name)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--model.memory", "dynamic", "--model.capacity", "8"], {"memory": "dynamic", "capacity": 8}),
        (["--memory=dynamic", "--capacity=none", "--tau=1"], {"memory": "dynamic", "capacity": None, "tau": 1.0}),
        (["--memory=dynamic", "--routed", "true"], {"memory": "dynamic", "routed": True}),
        (["--conv_bias", "none"], {"conv_bias": None}),
        (["--layers", "linear:single,softmax"], {"layers": ["linear:single", "softmax"]}),
        (["--layers", '["softmax"]'], {"layers": ["softmax"]}),
        (["--layers", "none"], {"layers": None}),
        (["--eos_token_id", "2"], {"eos_token_id": 2}),
        (["--eos-token-id", "2,3"], {"eos_token_id": [2, 3]}),
        (["--time_step_limit", "0, inf"], {"time_step_limit": (0.0, inf)}),
        (["--preset", "mamba2-tiny"], {"preset": "mamba2-tiny"}),
    ],
)
def test_overrides_of_the_model(read, options, expected):
    recipe = read("", *options)
    assert recipe.model == {"preset": "gdn-tiny", **expected}
    assert all(type(recipe.model[name]) is type(value) for name, value in expected.items())
    config = model_config(recipe)
    assert all(getattr(config, name) == x for name, x in expected.items() if name not in ("preset", "conv_bias"))


@pytest.mark.parametrize("dotted", TYPES)
def test_every_key_has_an_option(read, dotted):
    assert f"--{dotted}" in refusal(read, "", f"--{dotted}"), "without a value"
    if "." in dotted:
        short = f"--{dotted.rpartition('.')[2]}"
        same = [other for other in TYPES if other.rpartition(".")[2] == short[2:]]
        message = refusal(read, "", short)
        assert "has no value" in message
        if len(same) > 1:
            message = refusal(read, "", short, "1")
            assert all(f"--{other}" in message for other in same)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--optimizer.lrr", "1"], "'--optimizer.lrr' is not known; the nearest is '--optimizer.lr'"),
        (["--optimiser.lr", "1"], "'--optimiser.lr' is not known; the nearest is '--optimizer.lr'"),
        (["--lrr", "1"], "'--lrr' is not known; the nearest is '--optimizer.lr'"),
        (["--sed", "1"], "'--sed' is not known; the nearest is '--seed'"),
        (["--model.memroy=x"], "'--model.memroy' is not known; the nearest is '--model.memory'"),
        (["--optimizer.steps", "1"], "'--optimizer.steps' is not known; the nearest is '--schedule.steps'"),
        (["--data.train.path", "x"], "'--data.train.path' is not known; the nearest is '--data.train'"),
        (["--every", "1"], "--every may mean --checkpoint.every or --evaluation.every or --log.every; say which"),
        (["--gate", "1"], "--gate is a section and takes no value; set one of --gate.kind, --gate.start"),
        (["--lr"], "'--lr' has no value"),
        (["--lr", "--seed", "1"], "'--lr' has no value"),
        (["lr=1"], "'lr=1' is no option"),
        (["--seed", "1", "2"], "'2' is no option"),
        (["--"], "'--' is no option"),
        (["--seed", "1.5"], "--seed must be an integer >= 0, got '1.5'"),
        (["--optimizer.lr", "x"], "--optimizer.lr must be a finite number > 0, got 'x'"),
        (["--recompute", "yes"], "--recompute must be true or false, got 'yes'"),
        (["--steps", "none"], "--steps must be an integer >= 1, got 'none'"),
        (["--gate.kind", "sof"], "--gate.kind must be one of 'soft', 'hard', got 'sof'"),
        (["--betas", "1"], "--betas must be a list of 2 numbers, got [1.0]"),
        (["--betas", "[1"], "--betas: '[1' is not a list as in TOML"),
        (
            ["--data.train", "[{ pth = 'a' }]"],
            "'--data.train[0].pth' is not known; the nearest is '--data.train[0].path'",
        ),
        (["--run", "a\udcff"], r"--run must be valid UTF-8, got 'a\udcff'"),
        (["--capacity", "x"], "--capacity must be an integer >= 2 or \"none\", got 'x'"),
        (["--a\nb", "x"], r"'--a\nb' is not known"),
        (["--lr", "-1"], "--lr must be a finite number > 0, got -1.0"),
    ],
)
def test_refused_overrides(read, options, expected):
    assert expected in refusal(read, "", *options)


# Values


BAD_VALUES = [
    *(("run", value) for value in ("", " ")),
    ("seed", -1),
    ("seed", 2**63),
    ("data.train", ()),
    *(("data.holdout", value) for value in (-0.1, 1.0, nan)),
    ("data.tokenizer", ""),
    ("data.cache", ""),
    *(("data.length", value) for value in (1, 0, -5)),
    *((key, value) for key in ("batch.sequences", "evaluation.sequences", "schedule.steps") for value in (0, -1)),
    *((key, value) for key in ("checkpoint.keep", "compute.replicate", "log.every") for value in (0, -1)),
    *((key, value) for key in ("optimizer.lr", "optimizer.eps", "optimizer.clip") for value in (0.0, -1.0, inf, nan)),
    *((key, value) for key in ("gate.start", "gate.end") for value in (0.0, -1.0, inf, nan)),
    *(("optimizer.betas", value) for value in ((1.0, 0.9), (0.9, 1.0), (-0.1, 0.9), (0.9, nan))),
    *(("optimizer.weight_decay", value) for value in (-0.1, inf, nan)),
    *((key, value) for key in ("schedule.final", "gate.until") for value in (-0.1, 1.1, nan)),
    *((key, -1) for key in ("batch.micro", "optimizer.skips", "schedule.warmup", "log.memory_every")),
    *((key, -1) for key in ("compute.threads", "compute.shard", "checkpoint.every", "evaluation.every")),
]


def changed(recipe, key, value):
    section, _, name = key.rpartition(".")
    if not section:
        return replace(recipe, **{name: value})
    return replace(recipe, **{section: replace(getattr(recipe, section), **{name: value})})


@pytest.mark.parametrize(("key", "value"), BAD_VALUES)
def test_bad_values(key, value):
    message = refusal(check, changed(GOOD, key, value))
    assert message.startswith(f"{key} must be ")
    assert message.endswith(f"got {value!r}")


def test_every_limit_is_tested():
    of_sections = {key: kind for key, kind in TYPES.items() if not key.startswith("model.")}
    assert {key for key, _ in BAD_VALUES} == {key for key, kind in of_sections.items() if get_origin(kind) is Annotated}
    assert not any(kind in (int, float) for kind in of_sections.values())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data.holdout", 0.0),
        ("data.length", 2),
        ("batch.micro", 0),
        ("optimizer.betas", (0.0, 0.0)),
        ("optimizer.weight_decay", 0.0),
        ("schedule.final", 0.0),
        ("schedule.final", 1.0),
        ("gate.until", 0.0),
        ("gate.until", 1.0),
        ("schedule.warmup", 1000),
        ("gate.end", 0.2),
        ("checkpoint.every", 0),
    ],
)
def test_values_at_the_edge(key, value):
    recipe = changed(GOOD, key, value)
    assert check(recipe) is recipe


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (changed(GOOD, "schedule.warmup", 1001), "schedule.warmup must be at most schedule.steps = 1000, got 1001"),
        (changed(GOOD, "gate.end", 0.3), "gate.end must be at most gate.start = 0.2, got 0.3"),
        (changed(GOOD, "data.train", (Source("a", weight=0.0),)), "data.train[0].weight must be a finite number > 0"),
        (changed(GOOD, "data.train", (Source("a", weight=inf),)), "data.train[0].weight must be a finite number > 0"),
        (changed(GOOD, "data.validation", (Source("a"), Source(""))), "data.validation[1].path must be a text"),
        (changed(GOOD, "data.train", (Source("a", field=""),)), "data.train[0].field must be a text"),
        # recipes that come from no file
        (changed(GOOD, "optimizer.lr", "x"), "optimizer.lr must be a finite number > 0, got 'x'"),
        (
            changed(GOOD, "data.train", (Source("a", weight="x"),)),
            "data.train[0].weight must be a finite number > 0, got 'x'",
        ),
        (changed(GOOD, "gate.kind", "sof"), "gate.kind must be one of"),
        (replace(GOOD, model={"preset": "gdn-tiny", "tau": "x"}), "model.tau must be a finite number >= 0, got 'x'"),
        (replace(GOOD, model={"preset": "gdn-tiny", "tua": 1.0}), "model: 'tua' is not known; the nearest is 'tau'"),
        (replace(GOOD, model={}), "it lacks backbone, vocab_size, hidden_size, num_hidden_layers"),
        (replace(GOOD, model={"backbone": "linear", "hidden_size": 8, "num_hidden_layers": 1}), "it lacks vocab_size"),
        (replace(GOOD, model={"preset": "gdn-tiny", "load": "x"}), "so leave out model.preset"),
        (replace(GOOD, model={"load": "x", "tau": 0.5, "memory": "dynamic"}), "so leave out model.tau, model.memory"),
    ],
)
def test_values_that_do_not_go_together(recipe, expected):
    assert expected in refusal(check, recipe)


# Models

OWN = {"backbone": "linear", "vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2, "memory": "log_linear"}


def test_models_of_their_own_shape():
    config = model_config(replace(GOOD, model=OWN))
    assert isinstance(config, DLAConfig)
    assert {name: getattr(config, name) for name in OWN} == OWN
    pattern = {**OWN, "layers": ["linear", "softmax"]}
    del pattern["backbone"]
    assert check(replace(GOOD, model=pattern)) and model_config(replace(GOOD, model=pattern)).layers


def test_options_change_a_preset():
    config = model_config(replace(GOOD, model={"preset": "mamba2-tiny", "memory": "dynamic", "capacity": 8}))
    assert (config.backbone, config.memory, config.capacity, config.temperature) == ("mamba2", "dynamic", 8, None)


def test_positions_cover_the_length():
    for model in ({"preset": "gdn-tiny"}, {"preset": "gdn-tiny", "memory": "log_linear"}, OWN):
        for length, expected in ((64, 16384), (16384, 16384), (40000, 40000)):
            recipe = replace(GOOD, model=model, data=Data(length=length))
            assert model_config(recipe).max_position_embeddings == expected
        given_ = replace(GOOD, model={**model, "max_position_embeddings": 64}, data=Data(length=64))
        assert model_config(given_).max_position_embeddings == 64
        assert "must be at least data.length = 65, got 64" in refusal(
            model_config, replace(given_, data=Data(length=65))
        )
    levels = model_config(replace(GOOD, model=OWN, data=Data(length=40000))).level_width
    assert levels == (40000 - 1).bit_length() + 1


def test_saved_models(tmp_path):
    recipe = replace(GOOD, model={"load": str(tmp_path / "model")})
    assert check(recipe) is recipe
    assert "model.load must be the folder of a saved model" in refusal(model_config, recipe)
    # the name of a preset is none of a folder
    assert "the folder of a saved model, got 'gdn-tiny'" in refusal(
        model_config, replace(GOOD, model={"load": "gdn-tiny"})
    )
    (tmp_path / "model").mkdir()
    assert "model.load: " in refusal(model_config, recipe)
    DLAConfig(**OWN).save_pretrained(tmp_path / "model")
    config = model_config(recipe)
    assert {name: getattr(config, name) for name in OWN} == OWN


# Writing

TEXTS = st.text(min_size=1, max_size=20).filter(str.strip)
SPECIAL = {  # narrower than the type
    "data.length": st.integers(2, 16384),
    "data.train": st.lists(st.builds(Source, TEXTS, st.floats(1e-3, 1e3), TEXTS, st.text(), st.text()), min_size=1),
    "data.validation": st.lists(st.builds(Source, TEXTS, st.floats(1e-3, 1e3), TEXTS, st.text(), st.text())),
    "data.holdout": st.floats(0, 1, exclude_max=True),
    "optimizer.betas": st.tuples(st.floats(0, 0.9999), st.floats(0, 0.9999)),
    "schedule.steps": st.integers(1000, 10**9),
    "schedule.warmup": st.integers(0, 1000),
    "schedule.final": st.floats(0, 1),
    "gate.until": st.floats(0, 1),
    "gate.start": st.floats(1, 1e300),
    "gate.end": st.floats(1e-300, 1),
}
BY_TYPE = {int: st.integers(1, 2**40), float: st.floats(1e-300, 1e300), bool: st.booleans(), str: TEXTS}
MODELS = st.fixed_dictionaries(
    {"preset": st.just("mamba2-tiny"), "memory": st.just("dynamic")},
    optional={
        "capacity": st.none() | st.integers(2, 100),
        "tau": st.floats(0, 2),
        "routed": st.booleans(),
        "eos_token_id": st.none() | st.integers(0, 255) | st.lists(st.integers(0, 255), max_size=3),
        "layers": st.none() | st.just(["mamba2", "mamba2:single", "softmax", "mamba2:log_linear"]),
        "time_step_limit": st.just((0.0, inf)) | st.tuples(st.floats(0, 1), st.floats(1, inf)),
    },
)


def strategy(kind, prefix=""):
    """Any value of a type that a recipe may have."""
    if prefix in SPECIAL:
        made = SPECIAL[prefix]
        return made.map(tuple) if get_origin(bare(kind)) is tuple else made
    if get_origin(kind) is Literal:
        return st.sampled_from(get_args(kind))
    if is_dataclass(kind):
        hints = get_type_hints(kind, include_extras=True)
        return st.builds(kind, **{name: strategy(hint, f"{prefix}.{name}".strip(".")) for name, hint in hints.items()})
    return MODELS if prefix == "model" else BY_TYPE[bare(kind)]


def bare(kind):
    """A type without its limits."""
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


@given(strategy(Recipe))
def test_what_is_written_is_read_again(tmp_path_factory, recipe):
    file = tmp_path_factory.getbasetemp() / "again.toml"
    text = write_recipe(recipe)
    file.write_text(text)
    again = read_recipe(file)
    assert again == recipe
    assert write_recipe(again) == text


def value_of(kind):
    """Any value of an annotation in DLAConfig."""
    if kind is Range:
        return st.tuples(st.floats(0, 1), st.floats(1, inf))
    if get_origin(kind) is Annotated:
        base, *limits = get_args(kind)
        return value_of(base).filter(lambda x: all(limit.good(x) for limit in limits))
    if kind is int:
        return st.integers(1, LARGEST) | st.integers(1, 100)
    if kind in BY_TYPE:
        return st.floats(allow_nan=False) if kind is float else st.text() if kind is str else BY_TYPE[kind]
    args = get_args(kind)
    if get_origin(kind) is Literal:
        return st.sampled_from(args)
    if get_origin(kind) is list:
        return st.lists(value_of(args[0]), max_size=3)
    if get_origin(kind) is tuple:
        return st.lists(value_of(args[0]), max_size=3).map(tuple)
    return st.one_of(st.none() if arg is type(None) else value_of(arg) for arg in args)


@given(st.fixed_dictionaries({}, optional={name: value_of(kind) for name, kind in MODEL.items()}))
def test_every_option_of_the_model_is_written_and_read(model):
    model = {name: convert(name, value, MODEL[name]) for name, value in model.items()}
    assert typed_tree(tomllib.loads(write_recipe(Recipe(model=model))))["model"] == model


def test_all_fields_are_written():
    content = tomllib.loads(write_recipe(GOOD))
    for field in fields(Recipe):
        value = getattr(GOOD, field.name)
        assert not is_dataclass(value) or list(content[field.name]) == [each.name for each in fields(value)]
    assert set(content) == {field.name for field in fields(Recipe)}
    assert set(content["data"]["train"][0]) == {field.name for field in fields(Source)}
    assert write_recipe(GOOD).isascii()


@pytest.mark.parametrize("name", RUNS)
def test_recipes_of_the_repository_are_written_and_read(name, tmp_path):
    recipe = read_recipe(RECIPES / f"{name}.toml")
    (tmp_path / "recipe.toml").write_text(write_recipe(recipe))
    assert read_recipe(tmp_path / "recipe.toml") == recipe


# Names


def test_names():
    assert nearest("lrr", ["eps", "lr"]) == "lr"
    assert nearest("zzz", ["lr"]) == "lr", "there is always one"
    check_known("here", ["lr"], iter(["eps", "lr"]))
    message = refusal(check_known, "here", ["lr", "lrr", "x"], iter(["eps", "lr"]))
    assert message == "here: 'lrr' is not known; the nearest is 'lr'"


def test_arrays_without_an_end_are_refused(tmp_path):
    (tmp_path / "deep.toml").write_text("run = " + "[" * 2000)
    with pytest.raises(ValueError, match=r"deep\.toml is not valid TOML"):
        read_recipe(tmp_path / "deep.toml")
    with pytest.raises(ValueError, match="is not a list as in TOML"):
        literal("data.sources", "[" * 2000, tuple[str, ...])
