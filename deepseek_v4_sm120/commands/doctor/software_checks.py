"""Checks of the packages, of our patches and changed defaults, and of what the next start will have to compile."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from deepseek_v4_sm120.commands.doctor import served
from deepseek_v4_sm120.commands.doctor.facts import Facts, volumes
from deepseek_v4_sm120.commands.doctor.finding import Finding, fail, not_run, ok, warn
from deepseek_v4_sm120.patching import HOST, lifetime, profile, report
from deepseek_v4_sm120.patching.steering import NOT_BY_DEFAULT, ON, USER
from deepseek_v4_sm120.settings import REPORT
from deepseek_v4_sm120.sglang_patches.defaults import REPRODUCIBLE

# in notes of sglang_patches/adapters
NOT_REPRODUCIBLE, HANDED_OVER = "NOT REPRODUCIBLE", ": SGLang's own, as "
# FlashInfer's top-k in blocks that wait for each other: until when it could wait for ever, and until when a barrier was
# missing in front of the wait; read in the wheels of 0.6.11.post1 to 0.7.2
RENORM_HANGS_BELOW, RENORM_RACES_BELOW = (0, 6, 14), (0, 7, 1)
# with post1: the FlashInfer that it pins, 0.6.12, lacks what SGLang's own attention imports at its first call
FLASHINFER_WITHOUT_KERNEL, ATTENTION_VARIABLE = re.compile(r"0\.5\.15(\.post\d+)?"), "SGLANG_SM120_FLASHMLA_BACKEND"


def checks(facts: Facts) -> Iterator[Finding]:
    """All findings about software."""
    yield from _sitecustomize(facts)
    yield from _surroundings(facts)
    yield from _build(facts)
    yield from _versions(facts)
    yield from _renorm(facts)
    yield from _patches(facts)
    yield from _shadow(facts)
    yield from _layers(facts)
    yield from _defaults(facts)
    yield from _reproducible(facts)
    yield from _profile(facts)
    yield from _processes(facts)
    yield from _left_to_sglang(facts)
    yield from _caches(facts)


def _sitecustomize(facts: Facts) -> Iterator[Finding]:
    ours = str(Path(facts.package, "sitecustomize.py").resolve())
    first = facts.sitecustomize[0] if facts.sitecustomize else None
    if facts.is_isolated:
        yield fail(
            "sitecustomize",
            "this Python runs with -I, -E or -S",
            "sitecustomize does not run: nothing is patched, in this process and in its children",
            "start Python without these flags",
        )
    elif first == ours:
        shadowed = facts.sitecustomize[1:]
        yield ok("sitecustomize", f"ours runs{', then ' + shadowed[0] if shadowed else ''}")
    elif first is None:
        yield warn(
            "sitecustomize",
            "none on this Python's path",
            "a server started with this environment is not patched",
            f"PYTHONPATH={facts.package}",
        )
    else:
        yield fail(
            "sitecustomize",
            f"{first} is found before ours",
            "Python runs only the first: a server started like this has us late, by SGLang's plugins, or not at all",
            f"put our folder first: PYTHONPATH={facts.package}:$PYTHONPATH",
        )


def _surroundings(facts: Facts) -> Iterator[Finding]:
    for text in (facts.status or {}).get("surroundings", ()):
        yield warn("our variables", text, "what it was meant for may not happen", "as the sentence says")


def _build(facts: Facts) -> Iterator[Finding]:
    build = (facts.status or {}).get("build")
    if build is None:
        yield not_run("compiled module", facts.status_problem or "unknown")
    elif build["problem"]:
        cost = "our CUDA operators cannot load"
        fix = "./build_docker.sh and mount build/; for another Python: csrc/build_artifact.py --python PATH"
        yield fail("compiled module", build["problem"], cost, fix)
    else:
        yield ok("compiled module", f"{build['version']}, git {build['git_commit']}, CUDA {build['cuda_version']}")


def _versions(facts: Facts) -> Iterator[Finding]:
    sglang = facts.versions.get("sglang")
    if sglang is None:
        yield not_run("versions", "SGLang is not installed for this Python", "run doctor inside of SGLang's image")
        return
    code = (facts.status or {}).get(HOST) or sglang
    if code.partition("+")[0] != sglang.partition("+")[0]:
        folder = facts.status["host_folder"]
        yield warn(
            "versions",
            f"two SGLangs: Python finds the code of {code}, in {folder}, and pip has installed {sglang}",
            "kernels and packages are those of the one, the code is the other's",
            f"one of them: pip uninstall sglang, or take {Path(folder).parent} off Python's path",
        )
        return
    wrong = [
        f"{name} {facts.versions[name] or 'is missing'} (SGLang {sglang} pins {pin})"
        for name, pin in facts.pins.items()
        if name in facts.versions and (facts.versions[name] or "").partition("+")[0] != pin
    ]
    if wrong:
        pins = " ".join(f"{name}=={pin}" for name, pin in facts.pins.items() if name in facts.versions)
        yield warn(
            "versions",
            ", ".join(wrong),
            "kernels are missing or called with other arguments than they take",
            f"use SGLang's own image, or: pip install {pins}",
        )
    if FLASHINFER_WITHOUT_KERNEL.fullmatch(sglang) and _runs_its_own_attention(facts):
        yield fail(
            "versions",
            f"SGLang {sglang}, whose own attention runs",
            "it imports a FlashInfer module that its pinned FlashInfer does not have",
            f"leave sparse_decode in place, without shadow mode; or {ATTENTION_VARIABLE}=triton; or SGLang 0.5.17",
        )
    elif not wrong:
        known = ", ".join(f"{name} {version}" for name, version in facts.versions.items() if version)
        yield ok("versions", f"as SGLang pins them: {known}")
    if facts.nvcc is None:
        yield warn(
            "nvcc",
            "not found",
            "SGLang compiles kernels at its start and stops where it cannot",
            "an image with the CUDA toolkit (lmsysorg/sglang has it), or set CUDA_HOME",
        )


def _runs_its_own_attention(facts: Facts) -> bool:
    """By FlashInfer, that is, as where nothing is said: to the servers that run, or where none does, here."""
    environs = list(facts.server_environ.values()) or [facts.environ]
    if all(environ.get(ATTENTION_VARIABLE, "flashinfer") != "flashinfer" for environ in environs):
        return False
    rows = served.patches(facts) if facts.status is not None else []
    is_ours = any(row["patch"] == "sparse_decode" and row["state"] in ("READY", "APPLIED") for row in rows)
    return not is_ours or bool((served.told(facts, "settings") or {}).get("shadow"))


def _renorm(facts: Facts) -> Iterator[Finding]:
    """FlashInfer's top_k_renorm_probs, by which SGLang samples for min_p and verifies drafts of requests with top_k."""
    told = facts.versions.get("flashinfer-python")
    version = tuple(map(int, re.findall(r"\d+", told)[:3])) if told else ()
    if len(version) < 3 or version >= RENORM_RACES_BELOW:
        return
    if version < RENORM_HANGS_BELOW:
        cost = "can wait for ever on these cards (flashinfer #3610): the server stands still with the GPU at 100%"
        fix = "SGLang 0.5.16 or newer"
    else:
        cost = "may now and then count too few (flashinfer #5251): tokens outside of the top k, or too few of it"
        fix = "SGLang 0.5.22 or newer"
    found = f"FlashInfer {told}: what samples for requests with min_p, and verifies drafts of those with top_k,"
    yield warn("sampling", found, cost, f"{fix}, whose FlashInfer is mended; or no min_p, no top_k with speculation")


