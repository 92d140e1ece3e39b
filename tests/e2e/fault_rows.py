"""What collect.py says of the stage `faults2` (faults_stage.py): what became of servers that something was done to, and
what they left."""

from __future__ import annotations

ISSUE = 20
END_BARS = {"stopped": 10.0}  # seconds until all of a server has ended; of the others 15


def rows(row, stages: list) -> list:
    """stages: `faults` of each stage file."""
    return [one for stage in stages for one in stage_rows(row, stage)]


def stage_rows(row, faults: dict) -> list:
    found = []

    def add(case, metric, value, bar=None):
        found.append(row(f"faults, two cards, {case}", "ours, every operator on", metric, value, bar, ISSUE))

    for case, seen in faults["cases"].items():
        if "not_shown" in seen:
            add(case, f"not shown: {seen['not_shown']}", None)
            continue
        add(case, "broke", int(bool(seen.get("problem"))), 0)
        for name, metric, bar in (
            ("seconds_to_the_end", "seconds until all its processes have ended", END_BARS.get(case, 15.0)),
            ("answers", "answers", None),
            ("differ", "answers that differ", 0),
            ("differ_in_a_bit", "answers with another bit", None),
            ("differ_from_the_prefix_cache", "answers from the prefix cache with another text", None),
            ("client_s", "seconds until its client knew", None),
            ("stalled_s", "seconds that rank 1 stood still", None),
            ("startup_s", "seconds to start again", None),
            ("given_back_mib", "memory given back, MiB", None),
        ):
            if name in seen:
                compared = name != "differ" or seen["answers"] > 0  # of none, none differs
                add(case, metric, seen[name] if compared else None, bar)
        if "processes_left" in seen:
            add(case, "processes left", len(seen["processes_left"]), 0)
        if seen.get("is_named") is not None:
            add(case, "messages that lack who ended", int(not seen["is_named"]), 0)
        if seen.get("is_named_in_a_sum") is not None:
            missing = int(not seen["is_named_in_a_sum"])
            # nothing is demanded: whoever outlives a rank may be waiting for it in SGLang's own broadcast of requests
            add(case, "messages that lack rank, call and sum", missing)
    add("all servers", "servers whose sums were not ours", sum(not ways for ways in faults["ways"].values()), 0)
    left = faults["left"]
    add("all ended", "entries left in /dev/shm, but for SGLang's own", len(left["shm"]), 0)
    kinds = left["shm_of_sglang"]
    told = f"SGLang's own entries left in /dev/shm ({', '.join(f'{kind}*' for kind in kinds) or 'none'})"
    add("all ended", told, sum(map(len, kinds.values())))
    add("all ended", "processes left", len(left["processes"]), 0)
    was_looked_at = "" if left["gpu_mib"] is not None else ": not looked at, nothing here says it"
    add("all ended", f"memory left on the cards, MiB{was_looked_at}", left["gpu_mib"], 64)
    return found
