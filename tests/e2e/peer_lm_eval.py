"""Scores by lm-evaluation-harness's own task file, filters and metric on completions that we made.

As a script: python tests/e2e/peer_lm_eval.py GSM8K_MEASUREMENT.json ...   (needs lm-eval's modules)
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from orchestrator.bench import extraction

FILTERS = {"strict-match": extraction.strict, "flexible-extract": extraction.flexible}


@dataclass(frozen=True)
class Disagreement:
    item: int
    filter: str
    ours: tuple[str, bool]  # extracted, correct
    theirs: tuple[str, bool]
    completion: str


def task() -> dict[str, Any]:
    """The harness's own gsm8k task as it ships."""
    spec = importlib.util.find_spec("lm_eval")
    if spec is None or spec.origin is None:
        raise RuntimeError("lm_eval is not installed: pip install --no-deps lm-eval==0.4.13")
    return yaml.safe_load((Path(spec.origin).parent / "tasks" / "gsm8k" / "gsm8k.yaml").read_text())


def their_scores(completions: Sequence[str], answers: Sequence[str]) -> dict[str, list[tuple[str, bool]]]:
    """Filter name -> (extracted, correct) of each completion, by the harness's code alone."""
    from lm_eval.api.metrics import exact_match_fn
    from lm_eval.filters.extraction import RegexFilter

    definition = task()
    (metric,) = definition["metric_list"]
    options = {key: metric[key] for key in ("regexes_to_ignore", "ignore_case", "ignore_punctuation")}
    scores = {}
    for pipeline in definition["filter_list"]:
        regex, take_first = pipeline["filter"]
        assert (regex.pop("function"), take_first["function"]) == ("regex", "take_first")
        responses = [[completion] for completion in completions]
        extracted = [found[0] for found in RegexFilter(**regex).apply(responses, [{}] * len(responses))]
        scores[pipeline["name"]] = [
            (found, bool(exact_match_fn(predictions=[found], references=[answer], **options)["exact_match"]))
            for found, answer in zip(extracted, answers, strict=True)
        ]
    return scores


def disagreements(completions: Sequence[str], answers: Sequence[str]) -> list[Disagreement]:
    """Every item and filter where extraction or score differ; empty where all agree."""
    found = []
    theirs = their_scores(completions, answers)
    if set(theirs) != set(FILTERS):
        raise RuntimeError(f"the harness's task has the filters {sorted(theirs)}")
    for name, extract in FILTERS.items():
        for item, (completion, answer) in enumerate(zip(completions, answers, strict=True)):
            ours = (extract(completion), extraction.matches(extract(completion), answer))
            if ours != theirs[name][item]:
                found.append(Disagreement(item, name, ours, theirs[name][item], completion))
    return found


if __name__ == "__main__":
    samples = [sample for path in sys.argv[1:] for sample in json.loads(Path(path).read_text())["samples"]]
    answered = [sample for sample in samples if not sample["error"]]
    differing = disagreements([sample["completion"] for sample in answered], [sample["answer"] for sample in answered])
    print(f"{len(answered)} completions, {len(FILTERS)} filters, {len(differing)} disagreements")
    for difference in differing:
        print(difference)
    sys.exit(1 if differing else 0)
