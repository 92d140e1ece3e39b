"""What collect.py says of the stage `shortage` (shortage_stage.py)."""

from __future__ import annotations

ISSUE, END_S = 23, 60.0  # SGLang's own processes wait for one another where a start fails
OURS = "ours, every operator on"


def rows(row, stages: list) -> list:
    """stages: `shortage` of each stage file."""
    return [one for stage in stages for one in stage_rows(row, stage)]


def stage_rows(row, stage: dict) -> list:
    found = []

    def add(case, metric, value, bar=None):
        found.append(row(f"shortage, {case}", OURS, metric, value, bar, ISSUE))

    for case, seen in (stage["cases"] | stage["broke"]).items():
        add(case, "broke", int("problem" in seen), 0)
        if "problem" in seen:
            add(case, f"broke: {seen['problem'][:200]}", None)
            continue
        if "disk" in seen:
            add(case, f"the disk: {seen['disk']}", None)
        if "started" in seen:
            add(case, "started all the same", int(seen["started"]))
        if "seconds_to_the_end" in seen:
            add(case, "seconds until all its processes have ended", seen["seconds_to_the_end"], END_S)
            add(case, "processes left", len(seen["processes_left"]), 0)
        if "is_said" in seen:
            add(case, "logs that lack what ran out", int(not seen["is_said"]), 0)
        for name, metric, bar in (
            ("told", "times that it was said", None),
            ("answered", "long prompts answered", None),
            ("refused", "long prompts refused", None),
            ("hung", "long prompts without an end", 0),
            ("no_shortage", "no shortage was seen", 0),
            ("other_long", "long prompts answered otherwise than with all of the memory", 0),
            ("ended", "ended under it", None),
            ("restart_s", "seconds to start again", None),
            ("answers", "answers", None),
        ):
            if name in seen:
                add(case, metric, int(seen[name]) if isinstance(seen[name], bool) else seen[name], bar)
        if "answers" in seen or case != "full_cache":  # a server that did not start answers nothing
            add(case, "answers that differ", seen.get("differ") if seen.get("answers") else None, 0)
    add("all ended", "processes left", len(stage["processes"]), 0)
    return found
