"""The shipped prose, code and prompts: sizes, shape, and that the code is code."""

from __future__ import annotations

import ast
import re
import sqlite3
from collections import Counter
from importlib.resources import files

import yaml

DATA = files("orchestrator") / "corpora_data"
CATEGORIES = ("code", "reasoning", "prose", "json", "file_edit", "summarization", "math", "chat")


def read(name: str) -> str:
    return (DATA / name).read_text("utf-8")


def code_files() -> dict[str, str]:
    """File name -> source, split at the `file: NAME` comments of code.txt."""
    parts = re.split(r"^(?:#|--|/\*) file: (\S+)(?: \*/)?$", read("code.txt"), flags=re.MULTILINE)
    assert parts[0] == ""
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_prose_is_thousands_of_words_in_paragraphs_that_do_not_repeat():
    paragraphs = read("prose.txt").strip().split("\n\n")
    assert 6000 <= len(read("prose.txt").split()) <= 8000
    assert len(set(paragraphs)) == len(paragraphs) >= 50
    assert all("\n" not in paragraph for paragraph in paragraphs)


def test_prose_does_not_reuse_its_phrases():
    """Filler shows as the same eight words in a row; natural text of this length has next to none."""
    words = re.findall(r"[a-z']+", read("prose.txt").lower())
    runs = Counter(tuple(words[i : i + 8]) for i in range(len(words) - 7))
    assert [" ".join(run) for run, count in runs.items() if count > 1] == []


def test_every_python_file_in_the_code_corpus_parses():
    python = {name: source for name, source in code_files().items() if name.endswith(".py")}
    assert len(python) >= 10
    for name, source in python.items():
        ast.parse(source, filename=name)


def test_the_sql_in_the_code_corpus_runs():
    script = code_files()["inventory.sql"]
    database = sqlite3.connect(":memory:")
    database.executescript(script)
    assert {row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")} == {
        "warehouse",
        "item",
        "movement",
    }


def test_the_code_corpus_is_about_thirty_kilobytes_of_three_languages():
    assert 24_000 <= len(read("code.txt").encode()) <= 34_000
    assert {name.rsplit(".", 1)[1] for name in code_files()} == {"py", "c", "sql"}


def test_prompts_have_the_eight_categories_with_six_prompts_each():
    prompts = yaml.safe_load(read("prompts.yaml"))
    assert tuple(prompts) == CATEGORIES
    for category, rows in prompts.items():
        assert [row["id"] for row in rows] == [f"{category}-{n:02d}" for n in range(1, 7)]
        for row in rows:
            assert set(row) == {"id", "prompt", "max_tokens"}
            assert row["prompt"] == row["prompt"].strip() != ""
            assert isinstance(row["max_tokens"], int) and 64 <= row["max_tokens"] <= 384


def test_prompt_lengths_vary_from_a_line_to_hundreds_of_words():
    prompts = yaml.safe_load(read("prompts.yaml"))
    lengths = [len(row["prompt"].split()) for rows in prompts.values() for row in rows]
    assert min(lengths) <= 10
    assert max(lengths) >= 450
    assert sum(length >= 100 for length in lengths) >= 10


def test_every_file_edit_prompt_contains_a_file_and_every_summary_a_passage():
    prompts = yaml.safe_load(read("prompts.yaml"))
    assert all(row["prompt"].count("\n") >= 5 for row in prompts["file_edit"])
    assert all(len(row["prompt"].split()) >= 60 for row in prompts["summarization"])


def test_the_readme_says_whose_the_texts_are_and_what_they_are_not():
    text = read("README.md")
    assert "Apache-2.0" in text
    assert "never as GSM8K" in text and "never as wikitext" in text
    assert all(name in text for name in ("word_problems.jsonl", "prose.txt", "code.txt", "prompts.yaml"))


def test_all_texts_are_plain_ascii_so_that_every_tokenizer_sees_the_same_bytes():
    for name in ("word_problems.jsonl", "prose.txt", "code.txt", "prompts.yaml"):
        assert read(name).isascii(), name
