"""Runs where PYTHONPATH has this folder in place of the one around it: ends what would be SGLang without us."""

import os
import sys

is_chained = hasattr(sys, "_deepseek_v4_sm120_sitecustomize")  # the outer one ran
if __name__ == "sitecustomize" and not is_chained and os.environ.get("DSV4_SM120") != "off":
    sys.stderr.write(
        f"deepseek_v4_sm120: {os.path.dirname(os.path.abspath(__file__))} on PYTHONPATH is the package itself; mount "
        "the folder around it, build/, and put that on PYTHONPATH\n"
    )
    os._exit(1)
