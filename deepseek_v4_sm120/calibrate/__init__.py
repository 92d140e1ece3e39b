"""`python3 -m deepseek_v4_sm120 calibrate`: every implementation of every operator on this card, checked, then timed.

provider.py        what an implementation is
<operator>.py      cases, inputs, reference and providers of one operator; OPERATORS lists them
worker.py          one provider of one operator in a process of its own: a crash is a result, not the end
command.py         runs the workers, decides, prints the table, writes the profile (patching/profile.py reads it)
"""

OPERATORS = ("sparse_decode",)  # each a module here; a new operator is one file and its name in this list
