"""Reports on images and on graphs."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from cli_runs import run_command
from expmflow.report.certificates import certificates
from expmflow.report.summary import round_trip
from expmflow.runs.evaluation import open_run
from kind_runs import GRAPHS, IMAGES, train_kind
from report_page import CHROMIUM, Page, png_size, shown_widths


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_kind(tmp_path_factory.mktemp("images") / "run", IMAGES)


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_kind(tmp_path_factory.mktemp("graphs") / "run", GRAPHS)


def report(*runs: Path, out: Path) -> Page:
    outcome = run_command("report", *runs, "--out", out)
    assert outcome.code == 0, outcome.err
    return Page(out.read_text(encoding="utf-8"))


def test_images_stand_beside_samples(images: Path, tmp_path: Path):
    page = report(images, out=tmp_path / "report.html")
    assert len(page.images) == 6  # curves, data, samples, most and least likely, scores
    side = 6 * (64 + 2) + 2
    assert [png_size(image) for image in page.images[1:3]] == [(side, side)] * 2
    results = dict(page.tables["results"][1:])
    nats = float(results["test −ELBO (nats)"].split(" ± ")[0])
    bits = float(results["test −ELBO (bits per dimension)"].split(" ± ")[0])
    assert bits == pytest.approx(nats / (64 * math.log(2)), abs=1e-3)
    assert "tested on" not in results  # all of them
    assert float(results["round-trip error, grey levels"]) < 0.01
    assert "round-trip error, relative" not in results
    assert not [name for name in results if "importance" in name or "node" in name]
    (kind,) = [row[1] for row in page.tables["certificates"][1:]]
    assert kind == "ConvExp"  # inside the Sylvester layer


def test_importance_samples_of_evaluate_are_reported(images: Path, tmp_path: Path):
    copy = shutil.copytree(images, tmp_path / "run")
    found = json.loads(run_command("evaluate", copy, "--images", "3", "--importance-samples", "4", "--json").out)
    results = dict(report(copy, out=tmp_path / "report.html").tables["results"][1:])
    value, error = (found[f"importance_weighted_bpd{name}"] for name in ("", "_standard_error"))
    expected = f"{value:.4f} ± {error:.4f} (4 noises, 3 images)"
    assert results["importance-weighted (bits per dimension)"] == expected


def test_graphs_have_nats_per_node_and_their_entropy(graphs: Path, tmp_path: Path):
    page = report(graphs, out=tmp_path / "report.html")
    assert len(page.images) == 3
    results = dict(page.tables["results"][1:])
    per_node = float(results["test nll (nats per node)"].split(" ± ")[0])
    assert per_node > float(results["entropy of the data (nats per node)"])
    assert [row[1] for row in page.tables["certificates"][1:]] == 2 * ["GraphConvExp"]


def test_a_graph_exponential_is_certified_on_the_complete_graph(graphs: Path):
    trained = open_run(graphs)
    found = certificates(trained.model, trained.rows(trained.data().test[:2]))
    assert len(found) == 2
    complete, units = 1 - torch.eye(4, dtype=torch.float64), torch.eye(8, dtype=torch.float64).reshape(8, 1, 4, 2)
    for certificate in found:
        layer = trained.model.get_submodule(certificate.name).double()
        dense = torch.stack([layer.operator(complete)(unit) for unit in units])
        norm = float(torch.linalg.matrix_norm(dense.detach().reshape(8, 8), ord=2))
        assert norm <= certificate.norm * (1 + 1e-5)
        assert certificate.norm <= 2


def test_a_round_trip_is_in_grey_levels(images: Path):
    trained = open_run(images)
    rows = trained.data().test[:4]
    flow, middle = trained.model.flow, (rows + 0.5) / 17 - 0.5
    with torch.no_grad():
        back = flow.decode(flow.encode(middle))
    assert round_trip(trained, rows) == pytest.approx(17 * float((back - middle).abs().max()), abs=1e-9)


def test_kinds_stand_side_by_side(images: Path, graphs: Path, tmp_path: Path):
    page = report(images, graphs, out=tmp_path / "report.html")
    results = {row[0]: row[1:] for row in page.tables["results"][1:]}
    assert results["test −ELBO (nats)"][1] == "–"
    assert results["test nll (nats per node)"][0] == "–"
    assert len(page.images) == 8
    if CHROMIUM is not None:
        assert all(width > 300 for width in shown_widths(tmp_path / "report.html", tmp_path))
