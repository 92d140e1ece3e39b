"""What a running server's reports say of its own settings: those of who asks may be others, as behind `serve`."""

from __future__ import annotations

from deepseek_v4_sm120.commands.doctor.facts import Facts


def told(facts: Facts, name: str):
    """What a running server says of itself in the first of its reports; where none does, what holds for this process,
    whose variables may be others than the server's. Reports are files that anybody may have written."""
    own = (facts.status or {}).get(name)
    for process in (facts.status or {}).get("processes", []):
        if name in process and _SHAPES[name](process[name]):
            return process[name]
    return own


def patches(facts: Facts) -> list[dict]:
    """A running server's, where its report has all that this process would look at."""
    own, served = facts.status["patches"], told(facts, "patches")
    return served if {row["patch"] for row in own} <= {row["patch"] for row in served} else own


def _are_rows(found, *texts: str) -> bool:
    is_list = isinstance(found, list) and all(isinstance(row, dict) for row in found)
    return is_list and all(isinstance(row.get(name), str) for row in found for name in texts)


_SHAPES = {
    "patches": lambda found: _are_rows(found, "patch", "state", "reason"),
    "defaults": lambda found: _are_rows(found, "default", "state", "reason", "why"),
    "settings": lambda found: isinstance(found, dict),
    "profile": lambda found: found is None or _is_profile(found),
}


def _is_profile(found) -> bool:
    if not isinstance(found, dict) or not isinstance(found.get("warnings"), list):
        return False
    maps = [found.get(name) for name in ("winners", "left_out", "wrong")]
    if not all(isinstance(one, dict) for one in maps):
        return False
    winners, left_out, wrong = (list(one.values()) for one in maps)
    reasons = [why for one in wrong if isinstance(one, dict) for why in one.values()]
    ways = [way for one in left_out if isinstance(one, list) for way in one]
    texts = [*winners, *reasons, *ways, *found["warnings"]]
    texts += [found[name] for name in ("problem", "outdated") if found.get(name) is not None]
    are_nested = all(isinstance(one, dict) for one in wrong) and all(isinstance(one, list) for one in left_out)
    return are_nested and {"problem", "outdated"} <= found.keys() and all(isinstance(text, str) for text in texts)
