"""Stand-in: names only, no tokenizer is loaded on our way."""


class PreTrainedTokenizerBase:
    pass


AutoProcessor = AutoTokenizer = PreTrainedTokenizer = PreTrainedTokenizerFast = PreTrainedTokenizerBase
