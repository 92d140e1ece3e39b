"""The fake server's engine: a deterministic "model" with a few scripted skills, a prefix cache, faults to order."""

from __future__ import annotations

import random
import re
import threading
import time
import zlib
from collections.abc import Callable

from bench.quality.arithmetic import shipped_problems
from bench.serving.prompts import prose
from tests.serving.fake_scheduler import Batch, Requests

FAULTS = {
    "wrong_logits": "log-probabilities and sometimes the greatest token are off",
    "spec_corrupt": "with eight requests and more in flight, a token of some answers is another one",
    "tie_flip": "takes the second token where two are exactly as likely",
    "batch_variant": "answers depend on how many requests are in flight",
    "ignores_temperature": "a sampled answer is the greedy one",
    "sampled_beside": "a greedy answer is drawn where a request beside it is",
    "forgets": "does not find what stands in the first half of a long prompt",
    "bad_math": "every answer is one too high",
    "foreign_script": "Chinese words in English text",
    "frozen": "the same token again and again",
    "broken_markup": "half of a tool call's markup in plain text",
    "markup_leak": "the tool call's markup also stands in content",
    "reasoning_leak": "</think> and the reasoning stand in content",
    "broken_arguments": "a tool call's arguments are no JSON",
    "empty_call": "asked for a tool call, gives none",
    "stream_differs": "the streamed tool call has other arguments",
    "lost_tool_delta": "the streamed tool call never comes",
    "cached_everything": "reports every prompt as found in the cache",
    "no_radix": "keeps no prefixes",
    "short_answers": "stops at half of the tokens asked for",
    "no_text": "gives token ids only, as with --skip-tokenizer-init",
    "no_tokenizer": "cannot tokenize",
    "vllm_routes": "tokenizes at /tokenize and knows no /v1/tokenize",
    "no_server_info": "has no /server_info",
    "error_500": "every completion fails",
    "hang": "never answers a completion",
    "die_mid_stream": "after `die_after` completions the server dies within the next one",
    "rejects_logprobs": "log-probabilities are refused, as by some speculation modes",
}
_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body information"
)
WORDS = _TEXT.split()
FOREIGN = ("的时候", "因为", "我们")
PIECE = re.compile(r"<[｜/][^>]*>|</?think>|\s*[^\s<]+|\s+|<")
BLOCK = 64  # tokens of a cached block
SLICE_S = 0.01  # of waiting
EOS = 1


def token_of(piece: str) -> int:
    return zlib.crc32(piece.encode()) & 0x7FFFFFFF


class Tokens:
    """Text to ids and back; ids that no text was seen for are written w123."""

    def __init__(self):
        self.pieces: dict[int, str] = {}
        for word in [" " + word for word in WORDS] + [" " + word for word in FOREIGN]:
            self.pieces[token_of(word)] = word

    def ids(self, text: str) -> list[int]:
        found = []
        for piece in PIECE.findall(text):
            found.append(token_of(piece))
            self.pieces[found[-1]] = piece
        return found

    def text(self, ids) -> str:
        return "".join(self.pieces.get(i, f" w{i}") for i in ids)


