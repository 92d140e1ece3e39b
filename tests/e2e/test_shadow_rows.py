"""What a shadow run's records say: each patch by its own bound, one bad call among good ones, and none at all."""

from __future__ import annotations

import pytest

from tests.e2e import collect, shadow_rows


def test_every_patch_of_a_shadow_run_is_judged_by_its_own_bound_and_issue():
    numbers = {"relative_l2_mean": 0.003, "row_relative_l2_max": 0.006, "nonfinite_ours": 0, "nonfinite_original": 0}
    numbers["left_out"] = 0
    common = numbers | {"calls": 4, "bad_calls": 0, "captured": False, "shape": {"rows": 8}, "layer": 1}
    records = [
        common | {"patch": "sparse_decode", "bound": 0.004, "relative_l2_max": 0.005, "absolute_error_max": 0.1},
        common | {"patch": "mxfp4_moe", "bound": 0.008, "relative_l2_max": 0.005, "absolute_error_max": 0.1},
        common | {"patch": "mxfp4_moe", "bound": 0.0, "relative_l2_max": 0.001, "absolute_error_max": 0.1},
        common | {"patch": "mxfp4_moe", "bound": 0.004, "relative_l2_max": 0.005, "absolute_error_max": 0.1},
        common | {"patch": "index_select", "bound": 0.0, "relative_l2_max": 0.1, "absolute_error_max": 3.0},
    ]
    rows = shadow_rows.rows("ops_shadow", "ours", records, collect.row)
    judged = {(r["issue"], r["case"], r["value"], r["bar"]): r["met"] for r in rows if "greatest" in r["metric"]}
    assert judged[2, "ops_shadow, sparse_decode, all calls", 0.005, 0.004] is False
    assert judged[6, "ops_shadow, mxfp4_moe, all calls", 0.005, 0.008] is True
    assert judged[6, "ops_shadow, mxfp4_moe, to the bit, all calls", 0.001, 0.0] is False
    assert judged[6, "ops_shadow, mxfp4_moe, bound 0.004, all calls", 0.005, 0.004] is False
    assert judged[5, "ops_shadow, index_select", 3.0, 0] is False


def shadow_record(**changes):
    record = {"patch": "sparse_decode", "calls": 2, "bad_calls": 0, "captured": False, "layer": 0, "bound": 0.004}
    record |= {"relative_l2_max": 0.003, "relative_l2_mean": 0.002, "row_relative_l2_max": 0.9, "shape": {"rows": 1}}
    return record | {"absolute_error_max": 0.0, "nonfinite_ours": 0, "nonfinite_original": 0, "left_out": 0} | changes


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({}, None),
        ({"relative_l2_max": 0.005}, "relative L2 of a call, greatest"),
        ({"relative_l2_max": float("nan")}, "relative L2 of a call, greatest"),
        ({"bad_calls": 1}, "calls above the bound"),
        ({"nonfinite_ours": 1}, "non-finite elements of ours only"),
        (
            {"patch": "index_select", "absolute_error_max": 1.0},
            "entries of a row that differ beyond the tolerance, greatest",
        ),
        ({"patch": "index_select_within_tolerance", "absolute_error_max": 1.0}, None),
    ],
)
@pytest.mark.parametrize("place", range(3))
def test_one_bad_record_among_good_ones_is_a_missed_bar(changes, missed, place):
    shadow, patch = shadow_rows, changes.get("patch", "sparse_decode")
    records = [shadow_record(patch=patch) for _ in range(3)]
    records[place] |= changes | {"captured": True, "layer": 1}
    rows = shadow.rows("ops_shadow", "ours", [shadow_record(), *records], collect.row)
    unmet = {(row["case"].split(", ")[1], row["metric"]) for row in rows if row["met"] is False}
    assert unmet == ({(patch, missed)} if missed else set())
    if patch == "sparse_decode":
        calls = {row["case"].partition("decode, ")[2]: row["value"] for row in rows if row["metric"] == "calls"}
        assert calls["all calls"] == 8 and calls["replayed in graphs"] == 2 and calls["eager, up to 128 rows"] == 6
        assert [row["value"] for row in rows if row["metric"] == "layers seen"] == [2]


def test_what_was_left_out_is_a_row_of_its_own():
    records = [shadow_record(), shadow_record(patch="compressor", left_out=8, captured=True)]
    rows = shadow_rows.rows("eagle314_shadow", "ours", records, collect.row)
    found = {row["case"]: (row["value"], row["met"]) for row in rows if row["metric"].startswith("results left out")}
    of = "eagle314_shadow, compressor, "
    assert found == {f"{of}all calls": (8, None), f"{of}replayed in graphs": (8, None)}


@pytest.mark.parametrize(
    ("name", "patch"),
    [("index_shadow", "index_select"), ("index2_shadow", "dealt_index"), ("sums4_shadow", "all_reduce"),
     ("router_shadow", "router_topk"), ("eagle314_shadow", "draft_head"), ("ops_shadow", "sparse_decode")],
)  # fmt: skip
def test_a_shadow_run_without_a_record_of_what_it_is_for_has_shown_nothing(name, patch):
    def unmet(*records):
        rows = shadow_rows.rows(name, "ours", list(records), collect.row)
        return {(row["case"], row["metric"]) for row in rows if row["met"] is False}

    others = [shadow_record(patch=other) for other in ("sparse_decode", "mhc") if other != patch]
    missed = {(f"{name}, {patch}", "shadow calls recorded: none")}
    assert unmet(*others) == missed == unmet(*others, shadow_record(patch=patch, calls=0))
    assert unmet(*others, shadow_record(patch=patch)) == set()


def test_records_that_only_count_have_no_verdict():
    """A share of guesses that are others: no bound could be passed, so none is said to be met."""
    record = {"calls": 2, "bad_calls": 0, "captured": False, "layer": 0, "shape": {"rows": 1}, "bound": 1.0}
    record |= {"relative_l2_max": 1.0, "relative_l2_mean": 0.5, "row_relative_l2_max": 1.0, "absolute_error_max": 1.0}
    record |= {"nonfinite_ours": 0, "nonfinite_original": 0, "left_out": 0}
    verdicts = {}
    for patch in ("draft_head_guesses", "draft_head"):
        records = [record | {"patch": patch}, record | {"patch": "sparse_decode"}]
        rows = shadow_rows.rows("eagle314_shadow", "ours", records, collect.row)
        of = f"eagle314_shadow, {patch},"
        verdicts[patch] = {r["metric"] for r in rows if r["met"] is not None and f"{r['case']},".startswith(of)}
    bounds = {"relative L2 of a call, greatest", "calls above the bound"}
    assert verdicts["draft_head"] - verdicts["draft_head_guesses"] == bounds
    assert verdicts["draft_head_guesses"] == {"non-finite elements of ours only"}
