"""The demo keeps its own promises."""

import sys
from pathlib import Path

import pytest
import torch

import expmflow as ef
from expmflow.experiments import feature_maps


def test_errors_stay_within_their_certificates():
    outcome = feature_maps.run(feature_maps.draw_cat())
    assert 0 < outcome.measured <= outcome.proven < 1e-5
    assert 0 < outcome.round_trip_measured <= outcome.round_trip_proven < 1e-5
    assert not torch.allclose(outcome.z, outcome.x, atol=0.1)  # the exponential did something


def test_reference_is_the_exponential_of_the_same_operator():
    x = feature_maps.draw_cat(16).double()
    dense = feature_maps.edge_operator(torch.float64).dense((1, 16, 16))
    expected = (torch.linalg.matrix_exp(dense) @ x.flatten()).reshape(x.shape)
    torch.testing.assert_close(feature_maps.exact_exponential(x), expected)


def test_terms_add_up_to_the_exponential():
    x = feature_maps.draw_cat().double()
    op = feature_maps.edge_operator(torch.float64)
    terms = feature_maps.series_terms(op, x, 25)
    assert len(terms) == 26
    torch.testing.assert_close(sum(terms), ef.expm_apply(op, x))


def test_logdet_is_the_trace():
    outcome = feature_maps.run(feature_maps.draw_cat(16))
    matrix = torch.linalg.matrix_exp(feature_maps.edge_operator(torch.float64).dense((1, 16, 16)))
    assert outcome.logdet == pytest.approx(torch.linalg.slogdet(matrix).logabsdet.item(), abs=1e-10)


def test_picture_is_a_symmetric_grey_image():
    cat = feature_maps.draw_cat()
    assert cat.shape == (1, 1, 64, 64)
    assert cat.min() == 0
    assert 0.9 < cat.max() <= 1
    torch.testing.assert_close(cat, cat.flip(-1))


@pytest.mark.parametrize("size", [0, 15])
def test_picture_refuses_sizes_without_a_cat(size):
    with pytest.raises(ValueError, match=r"Expected size of at least 16; got"):
        feature_maps.draw_cat(size)


def test_main_prints_the_errors_and_writes_the_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert feature_maps.main(["--out", str(tmp_path / "new" / "folder")]) == 0
    printed = capsys.readouterr().out
    assert "proven" in printed
    assert "measured" in printed
    written = list(tmp_path.rglob("*.*"))
    assert [path.name for path in written] == ["terms.png"]
    assert written[0].read_bytes().startswith(b"\x89PNG")


def test_main_refuses_a_file_as_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    occupied = tmp_path / "file"
    occupied.touch()
    assert feature_maps.main(["--out", str(occupied)]) == 1
    assert "Expected --out to be a folder; got the file" in capsys.readouterr().err


def test_without_matplotlib_the_error_names_the_extra(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert feature_maps.main(["--out", str(tmp_path)]) == 1
    assert "Install the extra `report`" in capsys.readouterr().err