def _patches(facts: Facts) -> Iterator[Finding]:
    if facts.status is None:
        yield fail("patches", facts.status_problem or "unknown", "nothing is patched", "see the sentence itself")
        return
    broken = [f"{r['patch']}: {r['reason']}" for r in facts.status["patches"] if r["state"] == "BROKEN"]
    broken = report.by_reason(list(dict.fromkeys(broken)))
    unsupported = [r["reason"] for r in facts.status["patches"] if r["state"] == "UNSUPPORTED"]
    unreviewed = sorted({r["patch"] for r in facts.status["patches"] if r["review"].startswith("UNREVIEWED")})
    ready = sorted({r["patch"] for r in facts.status["patches"] if r["state"] == "READY"})
    off = {r["patch"]: r["reason"] for r in served.patches(facts) if r["state"] == "OFF"}
    if off:
        why = ", ".join(dict.fromkeys(off.values()))
        yield warn("switched off", f"{', '.join(off)} by {why}", "SGLang's own code runs there", "unset the variable")
        if not ready:
            return
    if facts.versions.get("sglang") is None and not ready:
        yield not_run("patches", "SGLang is not on this Python's path")
    elif broken:
        fix = "a release of deepseek_v4_sm120 for this SGLang, or DSV4_SM120_ON_BROKEN=warn"
        yield fail("patches", "; ".join(broken), "the server does not start", fix)
    elif unsupported:
        yield warn("patches", unsupported[0], "SGLang's own code runs", "another SGLang, or a newer deepseek_v4_sm120")
    elif unreviewed:
        yield warn(
            "patches",
            f"{', '.join(unreviewed)}: applied to code that nobody has looked at",
            "probably fine, not checked",
            "`status` says which version is known; check with DSV4_SM120_SHADOW=1",
        )
    else:
        yield (
            ok("patches", f"fit this SGLang: {', '.join(ready)}")
            if ready
            else not_run("patches", "none of them was looked for: nothing says that any fits")
        )


