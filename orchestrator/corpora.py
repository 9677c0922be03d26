"""The texts the benches send: own ones that ship with the package, public ones by pinned SHA-256."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from orchestrator.errors import UsageError
from orchestrator.records import write_bytes

GSM8K_URL = "https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data/test.jsonl"
GSM8K_SHA256 = "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14"  # 1,319 questions
WIKITEXT_URL = "https://raw.githubusercontent.com/pytorch/examples/main/word_language_model/data/wikitext-2/test.txt"
WIKITEXT_SHA256 = "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0"  # wikitext-2-v1, test split
LENGTHS = ("short", "medium", "long")
CATEGORIES = ("code", "reasoning", "prose", "json", "file_edit", "summarization", "math", "chat")


@dataclass(frozen=True)
class Corpus:
    """A text and the SHA-256 of its bytes; `parts` where it is made of pieces that belong not together."""

    name: str
    sha256: str
    text: str
    parts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Question:
    id: str
    question: str
    answer: str  # worked solution that ends with "#### <number>"


@dataclass(frozen=True)
class Prompt:
    id: str
    category: str
    prompt: str
    max_tokens: int


class Corpora:
    """Loads from `data_dir` (default: what ships with the package); downloads go to `cache_dir`/corpora."""

    def __init__(self, cache_dir: Path, data_dir: Path | None = None) -> None:
        self.cache_dir = cache_dir
        self.data_dir = data_dir or Path(__file__).parent / "corpora_data"

    def prose(self) -> Corpus:
        return self._own("prose", "prose.txt")

    def code(self) -> Corpus:
        return self._own("code", "code.txt")

    def wikitext(self, path: str) -> Corpus:
        """WikiText-2's test split (wikitext-2-v1: rare words are <unk>), found as in `gsm8k`."""
        return _corpus("wikitext", self._public(path, "wikitext2_test.txt", WIKITEXT_URL, WIKITEXT_SHA256))

    def traffic(self, path: str) -> Corpus:
        """Served text of the user's own: JSON lines, each an object with a `text`."""
        if not path:
            raise UsageError("benches.kld.traffic_path is empty; give a file of JSON lines, each with a text")
        content = _read(Path(path))
        parts = tuple(_text_of(line, f"{path}:{number}", "text") for number, line in _json_lines(content, path))
        if not parts:
            raise UsageError(f"{path}: no line in it; write one JSON object with a text for each request")
        return Corpus("traffic", _sha256(content), "\n\n".join(parts), parts)

    def prompts(self) -> tuple[str, tuple[Prompt, ...]]:
        """(SHA-256, prompts in the order of CATEGORIES); raises UsageError where a category is missing."""
        import yaml

        path = self.data_dir / "prompts.yaml"
        content = _read(path)
        groups: Mapping[str, list[Mapping[str, object]]] = yaml.safe_load(content)
        if set(groups) != set(CATEGORIES):
            raise UsageError(f"{path}: categories are {', '.join(sorted(groups))}, not {', '.join(CATEGORIES)}")
        return _sha256(content), tuple(
            Prompt(str(entry["id"]), category, str(entry["prompt"]), int(str(entry["max_tokens"])))
            for category in CATEGORIES
            for entry in groups[category]
        )

    def heldout(self, path: str) -> tuple[str, tuple[Prompt, ...]]:
        """(SHA-256, prompts that nothing else uses): own ones, or those of JSON lines with a `prompt` each."""
        import yaml

        if not path:
            content = _read(self.data_dir / "heldout.yaml")
            texts = [str(text) for text in yaml.safe_load(content)]
        else:
            content = _read(Path(path))
            texts = [_text_of(line, f"{path}:{number}", "prompt") for number, line in _json_lines(content, path)]
        return _sha256(content), tuple(
            Prompt(f"heldout-{number:03}", "heldout", text, 2**20) for number, text in enumerate(texts, 1)
        )

    def battery(self) -> tuple[str, tuple[Prompt, ...]]:
        """(SHA-256, prompts whose answers are short)."""
        import yaml

        content = _read(self.data_dir / "battery.yaml")
        entries = yaml.safe_load(content)
        return _sha256(content), tuple(Prompt(entry["id"], "battery", entry["prompt"], 2**20) for entry in entries)

    def grid(self) -> Mapping[str, tuple[str, str]]:
        """Prompt id -> (input, output), each one of LENGTHS; raises UsageError where it does not fit the prompts."""
        import yaml

        path = self.data_dir / "grid.yaml"
        cells: Mapping[str, list[str]] = yaml.safe_load(_read(path))
        _, prompts = self.prompts()
        found = {}
        for category in CATEGORIES:
            ids = [prompt.id for prompt in prompts if prompt.category == category]
            for prompt_id, cell in zip(ids, cells.get(category, ()), strict=False):
                wanted, _, produced = cell.partition("/")
                if wanted not in LENGTHS or produced not in LENGTHS:
                    raise UsageError(f"{path}: {category}: {cell!r} is no cell; write one as short/medium")
                found[prompt_id] = (wanted, produced)
            if len(cells.get(category, ())) != len(ids):
                raise UsageError(f"{path}: {category} has {len(cells.get(category, ()))} cells for {len(ids)} prompts")
        return found

    def word_problems(self) -> tuple[str, tuple[Question, ...]]:
        """(SHA-256, own word problems)."""
        content = _read(self.data_dir / "word_problems.jsonl")
        return _sha256(content), _questions(content)

    def gsm8k(self, path: str) -> tuple[str, tuple[Question, ...]]:
        """(SHA-256, the 1,319 GSM8K test questions) from `path`, else the cache, else the network."""
        return GSM8K_SHA256, _questions(self._public(path, "gsm8k_test.jsonl", GSM8K_URL, GSM8K_SHA256))

    def _public(self, path: str, name: str, url: str, sha256: str) -> bytes:
        """A public file's bytes; raises UsageError where they are not there or not the pinned ones."""
        if path:
            return _pinned(_read(Path(path)), sha256, path)
        cached = self.cache_dir / "corpora" / name
        if not cached.exists():
            write_bytes(cached, _pinned(_download(url), sha256, url))
        return _pinned(_read(cached), sha256, str(cached))

    def _own(self, name: str, file: str) -> Corpus:
        return _corpus(name, _read(self.data_dir / file))


