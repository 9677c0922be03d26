"""The server's own counters: a snapshot of its Prometheus page, and what they grew by between two snapshots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.errors import InvalidMeasurement

PREFIX_CACHE_HITS = "vllm:prefix_cache_hits_total"
PREFIX_CACHE_QUERIES = "vllm:prefix_cache_queries_total"
DRAFTS = "vllm:spec_decode_num_drafts_total"
DRAFT_TOKENS = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED_TOKENS = "vllm:spec_decode_num_accepted_tokens_total"
ACCEPTED_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
PREEMPTIONS = "vllm:num_preemptions_total"
GENERATION_TOKENS = "vllm:generation_tokens_total"


@dataclass(frozen=True)
class Snapshot:
    """Sample name -> label set (sorted pairs) -> value."""

    values: Mapping[str, Mapping[tuple[tuple[str, str], ...], float]]

    def total(self, name: str) -> float | None:
        """The sum over all label sets (engines); None where the server has no such sample."""
        series = self.values.get(name)
        return sum(series.values()) if series else None

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Sums per value of `label`, empty where the server has no such sample."""
        sums: dict[str, float] = {}
        for labels, value in self.values.get(name, {}).items():
            key = dict(labels).get(label, "")
            sums[key] = sums.get(key, 0.0) + value
        return sums


@dataclass(frozen=True)
class Speculation:
    """What a drafter did between two snapshots (counts)."""

    drafts: float
    draft_tokens: float
    accepted_tokens: float
    accepted_per_position: tuple[float, ...]

    @property
    def acceptance_length(self) -> float:
        """Tokens per verified draft, the target model's own token included."""
        return 1.0 + self.accepted_tokens / self.drafts

    @property
    def accepted_shares(self) -> tuple[float, ...]:
        """Of all drafts, those whose token at each position was accepted."""
        return tuple(accepted / self.drafts for accepted in self.accepted_per_position)

    @property
    def tokens(self) -> float:
        """Tokens that came from drafted steps."""
        return self.drafts + self.accepted_tokens


def parse(page: str) -> Snapshot:
    """A Prometheus text page as a snapshot; raises InvalidMeasurement where it is none."""
    from prometheus_client.parser import text_string_to_metric_families

    values: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    try:
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                values.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    except ValueError as error:
        raise InvalidMeasurement(f"/metrics is not a Prometheus page: {error}") from error
    return Snapshot(values)


def growth(before: Snapshot, after: Snapshot, name: str) -> float | None:
    """What counter `name` grew by; None where the server has no such counter.

    Raises InvalidMeasurement where it fell, vanished or was made anew: the server restarted in between.
    """
    for labels, value in before.values.get(name, {}).items():
        if after.values.get(name, {}).get(labels, -1.0) < value:
            raise InvalidMeasurement(f"counter {name} went backwards: the server restarted while it was measured")
    made = name.removesuffix("_total") + "_created"  # when the counter began, in seconds
    for labels, value in before.values.get(made, {}).items():
        if after.values.get(made, {}).get(labels, value) != value:
            raise InvalidMeasurement(f"counter {name} started anew: the server restarted while it was measured")
    end = after.total(name)
    return None if end is None else end - (before.total(name) or 0.0)


def speculation(before: Snapshot, after: Snapshot) -> Speculation | None:
    """The drafter's counts between the snapshots; None where no draft was verified. Raises as `growth` does."""
    drafts = growth(before, after, DRAFTS)
    if not drafts:
        return None
    growth(before, after, ACCEPTED_PER_POSITION)  # for its refusal
    earlier = before.by_label(ACCEPTED_PER_POSITION, "position")
    later = after.by_label(ACCEPTED_PER_POSITION, "position")
    return Speculation(
        drafts=drafts,
        draft_tokens=growth(before, after, DRAFT_TOKENS) or 0.0,
        accepted_tokens=growth(before, after, ACCEPTED_TOKENS) or 0.0,
        accepted_per_position=tuple(
            later[position] - earlier.get(position, 0.0) for position in sorted(later, key=int)
        ),
    )
