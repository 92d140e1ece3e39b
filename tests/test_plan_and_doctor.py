"""What `doctor` says of a server that runs a plan, and `serve` makes of it: they may not send its owner to and fro."""

import dataclasses
import functools
import re

import pytest

from deepseek_v4_sm120 import OPS
from deepseek_v4_sm120.__main__ import main
from deepseek_v4_sm120.commands.doctor import command, server
from deepseek_v4_sm120.commands.doctor.finding import OK, WARN
from deepseek_v4_sm120.commands.plan import launch, memory, models
from deepseek_v4_sm120.commands.plan.command import show
from deepseek_v4_sm120.commands.speculation import DSPARK, DSPARK_SINCE, EAGLE, Speculation
from tests.patching.wheels import RELEASES, content, fetch, since
from tests.test_plan import flags, request

OF_THE_RELEASE = {"parsers", "reasoning effort", "metrics"}  # what no flag of a plan could mend
PLANS = [
    {"gpus": gpus, "concurrency": streams, "context": context}
    for gpus, streams, context in (
        *((2, 1, 1_048_576), (2, 8, 393_216), (2, 8, 1_048_576), (2, 16, 290_048), (2, 64, 131_072)),
        *((4, 1, 131_072), (4, 32, 1_048_576), (8, 8, 1_048_576)),
    )
]


def answers(plan):
    """A server of these flags, as /server_info has them; `applied` as its reports would have it."""
    r, told = plan.request, flags(plan)
    info = {
        "version": r.sglang,
        "model_path": told["--model-path"],
        "attention_backend": "dsv4",
        "moe_runner_backend": told.get("--moe-runner-backend", "flashinfer_mxfp4"),
        "disable_custom_all_reduce": False,
        "disable_cuda_graph": False,
        "enable_mixed_chunk": False,
        "cuda_graph_bs": [1, int(told.get("--cuda-graph-max-bs-decode") or told["--cuda-graph-max-bs"])],
        "max_total_num_tokens": plan.tokens,
        "swa_full_tokens_ratio": memory.SWA_RATIO,
        "mem_fraction_static": float(told["--mem-fraction-static"]),
        "speculative_algorithm": told.get("--speculative-algorithm"),
        "speculative_num_draft_tokens": r.rows or None,
        "tool_call_parser": told["--tool-call-parser"],
        "reasoning_parser": told["--reasoning-parser"],
    }
    whole = ("tp-size", "chunked-prefill-size", "context-length", "max-running-requests")
    info |= {name.replace("-", "_"): int(told[f"--{name}"]) for name in whole}
    if since(r.sglang, "0.5.19"):
        info["prefill_decode_interval"] = int(told.get("--prefill-decode-interval", 0))
    if since(r.sglang, "0.5.21"):
        tails = told.get("--swa-prefix-tails")
        info["swa_prefix_tails"] = None if tails is None else int(tails)
    variables = {flag.name: flag.value for flag in plan.environment}
    ours = {*OPS, "cached_beginning"}
    ours |= {"prefill_interval"} if "prefill_decode_interval_0_5_17" in variables.get("DSV4_SM120_SET", "") else set()
    return server.Answers(info, None, frozenset(ours), model_type="deepseek_v4", variables=variables)


@pytest.mark.parametrize("release", RELEASES)
def test_doctor_has_nothing_against_a_plan(release):
    lacks_interval, fit = release != "0.5.17" and not since(release, "0.5.19"), 0
    for wanted in PLANS:
        drafts = [{}, {"speculation": None}]
        if request(sglang=release).version >= DSPARK_SINCE and since(release, "0.5.19"):
            drafts.append({"model": models.FLASH_0731, "speculation": Speculation(DSPARK, 4)})
        for more in drafts:
            plan = launch.make(request(sglang=release, **wanted, **more))
            told = {f.check: f for f in server.checks(answers(plan)) if f.state != OK}
            fit += plan.fits
            of_it = {"prefill and decode"} if lacks_interval and wanted["concurrency"] > 1 else set()
            of_it |= {"prefix cache"} if any("drops what" in note for note in plan.notes) else set()
            assert not plan.fits or told.keys() - OF_THE_RELEASE == of_it, (wanted, more, told)
            if "prefill and decode" in of_it and plan.fits:  # and the plan says so itself
                assert "0.5.19 or newer" in told["prefill and decode"].fix
                assert any("0.5.19 and later have one" in note for note in plan.notes)
    assert fit > len(PLANS)


def test_streams_that_wait_for_a_prompt_are_told_where_there_are_some():
    plan = launch.make(request(sglang="0.5.17"))
    told = answers(plan)
    without = server.Answers(told.info, None, told.applied - {"prefill_interval"}, model_type="deepseek_v4")
    alone = server.Answers(told.info | {"max_running_requests": 1}, None, without.applied, model_type="deepseek_v4")
    of = [{f.check: f for f in server.checks(one)}.get("prefill and decode") for one in (told, without, alone)]
    assert of[0] is of[2] is None and of[1].state == WARN and "prefill_decode_interval_0_5_17=on" in of[1].fix


