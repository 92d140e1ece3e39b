"""The environment variables of this package, its settings: read once, in this module only. SGLang's own values that we
change are defaults (sglang_patches/defaults.py), what DSV4_SM120_SET says of those are choices, a server's flags
arguments.

DSV4_SM120=off              nothing is patched
DSV4_SM120_FORCE=ops        validation on other GPUs (9.0 and later): our gate is open, SGLang keeps its own path
DSV4_SM120_FORCE=seams      validation on other GPUs: SGLang itself takes its SM120 branches, so their seams are run
DSV4_SM120_SHADOW=1         run ours beside the original on live inputs, record the difference, keep the original's
DSV4_SM120_SHADOW=ours      the same, but keep our result
DSV4_SM120_ON_BROKEN=warn   a patch that does not fit this SGLang is left out with a warning, the server starts
DSV4_SM120_UNREVIEWED=refuse   a patch of code that nobody has looked at is treated like one that does not fit
DSV4_SM120_REPORT=<dir>     every patched process writes <dir>/<pid>.json; what prevents that is told and stops nothing
DSV4_SM120_SET=<name>=<on, off or a number>[,...]   which of SGLang's defaults we change, and to what; <patch>=off;
                            all_reduce=host or peer: by that way alone
DSV4_SM120_PROFILE=<file>   what `calibrate` measured on this machine: patches that lost there are left out;
                            DSV4_SM120_SET=<operator>=on or off stands above
DSV4_SM120_LAYERS=<dir>     what every sublayer is given can be recorded there, when `layers` asks for it
"""

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from deepseek_v4_sm120 import LAYERS, PROFILE, REPORT

_ACCEPTED = {
    "DSV4_SM120": ("on", "off"),
    "DSV4_SM120_FORCE": ("ops", "seams"),
    "DSV4_SM120_SHADOW": ("1", "ours"),
    "DSV4_SM120_ON_BROKEN": ("raise", "warn"),
    "DSV4_SM120_UNREVIEWED": ("warn", "refuse"),
}
PREFIX, LIKE_OURS = "DSV4_SM120", 0.85  # of difflib's ratio, for what begins otherwise
WORDS = {"all_reduce": ("host", "peer")}  # that a name of DSV4_SM120_SET takes besides
MOST_DIGITS = 6  # of a number there
NO = ("off", "0")  # what a name of it may have that leaves it out
SERVICE = ("_SERVICE_HOST", "_SERVICE_PORT")  # what every Service of Kubernetes' has behind its name, and _PORT
KNOWN = (*_ACCEPTED, REPORT, "DSV4_SM120_SET", PROFILE, LAYERS)


@dataclass(frozen=True)
class Settings:
    off: bool = False
    force: str | None = None  # None, "ops" or "seams"
    shadow: str | None = None  # None, "1" (keep the original's result) or "ours"
    on_broken: str = "raise"  # "raise" or "warn"
    report: str | None = None  # folder of the per-process reports
    choices: Mapping[str, str] = field(default_factory=dict)  # default or patch -> "on", "off", a number or a word
    profile: str | None = None  # file that `calibrate` wrote
    unreviewed: str = "warn"  # "warn" or "refuse"
    layers: str | None = None  # folder of what sublayers are given
    wrong: tuple[str, ...] = ()  # a sentence for each variable whose value is none; what it is for is at its default

    def given(self, variable: str) -> str | None:
        """The folder that one of these variables names."""
        return {REPORT: self.report, LAYERS: self.layers}[variable]

    @property
    def reproducible(self) -> bool:
        """Whether every sum is to have one order, at any number of rows (docs/notes/reproducible.md)."""
        return self.choices.get("reproducible") == "on"

    @property
    def transport(self) -> str | None:
        """The one way in which the cards may sum, where the user chose it."""
        asked = self.choices.get("all_reduce")
        return asked if asked in WORDS["all_reduce"] else None

    @property
    def mode(self) -> str:
        """What the table's rows are chosen by: "sm120" in normal use, else the validation switch."""
        return self.force or "sm120"


def read_settings(environ: Mapping[str, str]) -> Settings:
    """Settings from a mapping. Unset and empty mean the default; what has an unknown value is told in `wrong`."""
    wrong = []

    def value(name: str) -> str | None:
        text = environ.get(name, "")
        if text and text not in _ACCEPTED[name]:
            wrong.append(f"{name} must be unset or one of {', '.join(_ACCEPTED[name])}; got {text!r}")
            return None
        return text or None

    choices: dict[str, str] = {}
    try:
        choices = read_choices(environ.get("DSV4_SM120_SET", ""))
    except ValueError as error:
        wrong.append(str(error))
    return Settings(
        off=value("DSV4_SM120") == "off",
        force=value("DSV4_SM120_FORCE"),
        shadow=value("DSV4_SM120_SHADOW"),
        on_broken=value("DSV4_SM120_ON_BROKEN") or "raise",
        report=environ.get(REPORT) or None,
        choices=choices,
        profile=environ.get(PROFILE) or None,
        unreviewed=value("DSV4_SM120_UNREVIEWED") or "warn",
        layers=environ.get(LAYERS) or None,
        wrong=tuple(wrong),
    )


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """A sentence for each variable that looks like one of ours and is none, with the nearest that is. Those by which
    Kubernetes tells every container of a Service named like us were typed by nobody."""
    services = tuple(
        f"{service}{end}"
        for service in (name.removesuffix(SERVICE[0]) for name in environ if name.endswith(SERVICE[0]))
        if service + SERVICE[1] in environ
        for end in (*SERVICE, "_PORT")
    )
    upper = {name: name.upper() for name in environ if name not in KNOWN and not name.startswith(services)}
    strangers = sorted(name for name, n in upper.items() if "SM1" in n or n.startswith("DSV4"))
    if not strangers:
        return []
    from difflib import get_close_matches

    cutoffs = {name: 0 if upper[name].startswith(PREFIX) else LIKE_OURS for name in strangers}
    nearest = {name: get_close_matches(upper[name], KNOWN, n=1, cutoff=cutoffs[name]) for name in strangers}
    return [
        f"the variable {name} is none of ours and changes nothing; the nearest is {near[0]}"
        for name, near in nearest.items()
        if near
    ]


def read_choices(text: str) -> dict[str, str]:
    """DSV4_SM120_SET: {name: "on", "off", digits or a word of WORDS}; ValueError for anything else."""
    choices = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (part.strip() for part in item.partition("="))
        words = WORDS.get(name, ())
        is_number = value.isascii() and value.isdigit() and len(value) <= MOST_DIGITS
        if not name or not (value in ("on", "off", *words) or is_number):
            got = f"{item!r:.80}" + (f" ({name} takes {' and '.join(words)} too)" if words else "")
            got += f" (numbers have up to {MOST_DIGITS} digits)" if value.isdigit() else ""
            raise ValueError(f"DSV4_SM120_SET must be <name>=<on, off or a number>, comma-separated; got {got}")
        if choices.setdefault(name, value) != value:
            raise ValueError(f"DSV4_SM120_SET must say one thing of {name}; got {choices[name]} and {value}")
    return choices


def asks_for(choices: Mapping[str, str], name: str) -> bool:
    """Whether DSV4_SM120_SET asks for what is off unless somebody does."""
    return choices.get(name, "off") not in NO


@functools.cache
def settings() -> Settings:
    """This process's settings, read at the first call."""
    return read_settings(os.environ)
