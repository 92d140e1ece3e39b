"""The stages `streams2_same` and `streams2_43` of run_stage.py: a prompt's residual streams dealt to two cards, and all
on both. To the last bit, at six layers; and the time to the first token, over NVLink and through host memory, over
NVLink beside stock's."""

import halves_stage
import prompt_times

ISSUE = 22
SETTING = "dealt_streams"
WORDS = {"dealt": "streams dealt", "kept": "streams kept whole"}
DEALT, KEPT, AGAIN = "same_dealt_streams2", "same_kept_streams2", "same_kept_again2"
# NCCL adds two terms, by whatever algorithm; a row's boundary hangs on nothing but the row; all else has all rows
SAMES = [
    ("two cards, streams dealt against kept whole", DEALT, KEPT),
    ("two cards, streams dealt, once more", DEALT, DEALT),
    ("yardstick: two cards, streams kept whole, two processes", AGAIN, KEPT),
]
TIMED = {f"{how}_streams2_43{peers}": (how, peers) for peers in prompt_times.PEERS for how in WORDS}
STOCK = "stock_streams2_43"
# compared like with like: prompts alone with prompts alone, 8 at once with 8 at once
PROMPTS = ["--prompts", "2100,4100,8200,20001", "--batches", "8", "--graph-bs", "1", "8"]
SHAPES = (*prompt_times.SHAPES, "32x1024")
MOST = 1.0  # of the whole's time to the first token of 8,192 and more: reckoned 0.97 by NVLink, 0.98 through the host
MOST_OF_STOCK = dict.fromkeys(("1x32000", "8x1024", "32x1024"), 0.8)  # slower of each, over NVLink
# prompts alone, twice, and 8 at once; two rounds of 1, 4 and 1 passes. Reports are written at powers of two
PASSES = {DEALT: 8, **{name: 4 for name, (how, _) in TIMED.items() if how == "dealt"}}
IMPLEMENTATIONS = {
    DEALT: "ours, two cards, streams dealt",
    KEPT: "ours, two cards, streams kept whole",
    AGAIN: "ours, two cards, streams kept whole, another process",
    **{name: f"ours, two cards, {prompt_times.PEERS[peers]}, {WORDS[how]}" for name, (how, peers) in TIMED.items()},
    STOCK: f"SGLang stock (Hopper kernels), two cards, {prompt_times.PEERS['']}",
}


def stages(make, timed, same, sets, ours, no_peers):
    """timed, same: options of the two kinds of engines, over two cards."""
    on, whole = {"DSV4_SM120_SET": f"{SETTING}=on"}, halves_stage.WHOLE_PASSES
    timed = [*timed, *sets(json_model_override_args='{"n_routed_experts": 16}'), "--mem", "0.97", "--rounds", "2"]
    timed += ["--phases", "prompts", "--shapes", *SHAPES, "--max-total-tokens", "100000"]
    same = [*same, *PROMPTS]
    return {
        "streams2_same": [
            make(DEALT, same, environment=ours | on),
            make(KEPT, same, environment=ours | whole),
            make(AGAIN, same, environment=ours | whole),
        ],
        "streams2_43": [
            *(
                make(
                    name,
                    timed,
                    environment=ours | (on if how == "dealt" else whole) | (no_peers if peers else {}),
                    takes_turns=True,
                )
                for name, (how, peers) in TIMED.items()
            ),
            make(STOCK, timed, patched=False, takes_turns=True),
        ],
    }


def rows(cases, row):
    """collect.py's rows of the cases of a stage. row: its maker of rows."""
    ours = [name for name in cases if name in IMPLEMENTATIONS and name != STOCK]
    found = [
        prompt_times.counted(
            *(name, cases[name]["reports"], SETTING, "passes", "passes dealt"),
            *(IMPLEMENTATIONS[name], PASSES.get(name), row),
        )
        for name in ours
    ]
    stock = cases.get(STOCK, {}).get("prompts", {})
    for name, (how, peers) in (TIMED | {STOCK: ("stock", "")}).items():
        times, impl = cases.get(name, {}).get("prompts", {}), IMPLEMENTATIONS[name]
        kept = cases.get(f"kept_streams2_43{peers}", {}).get("prompts", {})
        for at in SHAPES if name in cases else ():
            what = prompt_times.case_of(at)
            found += prompt_times.times_of(times.get(at, {}), what, impl, row)
            if how == "kept" and not peers and at in MOST_OF_STOCK:
                share = prompt_times.share_of(times, stock, at, "first_token_ms_worst")
                metric = "time to all first tokens, slower of each, of stock's"
                found.append(row(what, impl, metric, share, MOST_OF_STOCK[at], ISSUE))
            if how == "dealt":
                share = prompt_times.share_of(times, kept, at)
                bar = MOST if at.startswith("1x") else None
                found.append(row(what, impl, "time to all first tokens, of the whole's", share, bar, ISSUE))
    return found
