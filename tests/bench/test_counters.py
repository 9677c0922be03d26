"""Counters of the server's /metrics page."""

from __future__ import annotations

import pytest

from orchestrator.errors import InvalidMeasurement
from orchestrator.metrics import PREFIX_CACHE_HITS, growth, parse, speculation

PAGE = """# TYPE vllm:prefix_cache_hits counter
vllm:prefix_cache_hits_total{{engine="0"}} {hits}.0
vllm:prefix_cache_hits_total{{engine="1"}} 5.0
# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{{engine="0"}} {drafts}.0
# TYPE vllm:spec_decode_num_draft_tokens counter
vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {draft_tokens}.0
# TYPE vllm:spec_decode_num_accepted_tokens counter
vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {accepted}.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} {accepted}.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="10"}} 0.0
"""


def page(hits=0, drafts=0, draft_tokens=0, accepted=0):
    return parse(PAGE.format(hits=hits, drafts=drafts, draft_tokens=draft_tokens, accepted=accepted))


def test_growth_sums_over_engines():
    assert growth(page(hits=3), page(hits=10), PREFIX_CACHE_HITS) == 7.0


def test_a_counter_the_server_lacks_has_no_growth():
    assert growth(page(), page(), "vllm:nothing_total") is None


def test_a_counter_that_fell_means_the_server_restarted():
    with pytest.raises(InvalidMeasurement, match="the server restarted"):
        growth(page(hits=10), page(hits=3), PREFIX_CACHE_HITS)


def test_a_counter_that_began_anew_means_a_restart_also_where_it_has_passed_its_old_value():
    def begun(at_s: float, hits: int):
        counter = f'# TYPE vllm:prefix_cache_hits counter\nvllm:prefix_cache_hits_total{{engine="0"}} {hits}\n'
        return parse(f'{counter}# TYPE vllm:made gauge\nvllm:prefix_cache_hits_created{{engine="0"}} {at_s}\n')

    assert growth(begun(1.0, 3), begun(1.0, 10), PREFIX_CACHE_HITS) == 7.0
    with pytest.raises(InvalidMeasurement, match="started anew"):
        growth(begun(1.0, 3), begun(2.0, 10), PREFIX_CACHE_HITS)


def test_acceptance_length_counts_the_targets_own_token():
    drafter = speculation(page(drafts=10, draft_tokens=40, accepted=5), page(drafts=30, draft_tokens=120, accepted=65))
    assert drafter is not None
    assert (drafter.drafts, drafter.draft_tokens, drafter.accepted_tokens) == (20, 80, 60)
    assert drafter.acceptance_length == 4.0
    assert drafter.tokens == 80
    assert drafter.accepted_per_position == (60, 0)
    assert drafter.accepted_shares == (3.0, 0.0)


def test_no_draft_is_no_speculation():
    assert speculation(page(), page()) is None


def test_a_page_that_is_not_prometheus_is_invalid():
    with pytest.raises(InvalidMeasurement, match="not a Prometheus page"):
        parse("<html>{ not metrics")