def _shadow(facts: Facts) -> Iterator[Finding]:
    settings = served.told(facts, "settings") or {}
    if shadow := settings.get("shadow"):
        kept = "ours are kept" if shadow == "ours" else "SGLang's are kept"
        cost = "every call of every operator runs ours and SGLang's, and compares them: the time of both"
        yield warn("shadow mode", f"DSV4_SM120_SHADOW={shadow}: {kept}", cost, "unset it; what it found is in `status`")


def _layers(facts: Facts) -> Iterator[Finding]:
    settings = served.told(facts, "settings") or {}
    if folder := settings.get("layers"):
        cost = "each step of up to 32 rows copies what its sublayers are given, whether anybody asks for it or not"
        yield warn("layers", f"DSV4_SM120_LAYERS={folder}", cost, "unset it once `layers` has said what it says")


def _defaults(facts: Facts) -> Iterator[Finding]:
    for row in served.told(facts, "defaults") or []:
        name = f"default {row['default']}"
        if row["state"] == "OFF" and row["reason"] == NOT_BY_DEFAULT:
            yield not_run(name, f"off: {row['why']}", f"to try it: DSV4_SM120_SET={row['default']}=on")
        elif row["state"] == "OFF":
            yield warn(name, f"off by {row['reason']}", row["why"], "remove it from DSV4_SM120_SET")
    unknown = (facts.status or {}).get("unknown_choices")
    if unknown:
        yield fail("DSV4_SM120_SET", unknown, "the server does not start", "a name of that list")


def _reproducible(facts: Facts) -> Iterator[Finding]:
    """Where it was asked for: what of the model still has another order of sums."""
    status = facts.status or {}
    defaults = served.told(facts, "defaults") or []
    if not any(row["default"] == "reproducible" and row["state"] in (ON, USER) for row in defaults):
        return
    in_place = {row["patch"] for row in served.patches(facts) if row["state"] in ("READY", "APPLIED")}
    missing = [name for name in REPRODUCIBLE if name not in in_place]
    told = [note for process in status["processes"] for note in process.get("notes", ()) if NOT_REPRODUCIBLE in note]
    costs = "the same prompt may be answered otherwise in another batch, or in other chunks"
    if missing:
        fix = "DSV4_SM120_SET without NAME=off, and with NAME=on where a profile leaves one out"
        yield fail("reproducible", f"SGLang's own are {', '.join(missing)}", costs, fix)
    elif told:
        yield fail("reproducible", told[0], costs, "what the line says of cards and links; or one card")
    else:
        found = "asked for, and every operator that it needs is ours; prompts take longer (4.12 s for 2.39, an H200)"
        yield ok("reproducible", found)


def _profile(facts: Facts) -> Iterator[Finding]:
    found = served.told(facts, "profile")
    if not found:
        yield not_run("profile", "none: the shipped defaults hold", "`calibrate` writes one for this machine")
        return
    if found["problem"]:
        fix = "write it again, or unset DSV4_SM120_PROFILE"
        yield fail("profile", found["problem"], "the server does not start", fix)
        return
    if found["warnings"]:
        yield warn("profile", found["warnings"][0], "it is not used", "`calibrate` on this machine")
        return
    if found["outdated"]:
        cost = "a verdict may be of a kernel that is another one now"
        yield warn("profile", found["outdated"], cost, "`calibrate` on this machine")
    told = profile.verdicts(found)
    wrong = {
        f"{operator}/{provider}": why
        for operator, reasons in found["wrong"].items()
        for provider, why in reasons.items()
    }
    crashed = [name for name, why in wrong.items() if why.startswith("crashed") and f"/{profile.OURS}" not in name]
    wrong = {name: why for name, why in wrong.items() if name not in crashed}
    if wrong:
        yield fail(
            "profile",
            f"{told}; " + "; ".join(f"{name} is wrong on this card: {why}" for name, why in wrong.items()),
            "ours are left out where they are wrong; a wrong one of SGLang's answers wrongly where it is used",
            "report it; where it is SGLang's own, choose another backend",
        )
    elif crashed:
        found = f"{told}; crashed under calibrate: {', '.join(crashed)}"
        yield warn("profile", found, "we do not use it; nothing else, unless a server does", "report it with the table")
    elif lost := [name for name, winner in found["winners"].items() if winner != profile.OURS]:
        yield warn(
            "profile",
            told,
            f"SGLang's own {', '.join(lost)} was faster here, and is used",
            "`calibrate` again with nothing else on the cards; where it stays so, tell us the figures",
        )
    else:
        yield ok("profile", told)


