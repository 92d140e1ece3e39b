"""The stages `prompts` of run_stage.py: prompts of few tokens, whose passes are bound by launches and the host, without
and with SGLang's prefill graphs (--cuda-graph-backend-prefill breakable: a pass in graphs that end at each attention);
and many prompts at once, pass by pass: what the cards do in each, and how long they wait."""

import collections
import re

import returns_stage

PROMPTS = ((1, 128), (1, 512), (1, 1024), (8, 1024), (32, 1024))  # at once, tokens of each
TRACED = ((1, 1024), (32, 1024), (1, 8192))
# kernels of NCCL's, a sum in two where streams are dealt; their time is the wait for the other cards, too
SUMS = re.compile(r"nccl\w*(AllReduce|ReduceScatter|AllGather)")
REPEATS = 3
KERNELS, KERNEL_NAME = 24, 120  # of a pass that are told, those that took most; characters of a name
CHUNK = 8192  # rows of a pass at most
ISSUE = 22
FIRST_TOKEN_BARS = {(f"{kind}43_prompts", "1x1024"): 100.0 for kind in ("graphs", "planned")}  # ms
WITH_EAGLE = "with EAGLE 3/1/4"
# rows that are captured: by SGLang's own arguments what is timed, by our setting what is compared
TIMED_ROWS = [128, 256, 512, 1024, CHUNK]
# a prompt alone on a server whose prompts make room for streams: as it is, with the turns that SGLang keeps free for
# nobody, and without that argument (not in 0.5.17)
INTERVAL_ARGUMENT, INTERVAL, INTERVAL_SHAPES = "prefill_decode_interval", 8, ("1x8192", "1x32000")
INTERVALS = {
    "interval43_prompts": (f"{INTERVAL_ARGUMENT} {INTERVAL}", INTERVAL, {}),
    "turns43_prompts": (
        f"{INTERVAL_ARGUMENT} {INTERVAL}, prompts_alone off",
        *(INTERVAL, {"DSV4_SM120_SET": "prompts_alone=off"}),
    ),
    "no_interval43_prompts": (f"no {INTERVAL_ARGUMENT}", 0, {}),
}
CARDS_SHAPES = ("1x1024", "1x8192", "1x32000", "8x1024", "32x1024")
IN_STAGES = "_stages"  # the same with --pp-size 2
FLAG, SETTING, PLANNED = "cuda_graph_backend_prefill", "prefill_graphs=2048", "prefill_graphs=on"
SAMES = [
    ("prefill graphs against none", "same_graphs", "same_no_graphs"),
    ("prefill graphs, in batches, behind its first half, and once more", "same_graphs", "same_graphs"),
    ("prefill graphs of chunks behind longer and longer prefixes against none", "same_chunks_graphs", "same_no_graphs"),
    ("two cards, prefill graphs against none", "same_tp2_graphs", "same_tp2_no_graphs"),
]
IMPLEMENTATIONS = {
    **{
        f"{kind}43_prompts{suffix}": f"{name}{cards}"
        for suffix, cards in (("", ""), ("_tp2", ", two cards"))
        for kind, name in (
            ("stock", "SGLang stock (Hopper kernels)"),
            ("ops", "ours, every operator on"),
            ("graphs", "ours, every operator on, prefill graphs"),
            ("planned", "ours, every operator on, prefill graphs as planned"),
        )
    },
    **{
        f"{name}_cards2": f"ours, every operator on, {words}, no peers"
        for name, words in (
            ("tensors43", "two cards"),
            ("layers43", "pp_size 2, own_outputs off"),
            ("layers43_own", "pp_size 2"),
            ("layers43_4096", "pp_size 2, chunks of 4,096"),
        )
    },
    "ops43_prompts_eagle": f"ours, every operator on, {WITH_EAGLE}",
    "planned43_prompts_eagle": f"ours, every operator on, {WITH_EAGLE}, prefill graphs as planned",
    **{
        f"{name}{suffix}": f"ours, every operator on, {words}{cards}"
        for suffix, cards in (("", ""), (IN_STAGES, ", pp_size 2"))
        for name, (words, *_) in INTERVALS.items()
    },
    **{
        f"same_{cards}{kind}": f"ours, reproducible, {words}{on}"
        for cards, on in (("", ""), ("tp2_", ", two cards"))
        for kind, words in (
            ("no_graphs", "no prefill graphs"),
            ("graphs", "prefill graphs"),
            ("chunks_graphs", "prefill graphs, chunks of 2,048"),
        )
    },
    **returns_stage.IMPLEMENTATIONS,
}


def graph_options(sets):
    return sets(**{FLAG: "breakable", "cuda_graph_bs_prefill": TIMED_ROWS})


