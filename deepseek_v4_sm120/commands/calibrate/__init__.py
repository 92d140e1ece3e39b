"""`python3 -m deepseek_v4_sm120 calibrate`: every implementation of every operator on this card, checked, then timed.

specs/<operator>.py   what there is to run: cases of a plan, providers, inputs, what is allowed
worker.py             providers one after the other in a process of its own: a crash is a result, not the end
command.py            runs the workers, ours first, then stock, then the others; decides, prints the table, writes the
                      profile (patching/profile.py reads it), also of what was reached when the time is over
"""
