"""`python3 -m deepseek_v4_sm120 plan`: does the model fit these cards, with which flags, how fast at best.

models.py    the shapes of the two models, or those of a config.json
memory.py    bytes: weights of a rank, pools as SGLang sizes them, scratch
roofline.py  the least time of a decode step, and published figures
launch.py    the command line, each flag with its reason
"""
