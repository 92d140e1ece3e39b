"""A pool of sliding windows that hardly holds a chunk: `doctor`, beside each release's own admission."""

import pytest

from deepseek_v4_sm120.commands.doctor import server
from deepseek_v4_sm120.commands.doctor.finding import WARN
from tests.doctor.test_server import STOCK, found
from tests.patching.test_wheel_cached_beginning import CHUNK, IN, NEEDED, NEVER, PAGE, answer
from tests.patching.wheels import every_release, since


def told(version, slots, **also):
    tokens = {"max_total_num_tokens": 10 * slots, "version": version, "max_running_requests": None, **also}
    return found(STOCK | {"prefill_decode_interval": 8} | tokens).get("sliding windows")


@every_release()
@pytest.mark.parametrize("slots", [NEEDED - PAGE, NEEDED, NEEDED + PAGE, NEEDED + 2 * PAGE, NEEDED + 3 * PAGE])
def test_what_would_wait_for_ever_is_told_and_nothing_else(version, slots):
    fresh, cached = answer(version, slots), [answer(version, slots, locked=pages * PAGE) for pages in (1, 2)]
    assert (NEVER in (fresh, *cached)) == (told(version, slots) is not None), (fresh, cached)
    warned = told(version, slots)
    if warned is not None:
        assert warned.state == WARN and warned.fix == f"--chunked-prefill-size {CHUNK // 2}"
        assert answer(version, slots, locked=2 * PAGE, chunk=CHUNK // 2) == IN
    if fresh == NEVER:
        assert not since(version, "0.5.16") and "a prompt that fills a chunk" in told(version, slots).cost
    elif NEVER in cached:
        assert "goes on from a cached" in told(version, slots).cost


def test_a_pool_of_another_size_and_a_server_without_a_prefix_cache_are_fine():
    slots = NEEDED + PAGE
    assert told("0.5.20", slots) and told("0.5.23", slots) and told("0.5.20", slots, max_running_requests=8)
    assert told("0.5.23", slots, max_running_requests=8) is None  # the pool is sized by the requests
    set_by_hand = {
        "swa_full_tokens_ratio": 0.1,
        "_swa_full_tokens_ratio_explicitly_set": True,
    }
    assert told("0.5.23", slots, max_running_requests=8, **set_by_hand)
    assert told("0.5.23", slots, disable_radix_cache=True) is None
    assert told("0.5.14", NEEDED, disable_radix_cache=True)  # no prompt that fills a chunk, cached or not
    for other in ({"max_total_num_tokens": None}, {"chunked_prefill_size": -1}):
        assert told("0.5.23", slots, **other) is None


def test_where_ours_is_in_place_nothing_waits():
    info = STOCK | {"max_total_num_tokens": 10 * (NEEDED + PAGE), "max_running_requests": None, "version": "0.5.23"}
    answers = (
        server.Answers(info, None, names, model_type="deepseek_v4") for names in (None, frozenset({"cached_beginning"}))
    )
    assert ["sliding windows" in {f.check for f in server.checks(a)} for a in answers] == [True, False]
