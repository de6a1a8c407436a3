"""Tables of numbers in files, and what is wrong in them."""

from __future__ import annotations

import gzip

import numpy as np
import pytest

from murmurate.datasets.table import Table, read_table
from murmurate.datasets.table_world import TableWorld
from murmurate.errors import Refusal

NUMBERS = np.array([[1.5, 2.0, -3.0], [4.0, 5e3, 0.25]])
TEXTS = {
    "a.csv": "x,y,z\n1.5,2,-3\n4,5e3,0.25\n",
    "b.csv": "1.5;2;-3\n4;5e3;0.25\n",
    "c.tsv": "a\tb\tc\n1.5\t2\t-3\n4\t5e3\t0.25\n",
    "d.txt": "  1.5  2 -3\n 4 5e3   0.25\n\n",
    "e.csv": "# made by hand\n1.5,2,-3\n4,5e3,0.25\n",
    "f.csv": "\ufeff1.5,2,-3\n4,5e3,0.25\n",
    "h.csv": 'sample #,"a#b", z\n1.5,2,-3\n4,5e3,0.25 # the last, I think\n',
    "i.txt": "x y z # units, of all\n1.5 2 -3\n4 5e3 0.25\n",
    "g.csv": '"x, m",y,z\n"1.5",2,"-3"\n"4",5e3,0.25\n',
}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("zipped", [False, True])
def test_text(name, zipped, tmp_path):
    path = tmp_path / (name + ".gz" * zipped)
    path.write_bytes(gzip.compress(TEXTS[name].encode()) if zipped else TEXTS[name].encode())
    np.testing.assert_array_equal(read_table(path).values, NUMBERS)
    capitals = path.rename(tmp_path / path.name.upper())
    np.testing.assert_array_equal(read_table(capitals).values, NUMBERS)


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.int64])
def test_arrays(kind, tmp_path):
    wanted = NUMBERS.astype(kind)
    np.save(tmp_path / "a.npy", wanted)
    np.savez(tmp_path / "a.npz", rows=wanted)
    np.save(tmp_path / "one.npy", wanted[:, 0])
    assert isinstance(read_table(tmp_path / "a.npy").values, np.memmap)
    for name in ("a.npy", "a.npz"):
        np.testing.assert_array_equal(read_table(tmp_path / name).values, wanted)
    (tmp_path / "a.npy").rename(tmp_path / "B.NPY")
    (tmp_path / "a.npz").rename(tmp_path / "B.NPZ")
    for name in ("B.NPY", "B.NPZ"):
        np.testing.assert_array_equal(read_table(tmp_path / name).values, wanted)
    assert read_table(tmp_path / "one.npy").columns == 1
    chosen = read_table(tmp_path / "B.NPY").select([1, 0, 1])
    np.testing.assert_array_equal(chosen.values, wanted[[1, 0, 1]])


