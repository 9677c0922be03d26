"""The loader of corpora: hashes, pinned files, refusals."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from orchestrator import corpora as loader
from orchestrator.corpora import CATEGORIES, Corpora
from orchestrator.errors import UsageError


def test_own_corpora_carry_the_hash_of_their_bytes(corpora: Corpora):
    content = (corpora.data_dir / "prose.txt").read_bytes()
    assert corpora.prose().sha256 == hashlib.sha256(content).hexdigest()
    assert corpora.prose().text == content.decode()


def test_prompts_come_in_the_order_of_the_categories(corpora: Corpora):
    _, prompts = corpora.prompts()
    assert list(dict.fromkeys(prompt.category for prompt in prompts)) == list(CATEGORIES)


def test_a_missing_category_is_refused(corpora: Corpora):
    (corpora.data_dir / "prompts.yaml").write_text("code: []")
    with pytest.raises(UsageError, match="categories are code, not"):
        corpora.prompts()


def test_another_file_in_place_of_gsm8k_is_refused(corpora: Corpora, tmp_path: Path):
    other = tmp_path / "test.jsonl"
    other.write_text('{"question": "?", "answer": "#### 1"}')
    with pytest.raises(UsageError, match="SHA-256 is"):
        corpora.gsm8k(str(other))
    with pytest.raises(UsageError, match="No such file"):
        corpora.gsm8k(str(tmp_path / "absent"))


def test_a_download_is_checked_before_it_is_kept(corpora: Corpora, monkeypatch):
    monkeypatch.setattr(loader, "_download", lambda url: b"an error page")
    with pytest.raises(UsageError, match="SHA-256 is"):
        corpora.gsm8k("")
    assert not (corpora.cache_dir / "corpora").exists()


def test_without_a_network_a_public_corpus_asks_for_a_local_path(corpora: Corpora, monkeypatch):
    monkeypatch.setattr(loader, "WIKITEXT_URL", "http://127.0.0.1:9/test.txt")
    with pytest.raises(UsageError, match=r"download of http://127.0.0.1:9/test.txt failed: .*; give a local path"):
        corpora.wikitext("")


def test_what_ships_loads(tmp_path: Path):
    shipped = Corpora(tmp_path)
    _, questions = shipped.word_problems()
    _, prompts = shipped.prompts()
    assert len(questions) == 60
    assert len(prompts) == 6 * len(CATEGORIES)
    assert len(shipped.prose().text.split()) > 5000
    assert len(shipped.code().text) > 20_000
