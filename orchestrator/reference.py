"""The KL reference: token ids of the documents and what the reference model expected at each position.

Stored as `<cache>/references/<stack>/<key>/` with `scores.npz` and `manifest.json`. The manifest is written last,
so a directory without one is a write that was cut off.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from orchestrator.errors import UsageError
from orchestrator.records import write_bytes, write_json

FORMAT = 3
FIELDS = frozenset(
    {"format", "stack", "top_k", "corpora", "documents", "first_text", "scores_sha256", "manifest_sha256"}
)


@dataclass(frozen=True)
class Document:
    """One document of T tokens, scored from position `first` on: N = T - first rows, row i about position first + i.

    Unused slots of the K columns hold token -1 and log probability -inf.
    """

    corpus: str
    token_ids: numpy.ndarray  # int32 (T,)
    top_ids: numpy.ndarray  # int32 (N, K)
    top_logprobs: numpy.ndarray  # float32 (N, K), nats
    first: int = 1


@dataclass(frozen=True)
class Reference:
    documents: tuple[Document, ...]
    top_k: int
    corpora: Mapping[str, str]  # name -> SHA-256
    first_text: str = ""  # the first document's text by the reference's tokenizer
    floor_kl_nats: tuple[numpy.ndarray, ...] = ()  # per document, float64 (N,): its second pass against its first
    stack: str = ""  # fingerprint of what served it

    @property
    def floor_nats(self) -> dict[str, float]:
        """Corpus -> mean KL of the reference against itself over all positions; empty without a second pass."""
        of_corpus: dict[str, list[numpy.ndarray]] = {}
        for document, kl_nats in zip(self.documents, self.floor_kl_nats, strict=bool(self.floor_kl_nats)):
            of_corpus.setdefault(document.corpus, []).append(kl_nats)
        return {corpus: float(numpy.concatenate(parts).mean()) for corpus, parts in of_corpus.items()}


def directory(cache_dir: Path, stack: str, key: str) -> Path:
    return cache_dir / "references" / _name(stack) / _name(key)


def save(cache_dir: Path, stack: str, key: str, reference: Reference) -> Path:
    """Write the reference of `stack`; what is there already is replaced. Returns its directory."""
    path = directory(cache_dir, stack, key)
    (path / "manifest.json").unlink(missing_ok=True)
    content = io.BytesIO()
    arrays: dict[str, numpy.ndarray] = {}
    for number, document in enumerate(reference.documents):
        arrays[f"{number}.token_ids"] = document.token_ids
        arrays[f"{number}.top_ids"] = document.top_ids
        arrays[f"{number}.top_logprobs"] = document.top_logprobs
        arrays[f"{number}.first"] = numpy.array(document.first)
    for number, kl_nats in enumerate(reference.floor_kl_nats):
        arrays[f"{number}.floor_kl_nats"] = kl_nats
    numpy.savez_compressed(content, **arrays)
    write_bytes(path / "scores.npz", content.getvalue())
    manifest = {
        "format": FORMAT,
        "stack": stack,
        "key": key,
        "top_k": reference.top_k,
        "corpora": dict(reference.corpora),
        "documents": [document.corpus for document in reference.documents],
        "first_text": reference.first_text,
        "scores_sha256": hashlib.sha256(content.getvalue()).hexdigest(),
    }
    write_json(path / "manifest.json", {**manifest, "manifest_sha256": _sha256_of(manifest)})
    return path


def load(cache_dir: Path, stack: str, key: str) -> Reference | None:
    """The stored reference of `stack`, or None where there is none yet.

    Raises UsageError where what is stored belongs to another stack, is damaged, or is of another format.
    """
    path = directory(cache_dir, stack, key)
    if not (path / "manifest.json").exists():
        return None
    return read(path, stack)


def read(path: Path, stack: str) -> Reference:
    """The reference in directory `path`, which must be one of `stack`."""
    try:
        manifest: Any = json.loads((path / "manifest.json").read_text())
        content = (path / "scores.npz").read_bytes()
    except (OSError, ValueError) as error:
        raise UsageError(f"KL reference {path} cannot be read: {error}; delete the directory to remake it") from error
    if not isinstance(manifest, dict) or not manifest.keys() >= FIELDS or manifest["format"] != FORMAT:
        raise UsageError(f"KL reference {path} is damaged or of another format; delete the directory to remake it")
    if hashlib.sha256(content).hexdigest() != manifest["scores_sha256"] or not _as_written(manifest):
        raise UsageError(f"KL reference {path} is damaged or of another format; delete the directory to remake it")
    require_stack(manifest["stack"], stack, str(path))
    with numpy.load(io.BytesIO(content), allow_pickle=False) as arrays:
        documents = tuple(
            Document(
                corpus=corpus,
                token_ids=arrays[f"{number}.token_ids"],
                top_ids=arrays[f"{number}.top_ids"],
                top_logprobs=arrays[f"{number}.top_logprobs"],
                first=int(arrays[f"{number}.first"]),
            )
            for number, corpus in enumerate(manifest["documents"])
        )
        floors = [f"{number}.floor_kl_nats" for number in range(len(documents))]
        floor_kl_nats = tuple(arrays[name] for name in floors if name in arrays)
    return Reference(
        documents=documents,
        top_k=manifest["top_k"],
        corpora=manifest["corpora"],
        first_text=manifest["first_text"],
        floor_kl_nats=floor_kl_nats,
        stack=manifest["stack"],
    )


def _as_written(manifest: Mapping[str, Any]) -> bool:
    """Whether the manifest is as `save` wrote it: the order of its documents too."""
    rest = {name: value for name, value in manifest.items() if name != "manifest_sha256"}
    return manifest["manifest_sha256"] == _sha256_of(rest)


def _sha256_of(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def require_stack(found: str, wanted: str, where: str) -> None:
    """Raises UsageError that names both stacks where they differ."""
    if found != wanted:
        raise UsageError(
            f"KL reference {where} is of stack {found}, this boot is stack {wanted}: "
            "a KL across stacks measures the stacks; make a reference on this one"
        )


def _name(part: str) -> str:
    """`part` where it is a plain file name, else a hash of it."""
    plain = part and not part.startswith(".") and all(c.isalnum() or c in "._-" for c in part)
    return part if plain and len(part) <= 100 else hashlib.sha256(part.encode()).hexdigest()[:32]
