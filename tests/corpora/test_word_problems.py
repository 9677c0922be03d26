"""The shipped word problems: every answer is computed a second time, from an expression written apart from the text."""

from __future__ import annotations

import json
import re
from fractions import Fraction
from importlib.resources import files

import pytest

ROWS = [
    json.loads(line)
    for line in (files("orchestrator") / "corpora_data" / "word_problems.jsonl").read_text("utf-8").splitlines()
]

EXPRESSIONS = {
    "wp-001": "7 + 5",
    "wp-002": "20 - 6",
    "wp-003": "4 * 8",
    "wp-004": "18 / 3",
    "wp-005": "45 - 12 + 9",
    "wp-006": "5 * 6",
    "wp-007": "7 * 10",
    "wp-008": "50 - 2 * 8",
    "wp-009": "6 * 8",
    "wp-010": "15 + 2 * 15",
    "wp-011": "14 - 4 * 3",
    "wp-012": "25 + 10",
    "wp-013": "24 / 2",
    "wp-014": "9 + 4 + 3",
    "wp-015": "5 * 9 - 4",
    "wp-016": "27 / 3",
    "wp-017": "100 - 35",
    "wp-018": "4 * 2 + 2 * 3",
    "wp-019": "10 - (4 + 3)",
    "wp-020": "3 * 6 * 2",
    "wp-021": "73 - 58",
    "wp-022": "40 / 8",
    "wp-023": "5 * 4",
    "wp-024": "11 + 9 + 10",
    "wp-025": "120 - 45",
    "wp-026": "60 / 15",
    "wp-027": "130 + 95",
    "wp-028": "7 * 20",
    "wp-029": "31 - 12",
    "wp-030": "12 - 4 * 2",
    "wp-031": "36 * 2 + 50 * 1 - 41",
    "wp-032": "18 * 2 + 15 * 3",
    "wp-033": "(12 * 24 - 38) / 10",
    "wp-034": "14 * 6 * 4 - 85",
    "wp-035": "80 * (100 - 25) / 100 - 5",
    "wp-036": "15 * 12 / 3 * 30 + 15 * 12 * 2 / 3 * 50",
    "wp-037": "6 * 70 / 20 + 3",
    "wp-038": "(44 - 2 * 6) / 4 * 3",
    "wp-039": "(2 * (14 + 9) - 2) * 7",
    "wp-040": "240 + (240 + 60) + (240 + 60) / 2",
    "wp-041": "500 - (35 - 5) * 8",
    "wp-042": "(5 * 25 - 20 * 4) / 5",
    "wp-043": "20 - (3 * 2 + 4 * 1.5 + 6)",
    "wp-044": "25 * 16 * 60 / 100 - 18",
    "wp-045": "5 * 16 - (12 + 18 + 9 + 21)",
    "wp-046": "6 * 4 + 2 * 6 * 3",
    "wp-047": "18 + (260 - 100) * 10 / 100",
    "wp-048": "900 - (14 * 35 + 8 * 40)",
    "wp-049": "60 - 60 / 4 - 60 / 3",
    "wp-050": "24 - (12 - 6) / 2 * 3",
    "wp-051": "(96 - (7 + 5) * 4) / 8",
    "wp-052": "48 * 3 / 8 * 30 + (48 - 48 * 3 / 8) * 12",
    "wp-053": "1900 - (1200 + 450 - 275)",
    "wp-054": "(9 * 14 / 0.5 - 22) * 5",
    "wp-055": "(990 - 12 * 20 - 10 * 35) / (30 - 12 - 10)",
    "wp-056": "8 * 52 + 5 * 20 / 2",
    "wp-057": "(260 - 74 - 30) / 12",
    "wp-058": "(300 / 4 * 10 - 500) / 125",
    "wp-059": "(16 - 2) * 25 + 11 * 18",
    "wp-060": "3000 - 30 * 40 - 20 * 60",
}


def exact(expression: str) -> Fraction:
    """The value of an arithmetic expression without rounding: every number in it becomes a fraction."""
    return eval(re.sub(r"\d+(?:\.\d+)?", lambda number: f"Fraction('{number[0]}')", expression))


def final_answer(row: dict[str, str]) -> str:
    return row["answer"].rsplit("#### ", 1)[1]


def test_there_are_sixty_problems_numbered_in_order():
    assert [row["id"] for row in ROWS] == [f"wp-{n:03d}" for n in range(1, 61)]
    assert list(EXPRESSIONS) == [row["id"] for row in ROWS]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_the_answer_equals_its_independent_expression(row):
    assert set(row) == {"id", "question", "answer"}
    assert re.fullmatch(r"\d+", final_answer(row)), "the loader's extraction expects a bare integer"
    assert exact(EXPRESSIONS[row["id"]]) == int(final_answer(row))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_every_equation_in_the_reasoning_holds(row):
    text = row["answer"].rsplit("\n#### ", 1)[0]
    number = r"\d+(?:\.\d+)?"
    equations = re.findall(rf"({number}(?: [-+*/] {number})+) = ({number})", text)
    for left, right in equations:
        assert exact(left) == Fraction(right), f"{left} = {right}"
    assert len(equations) == text.count(" = "), "an equation was not checked"
    assert re.search(rf"\b{final_answer(row)}\b", text), "the reasoning arrives at the answer"


def test_half_of_the_problems_are_easy_and_half_are_not():
    operations = {row["id"]: len(re.findall(r" [-+*/] ", EXPRESSIONS[row["id"]])) for row in ROWS}
    assert all(operations[f"wp-{n:03d}"] <= 3 for n in range(1, 31))
    assert sum(operations[f"wp-{n:03d}"] for n in range(1, 31)) / 30 < 1.5
    assert all(operations[f"wp-{n:03d}"] >= 2 for n in range(31, 61))


def test_no_question_is_asked_twice():
    assert len({row["question"] for row in ROWS}) == len(ROWS)
