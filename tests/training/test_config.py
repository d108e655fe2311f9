"""Configs: shipped, given, mistaken."""

from pathlib import Path

import pytest
import torch

from cli_runs import run_command
from expmflow.data import DataError, Dataset
from expmflow.models.mixing import MIXINGS
from expmflow.models.subflows import SUBFLOWS
from expmflow.training.build import build_data, resolve
from expmflow.training.config import Config, ConfigError, load_config, parse_config, presets
from expmflow.training.randomness import Randomness


@pytest.mark.parametrize("name", sorted(presets()))
def test_every_preset_parses(name: str):
    assert isinstance(load_config(name), Config)


def test_overrides_come_last_and_keep_their_kind():
    config = load_config("moons", ["train.steps=7", "optim.lr=1e-2", "optim.clip=null", "optim.betas=[0.8,0.9]"])
    assert (config.train.steps, config.optim.lr, config.optim.clip) == (7, 0.01, None)
    assert config.optim.betas == (0.8, 0.9)
    assert config.model == load_config("moons").model


def test_a_lone_name_of_a_column_is_a_list_of_one_and_names_may_be_numbers():
    config = load_config("table", ["data.drop=body mass", "data.columns=[2019,a]"])
    assert (config.data.drop, config.data.columns) == (["body mass"], ["2019", "a"])
    assert load_config("table", ["data.drop=0"]).data.drop == ["0"]
    with pytest.raises(ConfigError, match=r"data\.drop: input should be a valid list, got True"):
        load_config("table", ["data.drop=true"])


@pytest.mark.parametrize("suffix", ["yaml", "yml", "json"])
def test_files_in_yaml_and_json(tmp_path: Path, suffix: str):
    path = tmp_path / f"c.{suffix}"
    path.write_text('{"train": {"steps": 3, "seed": 1}, "optim": {"lr": 1e-5}}')
    config = load_config(str(path), ["train.seed=2"])
    assert (config.train.steps, config.train.seed, config.optim.lr) == (3, 2, 1e-5)


def test_a_config_is_its_own_json():
    config = load_config("table", ["data.path=here.csv"])
    assert parse_config(config.model_dump(mode="json")) == config


def test_five_mistakes_are_five_lines(tmp_path: Path):
    path = tmp_path / "wrong.yaml"
    path.write_text(
        "data: {name: moos}\nmodel: {blcks: 2}\noptim: {lr: -1}\ntrain: {steps: many, precision: float16}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config(str(path))
    first, *lines = str(caught.value).splitlines()
    assert first == "Expected a valid config; got 5 problems:"
    assert len(lines) == 5
    for place in ("data.name", "model.blcks", "optim.lr", "train.steps", "train.precision"):
        assert sum(line.startswith(f"  {place}: ") for line in lines) == 1, place


@pytest.mark.parametrize(
    ("override", "near"), [("train.setps=3", "steps"), ("optm.lr=1", "optim"), ("model.hiden=3", "hidden")]
)
def test_a_misspelt_key_names_the_nearest(override: str, near: str):
    with pytest.raises(ConfigError, match=rf"no such key \(did you mean '{near}'\?\)"):
        load_config("moons", [override])


@pytest.mark.parametrize(
    ("override", "key"),
    [("steps=50", "train.steps"), ("lr=1", "optim.lr"), ("path=x.csv", "data.path"), ("subflow=x", "model.subflow")],
)
def test_a_setting_without_its_section_is_told_which(override: str, key: str):
    with pytest.raises(ConfigError, match=rf"no such key \(did you mean '{key}'\?\)"):
        load_config("moons", [override])


@pytest.mark.parametrize(("setting", "kinds"), [("mixing", MIXINGS), ("subflow", SUBFLOWS)])
def test_configs_and_help_know_every_kind_of_layer_and_no_other(setting: str, kinds: dict[str, object]):
    for kind in kinds:
        assert getattr(load_config("image-coupling", [f"model.{setting}={kind}"]).model, setting) == kind
    with pytest.raises(ConfigError) as caught:
        load_config("image-coupling", [f"model.{setting}=none-such"])
    shown = run_command("train", "--help").out
    assert all(f"'{kind}'" in str(caught.value) for kind in kinds)
    assert all(kind in shown for kind in kinds)


@pytest.mark.parametrize(
    ("setting", "registry", "kind"),
    [("mixing", MIXINGS, MIXINGS["1x1"]), ("subflow", SUBFLOWS, SUBFLOWS["coupling"])],
)
def test_kinds_that_a_script_adds_are_known_to_configs_and_models(setting: str, registry, kind, monkeypatch):
    override = f"model.{setting}=mine"
    with pytest.raises(ConfigError, match="got 'mine'"):
        load_config("image-coupling", [override])
    monkeypatch.setitem(registry, "mine", kind)
    config = load_config("image-coupling", [override, "model.levels=1", "model.subflows=1", "model.growth=2"])
    assert config.model.build((1, 4, 4)).event_shape == (1, 4, 4)
    with pytest.raises(ConfigError, match=f"model.{setting}: input should be .* or 'mine', got 'other'"):
        load_config("image-coupling", [f"model.{setting}=other"])


def test_an_unknown_preset_names_the_known_and_the_nearest():
    with pytest.raises(
        ConfigError, match=r"Expected a preset \(.*moons.*\) or a \.yaml file; got 'mons' \(did you mean"
    ):
        load_config("mons")


@pytest.mark.parametrize("override", ["steps", "=3", "", " =3"])
def test_an_override_has_a_key_and_a_value(override: str):
    with pytest.raises(ConfigError, match="Expected an override key=value; got"):
        load_config("moons", [override])


@pytest.mark.parametrize(
    "text",
    ["[1, 2]", "a: b: c", "{", "\tx", "x: !!python/object/apply:os.system [ls]", "train: ${nowhere}", "train: 3"],
)
def test_what_is_no_config_is_refused(tmp_path: Path, text: str):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"Expected a (valid )?config"):
        load_config(str(path))


