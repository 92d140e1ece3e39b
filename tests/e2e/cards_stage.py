"""The stages `reproducible2`, `reproducible4` and `reproducible8` (two, four, eight cards) of run_stage.py, and with 43
layers, whose routers choose, `reproducible43_2`, `reproducible43_4` and `reproducible43_8`: with
DSV4_SM120_SET=reproducible=on every log-probability to the last bit by chunks and with the prefix cache, and the same
text with EAGLE as without."""

WORDS = {2: "two cards", 4: "four cards", 8: "eight cards"}
# (layers, as the runs' names have them, cards): words
KINDS = {("", cards): words for cards, words in WORDS.items()}
KINDS |= {("43", cards): f"{words}, 43 layers" for cards, words in WORDS.items()}
RUNS = {
    "same": {"8192": "chunks of 8,192", "512": "chunks of 512, prefix cache"},
    "text": {"plain": "without speculation", "eagle314": "EAGLE 3/1/4"},
}


def _name(phase, layers, cards, run):
    return f"{phase}{layers}_tp{cards}_{run}"


def _names(phase, run):
    """{what of the cards: the run's name}"""
    return {words: _name(phase, *kind, run) for kind, words in KINDS.items()}


IMPLEMENTATIONS = {
    name: f"ours, reproducible, {f'{how}, {words}' if phase == 'same' else f'{words}, {how}'}"
    for phase, runs in RUNS.items()
    for run, how in runs.items()
    for words, name in _names(phase, run).items()
}
TEXTS = [
    (f"EAGLE, 3 drafts, {words}", name, _names("text", "plain")[words])
    for words, name in _names("text", "eagle314").items()
]
SAMES = [
    (f"{words}, chunks of 512, prefix cache", name, _names("same", "8192")[words])
    for words, name in _names("same", "512").items()
]
WITHIN = [*_names("same", "8192").values()]  # runs that are compared with themselves, too


def stages(make, sums, options, environment):
    """In turn: cards that two engines share at once answer many times as slowly (seen at TP4), as a rank's kernels wait
    for those of others. sums: (cards, *options) -> options of several; options: {layers: {run: options}}."""
    return {
        f"reproducible{f'{layers}_' if layers else ''}{cards}": [
            make(
                _name(phase, layers, cards, run),
                sums(cards, *options[layers][run]),
                environment=environment,
                takes_turns=True,
            )
            for phase, runs in RUNS.items()
            for run in runs
        ]
        for layers, cards in KINDS
    }
