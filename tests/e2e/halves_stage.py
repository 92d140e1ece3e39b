"""The stages `halves2_same`, `halves4_same` (four cards), `halves2_combined` and `halves2_43` of run_stage.py: prompts
over cards in halves that take turns, as chunks of a half, and whole; launched one by one, and in SGLang's prefill
graphs. To the last bit, at six layers; where every sum has one order behind the prefix cache, of many prompts in a
pass, and the text with EAGLE, too; and the time to the first token through host memory, in passes of 8,192 rows and of
32,000, for which the host's launches are no more."""

import prompt_times
import prompts_stage

ISSUE = 22
SETTING = "prompts_in_halves"
HALVED, CHUNKED = "same_halves2", "same_chunks_of_a_half2"
HALVED_GRAPHS, CHUNKED_GRAPHS = "same_halves_graphs2", "same_chunks_graphs_of_a_half2"
# over four cards, where NCCL's order of terms may hang on the bytes: halves and chunks of one sum the same
HALVED4, CHUNKED4 = "same_halves4", "same_chunks_of_a_half4"
HALVED_GRAPHS4, CHUNKED_GRAPHS4 = "same_halves_graphs4", "same_chunks_graphs_of_a_half4"
FOUR = (HALVED4, CHUNKED4, HALVED_GRAPHS4, CHUNKED_GRAPHS4)
WHOLE, AGAIN = "same_unhalved2", "same_unhalved_again2"
VARIABLE = "DSV4_SM120_SET"
HALVED_PASSES = {VARIABLE: f"{SETTING}=1024"}  # all of twice as many rows, without a trial
WHOLE_PASSES = {VARIABLE: f"{SETTING}=off"}  # by default passes are tried out
# NCCL adds two terms. A half's products have the rows of a chunk of as many, so every bit is the chunk's; those of the
# whole may be by another kernel of cuBLAS or DeepGEMM, and have its bits where they are not
ROWS = 8192  # of a pass: sums of fewer than half of them may be SGLang's own
PROMPTS = ["--batches", "8", "--graph-bs", "1", "8", "--prompts", ",".join(str(count * ROWS) for count in (1, 2, 3))]
PADDED = 15001  # in graphs alone, whose middle stays where it is
# of which prompts at once are not compared
ALONE = ((HALVED, CHUNKED), (HALVED_GRAPHS, CHUNKED_GRAPHS), (HALVED4, CHUNKED4), (HALVED_GRAPHS4, CHUNKED_GRAPHS4))
SAMES = [
    ("two cards, prompts in halves against chunks of a half", HALVED, CHUNKED),
    ("two cards, the same in prefill graphs", HALVED_GRAPHS, CHUNKED_GRAPHS),
    ("four cards, prompts in halves against chunks of a half", HALVED4, CHUNKED4),
    ("four cards, the same in prefill graphs", HALVED_GRAPHS4, CHUNKED_GRAPHS4),
    ("two cards, prompts in halves against whole ones", HALVED, WHOLE),
    ("two cards, prompts in halves, once more", HALVED, HALVED),
    ("two cards, prompts in halves in prefill graphs, once more", HALVED_GRAPHS, HALVED_GRAPHS),
    ("yardstick: two cards, whole prompts, two processes", AGAIN, WHOLE),
]
# With one order of sums any cut has the bits of the whole: behind a prefix, with rows of many prompts, with drafts
COMBINED = {  # name -> what it is
    (TOGETHER := "same_halves_together2"): "prompts in halves, prefix cache",
    (TOGETHER_GRAPHS := "same_halves_together_graphs2"): "prompts in halves, prefill graphs, prefix cache",
    (TOGETHER_WHOLE := "same_unhalved_together2"): "prompts whole, prefix cache",
    (EAGLE := "text_halves2_eagle314"): "prompts in halves, EAGLE 3/1/4",
    (EAGLE_GRAPHS := "text_halves_graphs2_eagle314"): "prompts in halves, prefill graphs, EAGLE 3/1/4",
    (PLAIN := "text_unhalved2_plain"): "prompts whole, without speculation",
}
COMBINED_PROMPTS = "5,130,2100,8200,12000,20001"
SAMES += [
    ("two cards, prompts in halves, prefix cache and batches, against whole ones", TOGETHER, TOGETHER_WHOLE),
    ("two cards, prompts in halves in prefill graphs, prefix cache and batches", TOGETHER_GRAPHS, TOGETHER_WHOLE),
    ("two cards, whole prompts, in batches, behind their first half, and once more", TOGETHER_WHOLE, TOGETHER_WHOLE),
]
TEXTS = [
    ("EAGLE, 3 drafts, two cards, prompts in halves", EAGLE, PLAIN),
    ("EAGLE, 3 drafts, two cards, prompts in halves in prefill graphs", EAGLE_GRAPHS, PLAIN),
]
WORDS = {"halves": "prompts in halves", "unhalved": "prompts whole"}
GRAPHS = "_graphs"
CHUNKS = {"": "chunks of 8,192", GRAPHS: "chunks of 8,192 in prefill graphs", "_32k": "chunks of 32,768"}
TRIED = "tried2_43"  # a server that finds out by itself, in passes that its host is slow for
TIMED = {f"{how}2_43{chunk}": (how, chunk) for chunk in CHUNKS for how in WORDS}
SHAPES = {"": prompt_times.SHAPES, GRAPHS: prompt_times.SHAPES, "_32k": ("1x32000",)}
MOST_SEEN = 0.3  # of the sums' time, in passes of 8,192 rows and more: what is not hidden
# prompts alone, twice and by their first half; two rounds. Reports are written at powers of two
PASSES = {HALVED: 8, HALVED_GRAPHS: 8, TRIED: 4, **{name: 2 for name, (how, _) in TIMED.items() if how == "halves"}}
PASSES |= {HALVED4: 8, HALVED_GRAPHS4: 8}
PASSES |= {name: 8 if name in (TOGETHER, TOGETHER_GRAPHS) else 4 for name in COMBINED if "unhalved" not in name}
IMPLEMENTATIONS = {
    HALVED: "ours, two cards, prompts in halves",
    CHUNKED: "ours, two cards, chunks of a half",
    HALVED_GRAPHS: "ours, two cards, prompts in halves, prefill graphs",
    CHUNKED_GRAPHS: "ours, two cards, chunks of a half, prefill graphs",
    HALVED4: "ours, four cards, prompts in halves",
    CHUNKED4: "ours, four cards, chunks of a half",
    HALVED_GRAPHS4: "ours, four cards, prompts in halves, prefill graphs",
    CHUNKED_GRAPHS4: "ours, four cards, chunks of a half, prefill graphs",
    WHOLE: "ours, two cards, prompts whole",
    AGAIN: "ours, two cards, prompts whole, another process",
    TRIED: f"ours, two cards, {prompt_times.PEERS['_no_peers']}, {CHUNKS['']}, as the server finds",
    **{name: f"ours, reproducible, two cards, {how}" for name, how in COMBINED.items()},
    **{
        name: f"ours, two cards, {prompt_times.PEERS['_no_peers']}, {CHUNKS[chunk]}, {WORDS[how]}"
        for name, (how, chunk) in TIMED.items()
    },
}