class Engine:
    """What is behind the HTTP: one 'GPU' that one request uses at a time, a prefix cache, a model."""

    def __init__(
        self,
        faults=(),
        step_s=0.0,
        prefill_s=0.0,
        accept_length=1,
        die_after=0,
        on_death=None,
        max_running=64,
        quiet_s=0.0,
        stream_interval=1,
    ):
        """`quiet_s`: with company, and of the first request after a flush, no token is made until so long after the
        last arrival, as an engine that prefills first would do, and no answer ends until so long after the last first
        token, so that clients on a busy machine see that they ran at once (`settle`). `stream_interval`: tokens an
        event. The rest: main's help.
        """
        unknown = set(faults) - set(FAULTS)
        assert not unknown, f"no such fault: {unknown}"
        self.faults, self.step_s, self.prefill_s = set(faults), step_s, prefill_s
        self.accept_length, self.die_after, self.on_death = accept_length, die_after, on_death
        self.tokens = Tokens()
        self.gpu, self.count = threading.Lock(), threading.Lock()
        self.quiet_s, self.stream_interval = quiet_s, stream_interval
        self.arrived_s = self.begun_s = 0.0  # the last request's arrival, and the last first token
        self.flushed = False
        self.max_running, self.running = max_running, threading.BoundedSemaphore(max_running)
        self.active = self.completions = self.max_active = 0
        self.cached: set[int] = set()
        self.ended = threading.Event()
        self.requests, self.batch = Requests(), Batch()
        self.script = {problem.question: problem.answer for problem in shipped_problems()}

    # --- the model

    def scripted(self, text: str) -> str | None:
        asked = re.findall(r"What is the secret number of (\w+)\?", text)
        if asked:
            told = list(re.finditer(rf"The secret number of {asked[-1]} is (\d+)\.", text))
            if told and "forgets" in self.faults and told[-1].start() < len(text) / 2:
                return " I do not know."
            return f" The secret number is {told[-1].group(1)}." if told else " I do not know."
        for question, answer in self.script.items():
            if text.rstrip().endswith("Answer:") and question in text.rsplit("Question:", 1)[-1]:
                return f" We count. #### {answer + ('bad_math' in self.faults)}"
        if "Answer in English." in text[-100:]:  # the soak's requests: English, of some length
            seed = zlib.crc32(text.encode())
            begins = re.search(r'Begin with the words "([^"]+)"', text[-200:])
            return f" {begins.group(1) if begins else ''} {prose(60 + seed % 200, seed)}"
        return None

    def samples(self, sampling: dict) -> bool:
        """Whether an answer with these parameters is drawn."""
        return sampling.get("temperature", 0) > 0 and "ignores_temperature" not in self.faults

    def spoiled(self, tokens: list[int]) -> list[int]:
        """A scripted answer with the faults that an answer word by word has."""
        if "foreign_script" in self.faults:
            foreign = [token_of(" " + word) for word in FOREIGN]
            tokens = [foreign[place % 3] if place % 9 == 8 else token for place, token in enumerate(tokens)]
        return tokens[:5] + [tokens[4]] * (len(tokens) - 5) if "frozen" in self.faults else tokens

    def candidates(self, state: int) -> list[tuple[float, int]]:
        """The twenty best (log-probability, id) after the tokens whose hash is `state`."""
        source = random.Random(state)
        words = source.sample(WORDS, 20)
        gap = 0.0 if state % 11 == 0 else 0.5 + source.random()
        logprobs = [-0.4, *(-0.4 - gap - 0.3 * rank for rank in range(19))]
        ids = [token_of(" " + word) for word in words]
        if "wrong_logits" in self.faults:
            logprobs = sorted((min(0.0, value + source.gauss(0, 0.5)) for value in logprobs), reverse=True)
            if state % 3 == 0:
                ids[0], ids[1] = ids[1], ids[0]
        return list(zip(logprobs, ids, strict=True))

    def steps(self, ids: list[int], limit: int, ignore_eos: bool, samples: bool = False):
        """(id, log-probability, top twenty) of each new token. `samples`: any of the ten best is chosen."""
        script = self.scripted(self.tokens.text(ids))
        if script is not None and not ignore_eos:
            for token in self.spoiled(self.tokens.ids(script)[:limit]):
                yield token, -0.01, [(-0.01, token), *((-6.0 - i, token_of(" " + WORDS[i])) for i in range(19))]
            return
        state = 0
        for token in ids:  # a function of the whole context, wherever the prompt ends
            state = zlib.crc32(token.to_bytes(4, "little"), state)
        if "short_answers" in self.faults:
            limit = max(1, limit // 2)
        last = None
        for position in range(limit):
            top = self.candidates(state)
            logprob, token = top[0]
            if samples:
                logprob, token = random.choice(top[:10])
            if "tie_flip" in self.faults and top[0][0] == top[1][0]:
                logprob, token = top[1]
            if "spec_corrupt" in self.faults and self.active >= 8 and position == 5 and top[0][0] - top[7][0] > 1:
                logprob, token = top[7]
            if "batch_variant" in self.faults and self.active >= 4 and position >= 3:
                logprob, token = top[1 + position % 3]
            if "sampled_beside" in self.faults and position >= 3 and self.requests.any_samples():
                logprob, token = top[1 + position % 3]
            if "foreign_script" in self.faults and position % 9 == 8:
                token = token_of(" " + FOREIGN[position % 3])
            if "frozen" in self.faults and position > 4:
                token = last
            last = token
            yield token, next((value for value, one in top if one == token), logprob), top
            state = zlib.crc32(token.to_bytes(4, "little"), state)

    # --- the machine

    def find_cached(self, ids: list[int]) -> int:
        """Tokens of the longest known prefix, and remember this one."""
        if "cached_everything" in self.faults:
            return len(ids)
        state, longest, known = 0, 0, []
        for place in range(0, len(ids) - BLOCK, BLOCK):
            state = zlib.crc32(repr(ids[place : place + BLOCK]).encode(), state)
            known.append(state)
            if state in self.cached and longest == place:
                longest = place + BLOCK
        if "no_radix" not in self.faults:
            self.cached.update(known)
        return longest

    def enter(self) -> None:
        with self.count:
            self.completions += 1
            self.active += 1
            self.arrived_s = time.monotonic()
            self.max_active = max(self.max_active, self.active)

    def leave(self) -> None:
        with self.count:
            self.active -= 1

    def is_dying(self) -> bool:
        return "die_mid_stream" in self.faults and self.completions > self.die_after

    def die(self) -> None:
        self.ended.set()
        if self.on_death:
            self.on_death()

    def prefill(self, num_tokens: int) -> None:
        with self.gpu:
            time.sleep(self.prefill_s * num_tokens)

    def settle(self, last: Callable[[], float]) -> None:
        """With company: wait until nothing has come for quiet_s, `last` says when something did. A slice that took
        longer counts less: where the machine keeps us waiting, it keeps the clients waiting as well.
        """
        seen, quiet = last(), 0.0
        while quiet < self.quiet_s and (self.active > 1 or self.flushed):
            before = time.monotonic()
            time.sleep(SLICE_S)
            if last() != seen:
                seen, quiet = last(), 0.0
            else:
                quiet += SLICE_S**2 / (time.monotonic() - before)

    def step(self, first: bool, last: bool) -> None:
        """The time that a token takes; whether it is the first or the last of its answer."""
        if not self.step_s:
            return
        with self.gpu:
            pass  # a prefill that runs is waited for, as in an engine without chunks
        if first:
            self.settle(lambda: self.arrived_s)
            self.flushed, self.begun_s = False, time.monotonic()
        self.batch.step()
        if last:
            self.settle(lambda: self.begun_s)
        time.sleep(self.step_s)
