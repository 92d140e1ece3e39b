"""Cards that a stage numbers from 0, of those that CUDA_VISIBLE_DEVICES leaves its caller."""

import pytest

from tests.e2e.callers_cards import of_callers, stages_number


@pytest.mark.parametrize("chosen", [{}, {"CUDA_VISIBLE_DEVICES": ""}])
def test_without_a_choice_of_the_callers_they_are_the_machines(monkeypatch, chosen):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    assert of_callers("0") == "0" and of_callers("0,1") == "0,1"
    assert stages_number("1", "GPU-8a5c") == "1"


def test_they_are_of_those_that_the_caller_sees(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-8a5c")
    assert of_callers("0") == "3" and of_callers("1") == "GPU-8a5c" and of_callers("0,1") == "3,GPU-8a5c"
    with pytest.raises(ValueError, match="leaves 2 cards"):
        of_callers("1,2")


def test_a_card_of_the_machine_has_the_stages_number(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-8a5c")
    assert stages_number("3", "GPU-33") == "0" and stages_number("1", "GPU-8a5c-11") == "1"
    assert stages_number("0", "GPU-11") is None and stages_number("33", "GPU-33") is None
