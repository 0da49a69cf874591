"""The table of publicly reported bugs. If this fails, a case that we claim to hold is held by no test."""

import ast
import re

from tests.paths import ROOT

TABLE = ROOT / "tests" / "cases.md"
ROW = re.compile(r"^\| (B\d{3}) \| [^|]+ \| ([^|]+) \|$", re.MULTILINE)
MISSING_NUMBERS = {4, 10, 12, 14, 27, 28, 32, 38, 50, 54, 60, 63, 64, 66, 74, 75, 92, 94, 99, 106, 108, 129, 132, 140, 151}


def rows() -> dict[str, str]:
    return dict(ROW.findall(TABLE.read_text()))


def test_every_case_has_a_row() -> None:
    """130 cases were collected; none may be forgotten."""
    expected = {f"B{number:03d}" for number in range(1, 156) if number not in MISSING_NUMBERS}
    assert len(expected) == 130
    assert set(rows()) == expected


def test_every_named_test_exists() -> None:
    """`file.py::test` in the table is a test in that file; a row without one says which later work will hold it."""
    for case, held in rows().items():
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", held)
        assert named or held.strip().startswith("later:"), f"{case}: {held}"
        for file, test in named:
            path = ROOT / "tests" / file
            assert path.is_file(), f"{case} names {file}"
            functions = {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}
            assert test in functions, f"{case} names {file}::{test}"