def stages(make, timed, same, same4, sets, ours, no_peers):
    """timed, same: options of the two kinds of engines, over two cards; same4: over four."""
    tried = {VARIABLE: f"{SETTING}=on"}
    each, never = HALVED_PASSES, WHOLE_PASSES
    few_experts = sets(json_model_override_args='{"n_routed_experts": 16}')
    timed = [*timed, *few_experts, "--mem", "0.9", "--rounds", "2", "--phases", "prompts"]
    timed += ["--max-total-tokens", "100000"]
    same, same4 = ([*one, *PROMPTS, "--max-total-tokens", "400000", "--chunk"] for one in (same, same4))  # windows
    summed = ours | no_peers
    options = {chunk: [*timed, "--shapes", *SHAPES[chunk]] for chunk in CHUNKS}
    options["_32k"] += sets(chunked_prefill_size=32768)
    options[GRAPHS] += captured(sets, ROWS)

    def in_graphs(rows, same=same):
        return [*same, str(rows), "--prompts", f"{PROMPTS[-1]},{PADDED}", *captured(sets, rows)]

    return {
        "halves2_same": [
            make(HALVED, [*same, str(ROWS)], environment=summed | each),
            make(CHUNKED, [*same, str(ROWS // 2)], environment=summed | never),
            make(HALVED_GRAPHS, in_graphs(ROWS), environment=summed | each),
            make(CHUNKED_GRAPHS, in_graphs(ROWS // 2), environment=summed | never),
            make(WHOLE, [*same, str(ROWS)], environment=summed | never),
            make(AGAIN, [*same, str(ROWS)], environment=summed | never),
        ],
        "halves4_same": [
            make(HALVED4, [*same4, str(ROWS)], environment=summed | each, takes_turns=True),
            make(CHUNKED4, [*same4, str(ROWS // 2)], environment=summed | never, takes_turns=True),
            make(HALVED_GRAPHS4, in_graphs(ROWS, same4), environment=summed | each, takes_turns=True),
            make(CHUNKED_GRAPHS4, in_graphs(ROWS // 2, same4), environment=summed | never, takes_turns=True),
        ],
        "halves2_43": [
            make(
                name,
                options[chunk],
                environment=ours | no_peers | (each if how == "halves" else never),
                takes_turns=True,
            )
            for name, (how, chunk) in TIMED.items()
        ]
        + [make(TRIED, options[""], environment=ours | no_peers | tried, takes_turns=True)],
    }


def combined(make, same, text, sets, eagle, environment, one_order):
    """The engines of `halves2_combined`, in turn, as all that is asked of several cards. same, text: options of the two
    kinds of engines; eagle: EAGLE's; one_order: the setting."""
    cases, graphs = [], captured(sets, ROWS)
    for name in COMBINED:
        options = [*same, "--radix"] if name.startswith("same") else [*text, *(() if name == PLAIN else eagle)]
        options = [*options, "--prompts", COMBINED_PROMPTS, "--chunk", str(ROWS), "--max-total-tokens", "400000"]
        how = (WHOLE_PASSES if "unhalved" in name else HALVED_PASSES)[VARIABLE]
        options += graphs if GRAPHS in name else []
        cases.append(make(name, options, environment=environment | {VARIABLE: f"{one_order},{how}"}, takes_turns=True))
    return cases


def captured(sets, rows):
    return sets(**{prompts_stage.FLAG: "breakable", "cuda_graph_bs_prefill": [rows]})


def rows(cases, row):
    """collect.py's rows of the cases of a stage. row: its maker of rows."""
    found = []
    for name in (name for name in cases if name in IMPLEMENTATIONS):
        impl, reports = IMPLEMENTATIONS[name], cases[name]["reports"]
        least = PASSES.get(name)
        cards = 4 if name in FOUR else 2
        found.append(
            prompt_times.counted(name, reports, SETTING, "passes", "passes in halves", impl, least, row, cards)
        )
        if "graphs" in name:
            by_graphs = cases[name]["prefills"].get("true", 0)
            found.append(row(name, impl, "passes by prefill graphs, missing to 4", max(0, 4 - by_graphs), 0, ISSUE))
    found += found_out(cases, row) if TRIED in cases else []
    for name, (how, chunk) in TIMED.items():
        times, impl = cases.get(name, {}).get("prompts", {}), IMPLEMENTATIONS[name]
        whole = cases.get(f"unhalved2_43{chunk}", {}).get("prompts", {})
        for at in SHAPES[chunk] if name in cases else ():
            what = prompt_times.case_of(at)
            found += prompt_times.times_of(times.get(at, {}), what, impl, row)
            if how == "halves":
                share = prompt_times.share_of(times, whole, at)
                found.append(row(what, impl, "time to all first tokens, of the whole's", share, None, ISSUE))
            if how == "halves" and at == SHAPES[chunk][0]:  # whose sums were traced
                metric = "the sums' time that is not hidden, share of the whole's sums"
                found.append(row(what, impl, metric, not_hidden(times, whole, at), MOST_SEEN, ISSUE))
    return found


def found_out(cases, row):
    """What the server found, which two cards have alike, and what its prompts took of the whole's."""
    impl, reports = IMPLEMENTATIONS[TRIED], cases[TRIED]["reports"]
    ways = [report["found"][SETTING]["found"] for report in reports if SETTING in report["found"]]
    is_alike = len(ways) == 2 and ways[0] == ways[1] and len(ways[0]) > 0
    found = [row(TRIED, impl, "cards that found nothing or something else", 0 if is_alike else 1, 0, ISSUE)]
    for rows_, way in ways[0].items() if is_alike else ():
        found.append(row(f"{TRIED}, passes of {int(rows_):,} rows and more", impl, way, None, None, ISSUE))
    times, whole = (cases.get(name, {}).get("prompts", {}) for name in (TRIED, "unhalved2_43"))
    for at in SHAPES[""]:
        share = prompt_times.share_of(times, whole, at)
        found.append(
            row(prompt_times.case_of(at), impl, "time to all first tokens, of the whole's", share, None, ISSUE)
        )
    return found


def not_hidden(times, whole, at):
    """Of the sums' time in whole passes the share that halves still take; None where a time was not reached."""
    if at not in times or "sums_ms" not in whole.get(at, {}):
        return None
    saved = whole[at]["first_token_ms"] - times[at]["first_token_ms"]
    return 1 - saved / whole[at]["sums_ms"]
