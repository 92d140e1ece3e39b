"""Who the two sides are, and the rules by which a comparison is refused.

A comparison says something of one change. The sides' server arguments, versions, watched environment, GPUs and clocks
must agree but for what the caller named as intended (`--change`); else nothing is compared, and the reasons are
printed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from bench.serving.endpoint import Endpoint, ServerError
from deepseek_v4_sm120.commands.disclosure import printable, redacted
from deepseek_v4_sm120.patching.json_file import JsonFileError, load
from deepseek_v4_sm120.patching.lifetime import has_ended

# of /server_info: what differs between two equal servers, or from one moment to the next. `launch_command` (0.5.20 and
# later) holds the port, and keys as they were typed; the other flags are there as SGLang took them. Ports are more than
# those that users give: two are made of --port. tests/serving/test_server_info.py holds this against the releases
NOT_FLAGS = {
    "admin_api_key",
    "api_key",
    "crash_dump_folder",
    "disaggregation_bootstrap_port",
    "dist_init_addr",
    "encoder_bootstrap_port",
    "engine_info_bootstrap_port",
    "export_metrics_to_file_dir",
    "file_storage_path",
    "gated_launch_port",
    "grpc_http_sidecar_port",
    "grpc_port",
    "host",
    "internal_states",
    "kv_event_sources",
    "kv_events",
    "launch_command",
    "max_req_input_len",
    "max_total_num_tokens",
    "nccl_port",
    "port",
    "random_seed",
    "smg_http_sidecar_port",
    "startup_time",
    "status",
    "version",
    "weight_version",
}
PATCH_ENVIRONMENT = ("DSV4_", "PYTHONPATH")
# what --change may name, besides flag:NAME and env:NAME
CHANGES = ("patch", "version", "model", "nothing")
MAX_CLOCK_DIFFERENCE = 0.03
CLOCKS = ("sm_mhz", "mem_mhz")


@dataclass
class Identity:
    """One side. `patch`: {patch name: state} over its processes, None: not known (no report folder)."""

    name: str
    url: str
    command: str | None = None
    host: str = "this host"
    version: str | None = None
    model: str | None = None
    flags: dict = field(default_factory=dict)
    environment: dict[str, str] | None = None
    patch: dict[str, str] | None = None
    max_request_tokens: int | None = None
    cache_tokens: int | None = None
    unknown: list[str] = field(default_factory=list)

    @property
    def speculates(self) -> bool:
        return bool(self.flags.get("speculative_algorithm"))

    @property
    def patch_status(self) -> str:
        if self.patch is None:
            return "not known"
        return ", ".join(f"{name} {state}" for name, state in sorted(self.patch.items())) or "stock"


def patch_states(folder: Path | None) -> tuple[dict[str, str] | None, list[str]]:
    """({patch: state} from the reports of DSV4_SM120_REPORT, what could not be read). APPLIED if it is in any process.

    No report of a process that runs in the folder: stock. No folder, or a report that cannot be read: None, not known.
    """
    if folder is None:
        return None, ["patch status (no folder of DSV4_SM120_REPORT given)"]
    if not folder.is_dir():
        return None, [f"patch status (there is no folder {folder} here)"]
    found: dict[str, str] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            report = load(path)
        except JsonFileError as error:
            return None, [f"patch status ({path} {error})"]
        if not _is_report(report):
            return None, [f"patch status ({path} is no report of a patched process)"]
        if has_ended(report):  # of the server before this one
            continue
        mode = report.get("settings", {}).get("force")
        for entry in report.get("patches", []):
            if entry["state"] == "NOT APPLICABLE":
                continue
            state = entry["state"] + (f" (validation mode {mode})" if mode else "")
            if not found.get(entry["patch"], "").startswith("APPLIED"):
                found[entry["patch"]] = state
    return found, []


def _is_report(report) -> bool:
    if not isinstance(report, dict) or not isinstance(report.get("settings", {}), dict):
        return False
    entries = report.get("patches", [])
    return isinstance(entries, list) and all(
        isinstance(entry, dict) and all(isinstance(entry.get(name), str) for name in ("patch", "state"))
        for entry in entries
    )


def _whole(value) -> int | None:
    """A number of tokens that a server told, None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 40 else None


def _line(value) -> str | None:
    """A name or version that a server told, as one line."""
    return printable(" ".join(value.split()))[:200] if isinstance(value, str) else None


