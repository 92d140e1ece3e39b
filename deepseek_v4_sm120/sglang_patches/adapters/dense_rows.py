"""Which numbers of rows the dense layers take: those of a step, whatever it is; a prompt's are SGLang's, but where a
server is to be reproducible."""

from __future__ import annotations

from deepseek_v4_sm120.ops.shared.limits import STEP_ROWS
from deepseek_v4_sm120.settings import settings


def are_ours(rows: int) -> bool:
    return rows > 0 and (rows <= STEP_ROWS or settings().reproducible)
