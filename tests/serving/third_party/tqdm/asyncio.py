"""Stand-in: bars are off."""


class tqdm:
    pass
