"""Prefill and decode in processes of their own, on two cards of a host (SGLang's disaggregation).

The engine of engine_case.py decodes; beside it runs the same script once more, with the arguments of `--prefill` too,
and prefills. Both are asked the same under the same rooms, through the prefill process's bootstrap server. Its requests
come by its standard input, a line each; what it answers goes back through a pipe, because all that it and SGLang print
belongs to the log, where each of its lines begins with `[prefill]`.
"""

import json
import os
import shutil
import subprocess
import sys
import threading

HERE = os.path.dirname(os.path.abspath(__file__))
HOST = "127.0.0.1"
MARK = "[prefill] "
# behind the port of the engine that decodes, whose NCCL_PORT (run_stage.py) is between them
OWN_PORT, BOOTSTRAP_PORT, NCCL_PORT = 20, 40, 120
SHELF = "E2E_JIT_SHELF"
END_S = 30.0


class Prefill:
    """The process, from the side of the engine that decodes. given: NAME=JSON, its arguments; argv: the own ones."""

    def __init__(self, given, argv, name, port):
        self.port, self.rooms = port + BOOTSTRAP_PORT, 0
        ports = {"port": port + OWN_PORT, "nccl_port": port + NCCL_PORT, "disaggregation_bootstrap_port": self.port}
        words = [*given, *(f"{key}={value}" for key, value in ports.items())]
        reads, writes = os.pipe()
        line = [sys.executable, os.path.join(HERE, "engine_case.py"), *argv, "--prefill", "--name", f"{name}_prefill"]
        line += [part for word in words for part in ("--set", word)]
        self.process = subprocess.Popen(
            [*line, "--answers-to", str(writes)],
            **dict.fromkeys(("stdin", "stdout"), subprocess.PIPE),
            stderr=subprocess.STDOUT,
            env=os.environ | own_shelf(),
            pass_fds=(writes,),
            text=True,
            errors="replace",
        )
        os.close(writes)
        self.told = os.fdopen(reads)
        self.log = threading.Thread(target=self.show, daemon=True)
        self.log.start()

    def show(self):
        for line in self.process.stdout:
            print(f"{MARK}{line}", end="", flush=True)

    def receive(self):
        line = self.told.readline()
        if not line:
            self.log.join(END_S)  # its own error first
            raise RuntimeError(f"the process that prefills has ended, exit {self.process.wait(END_S)}")
        return json.loads(line)

    def generate(self, engine, asked):
        """What the engine answers to prompts that the other process prefills, and what that one said of them."""
        count = len(asked["input_ids"])
        rooms = list(range(self.rooms + 1, self.rooms + count + 1))
        self.rooms += count
        asked = asked | {"bootstrap_host": HOST, "bootstrap_port": self.port, "bootstrap_room": rooms}
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        return engine.generate(**asked), self.receive()

    def end(self):
        self.process.stdin.close()
        self.process.wait(END_S)
        self.log.join(END_S)


def own_shelf():
    """A copy for its own: two engines that add the same module would collide."""
    full = os.environ.get(SHELF)
    if not full or not os.path.isdir(full):
        return {}
    return {SHELF: shutil.copytree(full, f"{full}_prefill", dirs_exist_ok=True)}


def serve(engine, answers_to):
    """In the process that prefills: until nobody asks any more."""
    with os.fdopen(answers_to, "w") as told:

        def tell(what):
            told.write(json.dumps(what) + "\n")
            told.flush()

        tell("up")
        for line in sys.stdin:
            ends = [answer["meta_info"].get("finish_reason") for answer in engine.generate(**json.loads(line))]
            tell([(end or {}).get("type") for end in ends])
