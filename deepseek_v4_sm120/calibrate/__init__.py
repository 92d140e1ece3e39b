"""`python3 -m deepseek_v4_sm120 calibrate`: every implementation of every operator on this card, checked, then timed.

provider.py        what an implementation is
<operator>.py      cases, inputs, error against the reference, and providers of one operator
worker.py          one provider of one operator in a process of its own: a crash is a result, not the end
command.py         runs the workers, decides, prints the table, writes the profile (patching/profile.py reads it)
"""

from pathlib import Path

from deepseek_v4_sm120 import OPS

# Every operator that has a file here, in the order of OPS; test_calibrate.py says what the file must have.
OPERATORS = tuple(op for op in OPS if Path(__file__).with_name(f"{op}.py").is_file())
