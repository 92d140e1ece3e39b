"""What a file that is posted may not tell beside secrets: whose it is, and of which machine. Standard library only.

It rather hides too much than too little: of an absolute path outside of the system's folders the last name alone stays,
where that looks like a file's or a checkpoint's.
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from deepseek_v4_sm120.commands.disclosure import HIDDEN, is_secret, shown

LEFT_OUT = "prompts and answers, keys, names of hosts and users, folders' names, addresses, cards' UUIDs"
USER, HOST, ADDRESS, UUID = "USER", "HOST", "ADDRESS", "UUID"
OF_USERS = ("USER", "LOGNAME", "USERNAME", "SUDO_USER")
OF_HOSTS = ("HOSTNAME", "HOST", "NODE_NAME", "SLURMD_NODENAME", "POD_NAME")
# names that tell nobody's, or that are words of such a file
COMMON = {
    *("root", "user", "users", "ubuntu", "nobody", "admin", "docker", "nvidia", "localhost", "localdomain"),
    *("gpu", "host", "server", "model", "models", "cuda", "torch", "sglang", "max", "test", "home", "data", "ip6"),
    "container",
}
# folders at the top
SYSTEM = ("usr", "opt", "sys", "proc", "dev", "etc", "lib", "lib64", "tmp", "root", "sgl-workspace")
PUBLIC = ("127.0.0.1", "localhost", "0.0.0.0", "github.com", "huggingface.co", "pypi.org")
LEAST_SECRET = 6  # signs of a variable's value that is hidden wherever it stands
FIRST_USER, LAST_USER = 1000, 60_000  # numbers of accounts of people

_PATH = re.compile(r"""(?<![\w./~-])/(?![/*])[^\s"'`<>|;,:=()\[\]{}\\]+""")
_HOME = re.compile(r"""/(home|Users)/[^\s"'`<>|;,:=()\[\]{}\\/]+""")
_TELLS = re.compile(r"[A-Z0-9]|\.(?:py|json|so|log|txt|cu|cuh|h|xml)$")
_URL = re.compile(r"(?<=://)(?:\[[0-9A-Fa-f:.%]+\]|[^\s\"'<>/:@*]+)")
_FORMS = (
    (re.compile(r"(?i)\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"), UUID),
    (re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+"), f"{USER}@{HOST}"),
    (re.compile(r"(?<![\w.])(?<!==)(?!127\.|0\.0\.0\.0)\d{1,3}(?:\.\d{1,3}){3}(?![\w.]*\w)"), ADDRESS),
    (re.compile(r"(?<![\w:.])(?:[0-9A-Fa-f]{1,4}:){3,7}[0-9A-Fa-f]{1,4}(?![\w:])"), ADDRESS),
    (re.compile(r"(?<![\w:.])(?:[0-9A-Fa-f]{1,4}:){1,6}(?::[0-9A-Fa-f]{1,4}){1,6}(?![\w:])"), ADDRESS),
)


@dataclass(frozen=True)
class Known:
    """What is known here of names and secrets; home: the home folder, "" where it tells nobody's."""

    users: frozenset[str]
    hosts: frozenset[str]
    secrets: frozenset[str]
    home: str = ""


def known(root: Path, environ: Mapping[str, str], keys: Iterable[str | None] = ()) -> Known:
    """root: "/" in real life; keys: secrets that are given otherwise than by the environment."""
    users = {environ.get(name, "") for name in OF_USERS}
    users |= {name for name, number in _accounts(root) if FIRST_USER <= number < LAST_USER or number == os.getuid()}
    users |= set(_names_in(root / "home"))
    hosts = {environ.get(name, "") for name in OF_HOSTS} | {os.uname().nodename}
    hosts |= set(_text(root / "etc/hostname").split())
    hosts |= {word for line in _text(root / "etc/hosts").splitlines() for word in line.partition("#")[0].split()[1:]}
    hosts |= {name.partition(".")[0] for name in hosts}
    secrets = {value for name, value in environ.items() if is_secret(name) and len(value) >= LEAST_SECRET}
    secrets |= {key for key in keys if key}
    home = environ.get("HOME", "").rstrip("/")
    return Known(_telling(users), _telling(hosts), frozenset(secrets), "" if home in ("", "/root") else home)


def nameless(text: str, names: Known) -> str:
    """A line of text without what tells whose it is, and without secrets."""
    for secret in sorted(names.secrets, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    text = shown(text)
    text = _URL.sub(lambda found: found[0] if _is_public(found[0]) else HOST, text)
    for pattern, replacement in _FORMS:
        text = pattern.sub(replacement, text)
    if names.home:
        text = re.sub(rf"{re.escape(names.home)}(?![\w.-])", "~", text)
    text = _HOME.sub(rf"/\1/{USER}", text)
    for those, replacement in ((names.hosts, HOST), (names.users, USER)):
        for name in sorted(those, key=len, reverse=True):
            text = re.sub(rf"(?i)(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", replacement, text)
    return _PATH.sub(_short_path, text)


def _short_path(found: re.Match) -> str:
    folders = found[0].split("/")[1:]
    if folders[0] in SYSTEM or len(folders) == 1 or folders[:2] in (["home", USER], ["Users", USER]):
        return found[0]
    return f"/{HIDDEN}/{folders[-1] if _TELLS.search(folders[-1]) else HIDDEN}"


def _is_public(host: str) -> bool:
    return host == HIDDEN or any(host.lower() == name or host.lower().endswith(f".{name}") for name in PUBLIC)


def _telling(names: Iterable[str]) -> frozenset[str]:
    return frozenset(
        name for name in names if len(name) > 1 and not name.startswith("ip6-") and name.lower() not in COMMON
    )


def _accounts(root: Path) -> list[tuple[str, int]]:
    fields = [line.split(":") for line in _text(root / "etc/passwd").splitlines()]
    found = [(words[0], int(words[2])) for words in fields if len(words) > 2 and words[2].isdigit()]
    try:
        return [*found, (pwd.getpwuid(os.getuid()).pw_name, os.getuid())]
    except KeyError:  # a number without an account, as in many containers
        return found


def _names_in(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""
