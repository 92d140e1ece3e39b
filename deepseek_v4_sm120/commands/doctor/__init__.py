"""`python3 -m deepseek_v4_sm120 doctor`: what in this machine, container, environment or server costs speed or breaks.

facts.py     everything that is read, once: nvidia-smi, /sys, /proc, package versions, the reports of patched processes
probe.py     what only a GPU can tell: copies between peers, links under load; a process of its own, with a time limit
*_checks.py  pure functions from the facts to findings
server.py    --url: the running server's own answers
attached.py  --out: one file for an issue, of parts.py, each a process of its own; server_figures.py and server_log.py
"""