BAD = {
    "no number": (b"1,2\n3,four\n", "four"),
    "too few": (b"1,2\n3\n", "columns"),
    "missing": (b"1,2\n3,nan\n", "Row 1 .*missing or infinite"),
    "a column of one value": (b"1,2\n1,3\n", "Column 0 .*the same"),
    "nothing": (b"", "no row"),
    "names alone": (b"x,y\n", "no row"),
    "empty": (b"age,income\n1,2\n\n3,\n", r"bad\.csv, line 4: column 'income' is empty\. Leave .*in\.$"),
    "marked as missing": (b"1 2\n3 NA\n", r"line 2: column 1 \(from 0\) is 'NA'\. Leave"),
    "text": (
        b"age,city\n1,2\n3,Rome\n",
        r"line 3: column 'city' is 'Rome', which is no number\. Leave the column",
    ),
    "decimal commas": (b"x;y\n1,5;2\n", r"line 2: column 'x' is '1,5'\. If commas stand for decimal points"),
    "three decimal commas": (b"x;y;z\n1,5;2;3\n", r"line 2: column 'x' is '1,5'\. If commas stand"),
    "a name with a #": (b"sample #,height\n1,2\n3,tall\n", r"line 3: column 'height' is 'tall'"),
    "quotes after a space": (b'a, "b"\n1, 2\n3, "4"\n', r"line 3: column 'b' is '\"4\"', which is no"),
    "decimal commas alone": (
        b"1,5;2,5\n",
        "line 1: column 1 .* is '5;2'. If commas stand for decimal points",
    ),
    "too many": (b"# two\n1,2\n3,4,5\n", r"line 3: the number of values is 3, and of columns 2\."),
    "not text": (b"\xff\xfe\x00\x01\n", "no table of numbers"),
    "an open quote": (b'a,b\n1,2\n3,"4\n5,6\n', r"line 3: a quote in it is not closed\. Close it"),
    "a long open quote": (b'1,2\n"3,4\n' + b"5,6\n" * 40_000, "line 2: a quote in it is not closed"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_no_table_is_refused(what, tmp_path):
    content, words = BAD[what]
    path = tmp_path / "bad.csv"
    path.write_bytes(content)
    with pytest.raises(Refusal, match=words) as refused:
        read_table(path)
    assert str(path) in str(refused.value)


MIXED = 'id,name,"Annual Income",age\n7,"Ann, B.",1.5,30\n8,Bob,2.5,40\n'


def test_some_columns_by_name_or_number(tmp_path):
    (tmp_path / "a.csv").write_text(MIXED)
    (tmp_path / "b.csv").write_text(MIXED.partition("\n")[2])  # without names
    (tmp_path / "years.csv").write_text("city,2023,2024\nRome,1,2\nBonn,3,4\n")
    np.save(tmp_path / "c.npy", np.arange(10).reshape(2, 5))
    wanted = [[30, 1.5], [40, 2.5]]
    for columns in (("age", "Annual Income"), ("3", "2")):
        np.testing.assert_array_equal(read_table(tmp_path / "a.csv", columns).values, wanted)
    np.testing.assert_array_equal(read_table(tmp_path / "b.csv", ("3", "2")).values, wanted)
    np.testing.assert_array_equal(read_table(tmp_path / "c.npy", ("3", "2")).values, [[3, 2], [8, 7]])
    with pytest.raises(Refusal, match=r"line 2: column 'city' is 'Rome', which"):
        read_table(tmp_path / "years.csv", ("2024", "city"))
    world = TableWorld(str(tmp_path / "a.csv"), columns=("age",))
    assert world.fingerprint()["columns"] == 1
    with pytest.raises(Refusal, match=r"a\.csv: it has no column 'height'.* columns: id, name, Annual"):
        read_table(tmp_path / "a.csv", ("age", "height"))
    with pytest.raises(Refusal, match=r"line 2: column 'name' is 'Ann, B\.', .*--world.columns"):
        read_table(tmp_path / "a.csv", ("age", "name"))
    (tmp_path / "d.csv").write_text("x,x,y\n1,2,3\n2,3,4\n")
    with pytest.raises(Refusal, match="2 columns are called 'x'"):
        read_table(tmp_path / "d.csv", ("x",))


@pytest.mark.parametrize("columns", [("2024", "2023"), ("2025",)])
def test_a_header_of_numbers_is_one_if_its_names_are_the_columns(columns, tmp_path):
    (tmp_path / "a.csv").write_text("2023,2024,2025\n1,2,3\n3,4,5\n")
    values = np.array([[1, 2, 3], [3, 4, 5]])[:, [int(column) - 2023 for column in columns]]
    np.testing.assert_array_equal(read_table(tmp_path / "a.csv", columns).values, values)


def test_a_row_of_numbers_is_no_header_though_numbers_of_columns_are_in_it(tmp_path):
    (tmp_path / "a.csv").write_text("3,1,5\n0,2,2\n4,5,6\n")
    np.testing.assert_array_equal(read_table(tmp_path / "a.csv", ("1",)).values, [[1], [2], [5]])
    with pytest.raises(Refusal, match="no column '3'"):  # of three, counted from 1
        read_table(tmp_path / "a.csv", ("2", "3"))


def test_a_first_row_that_counts_is_warned_of(tmp_path):
    (tmp_path / "a.csv").write_text("0,1,2\n3,4,6\n")  # as pandas writes an array
    with pytest.warns(UserWarning, match=r"a\.csv: its first row counts from 0 to 2, .*, delete that line"):
        assert len(read_table(tmp_path / "a.csv")) == 2


@pytest.mark.parametrize(
    ("text", "columns", "message"),
    [
        ("a,b\n1,2\n3,4\n", ("a", "a"), "names the column 'a' twice"),
        ("a,b\n1,2\n3,2\n", ("b",), "Column 'b' is the same"),
        ("a,b\nfirst,1,2\nsecond,3,4\n", ("b",), "header has 2 names, and its first row 3 values"),  # as R
        ("a,b\n1,2\n\t\n3,x\n", ("b",), "line 4: column 'b' is 'x'"),
        ('a,b\n1,x\n2,"y\n3,z\n4,z\n', ("a",), "line 3: a quote in it is not closed"),  # hides two rows
    ],
)
def test_columns_that_cannot_be_taken(text, columns, message, tmp_path):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(Refusal, match=message):
        read_table(tmp_path / "a.csv", columns)


@pytest.mark.parametrize("row", ["Poe, E. A.,1,2,3", "Poe,1"])
def test_a_row_of_another_length_is_refused_where_some_columns_are_taken(row, tmp_path):
    rows = 'name,x,y\n"Ann, #2",0,1\n"Lee ""H.""\n# and\nothers",4,5\n# a comment, of two\n\n'
    (tmp_path / "a.csv").write_text(f'{rows}5" pipe,6,7\n')
    np.testing.assert_array_equal(read_table(tmp_path / "a.csv", ("y",)).values, [[1], [5], [7]])
    (tmp_path / "a.csv").write_text(f"{rows}{row}\nBo,6,7\n")
    with pytest.raises(Refusal, match=rf"a\.csv, line 8: the number of values is {row.count(',') + 1}, and"):
        read_table(tmp_path / "a.csv", ("x",))


@pytest.mark.parametrize(
    "text",
    ['a,b,c\n1,2,3 # 5" pipe\n4,5,6\n7,8,9\n', '# pipes of 5" and more\na,b,c\n1,2,3\n4,5,6\n7,8,9\n'],
)
def test_a_quote_in_a_comment_opens_no_value(text, tmp_path):
    (tmp_path / "a.csv").write_text(text)
    np.testing.assert_array_equal(read_table(tmp_path / "a.csv", ("a", "b")).values, [[1, 2], [4, 5], [7, 8]])


def test_texts_of_any_length_may_be_in_other_columns(tmp_path):
    (tmp_path / "a.csv").write_text('a,b\n1,"' + 50_000 * "so, " + '"\n2,short\n')
    np.testing.assert_array_equal(read_table(tmp_path / "a.csv", ("a",)).values, [[1], [2]])


def test_a_vector_has_one_column(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(5.0))
    with pytest.raises(Refusal, match="no column '3'"):
        read_table(tmp_path / "a.npy", ("3",))
    assert read_table(tmp_path / "a.npy", ("0",)).columns == 1


def test_arrays_that_are_none_are_refused(tmp_path):
    np.savez(tmp_path / "two.npz", a=NUMBERS, b=NUMBERS)
    np.save(tmp_path / "deep.npy", np.zeros((2, 2, 2)))
    np.save(tmp_path / "words.npy", np.array([["a", "b"]]))
    (tmp_path / "cut.npy").write_bytes((tmp_path / "deep.npy").read_bytes()[:100])
    (tmp_path / "cut.csv.gz").write_bytes(gzip.compress(b"1,2\n3,4\n" * 500)[:-4])
    for name, words in [
        ("two.npz", "one array"),
        ("deep.npy", r"\(2, 2, 2\)"),
        ("words.npy", "<U1"),
        ("cut.npy", "no table of numbers"),
        ("cut.csv.gz", r"cut\.csv\.gz: the gzip is cut short"),
        ("nowhere.csv", "cannot be read"),
    ]:
        with pytest.raises(Refusal, match=words):
            read_table(tmp_path / name)
    with pytest.raises(Refusal, match="list"):
        Table([[1.0]])  # type: ignore[arg-type]


def test_a_table_is_asked_for_as_in_python_too():
    with pytest.raises(Refusal, match=r"--world.path TABLE \(world=\{'path': 'TABLE'\} in Python\)"):
        TableWorld().load()
