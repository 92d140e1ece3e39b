"""The stages `pieces2_same` and `pieces2_43` of run_stage.py: a prompt's sums over two cards in pieces of rows, the
experts' in parts of columns, and whole. To the last bit, at six layers; and the time to the first token, over NVLink
and through host memory. Prompts' experts are by the kernels of an SM120 (sm120_plugin), which alone make parts."""

import experts_stage

ISSUE = 22
SETTING = "sums_in_pieces"
WORDS = {"pieces": "sums in pieces", "pieces8": "sums in 8 pieces", "whole": "sums whole"}
EXPERTS = experts_stage.KERNELS["wide"]
CUT = {"products": "products in pieces", "experts": "products of experts in parts"}
PIECES, WHOLE, AGAIN = "same_pieces2", "same_whole2", "same_again2"
# NCCL adds two terms, so a sum's pieces have the whole's bits; so has wo_b's product, if no row's sum depends on the
# rows beside it: DeepGEMM's does not, as it was read. Nothing else is cut but the experts' columns. Compared like with
# like: prompts alone with prompts alone, 8 at once with 8 at once
SAMES = [
    ("two cards, sums in pieces against whole ones", PIECES, WHOLE),
    ("two cards, sums in pieces, once more", PIECES, PIECES),
    ("yardstick: two cards, sums whole, two processes", AGAIN, WHOLE),
]
PROMPTS = ["--prompts", "2100,4100,8200,20001", "--batches", "8", "--graph-bs", "1", "8"]
SHAPES = ("1x8192", "1x32000", "8x1024")  # prompts at once, tokens of each
PEERS = {"": "NCCL by NVLink", "_no_peers": "NCCL through host memory"}
TIMED = {
    **{f"{how}2_43{peers}": (how, peers) for peers in PEERS for how in ("pieces", "whole")},
    "pieces8_2_43_no_peers": ("pieces8", "_no_peers"),
}
# of the whole's time to the first token of 8,192 and more; 8 pieces are looked at
MOST = {("pieces", ""): 1.02, ("pieces", "_no_peers"): 0.97, ("pieces8", "_no_peers"): None}
METRICS = {
    "time to all first tokens, ms, best": "first_token_ms",
    "time to all first tokens, ms, worst": "first_token_ms_worst",
    "NCCL's sums on a card, ms": "sums_ms",
}
# each layer of a pass makes a product in pieces, and one of experts in parts; reports are written at powers of two
PRODUCTS = {PIECES: 64, **{name: 256 for name, (how, _) in TIMED.items() if how != "whole"}}
IMPLEMENTATIONS = {
    PIECES: f"ours, two cards, {EXPERTS}, sums in pieces",
    WHOLE: f"ours, two cards, {EXPERTS}, sums whole",
    AGAIN: f"ours, two cards, {EXPERTS}, sums whole, another process",
    **{name: f"ours, two cards, {EXPERTS}, {PEERS[peers]}, {WORDS[how]}" for name, (how, peers) in TIMED.items()},
}


def stages(make, timed, same, sets, ours, no_peers):
    """timed, same: options of the two kinds of engines, over two cards."""
    ours = ours | {experts_stage.VARIABLE: "wide"}
    on, eight = ({"DSV4_SM120_SET": f"{SETTING}={word}"} for word in ("on", "8"))
    choices = {"pieces": on, "pieces8": eight, "whole": {}}
    # of 16 experts, so that five engines fit
    timed = [*timed, *sets(json_model_override_args='{"n_routed_experts": 16}'), "--mem", "0.97", "--rounds", "2"]
    timed += ["--phases", "prompts", "--shapes", *SHAPES, "--max-total-tokens", "100000"]
    same = [*same, *PROMPTS]
    return {
        "pieces2_same": [
            make(PIECES, same, environment=ours | on),
            make(WHOLE, same, environment=ours),
            make(AGAIN, same, environment=ours),
        ],
        "pieces2_43": [
            make(
                name,
                timed,
                environment=ours | choices[how] | (no_peers if peers else {}),
                takes_turns=True,
            )
            for name, (how, peers) in TIMED.items()
        ],
    }


def rows(cases, row):
    """collect.py's rows of the cases of a stage. row: its maker of rows."""
    found = [
        counted(name, case["reports"], SETTING, what, CUT[what], IMPLEMENTATIONS[name], PRODUCTS.get(name), row)
        for name, case in cases.items()
        for what in (CUT if name in IMPLEMENTATIONS else ())
    ]
    for name in (name for name in cases if name in IMPLEMENTATIONS and name not in PRODUCTS):
        found += experts_stage.ran(name, IMPLEMENTATIONS[name], "wide", cases[name], row, ISSUE)
    for name, (how, peers) in TIMED.items():
        times, impl = cases.get(name, {}).get("prompts", {}), IMPLEMENTATIONS[name]
        whole = cases.get(f"whole2_43{peers}", {}).get("prompts", {})
        for at in SHAPES if name in cases else ():
            found += times_of(times.get(at, {}), case_of(at), impl, row)
            if how != "whole":
                share, bar = share_of(times, whole, at), MOST[how, peers]
                metric = "time to all first tokens, of the whole's"
                found.append(row(case_of(at), impl, metric, share, bar if at != "8x1024" else None, ISSUE))
    return found


def times_of(seen, case, impl, row):
    """Rows of what was measured of one of SHAPES."""
    return [row(case, impl, metric, seen[key], None, ISSUE) for metric, key in METRICS.items() if key in seen]


def counted(name, reports, setting, key, what, impl, least, row):
    """Each card's report counts `key` of a setting. what: is counted; least: of that on each of two cards; None: of an
    engine that was not asked for any."""
    told = [report["found"][setting].get(key, 0) for report in reports if setting in report["found"]]
    if least is None:
        return row(name, impl, f"{what} where none was asked for", sum(told), 0, ISSUE)
    found = min(told) if len(told) == 2 else 0
    return row(name, impl, f"{what} on each card, missing to {least}", max(0, least - found), 0, ISSUE)


def share_of(times, others, at, key="first_token_ms"):
    """Of one time in another; None where either was not reached: a bar without what it is of is missed."""
    return times[at][key] / others[at][key] if at in times and at in others else None


def case_of(at):
    return f"flash43, 16 experts, {prompts_of(at)}"


def prompts_of(at):
    """at: one of SHAPES, or of another stage's of the same form."""
    count, length = map(int, at.split("x"))
    return f"{'a prompt' if count == 1 else f'{count} prompts'} of {length:,} tokens"
