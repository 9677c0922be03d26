"""Small corpora with the real ones' shapes, so that the tests of the benches depend on no data file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from orchestrator.bench.context import BenchContext
from orchestrator.corpora import CATEGORIES, Corpora


@pytest.fixture
def corpora(tmp_path: Path) -> Corpora:
    data = tmp_path / "data"
    data.mkdir()
    paragraphs = [f"Paragraph {number} tells of the {number}th river and its mills. " * 4 for number in range(40)]
    (data / "prose.txt").write_text("\n\n".join(paragraphs))
    (data / "code.txt").write_text("\n\n".join(f"def f{number}(x):\n    return x + {number}" for number in range(99)))
    problems = [
        {"id": f"p{number}", "question": f"What is {number} plus {number}?", "answer": f"Add.\n#### {2 * number}"}
        for number in range(12)
    ]
    (data / "word_problems.jsonl").write_text("\n".join(map(json.dumps, problems)))
    prompts = {
        name: [{"id": f"{name}-{n}", "prompt": f"Write {name} number {n}.", "max_tokens": 64} for n in range(3)]
        for name in CATEGORIES
    }
    (data / "prompts.yaml").write_text(yaml.safe_dump(prompts))
    cells = ["short/short", "medium/short", "long/medium"]
    (data / "grid.yaml").write_text(yaml.safe_dump(dict.fromkeys(CATEGORIES, cells)))
    (data / "heldout.yaml").write_text(yaml.safe_dump([f"Tell me about river number {number}." for number in range(9)]))
    battery = [{"id": f"battery-{number}", "prompt": f"Say {number}."} for number in range(4)]
    (data / "battery.yaml").write_text(yaml.safe_dump(battery))
    return Corpora(tmp_path / "cache", data)


@pytest.fixture
def context(corpora: Corpora) -> BenchContext:
    return BenchContext(seed=1, corpora=corpora)
