"""The stages `chain43` and `chain2_43` (two cards) of run_stage.py: a step of one to 64 streams, and of stock's in the
same run."""

ISSUE = 24
OURS, STOCK = "ops43_chain", "stock43_chain"
OURS2, STOCK2 = "ops43_chain2", "stock43_chain2"  # two cards, with the sums that each has there
STREAMS, STOCKS_STREAMS = ("1", "8", "32", "64"), ("1", "8")
IMPLEMENTATIONS = {
    **{STOCK: "SGLang stock (Hopper kernels), beside ours", OURS: "ours, every operator on, beside stock"},
    STOCK2: "SGLang stock (Hopper kernels, its own sums), two cards, beside ours",
    OURS2: "ours, every operator on, two cards, beside stock",
}
BARS = {  # ms; at 32 streams 0.85 of the 17.90 of the day that it was asked
    (name, streams): {"decode step, ms, worst": bar}
    for name, streams, bar in ((OURS, "1", 4.2), (OURS, "8", 8.8), (OURS, "32", 15.2), (OURS2, "1", 3.0))
}
OF_STOCK = {OURS: 0.6, OURS2: None}  # the bar of ours


def stages(make, timed, sums, ours):
    """sums: (2, *options) -> options of two cards."""
    return {
        "chain43": [
            make(STOCK, [*timed, "--bs", *STOCKS_STREAMS], patched=False, takes_turns=True),
            make(OURS, [*timed, "--bs", *STREAMS], environment=ours, takes_turns=True),
        ],
        "chain2_43": [
            make(STOCK2, sums(2, *timed, "--bs", *STOCKS_STREAMS), patched=False, takes_turns=True),
            make(OURS2, sums(2, *timed, "profile", "--bs", *STREAMS), environment=ours, takes_turns=True),
        ],
    }


def rows(cases, row):
    """collect.py's rows of the cases of a stage: the slower steps of ours in stock's. row: its maker of rows."""
    found = []
    for name, stocks in ((OURS, STOCK), (OURS2, STOCK2)):
        for streams in STOCKS_STREAMS if name in cases else ():
            ours, stock = (
                cases.get(case, {}).get("rows", {}).get(streams, {}).get("step_ms_worst") for case in (name, stocks)
            )
            value = ours / stock if ours and stock else None  # a bar without what it is of is missed
            case, metric = f"flash43e64, batch {streams}, 1K context", "decode step, worst, of stock's worst"
            found.append(row(case, IMPLEMENTATIONS[name], metric, value, OF_STOCK[name], ISSUE))
    return found