def _corpus(name: str, content: bytes) -> Corpus:
    return Corpus(name, _sha256(content), content.decode())


def _json_lines(content: bytes, path: str) -> Iterator[tuple[int, object]]:
    """(number from 1, value) of each line that is not blank."""
    for number, line in enumerate(content.decode(errors="replace").splitlines(), 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except ValueError as error:
                raise UsageError(f"{path}:{number}: no JSON ({error}); correct the line") from None


def _text_of(line: object, where: str, key: str) -> str:
    text = line.get(key) if isinstance(line, dict) else None
    if not isinstance(text, str) or not text.strip():
        raise UsageError(f'{where}: no "{key}" in it; write {{"{key}": "..."}}')
    return text


def _questions(content: bytes) -> tuple[Question, ...]:
    lines = [json.loads(line) for line in content.decode().splitlines() if line.strip()]
    return tuple(
        Question(str(line.get("id", f"test-{number}")), line["question"], line["answer"])
        for number, line in enumerate(lines)
    )


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _pinned(content: bytes, sha256: str, origin: str) -> bytes:
    if (found := _sha256(content)) != sha256:
        raise UsageError(f"{origin}: SHA-256 is {found}, expected {sha256}; this is another file or another version")
    return content


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"corpus {path}: {error.strerror}") from error


def _download(url: str) -> bytes:
    import urllib.request

    try:
        with urllib.request.urlopen(url, timeout=60) as response:
            return response.read()
    except OSError as error:
        raise UsageError(f"download of {url} failed: {error}; give a local path instead") from error