def test_where_0_5_15s_own_attention_runs_it_is_one_that_is_there():
    """Of FlashInfer 0.6.12, which it and its post release pin, `flashinfer.mla._sparse_mla_sm120` is no module."""
    others = tuple(op for op in OPS if op != "sparse_decode")
    for version, more, is_set in (
        *((version, {"replaced": others}, True) for version in ("0.5.15", "0.5.15.post1")),
        ("0.5.15", {"gpus": 4, "shadow": "1"}, True),
        *((version, {}, False) for version in ("0.5.15", "0.5.15.post1")),
        *((version, {"replaced": others}, False) for version in ("0.5.14", "0.5.16")),
    ):
        plan = launch.make(request(sglang=version, context=65_536, **more))
        assert ("SGLANG_SM120_FLASHMLA_BACKEND=triton" in launch.launch_line(plan)) == is_set, (version, more)
    for version in ("0.5.15", "0.5.15.post1"):
        asked = content(fetch(version), "sglang/srt/layers/attention/flash_mla_sm120.py")
        assert "    from flashinfer.mla._sparse_mla_sm120 import" in asked  # in the call, not at the start


# ---- windows of cached prefixes, where the KV cache does not hold all streams at full length


@pytest.mark.parametrize(("gpus", "streams", "context"), [(2, 8, 393_216), (2, 16, 290_048), (4, 32, 1_048_576)])
def test_one_conversation_of_full_length_does_not_drop_all_others(gpus, streams, context):
    plan = launch.make(request(gpus=gpus, concurrency=streams, context=context))
    kept = memory.kept_prefix_tokens(models.FLASH, plan.prefix_tails, plan.chunk)
    by_default = memory.pools(
        models.FLASH, plan.request.version, requests=streams, chunk=plan.chunk, drafts=plan.request.rows
    )
    whole = by_default.tokens(plan.pool_bytes)
    assert context <= kept < context + 4 * plan.chunk and whole < streams * context
    assert max(context, whole // 2) <= plan.tokens < whole and not plan.is_tight


def test_the_windows_take_no_more_than_half_of_the_cache_and_leave_a_request():
    plan = launch.make(request(concurrency=32, context=1_048_576))
    kept = memory.kept_prefix_tokens(models.FLASH, plan.prefix_tails, plan.chunk)
    short = memory.static_off_by(plan.weights, plan.fraction) / plan.pools.token_bytes
    assert kept < 1_048_576 and 0 <= plan.tokens - 1_048_576 - short < 8192 and not plan.is_tight
    assert any(note.startswith(f"a prompt of more than {kept:,} tokens drops what") for note in plan.notes)
    r = request(context=524_288)  # in small chunks, of which each leaves a window: no more than half
    sized = functools.partial(memory.pools, models.FLASH, r.version, requests=8, chunk=1024, drafts=r.rows)
    holds, tails = sized().tokens(plan.pool_bytes), launch._prefix_tails(r, sized(), sized, 1024, plan.pool_bytes, 0.0)
    assert 0 <= sized(prefix_tails=tails).tokens(plan.pool_bytes) - holds // 2 < 8192
    enough = launch.make(request(concurrency=64, context=131_072))  # whose own prefixes are more than one conversation
    assert enough.prefix_tails is None and enough.tokens < 64 * 131_072


@pytest.mark.parametrize("context", [131_072, 393_216, 786_432, 1_048_576])
@pytest.mark.parametrize("tokens", [1_100_000, 2_000_000, 2_500_000, 9_000_000])
def test_what_doctor_advises_leaves_a_request_of_full_length(context, tokens):
    """By the pools themselves: the same bytes with as many windows hold as many tokens as it says."""
    info = {"version": "0.5.23", "swa_prefix_tails": None, "swa_full_tokens_ratio": 0.1, "max_running_requests": 2}
    info |= {"chunked_prefill_size": 4096, "context_length": context, "max_total_num_tokens": tokens}
    info |= {"speculative_num_draft_tokens": 2, "model_path": "deepseek-v4", "attention_backend": "dsv4"}
    told = {f.check: f for f in server.checks(server.Answers(info, None))}["prefix cache"]
    wanted, left = re.search(r"--swa-prefix-tails (\d+) for .* leaves ([\d,]+) ", told.fix).groups()
    sized = {"requests": 2, "chunk": 4096, "drafts": 2}
    now, then = (memory.pools(models.FLASH, (0, 5, 23), **sized, prefix_tails=n) for n in (8, int(wanted)))
    holds = then.tokens(now.fixed_bytes + tokens * now.token_bytes)
    assert int(left.replace(",", "")) == pytest.approx(holds, abs=memory.PAGE_TOKENS)
    assert holds + memory.PAGE_TOKENS > max(context, tokens // 2) and int(wanted) > 8
    kept = memory.kept_prefix_tokens(models.FLASH, int(wanted), 4096)
    assert ("two of full length" in told.fix) == (kept >= 2 * context) and (kept >= 2 * context or tokens < 9_000_000)
    assert ("one of full length" in told.fix) == (context <= kept < 2 * context)


# ---- blocks, by the times that a plan prints


# accept len of none to 4 drafts, V4-Pro's weights on code with thoughts and without (InferenceX, dsv4_mtp.yaml)
ACCEPTED = {"text": (1, 1.79, 2.27, 2.49, 2.54), "structure": (1, 1.92, 2.61, 2.97, 3.00)}
BEHIND = 0.001  # of the best


def tokens_per_second(r, drafts):
    drafting = dataclasses.replace(r, speculation=Speculation(EAGLE, drafts + 1))
    return ACCEPTED[r.load][drafts] / drafting.drafted_step_seconds(drafts, drafting.has_draft_head)


@pytest.mark.parametrize("load", sorted(ACCEPTED))
@pytest.mark.parametrize("cards", [1, 2, 4, 8])
def test_no_advised_block_is_behind_the_best_of_the_plans_own_times(cards, load):
    advised = set()
    for streams in (1, 2, 3, 4, 6, 8, 9, 12, 16, 24, 32, 48, 64, 65, 85, 86, 127, 128, 129, 256):
        r = request(gpus=cards, concurrency=streams, load=load, speculation=None)
        rates = {drafts: tokens_per_second(r, drafts) for drafts in range(1, 5)}
        taken = {drafts: rate for drafts, rate in rates.items() if streams * (drafts + 1) <= 256} or {1: rates[1]}
        block = r.advised(EAGLE).block
        assert block in taken and rates[block] >= (1 - BEHIND) * max(taken.values()), (streams, rates)
        advised.add(block)
    assert len(advised) > 1  # no one block is the best everywhere


def test_a_blocks_reason_and_what_it_stands_on():
    reason = flags_reasons(request(gpus=8, concurrency=2))["--speculative-num-steps"]
    assert "the most by bytes of 1 to 3" in reason and "1.79, 2.27, 2.49: InferenceX" in reason
    of_many = request(gpus=8, concurrency=86).advised(EAGLE)
    assert (
        of_many.block == 1 and "of 1 to 1" in of_many.reason and "with 2 a step has more than the 256" in of_many.reason
    )
    for without in ({"also_set": {"draft_chain": "off"}}, {"off": True, "replaced": ()}):
        for streams in (1, 8, 32):
            stock = request(gpus=8, concurrency=streams, **without).advised(EAGLE)
            assert stock.block == 1 and "#25696" in stock.reason
    assert request(gpus=8, concurrency=2, also_set={"draft_chain": "on"}).advised(EAGLE).block == 2


def flags_reasons(r):
    return {flag.name: flag.reason for flag in launch.make(r).flags}


# ---- serve: what stands behind --


@pytest.mark.parametrize(
    ("sglang", "name"), [("0.5.13", "--cuda-graph-max-bs"), ("0.5.23", "--cuda-graph-max-bs-decode")]
)
def test_graphs_are_for_as_many_requests_as_the_user_lets_run(capsys, sglang, name):
    words = ["serve", "--gpus", "4", "--memory", "96", "--context", "65536", "--sglang", sglang, "--dry-run"]
    for own, graphs in (
        *(([], "8"), (["--max-running-requests", "48"], "48"), (["--max-running-requests=4"], "4")),
        *((["--max-running-requests", word], "8") for word in ("many", "0", "-1")),
    ):
        assert main([*words, "--", *own] if own else words) == 0
        assert f" {name} {graphs} " in capsys.readouterr().out
    assert main([*words, "--", "--max-running-requests", "48", name, "32"]) == 0
    told = capsys.readouterr().out
    assert f" {name} 32" in told and f" {name} 48" not in told


# ---- words that are taken for secrets


def test_no_word_of_advice_is_taken_for_a_key(capsys):
    for more in ({}, {"sglang": "0.5.17"}, {"gpus": 4, "nodes": 2}):
        show(launch.make(request(**more)))
    with pytest.raises(command.console.CommandError) as raised:
        command.run(type("Arguments", (), {"api_key": "x", "url": None}))
    command.console.say(str(raised.value))
    said = capsys.readouterr().out
    assert "`--api-key` and `--admin-api-key`" in said and "`--api-key` is that of" in said and "***" not in said
