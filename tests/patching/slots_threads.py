"""Threads that take turns: one runs until it asks its queue for work or is between two pages, and only where the load
has it run. So a run of the load is the same each time."""

import queue
import threading


class Turns:
    """In place of the module `threading`, where a controller makes its threads."""

    known: list = []
    here = threading.local()

    def __getattr__(self, name):
        return getattr(threading, name)

    class Thread:
        def __init__(self, target, daemon=True, **_):
            self.go, self.back, self.alive = threading.Semaphore(0), threading.Semaphore(0), False
            self.failure = None
            self.thread = threading.Thread(target=self._run, args=(target,), daemon=True)

        def _run(self, target):
            Turns.here.mine = self
            self.go.acquire()
            try:
                target()
            except BaseException as problem:  # told where its turn was
                self.failure = problem
            self.alive = False
            self.back.release()

        def start(self):
            self.alive = True
            Turns.known.append(self)
            self.thread.start()

        def turn(self):
            self.go.release()
            self.back.acquire()
            if self.failure is not None:
                raise self.failure

        def is_alive(self):
            return self.alive

        def join(self, timeout=None):
            for _ in range(10000):
                if not self.alive:
                    break
                self.turn()
            Turns.known.remove(self)

    @staticmethod
    def rest():
        """The turn is another's, where this is one of these threads."""
        mine = getattr(Turns.here, "mine", None)
        if mine is not None:
            mine.back.release()
            mine.go.acquire()
        return mine is not None

    @staticmethod
    def advance(chance):
        for thread in list(Turns.known):
            for _ in range(chance.choice([0, 0, 1, 1, 2, 5, 20])):
                if thread.alive:
                    thread.turn()

    @staticmethod
    def reset():
        Turns.known = []


class Queue(queue.Queue):
    def get(self, block=True, timeout=None):
        if self.empty() and Turns.rest() and self.empty():
            raise queue.Empty
        return super().get(block and timeout is None and not self.empty(), None)
