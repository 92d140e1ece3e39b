"""What the table finds of the scheduler's rows in each release, of DSPARK's graphs and of the kernel of
rows/sampling.py that has two places: test_wheels.py's part for rows/scheduler.py."""

from deepseek_v4_sm120.sglang_patches.rows import sampling
from deepseek_v4_sm120.sglang_patches.rows import scheduler as rows
from deepseek_v4_sm120.sglang_patches.rows.dspark import DSPARK_GRAPHS
from tests.patching.wheels import since

CUT_IN = {"0.5.18": "sglang.srt.managers.schedule_policy", "0.5.21": "sglang.srt.mem_cache.prefill_budget"}  # and later


def expected(version: str) -> dict[str, str]:
    """Patch -> place of its last target."""
    found = {
        "grammar_ends": rows.GRAMMAR_ENDS.targets[since(version, "0.5.16")].where,
        "abort_names": rows.SCHEDULER,
        "own_outputs": rows.PIPELINE,
        "replaced_sessions": rows.REPLACED_SESSIONS.targets[0].where,
        "first_stops": rows.FIRST_STOPS.targets[since(version, "0.5.13") + since(version, "0.5.14")].where,
        "stored_pages": rows.STORED_PAGES.targets[1].where,
        "preempted_requests": rows.PREEMPTED_REQUESTS.targets[-1 + since(version, "0.5.22")].where,
    }
    if not since(version, "0.5.13"):
        found["padded_rows"] = rows.GRAPH_INPUTS
    if not since(version, "0.5.15"):
        found["shared_beginnings"] = rows.SWA_CACHE
    if not since(version, "0.5.16"):
        found["logprob_pieces"] = sampling.LOGITS
    if since(version, "0.5.16") and not since(version, "0.5.19"):
        found["dspark_graphs"] = DSPARK_GRAPHS.targets[since(version, "0.5.17")].where
    if since(version, "0.5.17"):
        found |= {"waiting_chunks": rows.ADDER, "waiting_prompts": rows.SCHEDULER}
        found |= {} if since(version, "0.5.22") else {"mixed_chunks": rows.BATCH}
    if since(version, "0.5.14"):
        found["certain_tokens"] = sampling.CERTAIN_TOKENS.targets[since(version, "0.5.16")].where
    if not since(version, "0.5.21"):
        found["prefix_walks"] = rows.TREE_CORE if since(version, "0.5.17") else rows.UNIFIED_CACHE
    if since(version, "0.5.19"):
        found |= {"prompts_alone": rows.SCHEDULER, "mixed_grammars": rows.SCHEDULER}
    else:
        found["idle_checks"] = rows.IDLE_CHECKS.targets[since(version, "0.5.13")].where
    if since(version, "0.5.20"):
        found["short_prompts"] = rows.ADDER
    if not since(version, "0.5.21"):
        found["asked_tokens"] = sampling.ASKED_TOKENS.targets[since(version, "0.5.16")].where
    if version == "0.5.18":
        found["freed_windows"] = rows.FREED_WINDOWS.targets[0].where
    if not since(version, "0.5.23"):
        found["fenced_copies"] = rows.FENCED_COPIES.targets[3 + since(version, "0.5.18")].where
    return found | dict(("cached_beginning", module) for first, module in CUT_IN.items() if since(version, first))
