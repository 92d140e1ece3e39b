"""The stages `products2_same` and `products2_43` of run_stage.py: the compressors' products dealt to two cards, and
whole on both. To the last bit, at six layers, by log-probabilities and by EAGLE's text; and a step of one and of eight
streams, by peers' memory and by the host's."""

import prompt_times

ISSUE = 24
SETTING = "dealt_products"
WORDS = {"dealt": "products dealt", "whole": "products whole"}
WAYS = {"": "sums by NVLink", "_host": "sums through host memory"}
DEALT, WHOLE = "same_dealt_products2", "same_whole_products2"
DEALT_TEXT, WHOLE_TEXT = "text_dealt_products2_eagle314", "text_whole_products2_eagle314"
SAMES = [
    ("two cards, products dealt against whole", DEALT, WHOLE),
    ("two cards, products dealt, in batches, behind its first half, and once more", DEALT, DEALT),
]
TEXTS = [("two cards, EAGLE, 3 drafts, products dealt against whole", DEALT_TEXT, WHOLE_TEXT)]
TIMED = {f"{how}_products2_43{way}": (how, way) for way in WAYS for how in WORDS}
STREAMS = ("1", "8")
EXPERTS = 32
STEP, SHARE = "step_ms_middle_round", "decode step, median of rounds in turn, of the whole's"
MOST = 1.0  # of the whole's step by NVLink: reckoned 0.975 to 0.985 at one stream
# Products of graphs count once, at their capture: of each size and its warm-ups four layers of six have one, 41 of 43.
# Reports are written at powers of two
PRODUCTS = {DEALT: 16, DEALT_TEXT: 16, **{name: 64 for name, (how, _) in TIMED.items() if how == "dealt"}}
IMPLEMENTATIONS = {
    **{name: f"ours, reproducible, two cards, {WORDS[how]}" for name, how in ((DEALT, "dealt"), (WHOLE, "whole"))},
    DEALT_TEXT: f"ours, reproducible, EAGLE 3/1/4, two cards, {WORDS['dealt']}",
    WHOLE_TEXT: f"ours, reproducible, EAGLE 3/1/4, two cards, {WORDS['whole']}",
    **{name: f"ours, two cards, {WAYS[way]}, {WORDS[how]}" for name, (how, way) in TIMED.items()},
}


def stages(make, timed, same, text, sets, ours, no_peers):
    """timed, same, text: options of the three kinds of engines, over two cards with our sums; text: speculating."""
    timed = [*timed, *sets(json_model_override_args=f'{{"n_routed_experts": {EXPERTS}}}'), "--mem", "0.97"]
    timed += ["--rounds", "3", "--max-total-tokens", "100000", "--bs", *STREAMS, "--phases", "bench"]

    def choices(*said):
        return ours | {"DSV4_SM120_SET": ",".join(filter(None, said))} if any(said) else ours

    def of(how):
        return f"{SETTING}=on" if how == "dealt" else None

    return {
        # in turn: engines that answer at once on the same cards wait for each other's ranks (cards_stage.py)
        "products2_same": [
            make(
                name.format(how),
                options,
                environment=choices("reproducible=on", of(how)),
                takes_turns=True,
            )
            for name, options in (("same_{}_products2", same), ("text_{}_products2_eagle314", text))
            for how in WORDS
        ],
        "products2_43": [
            make(
                name,
                timed,
                environment=choices("all_reduce=host" if way else None, of(how)) | (no_peers if way else {}),
                takes_turns=True,
            )
            for name, (how, way) in TIMED.items()
        ],
    }


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
    for name, (how, way) in TIMED.items():
        for streams in STREAMS if name in cases and how == "dealt" else ():
            dealt, whole = (
                cases.get(one, {}).get("rows", {}).get(streams, {}).get(STEP)
                for one in (name, f"whole_products2_43{way}")
            )
            value = dealt / whole if dealt and whole else None  # a bar without what it is of is missed
            case = f"flash43e64, {EXPERTS} experts, batch {streams}, 1K context"
            found.append(row(case, IMPLEMENTATIONS[name], SHARE, value, None if way else MOST, ISSUE))
    return found
