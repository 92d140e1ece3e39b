"""The stage `chain43` of run_stage.py: a step of one to 64 streams, and of stock's in the same run."""

ISSUE = 24
OURS, STOCK = "ops43_chain", "stock43_chain"
STREAMS, STOCKS_STREAMS = ("1", "8", "32", "64"), ("1", "8")
IMPLEMENTATIONS = {STOCK: "SGLang stock (Hopper kernels), beside ours", OURS: "ours, every operator on, beside stock"}
BARS = {  # ms; at 32 streams 0.85 of the 17.90 of the day that it was asked
    (OURS, streams): {"decode step, ms, worst": bar} for streams, bar in (("1", 4.2), ("8", 8.8), ("32", 15.2))
}
OF_STOCK = 0.6


def stages(make, timed, ours):
    return {
        "chain43": [
            make(STOCK, [*timed, "--bs", *STOCKS_STREAMS], patched=False, takes_turns=True),
            make(OURS, [*timed, "--bs", *STREAMS], environment=ours, takes_turns=True),
        ],
    }


def rows(cases, row):
    """collect.py's rows of the cases of a stage: the slower steps of ours in stock's. row: its maker of rows."""
    if OURS not in cases:
        return []
    found = []
    for streams in STOCKS_STREAMS:
        ours, stock = (
            cases.get(name, {}).get("rows", {}).get(streams, {}).get("step_ms_worst") for name in (OURS, STOCK)
        )
        value = ours / stock if ours and stock else None  # a bar without what it is of is missed
        case, metric = f"flash43e64, batch {streams}, 1K context", "decode step, worst, of stock's worst"
        found.append(row(case, IMPLEMENTATIONS[OURS], metric, value, OF_STOCK, ISSUE))
    return found
