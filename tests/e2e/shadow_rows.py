"""collect.py's rows of shadow records: what ours computed beside the original's, call by call."""

import experts_stage  # collect.py's folder

ISSUE = 2  # of the runs themselves
# which issue a patch's shadow records answer; a record says its own bound
ISSUES = {"sparse_decode": 2, "index_select": 5, "index_select_within_tolerance": 5, "mxfp4_moe": 6, "dealt_index": 22}
ISSUES |= {"draft_head": 21, "draft_head_guesses": 21, "router_topk": 24}
FIRST_PATCH = "sparse_decode"  # every shadow run must have records of it
OF_ITS_OWN = {  # and these of what they are for
    **dict.fromkeys(("index_shadow", "index_seams_shadow"), "index_select"),
    "index2_shadow": "dealt_index",
    "router_shadow": "router_topk",
    **dict.fromkeys(("sums2_shadow", "sums4_shadow", "sums8_shadow"), "all_reduce"),
    **dict.fromkeys(("eagle314_shadow", "dspark3_shadow"), "draft_head"),
    **dict.fromkeys(experts_stage.SHADOWS, "mxfp4_moe"),
}
INDEX_PATCHES = {  # their records count entries
    "index_select": "beyond the tolerance",
    "index_select_within_tolerance": "within the tolerance",
    "dealt_index": "from the whole call's",
}
EXACT = ", to the bit"
CLOSER = ", bound "
COUNTED = {"draft_head_guesses"}  # their records count what is nobody's fault: nothing is demanded of them


def rows(name, impl, records, row):
    """Totals of one run's shadow records, patch by patch; a run without any is a failed one, not a passed one."""
    by_patch = {patch: [] for patch in (FIRST_PATCH, OF_ITS_OWN.get(name, FIRST_PATCH))}
    loosest = {}
    for record in records:
        loosest[record["patch"]] = max(record["bound"], loosest.get(record["patch"], 0))
    for record in records:  # parts of an operator may have to be exact, or closer than the others
        by_patch.setdefault(record["patch"] + _part(record, loosest[record["patch"]]), []).append(record)
    every = []
    for patch, found in by_patch.items():
        if not sum(record["calls"] for record in found):
            every.append(row(f"{name}, {patch}", impl, "shadow calls recorded: none", None, 0, _issue(patch)))
            continue
        of = _index_rows if patch in INDEX_PATCHES else _patch_rows
        every += of(name, impl, patch, found, row)
    return every


def _part(record, loosest):
    if record["patch"] in INDEX_PATCHES:
        return ""
    if not record["bound"]:
        return EXACT
    return "" if record["bound"] == loosest else f"{CLOSER}{record['bound']:g}"


def _issue(patch):
    return ISSUES.get(patch.removesuffix(EXACT).partition(CLOSER)[0], ISSUE)


def _patch_rows(name, impl, patch, records, row):
    def add(case, metric, value, bar=None):
        rows.append(row(f"{name}, {patch}{case}", impl, metric, value, bar, _issue(patch)))

    rows = []
    bound, most_bad = (None, None) if patch in COUNTED else (records[0]["bound"], 0)
    eager = [r for r in records if not r["captured"]]
    kinds = {
        ", all calls": records,
        ", replayed in graphs": [r for r in records if r["captured"]],
        ", eager, up to 128 rows": [r for r in eager if isinstance(r["shape"]["rows"], int)],
        ", eager, above 128 rows": [r for r in eager if isinstance(r["shape"]["rows"], str)],
    }
    for kind, chosen in kinds.items():
        n = sum(r["calls"] for r in chosen)
        add(kind, "calls", n)
        if not n:
            continue
        add(kind, "relative L2 of a call, greatest", max(r["relative_l2_max"] for r in chosen), bound)
        add(kind, "relative L2 of a call, mean", sum(r["relative_l2_mean"] * r["calls"] for r in chosen) / n)
        add(kind, "relative L2 of a row, greatest", max(r["row_relative_l2_max"] for r in chosen))
        add(kind, "absolute error, greatest", max(r["absolute_error_max"] for r in chosen))
        add(kind, "calls above the bound", sum(r["bad_calls"] for r in chosen), most_bad)
        add(kind, "non-finite elements of ours only", sum(r["nonfinite_ours"] for r in chosen), 0)
        add(kind, "non-finite elements of the original", sum(r["nonfinite_original"] for r in chosen))
        if left_out := sum(r["left_out"] for r in chosen):
            add(kind, "results left out, of several rows that write to one place", left_out)
    add("", "layers seen", len({r["layer"] for r in records}))
    return rows


def _index_rows(name, impl, patch, records, row):
    """The indexer's records: sets of entries, as numbers of entries that differ."""
    what, n = INDEX_PATCHES[patch], sum(r["calls"] for r in records)
    mean = sum(r["relative_l2_mean"] * r["calls"] for r in records) / n
    worst = max(r["absolute_error_max"] for r in records)
    return [
        row(f"{name}, {patch}", impl, metric, value, bar, _issue(patch))
        for metric, value, bar in (
            ("calls", n, None),
            (f"entries of a row that differ {what}, greatest", worst, None if "tolerance" in patch else 0),
            (f"share of entries that differ {what}, mean", mean, None),
        )
    ]
