"""What users run: `python3 -m deepseek_v4_sm120 doctor|selftest|layers|calibrate|plan|serve|status`, and what they
share."""

import sys

if sys.version_info < (3, 10):  # noqa: UP036 before any module is read whose syntax these do not know
    found = f"{sys.executable} is {sys.version.split()[0]}"
    sys.stderr.write(f"deepseek_v4_sm120 needs Python 3.10 or newer, {found}; run this in SGLang's image\n")
    sys.exit(2)

from deepseek_v4_sm120.ops.shared import extension  # noqa: E402

told = extension.absent_sources()  # of half a folder any module may be the one that is missing
if told is not None:
    sys.stderr.write(f"deepseek_v4_sm120: {told}\n")
    sys.exit(2)
