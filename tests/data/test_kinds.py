"""Kinds of data: what each says of itself, and a new one that every command knows by its registration alone."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cli_runs import run_command
from expmflow.data import DataError, Dataset, split
from expmflow.data.drawing.grids import image_grid, save_grid
from expmflow.data.kinds import KINDS, NATS, Layout, kind_of_source, register, sources
from expmflow.data.kinds.base import Description, Kind, Picture, Rows, Source, Unit
from expmflow.runs.evaluation import open_run
from report_page import Page, png_size

ROOT = Path(__file__).parents[2] / "src" / "expmflow"


class Tones(Kind):
    """Sounds of four samples each, in files with a line for each sound."""

    name = "tones"
    models = ("dense",)
    files = ".txt files of tones"
    formats = (".txt", ".png", ".npy")
    measured_rows = 7

    def __init__(self) -> None:
        self.sources = {"chirps": Source(self.chirps, ("samples", "test"), "drawn")}

    def chirps(self, *, samples, test, generator, progress) -> Dataset:
        time = torch.arange(4) / 4
        pitch = torch.rand(samples, 1, generator=generator("chirps"))
        rows = torch.sin(2 * math.pi * pitch * time) + 0.1 * torch.randn(samples, 4, generator=generator("hiss"))
        parts = split(rows, 0.1, test)
        return Dataset(parts.train, parts.validation, parts.test, kind="tones")

    def check_event_shape(self, event_shape) -> None:
        assert event_shape == (4,)

    def unit(self, event_shape) -> Unit:
        return Unit("nats per sample", "nats_per_sample", 1 / event_shape[0])

    def units(self, event_shape):
        return NATS, self.unit(event_shape)

    def read(self, files, layout, *, fit, progress) -> Rows:
        parts = [torch.tensor([[float(x) for x in line.split()] for line in f.read_text().splitlines()]) for f in files]
        return Rows.of_files(files, parts)

    def describe(self, title, source, path, load) -> Description:
        return Description(f"{title}: {len(load().train)} tones to train on", [("samples of a tone", "4")])

    def text(self, rows, layout) -> str:
        return "\n".join(" ".join(map(str, row)) for row in rows.tolist()) + "\n"

    def draw(self, samples, layout, *, data=None, columns=None) -> Picture:
        pixels = ((samples.clamp(-1, 1) + 1) * 127).long().reshape(-1, 1, 1, 4)
        return Picture(lambda target: save_grid(image_grid(pixels, 256), target))


@pytest.fixture
def tones() -> Iterator[Tones]:
    kind = Tones()
    register(kind)
    yield kind
    del KINDS[kind.name]


def test_a_new_kind_is_one_registration(tones: Tones, here: Path):
    """Trained, evaluated, sampled, scored, described and reported: nothing but the registration knows of it."""
    (here / "c.yaml").write_text(
        "{data: {name: chirps, samples: 100}, model: {kind: dense, blocks: 1, hidden: 4}, "
        "train: {steps: 3, batch_size: 16, log_every: 1, validate_every: 3, sample_every: 3}}"
    )
    trained = run_command("train", "c.yaml", "--out", "run")
    assert trained.code == 0, trained.err
    assert "nats per sample" in trained.err
    assert (here / "run" / "samples.png").read_bytes().startswith(b"\x89PNG")
    assert (here / "run" / "samples" / "step-00000003.png").exists()
    assert open_run("run").kind is tones
    found = json.loads(run_command("evaluate", "run", "--json").out)
    assert found["nats_per_sample"] == pytest.approx(found["nll"] / 4)
    assert "bpd" not in found
    assert "nats per sample" in run_command("evaluate", "run").out
    drawn = run_command("sample", "run", "-n", "2").out
    (here / "new.txt").write_text(drawn)
    assert len(drawn.splitlines()) == 2
    assert run_command("sample", "run", "-n", "2", "--out", "same.txt").code == 0
    assert (here / "same.txt").read_text() == drawn
    scores = list(csv.DictReader(run_command("score", "run", "new.txt").out.splitlines()))
    assert [row["row"] for row in scores] == ["1", "2"]
    assert "8000 tones to train on" in " ".join(run_command("data", "chirps").out.split())
    assert run_command("report", "run").code == 0
    page = Page((here / "run" / "report.html").read_text())
    results = dict(page.tables["results"][1:])
    assert "test nll (nats per sample)" in results
    assert results["tested on"] == "the first 7 of 10 rows"
    assert png_size(page.images[1])[0] > 0
    refused = run_command("train", "c.yaml", "model.kind=image", "model.blocks=null")
    assert refused.code == 2


def test_without_it_the_name_is_unknown(here: Path):
    outcome = run_command("train", "moons", "data.name=chirps")
    assert outcome.code == 2
    assert f"data.name: input should be one of {', '.join(sources())}, got 'chirps'" in outcome.err
    near = run_command("train", "moons", "data.name=moos")
    assert "got 'moos' (did you mean 'moons'?)" in near.err


def test_names_are_taken_once(tones: Tones):
    with pytest.raises(ValueError, match="Expected a kind of data whose names are new; got chirps, tones again"):
        register(Tones())


def test_every_source_has_one_kind_and_models():
    for name in sources():
        kind = kind_of_source(name)
        assert name in kind.sources
        assert kind.models
    with pytest.raises(ValueError, match=r"Expected data called one of moons, .*; got 'nothing'"):
        kind_of_source("nothing")


@pytest.mark.parametrize(
    ("kind", "shape", "unit", "per_nat"),
    [
        ("vectors", (5,), "nats", 1),
        ("graphs", (4, 2), "nats per node", 1 / 4),
        ("images", (3, 8, 8), "bits per dimension", 1 / (192 * math.log(2))),
    ],
)
def test_units(kind: str, shape: tuple[int, ...], unit: str, per_nat: float):
    found = KINDS[kind].unit(shape)
    assert (found.name, found.per_nat) == (unit, pytest.approx(per_nat))
    assert NATS in KINDS[kind].units(shape)
    KINDS[kind].check_event_shape(shape)


def test_settings_of_another_source_are_refused_by_name(here: Path):
    outcome = run_command("train", "moons", "data.size=32")
    assert outcome.err == "Expected data.name=images with data.size=32; got data.name=moons."
    outcome = run_command("train", "moons", "data.path=t.csv")
    assert outcome.err.startswith("Expected data.name=table or graphs or images")


def test_rows_are_read_as_they_are_written(here: Path):
    """Vectors and graphs, with every digit; a table has names."""
    generator = torch.Generator().manual_seed(0)
    vectors, layout = torch.randn(3, 2, generator=generator).double(), Layout((2,), ("a", "b, c"))
    Path("v.csv").write_text(KINDS["vectors"].text(vectors, layout))
    again = KINDS["vectors"].read([Path("v.csv")], layout, fit=False, progress=None)
    assert torch.equal(again.rows, vectors)
    assert (again.names, again.numbers) == (["v.csv"] * 3, [1, 2, 3])
    with pytest.raises(DataError, match=r"Expected 3 columns in v\.csv"):
        KINDS["vectors"].read([Path("v.csv")], Layout((3,)), fit=False, progress=None)


def test_nobody_above_decides_by_kind():
    """By a kind's name, by the number of axes, or by the class of a model."""
    names = "|".join(f'"{name}"' for name in (*KINDS, "dense", "image", "graph"))
    deciding = re.compile(
        rf"(kind|name) (==|!=|in|not in) ?\(?({names})|ndim ==|len\((data\.)?event_shape\)|isinstance\([^)]*Flow"
    )
    for floor in ("training", "runs", "report", "cli"):
        for path in sorted((ROOT / floor).glob("*.py")):
            for line in path.read_text().splitlines():
                assert not deciding.search(line), f"{path}: {line}"
                assert floor == "runs" or not re.search(r"kind ==|ndim ==|len\(event_shape\)", line), f"{path}: {line}"
