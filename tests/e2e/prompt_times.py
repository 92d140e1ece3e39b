"""What stages of prompts over two cards have alike: the prompts that are timed, and the rows of their times, of what
was counted in reports, and of shares."""

ISSUE = 22
SHAPES = ("1x8192", "1x32000", "8x1024")  # prompts at once, tokens of each
PEERS = {"": "NCCL by NVLink", "_no_peers": "NCCL through host memory"}
METRICS = {
    "time to all first tokens, ms, best": "first_token_ms",
    "time to all first tokens, ms, worst": "first_token_ms_worst",
    "NCCL's sums on a card, ms": "sums_ms",
}


def times_of(seen, case, impl, row):
    """Rows of what was measured of one of SHAPES."""
    return [row(case, impl, metric, seen[key], None, ISSUE) for metric, key in METRICS.items() if key in seen]


def counted(name, reports, setting, key, what, impl, least, row, cards=2):
    """Each card's report counts `key` of a setting. what: is counted; least: of that on each of the cards; None: of an
    engine that was not asked for any."""
    told = [report["found"][setting].get(key, 0) for report in reports if setting in report["found"]]
    if least is None:
        return row(name, impl, f"{what} where none was asked for", sum(told), 0, ISSUE)
    found = min(told) if len(told) == cards else 0
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
