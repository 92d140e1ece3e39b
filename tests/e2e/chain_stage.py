"""The stages `chain43`, `chain2_43` (two cards) and `chain4_43` (four, all experts) of run_stage.py: a step of one to
64 streams, and of stock's in the same run; over four cards prompts, too, by NVLink and through host memory. And of
EAGLE's with all experts: `speculation4_43`, a step over four cards beside plain decode of as many rows, and
`speculation2_43`, over two cards beside stock's."""

import halves_stage
import prompt_times
import streams_stage

ISSUE, SPECULATION_ISSUE = 24, 21
OURS, STOCK = "ops43_chain", "stock43_chain"
DEEP, DEEP_TOKENS, MOST_OF_1K = "deep43_chain", 131_072, 1.08  # behind 128K of context, of the time behind 1K
OURS2, STOCK2 = "ops43_chain2", "stock43_chain2"  # two cards, with the sums that each has there
# four cards, which have room for one engine of all experts
OURS4, STOCK4, HOST4 = "ops43_chain_tp4", "stock43_chain_tp4", "host43_chain_tp4"
GRAPHS4, HOST_GRAPHS4 = "graphs43_chain_tp4", "host_graphs43_chain_tp4"
HOST_HALVES4 = "host_halves43_chain_tp4"  # its chunks in halves
BY_HOST = (HOST4, HOST_GRAPHS4, HOST_HALVES4)
ROWS4, EAGLE4 = "rows43_chain_tp4", "eagle43_chain_tp4"
STOCK_EAGLE2, EAGLE2 = "stock43_eagle_chain_tp2", "eagle43_chain_tp2"
DRAFTED = {"1": "4", "8": "32"}  # streams of EAGLE 3/1/4: rows that it verifies, of plain decode
DRAFTED2 = (*DRAFTED, "32")  # the last verifies 128 rows; with 64 of 256 experts one would have four times its rows
STREAMS, STOCKS_STREAMS = ("1", "8", "32", "64"), ("1", "8")
IMPLEMENTATIONS = {
    **{STOCK: "SGLang stock (Hopper kernels), beside ours", OURS: "ours, every operator on, beside stock"},
    DEEP: "ours, every operator on, beside stock, long context",
    STOCK2: "SGLang stock (Hopper kernels, its own sums), two cards, beside ours",
    OURS2: "ours, every operator on, two cards, beside stock",
    STOCK4: "SGLang stock (Hopper kernels, its own sums), four cards, before or behind ours",
    OURS4: "ours, every operator on, four cards",
    GRAPHS4: "ours, every operator on, four cards, prefill graphs",
    HOST4: "ours, every operator on, four cards, NCCL through host memory",
    HOST_GRAPHS4: "ours, every operator on, four cards, NCCL through host memory, prefill graphs",
    HOST_HALVES4: "ours, every operator on, four cards, NCCL through host memory, prefill graphs in halves",
    ROWS4: "ours, every operator on, four cards, plain decode of as many rows",
    EAGLE4: "ours, every operator on, four cards, EAGLE 3/1/4, drafts with the head in INT4",
    STOCK_EAGLE2: "SGLang stock (Hopper kernels, its own sums), two cards, EAGLE 3/1/4",
    EAGLE2: "ours, every operator on, two cards, EAGLE 3/1/4",
}
OF_SPECULATION = (ROWS4, EAGLE4, STOCK_EAGLE2, EAGLE2)
ISSUES = dict.fromkeys(IMPLEMENTATIONS, ISSUE) | dict.fromkeys(OF_SPECULATION, SPECULATION_ISSUE)
MOST_BEYOND_MS = 0.5  # a step of EAGLE's beyond plain decode
# A step by the difference of two runs, and within one: the former has what two prefills differ by, at four cards and 32
# streams 300 ms of 64 steps
WORST = "decode step within a run, ms, worst"
BARS = {  # ms; at 32 streams 0.85 of the 17.90 of the day that it was asked
    (name, streams): {WORST: bar}
    for name, steps in (
        (OURS, {"1": 4.2, "8": 8.8, "32": 15.2}),
        (OURS2, {"1": 3.0}),
        (OURS4, {"1": 2.6, "8": 5.0, "32": 9.5, "64": 11.0}),
    )
    for streams, bar in steps.items()
}
OF_STOCK = {OURS: 0.6, OURS2: None, OURS4: None}  # the bar of ours
MOST_RUNNING = str(1 + max(map(int, STREAMS)))  # the streams that are timed, and the prompt that says when they begin
PROFILED = ("1", "8")  # of four cards: streams of which there is a trace
SHAPES = ("1x1024", *streams_stage.MOST_OF_STOCK)  # of prompts over four cards
HOSTS_SHAPE, HOSTS_MS = "8x1024", 420.0


