"""A device's streams without a device: what is put on one runs in its order, and late.

An event is where a stream was; who waits for it has that stream run up to there. Nothing else runs but by `advance`,
so that a copy is as late as its order allows.
"""

from collections import deque


class Stream:
    def __init__(self, *_, **__):
        self.waiting, self.put, self.done = deque(), 0, 0
        Device.streams.append(self)

    def add(self, work):
        self.waiting.append(work)
        self.put += 1

    def run_to(self, place):
        while self.done < place:
            work = self.waiting.popleft()
            self.done += 1
            work()

    def synchronize(self):
        self.run_to(self.put)

    def wait_stream(self, other):
        if other is not self and isinstance(other, Stream):
            place = other.put
            self.add(lambda: other.run_to(place))

    def wait_event(self, event):
        stream, place = event.stream, event.place
        if stream is not None and stream is not self:
            self.add(lambda: stream.run_to(place))

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event


class Event:
    def __init__(self, *_, **__):
        self.stream, self.place = None, 0

    def record(self, stream=None):
        self.stream = stream or Device.current_stream()
        self.place = self.stream.put

    def query(self):
        return self.stream is None or self.stream.done >= self.place

    def synchronize(self):
        if self.stream is not None:
            self.stream.run_to(self.place)

    def wait(self, stream=None):
        (stream or Device.current_stream()).wait_event(self)

    def elapsed_time(self, _):
        return 0.0


class Within:
    def __init__(self, stream):
        self.stream = stream

    def __enter__(self):
        Device.stack.append(self.stream)

    def __exit__(self, *_):
        Device.stack.pop()


class Device:
    """In place of torch.cuda."""

    __name__ = "streams"
    streams: list = []
    stack: list = []
    Stream, Event, StreamContext = Stream, Event, Within
    stream = Within

    @staticmethod
    def current_stream(*_, **__):
        return Device.stack[-1]

    @staticmethod
    def synchronize(*_, **__):
        for stream in list(Device.streams):
            stream.synchronize()

    @staticmethod
    def reset():
        Device.streams, Device.stack = [], []
        Device.stack.append(Stream())

    @staticmethod
    def advance(chance):
        """Some work of some streams."""
        for stream in list(Device.streams):
            if stream.waiting and chance.random() < 0.5:
                stream.run_to(stream.done + chance.randint(1, len(stream.waiting)))


Device.reset()
