"""Tables from files, points in the plane, and how rows are split."""

import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from expmflow.data import DataError, Dataset, load_table, split, two_moons
from expmflow.data.columns import check_columns, integer_columns, repeated_values
from expmflow.training.config import load_config


def written(folder: Path, text: str, name: str = "t.csv") -> Path:
    path = folder / name
    path.write_bytes(text.encode())
    return path


@pytest.mark.parametrize(
    "text",
    ["1,2\n3,4\n", "a,b\n1,2\n3,4\n", "\ufeff1,2\r\n3,4\r\n", "1,2\n\n3,4", ' 1 ,"2"\n3e0,0.4e1\n', "x,\n1,2\n3,4\n"],
)
def test_the_same_table_in_many_hands(tmp_path: Path, text: str):
    assert load_table(written(tmp_path, text)).rows.tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("1,2\n", ()),
        ("a,b\n1,2\n", ("a", "b")),
        ('" peak\nflow ",\n1,2\n', ("peak flow", "x2")),
        ("\ufeffa,b\n1,2\n", ("a", "b")),
    ],
)
def test_columns_keep_their_names(tmp_path: Path, text: str, names: tuple[str, ...]):
    assert load_table(written(tmp_path, text)).names == names


def test_columns_are_found_by_name(tmp_path: Path):
    table = load_table(written(tmp_path, "a,b,c\n1,2,3\n"))
    assert table.arranged(("c", "a", "b")).tolist() == [[3, 1, 2]]
    assert table.arranged(()).tolist() == [[1, 2, 3]]
    unnamed = load_table(written(tmp_path, "1,2,3\n"))
    assert unnamed.arranged(("c", "a", "b")).tolist() == [[1, 2, 3]]
    with pytest.raises(DataError, match=r"Expected the columns b, d in .*t\.csv; got no d and a, c besides\."):
        table.arranged(("b", "d"))


def test_a_suffix_may_be_shouted(tmp_path: Path):
    assert load_table(written(tmp_path, "1,2\n", "T.CSV")).rows.tolist() == [[1, 2]]


def test_a_column_that_counts_rows_is_refused_until_it_is_left_out(tmp_path: Path):
    file = written(tmp_path, ",a,b\n0,1,2\n1,3,4\n")
    with pytest.raises(DataError, match=r"Expected a name for the first column of .*t\.csv; .*data\.drop=\[x1\]"):
        load_table(file)
    for table in (load_table(file, drop=["x1"]), load_table(file, columns=["a", "b"])):
        assert table.names == ("a", "b")
        assert table.rows.tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("0,1,2\n4,5,6\n", ("0", "1", "2")),  # as pandas names columns that have no names
        ("0,1\n0.5,1.5\n2.5,3.0\n", ("0", "1")),
        ("when,2019,2020\n1,0.5,2.5\n2,3.5,4.5\n", ("when", "2019", "2020")),
        ("when,2019\n1,0.5\n2,-1e-3\n", ("when", "2019")),
    ],
)
def test_names_may_be_numbers_and_a_warning_says_so(tmp_path: Path, caplog, text: str, names: tuple[str, ...]):
    table = load_table(written(tmp_path, text))
    assert table.names == names
    assert len(table.rows) == len(text.splitlines()) - 1
    assert f"Line 1 of {tmp_path / 't.csv'} is taken for the names of its columns: {', '.join(names)}." in caplog.text


@pytest.mark.parametrize("text", ["0,1\n1,0\n", "0,1\n1,-0.5\n", "1,2,3\n0.5,0.5,0.5\n", "0.0,1.0,2.0\n3.5,4.5,5.5\n"])
def test_other_numbers_are_a_row(tmp_path: Path, caplog, text: str):
    table = load_table(written(tmp_path, text))
    assert table.names == ()
    assert len(table.rows) == 2
    assert caplog.text == ""


def test_numbers_of_rows_and_of_columns_as_pandas_writes_them(tmp_path: Path):
    file = written(tmp_path, ",0,1\n0,1.5,2.5\n1,3.5,4.5\n")
    with pytest.raises(DataError, match=r"Expected a name for the first column of .*data\.drop=\[x1\]"):
        load_table(file)
    assert load_table(file, drop=["x1"]).rows.tolist() == [[1.5, 2.5], [3.5, 4.5]]


