"""What users run: `python3 -m deepseek_v4_sm120 doctor|selftest|calibrate|plan|serve|status`, and what those share."""

import sys

if sys.version_info < (3, 10):  # noqa: UP036 before any module is read whose syntax these do not know
    found = f"{sys.executable} is {sys.version.split()[0]}"
    sys.stderr.write(f"deepseek_v4_sm120 needs Python 3.10 or newer, {found}; run this in SGLang's image\n")
    sys.exit(2)
