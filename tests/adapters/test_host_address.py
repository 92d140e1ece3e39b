"""The address that a host with several tells the others: each release's own queue and search, with ours and without."""

import os
import socket
from types import SimpleNamespace
from unittest import mock

import pytest

from deepseek_v4_sm120.sglang_patches import host_address
from deepseek_v4_sm120.sglang_patches.adapters import argument_defaults
from tests.patching.test_wheel_wo_a import take
from tests.patching.wheels import every_release, fetch

QUEUE, NETWORK = "sglang.srt.distributed.device_communicators.shm_broadcast", "sglang.srt.utils.network"
WIFI, CABLE = "192.168.1.5", "10.0.0.1"
SERVER = {"nnodes": 2, "dist_init_addr": f"{CABLE}:5000"}


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    for name in host_address.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(host_address, "_set", None)


def reads(**given):
    return lambda name, default=None: {**SERVER, **given}.get(name, default)


class Way:
    """A datagram's socket of a host that has Wi-Fi and a cable to the others."""

    own = CABLE

    def __init__(self, *_):
        pass

    def connect(self, address):
        if address[0] == "unreachable":
            raise OSError("no route")

    def getsockname(self):
        return self.own, 40000

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


@pytest.fixture
def ways(monkeypatch):
    monkeypatch.setattr(socket, "socket", Way)
    return lambda own: monkeypatch.setattr(Way, "own", own)


def told(version):
    """What the release's own queue tells readers of another host, on a host whose first interface is Wi-Fi."""
    wheel = fetch(version)
    names = {"os": os, "get_local_ip_by_nic": lambda: WIFI}
    search = take(wheel, names, "get_local_ip_auto", NETWORK)
    made, handles = SimpleNamespace(), []
    made.setsockopt = lambda *_: None
    made.bind_to_random_port = lambda *_, **__: 7000
    made.bind = lambda *_, **__: None
    names = {
        "get_local_ip_auto": search,
        "Context": lambda: SimpleNamespace(socket=lambda _: made),
        "NetworkAddress": lambda host, port: SimpleNamespace(is_ipv6=False, to_tcp=lambda: f"tcp://{host}:{port}"),
        "Handle": lambda **given: handles.append(given["connect_ip"]),
        "get_open_port": lambda: 7000,
    }
    take(wheel, names, "MessageQueue.__init__", QUEUE)(SimpleNamespace(), 1, 0, local_reader_ranks=[])
    return handles


@every_release()
def test_the_queue_tells_the_others_of_the_network_in_which_they_meet(version, ways):
    assert told(version) == [WIFI]
    assert host_address.tell(reads(), os.environ) == CABLE and told(version) == [CABLE]
    host_address.forget(os.environ)
    assert told(version) == [WIFI]


@pytest.mark.parametrize("given", [{"nnodes": 1}, {"dist_init_addr": None}, {"disaggregation_mode": "decode"}])
def test_other_servers_are_told_nothing(given, ways):
    environ = {}
    assert host_address.tell(reads(**given), environ) is None and environ == {}


@pytest.mark.parametrize("name", host_address.VARIABLES)
def test_what_a_user_has_set_stays(name, ways):
    environ = {name: WIFI}
    assert host_address.tell(reads(), environ) is None and environ == {name: WIFI}
    host_address.forget(environ)
    assert environ == {name: WIFI}


@pytest.mark.parametrize("own", ["127.0.1.1", "::1"])
def test_an_address_that_no_other_host_reaches_is_not_told(own, ways):
    ways(own)
    assert host_address.tell(reads(), {}) is None


def test_where_there_is_no_way_sglang_searches(monkeypatch, ways):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(0, 0, 0, "", ("unreachable", 1))])
    assert host_address.tell(reads(), {}) is None
    assert host_address.tell(reads(dist_init_addr="no port"), {}) is None


def test_it_is_told_where_a_servers_arguments_are_resolved_and_forgotten_at_the_next(monkeypatch, ways):
    engine = mock.MagicMock()
    applied = [SimpleNamespace(default="one", applied=["A=1", "B=2"]), SimpleNamespace(default="other", applied=[])]
    engine.profile.of_other_cards.return_value, engine.steering.outcomes = None, applied
    monkeypatch.setattr(argument_defaults.patching, "active_engine", lambda: engine)
    monkeypatch.setattr(argument_defaults.device_gate, "serves_current_device", lambda: True)
    monkeypatch.setattr(argument_defaults, "settings", lambda: SimpleNamespace(reproducible=False))
    monkeypatch.setattr(argument_defaults, "config_of", lambda server_args: None)
    monkeypatch.setattr(argument_defaults, "_model_config", lambda server_args: None)
    monkeypatch.setattr(argument_defaults.extension, "stale", lambda: None)
    said = []
    for name in ("write", "info"):
        monkeypatch.setattr(argument_defaults.report, name, said.append)
    arguments, seen = SimpleNamespace(**SERVER), []
    resolve = argument_defaults.replace_apply_defaults(lambda *_: seen.append(os.environ.get("SGLANG_HOST_IP")))
    resolve(arguments, "DeepseekV4ForCausalLM")
    begin = argument_defaults.replace_adjustments(lambda server_args: seen.append(os.environ.get("SGLANG_HOST_IP")))
    begin(SimpleNamespace(nnodes=1))
    assert seen == [CABLE, None] and said[1:] == ["deepseek_v4_sm120: defaults for this GPU: one: A=1, B=2", engine]
    assert "other hosts reach this one at 10.0.0.1 (SGLANG_HOST_IP)" in said[0]
    assert [name for name, *_ in engine.steering.method_calls] == ["apply", "begin", "end"]
