"""--enable-streaming-session, SGLang's own flag (off by default): what goes wrong with it, for `serve` and `doctor`."""

from collections.abc import Sequence

from deepseek_v4_sm120.commands.console import CommandError

FLAG, FIELD = "--enable-streaming-session", "enable_streaming_session"
DOES = (
    "turns read each other's tokens, or slots that nobody wrote, and idle sessions may keep the windows for which all "
    "others wait"
)
SOURCE = "0.5.23's own scheduler under random load on the CPU; others were not looked at"
INSTEAD = f"sessions without {FLAG}: the prefix cache has what they said"


def refuse_if_asked_for(words: Sequence[str], insist: bool) -> list[str]:
    """What is tolerated of a command line, in sentences; CommandError where it asks for this and nobody insists."""
    if FLAG not in words:
        return []
    text = f"{FLAG}: answers are wrong: {DOES} ({SOURCE}). Instead: {INSTEAD}"
    if not insist:
        raise CommandError(f"{text}; or --insist")
    return [text]