@pytest.mark.parametrize("text", [",a\n0,1\n1,2\n", "a,b\n1,x\n", "a,b\n1,\n"])
def test_no_advice_to_leave_columns_out_where_all_are_needed(tmp_path: Path, text: str):
    with pytest.raises(DataError) as refused:
        load_table(written(tmp_path, text), droppable=False)
    assert "data." not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("1,5;2,5", "Write 1,5 as 1.5"),
        ("1.234,5;2.5", "Write 1.234,5 as 1234.5"),
        ("1,234.5;2.5", "Write 1,234.5 as 1234.5"),
        ("-1,234,567;2.5", "Write -1,234,567 as -1234567"),
        ("1,234;12,5", "Write 12,5 as 12.5"),
        ("1,234;5", "Write 1,234 as 1.234 or 1234"),  # the file does not say which
    ],
)
def test_numbers_with_commas_are_refused_with_how_to_write_them(tmp_path: Path, text: str, advice: str):
    for header in ("a;b\n", ""):
        with pytest.raises(DataError) as refused:
            load_table(written(tmp_path, f"{header}{text}\n{text}\n"))
        assert str(refused.value).endswith(f"{advice}: numbers have points, and no commas.")


def test_text_in_another_encoding_is_refused_with_what_to_do(tmp_path: Path):
    (tmp_path / "t.csv").write_bytes("größe\n1\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"Expected text in UTF-8 .* Save it as UTF-8\."):
        load_table(tmp_path / "t.csv")


def test_what_to_leave_out_can_be_pasted_into_a_shell(tmp_path: Path):
    file = written(tmp_path, "body mass,it's,no,a\nx,x,x,1\n")
    with pytest.raises(DataError) as refused:
        load_table(file)
    setting = str(refused.value).split("columns out: ")[1].removesuffix(".")
    (pasted,) = shlex.split(setting)
    assert yaml.safe_load(pasted.removeprefix("data.drop=")) == ["body mass", "it's", "no"]


def test_large_numbers_that_lie_close_together_are_told_apart(tmp_path: Path):
    times = [1.7e9 + k for k in range(100)]
    rows = load_table(written(tmp_path, "time,x\n" + "".join(f"{t:.0f},{k}\n" for k, t in enumerate(times)))).rows
    assert rows[:, 0].tolist() == times


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", ">f8", "i4", "u1", "i8"])
def test_arrays_of_any_real_kind(tmp_path: Path, dtype: str):
    np.save(tmp_path / "t.npy", np.asfortranarray(np.array([[1, 2], [3, 4]], dtype)))
    rows = load_table(tmp_path / "t.npy").rows
    assert rows.dtype == torch.float64
    assert rows.tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expected rows of numbers in"),
        ("a,b\n", "Expected rows of numbers in"),
        ("1,2\n3\n", "Expected 2 columns in line 2 of"),
        ("1,2\nx,4\n", "x1 has 'x' in line 2. Put numbers in their place, or leave such columns out: data.drop=[x1]."),
        ("a,b\n1,2\n3,\n", "b has 1 rows without a number, first line 3."),
        ("1,2\nnan,4\n?,4\n", "x1 has 2 rows without a number, first line 2."),
        ("1,inf\n", "x2 has inf in line 1, which float32 does not hold."),
        ("1,1e39\n", "x2 has 1e39 in line 1, which float32 does not hold."),
        ("1,x\n3,4\n", "x2 has 'x' in line 1."),
        ("1,2\n1_0,4\n", "x1 has '1_0' in line 2."),
        ('1,2\n"3"3,4\n', "Expected lines of text in"),
        ("a,b,c\n1,2\n", "Expected 2 names in"),
        ("a,b,a\n1,2,3\n", "got 'a' twice."),
        ("x2,\n1,2\n", "got 'x2' twice."),
        ("a,b,c\nx,1,\ny,2,\n", "got 2 with others: a has 'x' in line 2; c has 2 rows without"),
    ],
)
def test_what_is_no_table_is_named(tmp_path: Path, text: str, message: str):
    with pytest.raises(DataError) as caught:
        load_table(written(tmp_path, text))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(3),
        np.zeros((2, 2, 2)),
        np.zeros((0, 2)),
        np.zeros((2, 2), complex),
        np.array([["a"]]),
        np.zeros((2, 2), bool),
    ],
)
def test_arrays_of_another_kind_are_refused(tmp_path: Path, array: np.ndarray):
    np.save(tmp_path / "t.npy", array)
    with pytest.raises(DataError, match=r"Expected (rows and columns|real numbers) in"):
        load_table(tmp_path / "t.npy")


