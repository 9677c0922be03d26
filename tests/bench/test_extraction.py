"""Answers as lm-evaluation-harness 0.4.13 extracts and compares them in its task gsm8k."""

from __future__ import annotations

import pytest

from orchestrator.bench.extraction import INVALID, flexible, matches, strict

ANSWER = "Six of 7.\n6*7=<<6*7=42>>42\n#### 42"


@pytest.mark.parametrize(
    ("text", "strict_answer", "flexible_answer"),
    [
        ("so #### 42", "42", "42"),
        ("#### 41\n#### 42", "41", "42"),
        ("#### $42", INVALID, "$42"),
        ("#### -1,234.50", "-1,234.50", "-1,234.50"),
        ("####42", INVALID, "42"),
        ("The answer is 7", INVALID, "7"),
        ("It is 42.", INVALID, "42."),
        ("It is 7.", INVALID, "7."),
        ("well ...", INVALID, "..."),
        ("no number", INVALID, INVALID),
        ("", INVALID, INVALID),
    ],
)
def test_extraction(text: str, strict_answer: str, flexible_answer: str):
    assert strict(text) == strict_answer
    assert flexible(text) == flexible_answer


@pytest.mark.parametrize(
    ("extracted", "equal"),
    [("42", True), ("42.", True), ("$42", True), ("4,2", True), ("42.0", False), ("-42", False), (INVALID, False)],
)
def test_comparison_ignores_what_the_task_ignores(extracted: str, equal: bool):
    assert matches(extracted, ANSWER) is equal


def test_thousands_separators_of_the_answer_are_ignored_too():
    assert matches("1234", "#### 1,234")
