def add_arguments(parser):
    pass
def run(a):
    return 0
