"""The questions that the sides of a comparison do not answer alike, with what each side said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.recorded.sides import Sample, Side

LONGEST_TEXT = 4000  # characters of an answer that are shown


@dataclass(frozen=True)
class Question:
    """One that the sides did not answer alike; `answers` in the order of the sides: (right or not, what was taken from
    the text, the text)."""

    id: str
    expected: str
    answers: tuple[tuple[str, str, str], ...]


def differing(shown: Sequence[Side]) -> list[Question]:
    """The questions that one side answers right in more of its boots than another does, worst first."""
    of_sides = [[found for s in side.samples if (found := _answers(s))] for side in shown]
    if len(shown) < 2 or not all(of_sides):
        return []
    found = []
    for name in of_sides[0][0]:
        rights = [[boot[name]["correct_flexible"] for boot in of if name in boot] for of in of_sides]
        if not all(rights) or any(right is None for of in rights for right in of):
            continue
        shares = [sum(of) / len(of) for of in rights]
        if max(shares) == min(shares):
            continue
        answers = []
        for of, share, rights_of in zip(of_sides, shares, rights, strict=True):
            typical = share >= 0.5
            boot = next(b for b, right in zip([b for b in of if name in b], rights_of, strict=True) if right == typical)
            taken = str(boot[name].get("extracted_flexible") or "nothing")
            said = f"{'right' if typical else 'wrong'}, in {sum(rights_of)} of {len(rights_of)} boots right"
            answers.append((said, taken, _cut(str(boot[name].get("completion") or ""))))
        expected = str(of_sides[0][0][name].get("answer", "")).rsplit("####", 1)[-1].strip()
        found.append((min(shares) - max(shares), Question(str(name), expected, tuple(answers))))
    return [question for _, question in sorted(found, key=lambda pair: (pair[0], pair[1].id))]


def _answers(sample: Sample) -> dict[Any, Mapping[str, Any]]:
    measurement = sample.measurements.get("gsm8k")
    return (
        {}
        if measurement is None
        else {s["id"]: s for s in measurement.samples if "id" in s and "correct_flexible" in s}
    )


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]} ... [{len(text)} characters]"
