"""Which numbers of rows the dense layers take: those of a step, whatever it is; a prompt's are SGLang's, but where a
server is to be reproducible."""

from __future__ import annotations

import sys

from deepseek_v4_sm120.ops.shared.limits import STEP_ROWS
from deepseek_v4_sm120.settings import settings

MOST_ROWS = sys.maxsize if settings().reproducible else STEP_ROWS  # once: torch.compile traces what asks


def are_ours(rows: int) -> bool:
    return 0 < rows <= MOST_ROWS