@pytest.mark.parametrize("values", [None, [], "moons", 3])
def test_values_have_to_be_sections(values: object):
    with pytest.raises(ConfigError, match="Expected a config of sections; got"):
        parse_config(values)


def test_other_data_than_the_preset_has_comes_without_its_files() -> None:
    own = load_config("image-convsylvester", ["data.path=photos"])
    assert (own.data.name, own.data.size) == ("images", 32)
    other = load_config("image-convsylvester", ["data.name=cifar10"])
    assert (other.data.name, other.data.size, other.data.path) == ("cifar10", None, None)
    assert load_config("image-convsylvester", ["data.name=images"]).data.size == 32


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"name": "moons", "path": "t.csv"},
            r"Expected data\.name=table or graphs or images with data\.path=t\.csv",
        ),
        ({"name": "mog-4", "size": 3}, r"Expected data\.name=images with data\.size=3; got data\.name=mog-4"),
        (
            {"name": "table", "path": "t.csv", "channels": "grey"},
            r"Expected data\.name=images with data\.channels",
        ),
    ],
)
def test_settings_of_other_data_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        build_data(parse_config({"data": settings}).data, Randomness(0))


def test_settings_of_tables_follow_from_the_number_of_rows():
    for rows, hidden, jitter, decay in ((120, 32, 0.5, 1.0), (4_000, 64, 0.015, 0.1), (100_000, 64, 0.0, 0.004)):
        config = resolve(parse_config({"model": {"kind": "table"}}), vectors_of(rows))
        assert (config.model.hidden, config.data.jitter, config.optim.weight_decay) == (hidden, jitter, decay)
        given = parse_config({"model": {"kind": "table", "hidden": 5}, "data": {"jitter": 0.2}})
        assert resolve(given, vectors_of(rows)).model.hidden == 5
        assert resolve(given, vectors_of(rows)).data.jitter == 0.2
    with pytest.raises(ConfigError, match=r"Expected optim\.optimizer=adam for weight decay; got adamax"):
        resolve(parse_config({"optim": {"optimizer": "adamax", "weight_decay": 0.1}}), vectors_of(10))


def vectors_of(rows):
    part = torch.zeros(rows, 2)
    return Dataset(part, part, part, kind="vectors")