def stages(make, timed, same, sets, sums, eagle, ours, reproducible, no_peers):
    """timed, same: options of the two kinds of engines; sums(cards, *options): of several cards; eagle: EAGLE's;
    no_peers: the environment of cards that do not see each other's memory, of NCCL and of our sums."""

    graphs = graph_options(sets)
    (variable,) = reproducible

    def in_turn(suffix, options):
        kinds = (("stock", [], False, {}), ("ops", [], True, ours), ("graphs", graphs, True, ours))
        return [
            make(f"{kind}43_prompts{suffix}", options + more, patched=patched, environment=variables, takes_turns=True)
            for kind, more, patched, variables in kinds
        ]

    as_planned = ours | {variable: PLANNED}

    def planned(suffix, options, takes_turns=False):
        return [make(f"planned43_prompts{suffix}", options, environment=as_planned, takes_turns=takes_turns)]

    def in_intervals(suffix, more):
        options = [*timed, "--shapes", *INTERVAL_SHAPES, *more]
        return [
            make(
                f"{name}{suffix}",
                options + sets(**{INTERVAL_ARGUMENT: interval}),
                environment=ours | setting,
                takes_turns=True,
            )
            for name, (_, interval, setting) in INTERVALS.items()
        ]

    captured = ours | {variable: f"{reproducible[variable]},{SETTING}"}

    def pair(cards, options):
        return [
            make(f"same_{cards}no_graphs", options, environment=ours | reproducible),
            make(f"same_{cards}graphs", options, environment=captured),
        ]

    # a graph is captured without a prefix: what it kept of that would choose other entries behind 8,192 tokens
    in_chunks = make("same_chunks_graphs", [*same, "--chunk", "2048"], environment=captured)

    # of 32 experts, so that three engines fit a card; a prompt's products are as large as with 64
    returning = returns_stage.stages(make, timed, sets, ours, as_planned)
    timed = [*timed, *sets(json_model_override_args='{"n_routed_experts": 32}'), "--mem", "0.97"]
    timed += ["--phases", "prompts", "--max-total-tokens", "100000"]
    step = ["--phases", "prompts", "bench"]
    return {
        "prompts": in_turn("", timed),
        "prompts2": in_turn("_tp2", sums(2, *timed)),
        # the rows that `plan` has captured: alone on the cards, since what the graphs hold is by their free memory
        "prompts_planned": planned("", timed),
        "prompts_planned2": planned("_tp2", sums(2, *timed)),
        # beside drafts, which are in no graph then: a prompt's time, and that a step takes what it takes
        "prompts_eagle": [
            make("ops43_prompts_eagle", [*timed, *step, *eagle], environment=ours, takes_turns=True),
            *planned("_eagle", [*timed, *step, *eagle], takes_turns=True),
        ],
        "prompts_interval": in_intervals("", []),
        "prompts_interval_stages": in_intervals(IN_STAGES, sets(pp_size=2)),
        # two cards without peers, by their tensors and by their layers: a prompt's time, and a step's
        "cards2_43": [
            make(
                f"{name}_cards2",
                [*options, "--shapes", *CARDS_SHAPES, *step, "--bs", "1", "8", "32", *more],
                environment=ours | no_peers | setting,
                takes_turns=True,
            )
            for name, options, more, setting in (
                ("tensors43", sums(2, *timed), [], {}),
                ("layers43", timed + sets(pp_size=2), [], {variable: "own_outputs=off"}),
                ("layers43_own", timed + sets(pp_size=2), [], {}),
                ("layers43_4096", timed + sets(pp_size=2), ["--chunk", "4096"], {}),
            )
        ],
        "prompts_same": [*pair("", same), in_chunks],
        "prompts_same2": pair("tp2_", sums(2, *same)),
        **returning,
    }


# ---- in the engine


