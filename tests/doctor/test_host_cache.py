"""What doctor says of a server whose hierarchical cache keeps prompts in the host's memory."""

import pytest

from deepseek_v4_sm120.commands.doctor import host_cache_checks, server
from deepseek_v4_sm120.commands.doctor.finding import OK, WARN
from tests.doctor.test_server import PLANNED

ON = {"enable_hierarchical_cache": True, "hicache_write_policy": "write_through", "max_total_num_tokens": 1_000_000}
HELD = {"token_usage": 0.5, "hicache_host_total_tokens": 2_000_000.0, "hicache_host_used_tokens": 700_000.0}
FEW = {"hicache_host_total_tokens": 1_000_000.0}


@pytest.mark.parametrize(
    ("info", "metrics", "told"),
    [
        ({}, HELD, [(OK, "700,000 of 2,000,000 tokens")]),
        ({}, HELD | FEW, [(WARN, "1,000,000 tokens in the host's memory, 1,000,000 in the KV cache")]),
        ({"hicache_write_policy": "write_back"}, HELD, [(WARN, "write_back"), (OK, "2,000,000")]),
        ({"version": "0.5.14"}, HELD, [(WARN, "0.5.14"), (OK, "2,000,000")]),
        ({"version": "0.5.15"}, HELD, [(OK, "2,000,000")]),
        ({"enable_hierarchical_cache": False}, HELD | FEW, []),
        ({"enable_hierarchical_cache": None}, HELD | FEW, []),
        ({}, {"token_usage": 0.5}, []),
        ({}, None, []),
        ({"max_total_num_tokens": None}, HELD | FEW, []),
        ({"hicache_write_policy": ["write_back"]}, None, []),
    ],
)
def test_what_is_known_to_go_wrong_with_it_is_told(info, metrics, told):
    answers = server.Answers(PLANNED | ON | info, metrics, model_type="deepseek_v4")
    found = [f for f in server.checks(answers) if f.check == host_cache_checks.CHECK]
    assert [f.state for f in found] == [state for state, _ in told]
    assert all(words in f.found for f, (_, words) in zip(found, told, strict=True))


def test_of_another_model_nothing_is_known():
    answers = server.Answers(PLANNED | ON | {"hicache_write_policy": "write_back"}, HELD | FEW, model_type="qwen3")
    assert not [f for f in server.checks(answers) if f.check == host_cache_checks.CHECK]
