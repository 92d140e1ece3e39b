"""The stages `halves2` and `halves2_43` of run_stage.py: long prompts' chunks in halves beside whole ones, over two
cards by NCCL. To the last bit; and the time to the first token, over NVLink and through host memory."""

ISSUE = 22
SAME, WHOLE = "same_halves2", "same_whole2"
SAMES = [
    ("two cards by NCCL, chunks in halves", SAME, WHOLE),
    ("two cards by NCCL, in batches, behind its first half, and once more", WHOLE, WHOLE),
]
PROMPTS = ["--prompts", "700,2100,8200,20001", "--batches", "1", "8", "--graph-bs", "1", "8"]
PEERS = {"": "by NVLink", "_no_peers": "through host memory"}
TIMED = {f"halves2_43_{how}{peers}": (how, peers) for peers in PEERS for how in ("whole", "halves")}
SHAPES = {"1x8192": "a prompt of 8,192", "1x32000": "a prompt of 32,000", "8x1024": "8 prompts of 1,024"}
IN_HALVES = {SAME: 8, **{name: 16 for name, (how, _) in TIMED.items() if how == "halves"}}  # chunks at the least
MOST_LEFT, MOST_SLOWER = 0.3, 1.02  # of the sums' time, through host memory; of the whole's time, by NVLink
IMPLEMENTATIONS = {
    SAME: "ours, reproducible, two cards by NCCL, chunks in halves",
    WHOLE: "ours, reproducible, two cards by NCCL",
    **{
        name: f"ours, two cards, NCCL {PEERS[peers]}, chunks {'in halves' if how == 'halves' else 'whole'}"
        for name, (how, peers) in TIMED.items()
    },
}


def stages(make, same, timed, environment, no_peers):
    """Engines of 6 layers that answer, and of 43 that are timed in turn."""

    def sets(*choices):
        return {"DSV4_SM120_SET": ",".join(choices)} if choices else {}

    phase = ["--phases", "first", "--shapes", *SHAPES, "--rounds", "2"]
    return {
        "halves2": [
            make(SAME, [*same, *PROMPTS], environment=environment | sets("reproducible=on", "halves=on")),
            make(WHOLE, [*same, *PROMPTS], environment=environment | sets("reproducible=on")),
        ],
        "halves2_43": [
            make(
                name,
                [*timed, *phase],
                environment=environment | sets(*(["halves=on"] * (how == "halves"))) | (no_peers if peers else {}),
                takes_turns=True,
            )
            for name, (how, peers) in TIMED.items()
        ],
    }


def rows(cases, row):
    """Of what ran: whether chunks were in halves where they had to be, and nowhere else; times, and what is hidden."""
    ran = [name for name in IMPLEMENTATIONS if name in cases]
    found = [_in_halves(name, cases[name]["reports"], row) for name in ran]
    for peers in PEERS:
        whole, halves = (cases.get(f"halves2_43_{how}{peers}", {}).get("first") for how in ("whole", "halves"))
        for how, times in (("whole", whole), ("halves", halves)):
            for shape, seen in (times or {}).items():
                impl = IMPLEMENTATIONS[f"halves2_43_{how}{peers}"]
                found.append(row(_case(shape), impl, "time to the first token, ms, best", min(seen["ms"]), None, ISSUE))
        if whole and halves:
            found += [_beside(shape, peers, whole[shape], halves[shape], row) for shape in SHAPES if shape in halves]
            found += _hidden(peers, whole, halves, row)
    return found


def _case(shape):
    return f"flash43e64, {SHAPES[shape]} tokens"


def _in_halves(name, reports, row):
    """Each card's report counts, at powers of two."""
    told = [report["found"]["halves"] for report in reports if "halves" in report["found"]]
    counts = [found.get("forwards", 0) for found in told]
    if name not in IN_HALVES:
        return row(name, IMPLEMENTATIONS[name], "chunks in halves where none was asked for", sum(counts), 0, ISSUE)
    least = min(counts) if len(counts) == 2 else 0  # of two cards
    whole = {why: count for found in told for why, count in found.items() if why not in ("forwards", "rows")}
    why = f" ({'; '.join(f'{count} whole: {why}' for why, count in whole.items())})" if whole else ""
    missing = max(0, IN_HALVES[name] - least)
    return row(name, IMPLEMENTATIONS[name], f"chunks in halves, missing to {IN_HALVES[name]}{why}", missing, 0, ISSUE)


def _beside(shape, peers, whole, halves, row):
    share = min(halves["ms"]) / min(whole["ms"])
    bar = MOST_SLOWER if not peers else None
    impl = IMPLEMENTATIONS[f"halves2_43_halves{peers}"]
    return row(_case(shape), impl, "time to the first token, of the whole's", share, bar, ISSUE)


def _hidden(peers, whole, halves, row):
    """Of the shapes whose sums were profiled in the engine that cuts nothing."""
    impl, found = IMPLEMENTATIONS[f"halves2_43_halves{peers}"], []
    for shape in (shape for shape in SHAPES if whole.get(shape, {}).get("sums_ms") and shape in halves):
        sums = whole[shape]["sums_ms"]
        left = 1 - (min(whole[shape]["ms"]) - min(halves[shape]["ms"])) / sums
        whole_impl = IMPLEMENTATIONS[f"halves2_43_whole{peers}"]
        found.append(row(_case(shape), whole_impl, "sums between the cards, ms", sums, None, ISSUE))
        metric, bar = "share of the sums' time that is not hidden", MOST_LEFT if peers else None
        found.append(row(_case(shape), impl, metric, left, bar, ISSUE))
    return found