def _processes(facts: Facts) -> Iterator[Finding]:
    status = facts.status or {}
    processes = status.get("processes", [])
    for problem in filter(None, (status.get("report_problem"), *status.get("strange_reports", ()))):
        yield warn("reports", f"{REPORT}: {problem}", "not known what that server has applied", "a folder of its own")
    if not processes:
        ended = len(status.get("ended_processes", ()))
        none = f"{ended} reports, all of processes that have ended" if ended else "no reports"
        yield not_run("running servers", none, "start them and doctor with DSV4_SM120_REPORT=<the same folder>")
    elif unseen := [one for one in processes if one in status.get("unseen_processes", ())]:
        told = f"{len(unseen)} reports {lifetime.ELSEWHERE}"
        fix = f"doctor in the server's container; it goes by these: delete them in {REPORT} where they are old"
        yield not_run("running servers", f"{told}: not seen here whether they run", fix)
    if (count := len(set(facts.servers.values()))) > 1:
        told = f"reports of {count} servers: settings, defaults and profile are the first one's"
        yield not_run("running servers", told, "doctor --url <address of one>, for that one")
    for process in processes:
        applied = sorted({r["patch"] for r in process["patches"] if r["state"] == "APPLIED"})
        broken = sorted({r["patch"] for r in process["patches"] if r["state"] == "BROKEN"})
        name = f"process {process['pid']}"
        cards = [index for index, is_served in process.get("devices_served", {}).items() if is_served]
        if broken:
            yield fail(name, f"BROKEN: {', '.join(broken)}", "SGLang's own code runs there", "see `status`")
        elif differing := _differing(process):
            cost = "either is wrong, and answers with it"
            yield fail(
                name, f"in shadow mode: {differing}", cost, "`status` has the figures: tell us; until then NAME=off"
            )
        elif process.get("devices_served") and not cards:
            yield warn(name, "patched, but its GPU is not one that we serve", "SGLang's own code runs", "see GPU")
        else:
            yield ok(name, f"applied {', '.join(applied) or 'nothing yet'}")


def _left_to_sglang(facts: Facts) -> Iterator[Finding]:
    """Layers that an operator would have taken."""
    notes = [note for process in (facts.status or {}).get("processes", []) for note in process.get("notes", ())]
    for note in dict.fromkeys(note for note in notes if HANDED_OVER in note):
        fix = "the released checkpoint itself, without such a flag"
        yield warn("left to SGLang", note, "the time that the operator saves", fix)


def _differing(process: dict) -> str:
    """Which of our operators differ from the originals beside them, "" where none does or none was compared."""
    found: dict[str, int] = {}
    shadow = process.get("shadow")
    for row in shadow if isinstance(shadow, list) else ():
        told = [row.get(count) for count in ("bad_calls", "nonfinite_ours")] if isinstance(row, dict) else []
        if any(type(count) is int and count > 0 for count in told) and isinstance(row.get("patch"), str):
            found[row["patch"]] = found.get(row["patch"], 0) + max(told[0] if type(told[0]) is int else 0, 1)
    return ", ".join(f"{count} calls of {patch} are not what the original's are" for patch, count in found.items())


def _caches(facts: Facts) -> Iterator[Finding]:
    closed = [str(c.path) for c in facts.caches if c.is_closed]
    if closed:
        fix = "a home folder of this user's: docker run -e HOME=<its path>; no --read-only, no :ro mount there"
        yield fail("kernel caches", f"not this user's: {', '.join(closed)}", "SGLang stops where it compiles", fix)
        return
    lost = [c for c in facts.caches if not c.survives]
    empty = [c for c in facts.caches if not c.is_filled]
    cost = "6 layers started in 34 s with compiled kernels and in 355 s without; 43 layers take longer"
    if lost:
        mounts, where = volumes({c.variable: c.path for c in lost}), ", ".join(str(c.path) for c in lost)
        yield warn("kernel caches", f"in the container itself, lost with it: {where}", cost, f"docker run {mounts}")
    elif empty:
        yield warn(
            "kernel caches",
            f"empty, filled by the next start: {', '.join(str(c.path) for c in empty)}",
            cost,
            "start once before you need it; keep the folders",
        )
    else:
        yield ok("kernel caches", "filled, and they survive a restart")
