"""--enable-torch-compile: our frames stay out of what torch compiles.

torch.compile traces whatever SGLang's forward calls, ours too: it looks through functools.cache, so that what a kernel
keeps may be made anew in a trace, and may take for fixed what is asked of a stream (is it under capture?) when it
traces. So its graphs end in front of our functions, which run as without it, captured graphs included, and go on behind
them; SGLang's own functions that ours call are compiled as ever.
"""

from deepseek_v4_sm120.sglang_patches import models_served

PACKAGE = "deepseek_v4_sm120"


def keep_out() -> None:
    """In a process whose model torch compiles: none of our files is traced."""
    if models_served.is_compiled():
        from torch._dynamo import trace_rules  # seconds to import, so only where it is needed

        trace_rules.add(PACKAGE)
