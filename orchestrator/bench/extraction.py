"""The answer in a completion, as lm-evaluation-harness 0.4.13 finds and compares it in its task `gsm8k`.

Two filters, each the first of `re.findall` or the last one, then `exact_match` after dropping what its
`regexes_to_ignore` match, both sides in lower case.
"""

from __future__ import annotations

import re

VERSION = "lm-evaluation-harness 0.4.13 gsm8k"
INVALID = "[invalid]"
_STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
_FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
_IGNORED = (r",", r"\$", r"(?s).*#### ", r"\.$")


def strict(text: str) -> str:
    """What follows the first "#### "; "[invalid]" where there is none."""
    return _pick(_STRICT.findall(text), 0)


def flexible(text: str) -> str:
    """The last thing that looks like a number; "[invalid]" where there is none."""
    return _pick(_FLEXIBLE.findall(text), -1)


def matches(extracted: str, answer: str) -> bool:
    """Whether `extracted` equals the worked solution `answer` ("... #### 42")."""
    return _normal(extracted) == _normal(answer)


def _pick(found: list[str] | list[tuple[str, ...]], which: int) -> str:
    if not found:
        return INVALID
    match = found[which]
    if isinstance(match, tuple):  # the groups of an alternation: the one that took part
        match = next((group for group in match if group), INVALID)
    return match.strip()


def _normal(text: str) -> str:
    for pattern in _IGNORED:
        text = re.sub(pattern, "", text)
    return text.lower()
