"""Which numbers of rows the dense layers take: those of a step, whatever it is; a prompt's are SGLang's."""

from __future__ import annotations

from deepseek_v4_sm120.ops.shared.limits import STEP_ROWS


def are_ours(rows: int) -> bool:
    return 0 < rows <= STEP_ROWS
