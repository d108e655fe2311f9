"""Graphs of strangers: read from arrays and tables, trained, scored and sampled with their own edges."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from cli_runs import run_command
from expmflow.data import DataError
from expmflow.data.kinds.networks import Networks
from expmflow.data.own_graphs import holds_graphs, read_graphs
from expmflow.distributions import StructuredFlow
from expmflow.models import graph_flow
from expmflow.runs.evaluation import open_run

X = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0], [9.0, 0.5]])
EDGES = np.array([[0, 1, 3], [1, 2, 4]])
SIZES = np.array([3, 2])


def save(path: Path, **changes: object) -> Path:
    np.savez(path, **{"x": X, "edge_index": EDGES, "sizes": SIZES, **changes})
    return path


def tables(folder: Path) -> Path:
    folder.mkdir()
    (folder / "nodes.csv").write_text("graph,node,a,b\n1,1,1,2\n1,2,3,4\n1,3,5,6\n2,1,7,8\n2,2,9,0.5\n")
    (folder / "edges.csv").write_text("graph,node,other\n1,1,2\n1,2,3\n2,1,2\n")
    return folder


def many(path: Path, graphs: int = 60, seed: int = 0) -> Path:
    generator = np.random.default_rng(seed)
    sizes = generator.integers(2, 5, graphs)
    starts = np.cumsum(sizes) - sizes
    edges = np.concatenate([[[s + k, s + k + 1] for k in range(n - 1)] for s, n in zip(starts, sizes, strict=True)]).T
    return save(path, x=generator.normal(size=(sizes.sum(), 2)), edge_index=edges, sizes=sizes)


class TestReading:
    def test_arrays_and_tables_are_the_same_graphs(self, tmp_path: Path):
        arrays, written = read_graphs(save(tmp_path / "g.npz")), read_graphs(tables(tmp_path / "g"))
        assert torch.equal(arrays.rows, written.rows)
        assert written.names == ("a", "b")
        assert arrays.rows.shape == (2, 3, 2 + 3 + 1)
        features, adjacency, mask = arrays.rows.split([2, 3, 1], dim=-1)
        assert features[1].tolist() == [[7, 8], [9, 0.5], [0, 0]]
        assert adjacency[0].tolist() == [[0, 1, 0], [1, 0, 1], [0, 1, 0]]
        assert torch.equal(adjacency, adjacency.mT)
        assert mask.squeeze(-1).tolist() == [[1, 1, 1], [1, 1, 0]]

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"sizes": np.array([3, 3])}, "Expected sizes of graphs in .* that add up to the 5 nodes of x"),
            ({"edge_index": np.array([[0], [3]])}, "Expected edges within one graph in"),
            ({"edge_index": np.array([[0], [5]])}, "Expected edges between nodes 0 to 4 in"),
            ({"edge_index": np.zeros((3, 2), int)}, r"Expected edge_index of shape \(2, edges\) in"),
            ({"x": X[:, :1]}, r"Expected at least two features of each node in .*g\.npz; got 1"),
            ({"x": X.astype(object)}, r"Expected graphs in .*g\.npz; got: Python objects, which are never loaded"),
            ({"sizes": np.zeros(0, int), "x": X[:0]}, r"Expected finite features \(nodes, F\) in x of .*g\.npz"),
            ({"sizes": np.array([5, 0])}, r"Expected at least one node in each graph of .*g\.npz; got sizes\[1\] = 0"),
            ({"x": X * np.nan}, r"Expected finite features .* in x of .*; got NaN or infinity in 5 of 5 nodes, first"),
        ],
    )
    def test_what_is_no_graph_is_named(self, tmp_path: Path, changes: dict, message: str):
        with pytest.raises(DataError, match=message):
            read_graphs(save(tmp_path / "g.npz", **changes))

    def test_loops_repeated_edges_and_nodes_without_any(self, tmp_path: Path):
        plain = save(tmp_path / "plain.npz", edge_index=np.array([[0, 0], [0, 1]]))
        twice = save(tmp_path / "twice.npz", edge_index=np.array([[0, 0, 1, 0], [0, 1, 0, 1]]))
        adjacency = read_graphs(plain).rows[0, :, 2:-1]
        assert adjacency.tolist() == [[1, 1, 0], [1, 0, 0], [0, 0, 0]]
        assert torch.equal(read_graphs(plain).rows, read_graphs(twice).rows)

    def test_weights_of_edges_do_not_pass_in_silence(self, tmp_path: Path, caplog: pytest.LogCaptureFixture):
        read_graphs(save(tmp_path / "g.npz"))
        assert not caplog.records
        read_graphs(save(tmp_path / "g.npz", edge_weight=np.ones(3), y=np.ones(2)))
        assert "left out edge_weight, y: read are x, edge_index, sizes." in caplog.text

    @pytest.mark.parametrize("text", ["", "graph,node,other\n"])
    def test_graphs_without_edges(self, tmp_path: Path, text: str):
        folder = tables(tmp_path / "g")
        (folder / "edges.csv").write_text(text)
        arrays = read_graphs(save(tmp_path / "g.npz", edge_index=np.zeros((2, 0))))
        assert torch.equal(read_graphs(folder).rows, arrays.rows)
        assert not arrays.rows[..., 2:-1].any()

    @pytest.mark.parametrize(
        ("name", "text", "message"),
        [
            ("nodes.csv", "node,graph,a,b\n1,1,0,0\n", "Expected the first columns graph, node in"),
            ("nodes.csv", "graph,node,a,b\n1,1.5,0,0\n", "Expected whole numbers of graphs and nodes in"),
            ("nodes.csv", "graph,node,a,b\n1,1,0,0\n1,1,2,2\n", "Expected each node of a graph once in"),
            ("nodes.csv", "graph,node,a\n1,1,0\n", "Expected edges between nodes of"),
            ("edges.csv", "graph,node,other,weight\n1,1,2,0.5\n", "Expected only the columns .*; got weight besides"),
            ("nodes.csv", "graph,node\n1,1\n", "Expected features of nodes in .*; got none beside"),
            ("edges.csv", "graph,node,other\n1,1,9\n", "Expected edges between nodes of"),
        ],
    )
    def test_tables_that_are_no_graphs(self, tmp_path: Path, name: str, text: str, message: str):
        folder = tables(tmp_path / "g")
        (folder / name).write_text(text)
        with pytest.raises(DataError, match=message) as raised:
            read_graphs(folder)
        assert str(folder) in str(raised.value)

    def test_graphs_beyond_memory_are_refused_before_any_work(self, tmp_path: Path):
        long = 2**15
        path = save(tmp_path / "g.npz", x=np.zeros((long, 2)), edge_index=np.zeros((2, 0), int), sizes=np.array([long]))
        with pytest.raises(
            DataError, match=r"Expected graphs in .*g\.npz that fit in memory; got 1 of up to 32768 nodes"
        ):
            read_graphs(path)

    def test_missing_arrays_tables_and_nodes(self, tmp_path: Path):
        np.savez(tmp_path / "g.npz", x=X)
        with pytest.raises(DataError, match=r"Expected arrays x, edge_index, sizes in .*; got no edge_index, sizes\."):
            read_graphs(tmp_path / "g.npz")
        assert not holds_graphs(tmp_path / "g.npz")
        np.savez(tmp_path / "g.npz", x=X, edge_index=EDGES)
        described = run_command("data", tmp_path / "g.npz")  # a file with edges is none of images
        assert "Expected arrays x, edge_index, sizes in" in described.err
        folder = tables(tmp_path / "g")
        (folder / "edges.csv").write_text("graph,node,other\n1,1,9\n")
        with pytest.raises(DataError, match=r"Expected edges between nodes of .*; got 1 to 9 in graph 1\."):
            read_graphs(folder)
        (folder / "edges.csv").unlink()
        with pytest.raises(DataError, match=r"Expected the file .*edges\.csv; got none"):
            read_graphs(folder)
        with pytest.raises(DataError, match=r"Expected a \.npz file of graphs, or a folder"):
            read_graphs(tmp_path / "g.pt")


class TestDensity:
    def test_it_is_the_flow_given_the_graph_whatever_the_padding(self, tmp_path: Path):
        torch.manual_seed(0)
        rows = read_graphs(save(tmp_path / "g.npz")).rows
        density = StructuredFlow(graph_flow(3, 2, hidden=4, subflows=1)).double().eval()
        features, adjacency, mask = rows.split([2, 3, 1], dim=-1)
        expected = density.flow.log_prob(features, (adjacency, mask.squeeze(-1) > 0))
        torch.testing.assert_close(density(rows), expected)
        alone = density.flow.log_prob(features[1:, :2], adjacency[1:, :2, :2])
        torch.testing.assert_close(density(rows)[1:], alone)

    def test_samples_have_graphs_of_training_rows(self, tmp_path: Path):
        rows = read_graphs(many(tmp_path / "g.npz")).rows
        density = StructuredFlow(graph_flow(rows.shape[1], 2, hidden=4, subflows=1), keep=20).double()
        density.start_from(rows)
        drawn = density.eval().sample(50)
        known = {tuple(graph.flatten().tolist()) for graph in rows[:20, :, 2:]}
        assert all(tuple(graph.flatten().tolist()) in known for graph in drawn[..., 2:])
        assert (drawn[..., :2][drawn[..., -1] == 0] == 0).all()
        assert float(density.round_trip_error(rows).max()) < 1e-9


def test_the_baseline_is_a_gaussian_that_sees_one_node_at_a_time(tmp_path: Path):
    """Of graphs of other sizes than those it is fitted to, padding not counted, in nats per graph."""
    train, rows = read_graphs(many(tmp_path / "a.npz", 80)).rows, read_graphs(many(tmp_path / "b.npz", 9, seed=1)).rows
    nodes = torch.cat([row[row[:, -1] > 0, :2] for row in train])
    gaussian = torch.distributions.MultivariateNormal(nodes.mean(0), nodes.T.cov(correction=0))
    expected = -sum(gaussian.log_prob(row[row[:, -1] > 0, :2]).sum() for row in rows) / len(rows)
    ((name, value),) = Networks().baselines(train, rows).items()
    assert name == "a Gaussian of full covariance for each node"
    assert value == pytest.approx(float(expected), rel=1e-9)


def test_every_command_takes_them(here: Path):
    many(here / "g.npz")
    (here / "c.yaml").write_text(
        "{data: {name: graphs, path: g.npz}, model: {kind: graph, subflows: 1, hidden: 4}, "
        "train: {steps: 3, batch_size: 16, log_every: 1, validate_every: 3}}"
    )
    trained = run_command("train", "c.yaml", "--out", "run")
    assert trained.code == 0, trained.err
    assert "a Gaussian of full covariance for each node is" in trained.out + trained.err
    assert (open_run("run").kind.name, open_run("run").config.model.edges) == ("networks", True)
    found = json.loads(run_command("evaluate", "run", "--json").out)
    assert found["rows"] == 6
    many(here / "new.npz", graphs=4, seed=1)
    scores = list(csv.DictReader(run_command("score", "run", "new.npz").out.splitlines()))
    assert [row["row"] for row in scores] == ["1", "2", "3", "4"]
    header, *nodes = [line.split(",") for line in run_command("sample", "run", "-n", "3").out.splitlines()]
    assert header == ["graph", "node", "x1", "x2"]
    assert {line[0] for line in nodes} == {"1", "2", "3"}
    assert run_command("report", "run").code == 0
    assert "60 graphs" in " ".join(run_command("data", "g.npz").out.split())
    refused = run_command("train", "c.yaml", "model.network=sorted", "--out", "other")
    assert refused.err == "Expected model.network=gnf or gnf-exp for graphs with edges; got sorted."
    np.savez("wide.npz", x=np.zeros((2, 3)), edge_index=np.zeros((2, 0), int), sizes=np.array([2]))
    assert "Expected 2 features of each node in wide.npz" in run_command("score", "run", "wide.npz").err


def test_a_folder_of_tables_is_trained_by_the_preset_and_keeps_its_names(here: Path):
    graphs = dict(np.load(many(here / "g.npz")))
    owner = np.repeat(np.arange(60), graphs["sizes"])
    (here / "g").mkdir()
    nodes = [f"{g},{k},{a!r},{b!r}" for k, (g, (a, b)) in enumerate(zip(owner, graphs["x"].tolist(), strict=True))]
    edges = [f"{owner[a]},{a},{b}" for a, b in graphs["edge_index"].T]
    (here / "g" / "nodes.csv").write_text("\n".join(["graph,node,east,north", *nodes]))
    (here / "g" / "edges.csv").write_text("\n".join(["graph,node,other", *edges]))
    tiny = ("model.subflows=1", "model.hidden=4", "train.steps=2", "train.batch_size=8", "train.sample_every=2")
    for source, run in (("g", "run"), ("g.npz", "same")):
        outcome = run_command("train", "graphs", f"data.path={source}", *tiny, "--out", run)
        assert outcome.code == 0, outcome.err
    assert (here / "run" / "samples" / "step-00000002.png").read_bytes().startswith(b"\x89PNG")
    nll = [json.loads(run_command("evaluate", run, "--json").out)["nll"] for run in ("run", "same")]
    assert nll[0] == nll[1]
    assert run_command("evaluate", "run").out.count("nats") == 1
    assert run_command("sample", "run", "-n", "2").out.startswith("graph,node,east,north\n")
    assert run_command("score", "run", "g").code == 0
    assert run_command("report", "run").code == 0
    resumed = run_command("train", "--resume", "run", "train.steps=3")
    assert resumed.code == 0, resumed.err


def test_samples_in_a_file_are_graphs_to_be_read_and_scored(here: Path):
    many(here / "g.npz")
    tiny = ("model.subflows=1", "model.hidden=4", "train.steps=2", "train.batch_size=8")
    assert run_command("train", "graphs", "data.path=g.npz", *tiny, "--out", "run").code == 0
    for name in ("s.npz", "s.csv", "s.png"):
        assert run_command("sample", "run", "-n", "4", "--out", name).code == 0
    trained = open_run("run")
    torch.testing.assert_close(read_graphs(here / "s.npz", trained.event_shape[0]).rows, trained.sample(4).double())
    scores = list(csv.DictReader(run_command("score", "run", "s.npz").out.splitlines()))
    expected = trained.log_likelihoods(trained.sample(4))
    np.testing.assert_allclose([float(row["log_likelihood"]) for row in scores], expected.numpy(), rtol=1e-6)
    larger = save(here / "larger.npz", x=np.zeros((9, 2)), edge_index=np.zeros((2, 0), int), sizes=np.array([9]))
    both = list(csv.DictReader(run_command("score", "run", "s.npz", larger).out.splitlines()))
    assert [row["row"] for row in both] == [
        "1",
        "2",
        "3",
        "4",
        "1",
    ]  # padded to nine nodes, the likelihoods are the same
    np.testing.assert_allclose([float(row["log_likelihood"]) for row in both[:4]], expected.numpy(), rtol=1e-5)
    assert run_command("sample", "run", "--out", "s.npy").code == 1
