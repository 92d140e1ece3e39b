"""Whether what a fix touches is our model's on our cards: asked by processes that have a card, and by those that answer
over HTTP, where no GPU is asked."""

from deepseek_v4_sm120.sglang_patches import device_gate, models_served

ENCODING = "dsv4"  # DeepSeek-V4's prompts; V4.1 and V3.2 have others


def is_ours() -> bool:
    """In a process that has a card: our own model on one that we serve."""
    return models_served.announced() is not None and device_gate.serves_current_device()


def decides_alike(stages: int) -> bool:
    """In a process that has a card: whether all cards of our own model decide as we have one decide, by what all of
    them see in the same step: not with several stages of a pipeline, nor with hosts of which one may be without us."""
    return stages == 1 and not models_served.may_have_unlike_hosts() and is_ours()


def is_our_encoding(spec: str | None) -> bool:
    """In a process that answers over HTTP: our own model's prompts, and cards that we serve."""
    return spec == ENCODING and models_served.has_served_card()


def answers_for_ours(serving) -> bool:
    """The same of an OpenAIServingChat, and of what else knows its chat_encoding_spec."""
    return is_our_encoding(serving.chat_encoding_spec)
