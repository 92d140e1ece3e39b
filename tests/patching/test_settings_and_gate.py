"""Settings and the device gate, without a GPU."""

import sys
import types

import pytest

from deepseek_v4_sm120.settings import KNOWN, Settings, read_settings, unknown_variables
from deepseek_v4_sm120.sglang_patches import device_gate


def test_defaults():
    assert read_settings({}) == read_settings({"DSV4_SM120": "", "DSV4_SM120_REPORT": ""}) == Settings()
    assert Settings().mode == "sm120"


def test_all_values():
    environ = {
        "DSV4_SM120": "off",
        "DSV4_SM120_FORCE": "seams",
        "DSV4_SM120_SHADOW": "ours",
        "DSV4_SM120_ON_BROKEN": "warn",
        "DSV4_SM120_REPORT": "/reports",
        "DSV4_SM120_UNREVIEWED": "refuse",
        "DSV4_SM120_LAYERS": "/layers",
    }
    told = Settings(True, "seams", "ours", "warn", "/reports", unreviewed="refuse", layers="/layers")
    assert read_settings(environ) == told and told.given("DSV4_SM120_LAYERS") == "/layers"
    assert Settings().given("DSV4_SM120_LAYERS") is None
    assert read_settings(environ).mode == "seams"


@pytest.mark.parametrize(
    ("name", "accepted"),
    [
        ("DSV4_SM120", "on, off"),
        ("DSV4_SM120_FORCE", "ops, seams"),
        ("DSV4_SM120_SHADOW", "1, ours"),
        ("DSV4_SM120_ON_BROKEN", "raise, warn"),
        ("DSV4_SM120_UNREVIEWED", "warn, refuse"),
    ],
)
def test_unknown_values_are_told_with_the_accepted_ones_and_change_nothing_else(name, accepted):
    found = read_settings({name: "maybe", "DSV4_SM120_SET": "mhc=off", "DSV4_SM120_REPORT": "/reports"})
    assert found.wrong == (f"{name} must be unset or one of {accepted}; got 'maybe'",)
    assert found == Settings(report="/reports", choices={"mhc": "off"}, wrong=found.wrong)


def test_malformed_choices_are_told_with_the_others():
    found = read_settings({"DSV4_SM120_SET": "mhc=sometimes", "DSV4_SM120_SHADOW": "2"})
    assert [text.partition(" must be")[0] for text in found.wrong] == ["DSV4_SM120_SET", "DSV4_SM120_SHADOW"]
    assert found == Settings(wrong=found.wrong)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("DSV4_SM120_REPROT", "DSV4_SM120_REPORT"),
        ("DSV4_SM120_ONBROKEN", "DSV4_SM120_ON_BROKEN"),
        ("DSV4_SM120_UNREVIEW", "DSV4_SM120_UNREVIEWED"),
        ("DSV4_SM120S", "DSV4_SM120"),
        ("DSV4_SM120_XYZZY_QUUX", "DSV4_SM120"),
        ("DSV4SM120_SET", "DSV4_SM120_SET"),
        ("DSV4_SM_120_REPORT", "DSV4_SM120_REPORT"),
        ("DS4_SM120_PROFILE", "DSV4_SM120_PROFILE"),
        ("DSV4_SM12_SET", "DSV4_SM120_SET"),
        ("dsv4_sm120_set", "DSV4_SM120_SET"),
        ("dsv4_sm12_profile", "DSV4_SM120_PROFILE"),
    ],
)
def test_a_variable_that_is_none_of_ours_is_named_with_the_nearest(name, nearest):
    (sentence,) = unknown_variables({name: "1", "DSV4_SM120_SET": "", "SGLANG_X": "", "_DSV4_SM120_TOLD": ""})
    assert f"variable {name} is none of ours" in sentence and f"the nearest is {nearest}" in sentence


@pytest.mark.parametrize(("service", "told"), [("DSV4_SM120", 0), ("DSV4_SM120_2", 0), (None, 2)])
def test_what_kubernetes_tells_of_a_service_is_no_mistake(service, told):
    """A Service named dsv4-sm120 is in the environment of every container of its namespace."""
    ends = ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT", "PORT_30000_TCP", "PORT_30000_TCP_ADDR")
    given = {f"{service}_{end}": "tcp://10.0.0.1:30000" for end in ends if service}
    given |= {} if service else {"DSV4_SM120_PORT": "30000", "DSV4_SM120_SERVICE_HOST": "here"}
    assert len(unknown_variables(given)) == told
    (sentence,) = unknown_variables({"DSV4_SM120_SERVICE_HOST": "", "DSV4_SM120_SERVICE_PORT": "", "DSV4_SM120_ST": ""})
    assert "DSV4_SM120_ST is none of ours" in sentence


def test_every_variable_of_ours_is_known():
    assert unknown_variables(dict.fromkeys((*KNOWN, "SGLANG_DSV4_FP4_EXPERTS", "DSV4_CACHE", "SM120"), "")) == []


@pytest.mark.parametrize(
    ("capability", "force", "served"),
    [
        ((12, 0), None, True),
        ((12, 1), None, True),
        ((9, 0), None, False),
        ((10, 0), None, False),
        ((8, 9), None, False),
        ((13, 0), None, False),
        ((9, 0), "ops", True),
        ((10, 0), "seams", True),
        ((8, 9), "ops", False),
    ],
)
def test_rule(capability, force, served):
    assert device_gate.serves_capability(capability, force) is served


@pytest.fixture
def gpus(monkeypatch):
    """A torch whose devices 0 and 1 are SM120 and SM90; counts the look-ups."""
    asked = []

    def get_device_capability(index):
        asked.append(index)
        return {0: (12, 0), 1: (9, 0)}[index]

    cuda = types.SimpleNamespace(
        get_device_capability=get_device_capability, current_device=lambda: 1, is_available=lambda: True
    )
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(device_gate, "_answers", {})
    monkeypatch.setattr(device_gate, "_first_served", [])
    monkeypatch.setattr(device_gate, "settings", lambda: Settings())
    return asked


def device(kind, index=None):
    return types.SimpleNamespace(type=kind, index=index)


def test_asks_each_device_once(gpus):
    answers = [device_gate.serves(device("cuda", i)) for i in (0, 1, 0, 1, None)]
    assert answers == [True, False, True, False, False] and gpus == [0, 1]
    assert device_gate.answers() == {0: True, 1: False}
    del sys.modules["torch"].cuda.is_available  # there is one: nobody asks again
    assert device_gate.serves_current_device() is False


def test_other_devices_are_never_served_and_touch_no_cuda(gpus):
    assert device_gate.serves(device("cpu")) is False and device_gate.serves(device("meta")) is False
    assert gpus == []


def test_first_served_calls_back_once(gpus):
    calls = []
    device_gate.on_first_served(lambda: calls.append("audit"))
    device_gate.on_first_served(lambda: calls.append("another engine's"))
    device_gate.serves(device("cuda", 1))
    assert calls == []
    sys.modules["torch"].cuda.current_device = lambda: 0
    for _ in range(2):
        assert device_gate.serves_current_device()
        assert sorted(calls) == ["another engine's", "audit"]


def test_where_there_is_no_device_none_is_served(gpus):
    vars(sys.modules["torch"].cuda).update(is_available=lambda: False, current_device=None)
    assert device_gate.serves_current_device() is False


def test_force_opens_the_gate(gpus, monkeypatch):
    monkeypatch.setattr(device_gate, "settings", lambda: Settings(force="ops"))
    assert device_gate.serves(device("cuda", 1)) is True