def identify(
    name: str,
    endpoint: Endpoint,
    model: str | None = None,
    command: str | None = None,
    environment: dict[str, str] | None = None,
    report: Path | None = None,
) -> Identity:
    """Ask the server what it is. What cannot be known is listed in `unknown`, and never counts as equal in silence."""
    patch, not_known = patch_states(report)
    found = Identity(name, endpoint.url, command, environment=environment, patch=patch)
    if not endpoint.is_local():
        found.host = endpoint.host
        found.unknown.append("devices, clocks, topology (the server is on another host; what is told is this one's)")
    served = endpoint.models()
    if model:
        endpoint.check_model(model)
    found.model = model or _line(served[0] if served else None)
    try:
        info = endpoint.server_info()
    except ServerError as error:
        found.unknown.append(f"flags and version (no /server_info: {error})")
        info = {}
    if not isinstance(info, dict):
        found.unknown.append(f"flags and version (/server_info answers with a {type(info).__name__})")
        info = {}
    found.version = _line(info.get("version"))
    found.max_request_tokens = _whole(info.get("max_req_input_len")) or _whole(info.get("context_length"))
    found.cache_tokens = _whole(info.get("max_total_num_tokens"))
    found.flags = {key: value for key, value in info.items() if key not in NOT_FLAGS}
    if environment is None:
        found.unknown.append("environment (the server was not started by this program)")
    found.unknown += not_known
    return found


def check_changes(changes: Iterable[str]) -> None:
    for change in changes:
        if change not in CHANGES and not re.fullmatch(r"(flag|env):\S+", change):
            raise ValueError(f"--change must be {', '.join(CHANGES)}, flag:NAME or env:NAME; got {change!r}")


def differing(a: dict, b: dict) -> list[str]:
    absent = object()
    return sorted(key for key in a.keys() | b.keys() if a.get(key, absent) != b.get(key, absent))


def values_of(name: str, a: dict, b: dict) -> str:
    """Both sides' values of a flag or variable, as they may be shown: two keys that differ look the same."""
    shown = [redacted({name: side.get(name)})[name] for side in (a, b)]
    return "A {!r}, B {!r}".format(*shown)


def reasons_to_refuse(a: Identity, b: Identity, changes: Iterable[str]) -> list[str]:
    """Every difference that was not named as intended, and every intended change that is not there."""
    changes = set(changes)
    found, seen = [], set()

    def note(kinds: set[str], text: str) -> None:
        if changes & kinds:
            seen.update(changes & kinds)
        else:
            found.append(text)

    if a.host != b.host:
        note(set(), f"A and B are not on one host: A {a.host}, B {b.host}")
    if a.version != b.version:
        note({"version"}, f"SGLang differs: A {a.version}, B {b.version} (--change version)")
    if a.model != b.model:
        note({"model"}, f"the model differs: A {a.model}, B {b.model} (--change model)")
    for key in differing(a.flags, b.flags):
        values = values_of(key, a.flags, b.flags)
        kinds = {f"flag:{key}"} | ({"model"} if key in ("model_path", "served_model_name", "tokenizer_path") else set())
        if a.version != b.version and not (key in a.flags and key in b.flags):
            kinds.add("version")  # releases have other arguments: dozens between any two
        note(kinds, f"server argument {key} differs: {values} (--change flag:{key})")
    known = a.environment is not None and b.environment is not None
    for key in differing(a.environment, b.environment) if known else []:
        kinds = {f"env:{key}"} | ({"patch"} if key.startswith(PATCH_ENVIRONMENT) else set())
        values = values_of(key, a.environment, b.environment)
        note(kinds, f"environment variable {key} differs: {values} (--change env:{key})")
    if a.patch is not None and b.patch is not None and a.patch != b.patch:
        note({"patch"}, f"the patch differs: A {a.patch_status}, B {b.patch_status} (--change patch)")
    for change in sorted(changes - seen - {"nothing"}):
        if change == "patch" and (a.patch is None or b.patch is None):
            continue  # said in `unknown`
        found.append(f"the intended change {change} is not there: A and B are the same in it")
    return found


def clock_reasons(a: dict | None, b: dict | None) -> list[str]:
    """Clocks of the two sides, as summarised by machine.ClockWatch. Neither known: nothing to say here."""
    if (a is None) != (b is None):
        return [f"clocks were seen on side {'B' if a is None else 'A'} only"]
    if a is None or b is None:
        return []
    found = []
    for key in CLOCKS:
        if a.get(key) and b.get(key) and abs(b[key] / a[key] - 1) > MAX_CLOCK_DIFFERENCE:
            found.append(f"{key} differs by more than {MAX_CLOCK_DIFFERENCE:.0%}: A {a[key]:g}, B {b[key]:g}")
    for name, side in (("A", a), ("B", b)):
        if side.get("throttled"):
            found.append(f"side {name} was throttled (heat or power brake)")
    return found