def passes_of(answers, length):
    """Milliseconds of each pass, where the answers say how long they took: one token each, so a request ends with its
    pass. All come as one message and wait for nobody: equal passes of as many as CHUNK rows hold."""
    latencies = sorted(answer["meta_info"].get("e2e_latency") or 0.0 for answer in answers)
    if not latencies[0]:
        return []
    each = max(1, CHUNK // length)
    ends = [1e3 * latencies[min(i + each, len(latencies)) - 1] for i in range(0, len(latencies), each)]
    return [end - before for before, end in zip([0.0, *ends], ends, strict=False)]


def of_passes(events, passes):
    """What the card did in each pass, by a trace of kernels: milliseconds from its first to the next one's, those in
    which no kernel ran, launches, and where most of the time went. A pass begins with the kernel that runs most often,
    as often in each."""
    kernels = sorted((e["ts"], e["dur"], e["name"]) for e in events if e.get("cat") == "kernel" and "dur" in e)
    if not kernels:
        raise RuntimeError("prompts: the trace has no kernels")
    counts = collections.Counter(name for _, _, name in kernels)
    even = [(count, name) for name, count in counts.items() if count % passes == 0]
    if not even:
        raise RuntimeError(f"prompts: no kernel runs equally often in {passes} passes: {counts.most_common(5)}")
    most, marker = max(even)
    begins = [ts for ts, _, name in kernels if name == marker][:: most // passes]
    begins[0] = kernels[0][0]
    ends = [*begins[1:], max(ts + us for ts, us, _ in kernels)]
    found = []
    for begin, end in zip(begins, ends, strict=True):
        busy, until, each = 0.0, begin, collections.defaultdict(lambda: [0, 0.0])
        for ts, us, name in kernels:
            if begin <= ts < end:
                each[name][0] += 1
                each[name][1] += us
                busy += max(0.0, min(ts + us, end) - max(ts, until))
                until = max(until, ts + us)
        launches = sum(count for count, _ in each.values())
        told = {"ms": (end - begin) / 1e3, "idle_ms": (end - begin - busy) / 1e3, "launches": launches}
        table = sorted(([name[:KERNEL_NAME], *times] for name, times in each.items()), key=lambda one: -one[2])
        found.append(told | {"kernels": table[:KERNELS]})
    return found


def measure(case, shapes=None, earlier=None):
    """Of a Case of engine_case.py: time to the first tokens of each of `shapes` (PROMPTS), and what the card did in
    TRACED; of a single shape its sums. earlier: what the rounds before found."""
    rows = {}
    for count, length in PROMPTS if shapes is None else [tuple(map(int, shape.split("x"))) for shape in shapes]:
        before = (earlier or {}).get(f"{count}x{length}")
        if before is None:
            case.first_tokens(count, length, 1)  # whatever is compiled for a new shape
        asked = [case.first_tokens(count, length, 100 + 40 * i) for i in range(REPEATS)]
        seconds, answers = min(asked, key=lambda one: one[0])
        row = {
            "first_token_ms": 1e3 * seconds,
            "first_token_ms_worst": 1e3 * max(one[0] for one in asked),
            "passes_ms": passes_of(answers, length),
        }
        if before is not None:
            worst = max(row["first_token_ms_worst"], before["first_token_ms_worst"])
            best = min(before, row, key=lambda one: one["first_token_ms"])
            row = before | {name: best[name] for name in row} | {"first_token_ms_worst": worst}
        elif (count, length) in TRACED or len(shapes or ()) == 1:
            events = case.events(count, 0, length)
            if (count, length) in TRACED:
                row["card"] = of_passes(events, -(-count * length // CHUNK))
            sums = [e["dur"] for e in events if e.get("cat") == "kernel" and SUMS.match(e["name"])]
            row |= {"sums_ms": sum(sums) / 1e3} if sums else {}
        rows[f"{count}x{length}"] = row
        print(f"[{case.options.name}] {count} x {length}: {1e3 * seconds:.1f} ms {row['passes_ms']}", flush=True)
    return rows


# ---- around it


def prefills(log):
    """{ran in a graph: passes} by what SGLang's scheduler logs."""
    found = re.findall(r"Prefill batch.*cuda graph: (True|False)", "\n".join(log))
    return {str(ran).lower(): found.count(str(ran)) for ran in (True, False)}


def graphs_gib(log):
    """What the prefill graphs hold by SGLang's own count of free memory, of the card that has most; None without."""
    found = re.findall(r"Capture target prefill CUDA graph end.*mem usage=([0-9.]+) GB", "\n".join(log))
    return max(map(float, found), default=None)


def rows_of(row, name, case):
    """collect.py's rows of a case. row: its maker of rows."""
    if name in returns_stage.IMPLEMENTATIONS:
        return returns_stage.rows_of(row, name, case)
    impl, rows = IMPLEMENTATIONS[name], []

    def add(at, metric, value, bar=None):
        rows.append(row(f"43 layers, 32 experts, prompts at once x tokens: {at}", impl, metric, value, bar, ISSUE))

    for at, seen in case.get("prompts", {}).items():
        add(at, "time to all first tokens, ms, best", seen["first_token_ms"], FIRST_TOKEN_BARS.get((name, at)))
        add(at, "time to all first tokens, ms, worst", seen["first_token_ms_worst"])
        for number, ms in enumerate(seen["passes_ms"], 1):
            add(at, f"pass {number}, ms", ms)
        for number, card in enumerate(seen.get("card", []), 1):
            add(at, f"pass {number}, traced, ms", card["ms"])
            add(at, f"pass {number}, the card without a kernel, ms", card["idle_ms"])
            add(at, f"pass {number}, launches", card["launches"])
    if case.get("prefill_graphs_gib") is not None:
        rows.append(row(name, impl, "prefill graphs hold, GiB", case["prefill_graphs_gib"], issue=ISSUE))
    return rows


def graph_rows(row, name, impl, case):
    """Of any case that asks for prefill graphs: whether there was one. What agrees without them shows nothing."""
    if not any(asked in case["command"] for asked in (FLAG, SETTING, PLANNED)):
        return []
    ran = case.get("prefills", {}).get("true", 0)
    return [
        row(name, impl, "prefill passes in graphs", ran, issue=ISSUE),
        row(name, impl, "engines without a prefill pass in graphs", int(not ran), 0, ISSUE),
    ]
