"""The stages `products2_same`, `products4_same`, `products2_43` and `products4_43` of run_stage.py: the compressors'
products dealt to two and four cards, and whole on all. To the last bit, at six layers, by log-probabilities and by
EAGLE's text; and a step of one and of eight streams, by peers' memory and by the host's."""

import prompt_times

ISSUE = 24
SETTING = "dealt_products"
CARDS = {2: "two cards", 4: "four cards"}
WORDS = {"dealt": "products dealt", "whole": "products whole"}
WAYS = {"": "sums by NVLink", "_host": "sums through host memory"}
SAME, TEXT = "same_{}_products{}", "text_{}_products{}_eagle314"
SAMES = [
    row
    for n, cards in CARDS.items()
    for row in (
        (f"{cards}, products dealt against whole", SAME.format("dealt", n), SAME.format("whole", n)),
        (f"{cards}, products dealt, in batches, behind its first half, and once more", *[SAME.format("dealt", n)] * 2),
    )
]
TEXTS = [
    (f"{cards}, EAGLE, 3 drafts, products dealt against whole", TEXT.format("dealt", n), TEXT.format("whole", n))
    for n, cards in CARDS.items()
]
TIMED = {f"{how}_products{n}_43{way}": (n, how, way) for n in CARDS for way in WAYS for how in WORDS}
STREAMS = ("1", "8")
EXPERTS = 32
STEP, SHARE = "step_ms_middle_round", "decode step, median of rounds in turn, of the whole's"
MOST = 1.0  # of the whole's step by NVLink: reckoned 0.975 to 0.985 at one stream of two cards
# Products of graphs count once, at their capture: of each size and its warm-ups four layers of six have one, 41 of 43.
# Reports are written at powers of two
PRODUCTS = {one.format("dealt", n): 16 for one in (SAME, TEXT) for n in CARDS}
PRODUCTS |= {name: 64 for name, (_, how, _) in TIMED.items() if how == "dealt"}
IMPLEMENTATIONS = {
    **{SAME.format(how, n): f"ours, reproducible, {CARDS[n]}, {WORDS[how]}" for how in WORDS for n in CARDS},
    **{
        TEXT.format(how, n): f"ours, reproducible, EAGLE 3/1/4, {CARDS[n]}, {WORDS[how]}"
        for how in WORDS
        for n in CARDS
    },
    **{name: f"ours, {CARDS[n]}, {WAYS[way]}, {WORDS[how]}" for name, (n, how, way) in TIMED.items()},
}


def stages(make, timed, same, text, sets, ours, no_peers):
    """timed, same, text: cards -> options of the three kinds of engines with our sums; text: speculating."""
    few = sets(json_model_override_args=f'{{"n_routed_experts": {EXPERTS}}}')
    few += ["--mem", "0.97", "--rounds", "3", "--max-total-tokens", "100000", "--bs", *STREAMS, "--phases", "bench"]

    def choices(*said):
        return ours | {"DSV4_SM120_SET": ",".join(filter(None, said))} if any(said) else ours

    def of(how):
        return f"{SETTING}=on" if how == "dealt" else None

    def kinds(n):
        # in turn: engines that answer at once on the same cards wait for each other's ranks (cards_stage.py)
        return [
            make(name.format(how, n), options, environment=choices("reproducible=on", of(how)), takes_turns=True)
            for name, options in ((SAME, same(n)), (TEXT, text(n)))
            for how in WORDS
        ]

    def steps(n):
        return [
            make(
                name,
                [*timed(n), *few],
                environment=choices("all_reduce=host" if way else None, of(how)) | (no_peers if way else {}),
                takes_turns=True,
            )
            for name, (cards, how, way) in TIMED.items()
            if cards == n
        ]

    return {f"products{n}_same": kinds(n) for n in CARDS} | {f"products{n}_43": steps(n) for n in CARDS}


def rows(cases, row):
    """collect.py's rows of the cases of a stage. row: its maker of rows."""
    found = [
        prompt_times.counted(
            *(name, cases[name]["reports"], SETTING, "products", "products dealt"),
            *(IMPLEMENTATIONS[name], PRODUCTS.get(name), row),
        )
        for name in cases
        if name in IMPLEMENTATIONS
    ]
    for name, (n, how, way) in TIMED.items():
        for streams in STREAMS if name in cases and how == "dealt" else ():
            dealt, whole = (
                cases.get(one, {}).get("rows", {}).get(streams, {}).get(STEP)
                for one in (name, f"whole_products{n}_43{way}")
            )
            value = dealt / whole if dealt and whole else None  # a bar without what it is of is missed
            case = f"flash43e64, {EXPERTS} experts, batch {streams}, 1K context"
            found.append(row(case, IMPLEMENTATIONS[name], SHARE, value, None if way else MOST, ISSUE))
    return found
