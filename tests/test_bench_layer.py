"""bench/layer.py: its layers, launches and table. CPU only."""

from __future__ import annotations

import pytest
import torch


def test_the_layers_weights_are_over_twice_the_l2(bench):
    for tp, mb in {1: 140.5, 2: 77.6, 4: 46.1}.items():  # 14.7 MB on every card; what is dealt is 125.8 MB
        for l2_mb in (63, 134):
            count = bench.layers_for(tp, l2_mb * 1_000_000)
            assert 2.2 * l2_mb < count * mb < 2.2 * l2_mb + 3 * mb
    assert bench.layers_for(1, 1) == 3


def test_every_launch_is_one_of_the_kernel_for_few_rows(bench):
    found = bench.launches(188)
    assert {name: tuning.get("blocks") for name, tuning in found.items()} == {
        "1 warp beside, 1 block": 188,
        "1 warp beside, 2 blocks": 376,
        "4 warps beside": None,
    }
    assert max(bench.ROWS) <= 8


def test_the_summary_tells_what_another_launch_gains(bench):
    report, row = bench.common.Report("layer", "x", {}), bench.common.row
    report.add(
        row(24, "TP2, 1 rows", "as launched", "us", 80.0), row(24, "TP2, 1 rows", "wo_b: 4 warps beside", "us", 77.5)
    )
    assert "+2.50" in bench.summary(report) and "80.00" in bench.summary(report)


def test_results_are_numbers_with_the_same_bits(bench):
    made = [torch.tensor([1.0, -2.0]).bfloat16(), torch.tensor([0.5]).bfloat16()]
    assert bench.wrong([one.clone() for one in made], made) == ""
    assert "other bits" in bench.wrong([made[0], made[1] + 0.5], made)
    assert "other bits" in bench.wrong([torch.zeros(1).bfloat16()], [-torch.zeros(1).bfloat16()])
    for number in (torch.nan, torch.inf):
        broken = [made[0], torch.full_like(made[1], number)]
        assert "not finite" in bench.wrong(broken, broken)
    with pytest.raises(ValueError):
        bench.wrong(made[:1], made)


def test_what_is_tuned_is_every_fp8_layer(bench):
    assert bench.TUNED == ("wqkv_a", "wq_b", "index_wq_b", "wo_a", "wo_b", "shared_gate_up", "shared_down")