def test_objects_are_never_unpickled(tmp_path: Path):
    np.save(tmp_path / "t.npy", np.array([[{}]], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match="Expected an array of numbers in"):
        load_table(tmp_path / "t.npy")


@pytest.mark.parametrize("removed", [b"(", b"}", b"'", b"\n", b"descr", b"\x93"])
def test_a_damaged_header_is_refused(tmp_path: Path, removed: bytes):
    np.save(tmp_path / "t.npy", np.zeros((2, 2)))
    content = (tmp_path / "t.npy").read_bytes()
    (tmp_path / "t.npy").write_bytes(content.replace(removed, b"", 1))
    with pytest.raises(DataError, match="Expected an array of numbers in"):
        load_table(tmp_path / "t.npy")


def test_other_files_are_refused_by_name(tmp_path: Path):
    with pytest.raises(DataError, match=r"Expected a \.npy or \.csv file; got .*t\.txt"):
        load_table(tmp_path / "t.txt")
    with pytest.raises(DataError, match=r"Expected the file .*t\.csv; got none"):
        load_table(tmp_path / "t.csv")


@given(rows=st.integers(1, 60), validation=st.floats(0, 1, exclude_max=True), test=st.floats(0, 1, exclude_max=True))
def test_every_row_is_in_one_part(rows: int, validation: float, test: float):
    numbers = torch.arange(float(rows)).unsqueeze(1)
    if int(rows * validation) + int(rows * test) >= rows:
        with pytest.raises(ValueError, match="Expected at least one row for training; got"):
            split(numbers, validation, test)
        return
    parts = split(numbers, validation, test)
    assert isinstance(parts, Dataset)
    assert len(parts.train) >= 1
    assert torch.equal(torch.cat([parts.train, parts.validation, parts.test]), numbers)
    assert parts.event_shape == (1,)


def test_moons_lie_on_two_half_circles():
    points = two_moons(4000, torch.Generator().manual_seed(0), noise=0.0)
    first, second = points.norm(dim=1), (points - torch.tensor([1.0, 0.5])).norm(dim=1)
    distance = torch.minimum((first - 1).abs(), (second - 1).abs())
    assert distance.max() < 1e-5
    assert torch.equal(points, two_moons(4000, torch.Generator().manual_seed(0), noise=0.0))


class TestChoice:
    TEXT = "kind,a,b,c\nx,1,2,3\ny,4,5,6\n"

    def test_columns_are_taken_or_left_out_by_name(self, tmp_path: Path):
        path = written(tmp_path, self.TEXT)
        left = load_table(path, drop=["kind"])
        assert (left.names, left.rows.tolist()) == (("a", "b", "c"), [[1, 2, 3], [4, 5, 6]])
        taken = load_table(path, columns=["c", "a"])
        assert (taken.names, taken.rows.tolist()) == (("c", "a"), [[3, 1], [6, 4]])
        assert load_table(path, columns=["kind", "b"], drop=["kind"]).names == ("b",)

    def test_columns_without_names_go_by_their_place(self, tmp_path: Path):
        path = written(tmp_path, "1,2,3\n4,5,6\n")
        assert load_table(path, drop=["x2"]).rows.tolist() == [[1, 3], [4, 6]]
        assert load_table(path, drop=["x2"]).names == ("x1", "x3")
        reduced = written(tmp_path, "1,3\n4,6\n", "u.csv")
        assert load_table(reduced, columns=["x1", "x3"]).rows.tolist() == [[1, 3], [4, 6]]

    def test_what_is_not_there_is_named(self, tmp_path: Path):
        path = written(tmp_path, self.TEXT)
        with pytest.raises(DataError, match=r"Expected the columns d in .*t\.csv; got kind, a, b, c\."):
            load_table(path, columns=["a", "d"])
        with pytest.raises(DataError, match=r"Expected at least one column of .* to be left"):
            load_table(path, drop=["kind", "a", "b", "c"])

    @pytest.mark.parametrize("mark", [",", ";", "\t"])
    def test_separators_are_found(self, tmp_path: Path, mark: str):
        path = written(tmp_path, f"a{mark}b\n1{mark}2\n")
        assert load_table(path).rows.tolist() == [[1, 2]]
        assert load_table(path, separator=mark).names == ("a", "b")

    @pytest.mark.parametrize(
        ("text", "names"),
        [
            ("temp, C;hum\n1.5;2\n", ("temp, C", "hum")),
            ('when\t"wind, m/s"\n1\t2\n', ("when", "wind, m/s")),
            ('"a; b",c\n1,2\n', ("a; b", "c")),
        ],
    )
    def test_commas_in_names_are_no_separators(self, tmp_path: Path, text: str, names: tuple[str, ...]):
        assert load_table(written(tmp_path, text)).names == names

    @pytest.mark.parametrize("text", ["1,5;2,5\n3,5;4,5\n", "a, b;c\n1,5;2,5\n"])
    def test_nor_are_commas_in_numbers(self, tmp_path: Path, text: str):
        with pytest.raises(DataError, match=r"Write (\d),5 as \1\.5: numbers have points"):
            load_table(written(tmp_path, text))

    def test_semicolons_in_text_are_none(self, tmp_path: Path):
        assert load_table(written(tmp_path, "x;y,1\nz;w,2\n"), drop=["x1"]).rows.tolist() == [[1], [2]]

    @pytest.mark.parametrize("mark", ["|", " "])
    def test_others_are_asked_about(self, tmp_path: Path, mark: str):
        """And what is advised can be pasted into a shell."""
        path = written(tmp_path, f"a{mark}b\n1{mark}2\n")
        with pytest.raises(DataError) as refused:
            load_table(path)
        (pasted,) = shlex.split(str(refused.value).split("say so: ")[1].removesuffix("."))
        assert load_config("table", [pasted]).data.separator == mark

    def test_or_given(self, tmp_path: Path):
        path = written(tmp_path, "a|b\n1|2\n")
        assert load_table(path, separator="|").rows.tolist() == [[1, 2]]


class TestColumns:
    ROWS = torch.randn(60, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def check(self, *columns: torch.Tensor) -> None:
        check_columns(torch.stack(columns, dim=1), ("a", "b", "c")[: len(columns)], "t.csv")

    def test_one_row_is_too_few(self):
        with pytest.raises(DataError, match=r"^Expected at least 2 rows for training in t\.csv; got 1\.$"):
            self.check(torch.ones(1), torch.zeros(1))

    def test_constant_ones_are_refused_by_name(self):
        a, b, _ = self.ROWS.T
        with pytest.raises(DataError, match=r"got b, of one value\. Leave them out: data\.drop=\[b\]\."):
            self.check(a, torch.full_like(b, 0.1))

    @pytest.mark.parametrize("copy", [lambda x: x, lambda x: -3 * x + 1e3])
    def test_copies_are_refused_by_name(self, copy):
        a, b, _ = self.ROWS.T
        with pytest.raises(DataError, match=r"up to scale and offset: c of a\. Leave them out: data\.drop=\[c\]\."):
            self.check(a, b, copy(a))

    def test_columns_that_determine_each_other_are_a_warning(self, caplog):
        a, b, c = self.ROWS.T
        self.check(a, b, c)
        assert caplog.text == ""
        self.check(a, b, a + b)
        assert "Columns a, b, c of t.csv determine each other" in caplog.text

    def test_those_constant_up_to_rounding_are_refused_by_name(self):
        a, b, _ = self.ROWS.T
        with pytest.raises(DataError, match=r"got b, of one value\."):
            self.check(a, 0.1 * 3 + 1e-17 * b + torch.where(b > 0, 5e-17, 0.0))

    def test_those_of_one_value_in_nearly_all_rows_are_refused_by_name(self):
        a, b, _ = self.ROWS.T
        rain = torch.zeros(300, dtype=torch.float64)
        rain[:6] = a[:6].abs()
        rain[6] = rain[5] + 1e-3
        with pytest.raises(
            DataError, match=r"got b, which is 0 in 293 of 300: .* data\.drop=\[b\]\. Or put 0 and 1 in"
        ):
            self.check(b.repeat(5), rain)
        self.check(b.repeat(5), (rain > 0).double())  # what it advises
        self.check(b.repeat(5), 0.5 * (rain > 0).double())

    def test_values_that_repeat_are_found_with_what_they_are_known_up_to(self):
        a, b, c = self.ROWS.T
        stars = (2 * a).round() / 2
        rain = torch.where(b > 0, c.abs(), 0.0)
        found = repeated_values(torch.stack([a, stars, rain, b.round()], dim=1))
        assert found == ((1, 0.5), (2, pytest.approx(0.01 * float(rain.std(correction=0)))))

    def test_whole_numbers_are_found(self):
        rows = torch.stack([self.ROWS[:, 0], self.ROWS[:, 1].round(), torch.arange(60.0)], dim=1)
        assert integer_columns(rows) == (1, 2)


def test_tables_that_no_machine_holds_are_refused_before_they_are_read(tmp_path, monkeypatch):
    path = tmp_path / "t.csv"
    path.write_text("1,2\n3,4\n")
    monkeypatch.setattr("expmflow.data.table.LARGEST_TABLE", 5)
    with pytest.raises(DataError, match="Expected a table of at most 5 bytes; got 8 in"):
        load_table(path)