def stages(make, timed, sums, ours, no_peers, graphs, drafts):
    """timed: options, the phase `bench` last; sums: (cards, *options) -> options of several; graphs: prefill's; drafts:
    EAGLE's options and environment."""
    timed = ["--max-running", MOST_RUNNING, *timed]
    of_four = ["--shapes", *SHAPES, "--profiled", *PROFILED, "--variant", "flash43", "--bs", *STREAMS, "--mem", "0.97"]
    four = sums(4, *timed, "prompts", *of_four)
    host = [*four, "--phases", "prompts", "--shapes", HOSTS_SHAPE]
    alone = sums(4, *timed, "--variant", "flash43", "--mem", "0.97")
    # a trace of 128 rows takes longer than the step's repetitions: of ours alone, as a call ends before stock has three
    drafted2 = ["--variant", "flash43", "--mem", "0.97", "--bs", *DRAFTED2]
    deep = ["--bs", "1", "--reps", "1", "--in-len", str(DEEP_TOKENS), "--context", str(DEEP_TOKENS + 4096)]
    speculating, drafts_environment = drafts
    return {
        "chain43": [
            make(STOCK, [*timed, "--bs", *STOCKS_STREAMS], patched=False, takes_turns=True),
            make(OURS, [*timed, "--bs", *STREAMS], environment=ours, takes_turns=True),
            make(DEEP, [*timed, *deep], environment=ours, takes_turns=True),
        ],
        "chain2_43": [
            make(STOCK2, sums(2, *timed, "--bs", *STOCKS_STREAMS), patched=False, takes_turns=True),
            make(OURS2, sums(2, *timed, "profile", "--bs", *STREAMS), environment=ours, takes_turns=True),
        ],
        "chain4_43": [
            make(OURS4, sums(4, *timed, "profile", "prompts", *of_four), environment=ours),
            make(STOCK4, four, patched=False),
            make(GRAPHS4, [*four, *graphs, "--phases", "prompts"], environment=ours),
            make(HOST4, host, environment=ours | no_peers),
            make(HOST_GRAPHS4, [*host, *graphs], environment=ours | no_peers),
            make(HOST_HALVES4, [*host, *graphs], environment=ours | no_peers | halves_stage.HALVED_PASSES),
        ],
        "speculation4_43": [
            make(ROWS4, [*alone, "--bs", *DRAFTED.values()], environment=ours),
            make(EAGLE4, [*alone, *speculating, "--bs", *DRAFTED], environment=ours | drafts_environment),
        ],
        "speculation2_43": [
            make(EAGLE2, sums(2, *timed, "profile", *drafted2, *speculating), environment=ours),
            make(STOCK_EAGLE2, sums(2, *timed, *drafted2, *speculating), patched=False),
        ],
    }


def rows(cases, row):
    """collect.py's rows of the cases of a stage: the slower steps of ours in stock's, and prompts over four cards. row:
    its maker of rows."""
    found = []
    for name, stocks in ((OURS, STOCK), (OURS2, STOCK2), (OURS4, STOCK4)):
        for streams in STOCKS_STREAMS if name in cases else ():
            ours, stock = (_worst(cases, case, streams) for case in (name, stocks))
            value = ours / stock if ours and stock else None  # a bar without what it is of is missed
            case = f"{'flash43' if name == OURS4 else 'flash43e64'}, batch {streams}, 1K context"
            metric = "decode step within a run, worst, of stock's worst"
            found.append(row(case, IMPLEMENTATIONS[name], metric, value, OF_STOCK[name], ISSUE))
    if DEEP in cases:
        deep, short = (_worst(cases, case, "1") for case in (DEEP, OURS))
        metric, value = "decode step within a run, worst, of that behind 1K", deep / short if deep and short else None
        case = f"flash43e64, batch 1, {DEEP_TOKENS >> 10}K context"
        found.append(row(case, IMPLEMENTATIONS[DEEP], metric, value, MOST_OF_1K, ISSUE))
    for streams, rows_of_it in DRAFTED.items() if EAGLE4 in cases else ():
        eagle, plain = _worst(cases, EAGLE4, streams), _worst(cases, ROWS4, rows_of_it)
        value = eagle - plain if eagle and plain else None
        case = f"flash43, {streams} of EAGLE's streams, {rows_of_it} rows, 1K context"
        metric = "step within a run, worst, beyond plain decode's, ms"
        found.append(row(case, IMPLEMENTATIONS[EAGLE4], metric, value, MOST_BEYOND_MS, SPECULATION_ISSUE))
    for name in (OURS4, STOCK4, GRAPHS4, *BY_HOST):
        found += _prompts(name, cases, row) if name in cases else []
    return found


def _worst(cases, case, batch):
    """Milliseconds of the slower step within a run; None where it was not reached."""
    return cases.get(case, {}).get("rows", {}).get(batch, {}).get("within_ms_worst")


def _prompts(name, cases, row):
    """Times to the first token, by which another issue asks."""
    impl, issue = IMPLEMENTATIONS[name], streams_stage.ISSUE
    times, stock = (cases.get(case, {}).get("prompts", {}) for case in (name, STOCK4))
    worst, found = "first_token_ms_worst", []
    is_by_host = name in BY_HOST
    for at in (HOSTS_SHAPE,) if is_by_host else SHAPES:
        what, seen = f"flash43, {prompt_times.prompts_of(at)}", times.get(at, {})
        bar = HOSTS_MS if is_by_host else None
        for metric, key in prompt_times.METRICS.items():
            if key in seen or (bar and key == worst):
                found.append(row(what, impl, metric, seen.get(key), bar if key == worst else None, issue))
        if name in (OURS4, GRAPHS4):
            share = prompt_times.share_of(times, stock, at, worst)
            metric = "time to all first tokens, slower of each, of stock's"
            bar = streams_stage.MOST_OF_STOCK.get(at)
            found += [row(what, impl, metric, share, bar, issue)] if share or bar else []
    return found
