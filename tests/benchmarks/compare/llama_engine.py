"""llama.cpp as an engine of the comparison: fixed batches by command, and a service over ZeroMQ for the same clients.

Runs in the peers' environment:

    python -m tests.benchmarks.compare.llama_engine MODEL.gguf --address ipc:///tmp/x --n-slots 32 --n-ctx-seq 2048

One thread does all: commands, messages, and a step whenever there is work. The messages are those of proto/README.md.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgpack
import zmq

from tests.benchmarks.compare.command_lines import CommandLines
from tests.benchmarks.compare.llama_decoder import N_BATCH, LlamaDecoder
from tests.benchmarks.compare.llama_slots import LlamaSlots, SlotRequest

HEARTBEAT_S = 1.0


class FixedBatches:
    """What is asked by command; every sequence is free before and after."""

    def __init__(self, decoder: LlamaDecoder) -> None:
        self._decoder = decoder

    def prefill(self, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Prompt tokens a second until each has its first token, n_batch tokens at a time."""
        slots, started_at = LlamaSlots(self._decoder, len(prompts)), time.perf_counter()
        for prompt in prompts:
            slots.add(SlotRequest(prompt, 1, lambda index, token: None, lambda request: None))
        while not slots.is_idle:
            slots.step()
        elapsed = time.perf_counter() - started_at
        return {"tok_s": sum(map(len, prompts)) / elapsed}

    def decode(self, prompts: Sequence[Sequence[int]], steps: int, copies: bool) -> dict[str, Any]:
        """Decode tokens a second of all together.

        Args:
            copies: prefill the first prompt only and give every sequence a copy: what they hold differs, what a step
                costs does not.
        """
        decoder, count = self._decoder, len(prompts)
        tokens = []
        for seq_id, prompt in enumerate(prompts):
            if copies and seq_id:
                decoder.seq_cp(0, seq_id)
                tokens.append(tokens[0])
            else:
                tokens += self._evaluate(seq_id, prompt)
        lengths = [len(prompts[0]) if copies else len(prompt) for prompt in prompts]
        tokens = self._step(tokens, lengths, 0)  # copies are carried out by the first step
        started_at = time.perf_counter()
        for step in range(1, steps + 1):
            tokens = self._step(tokens, lengths, step)
        elapsed = time.perf_counter() - started_at
        for seq_id in range(count):
            decoder.seq_rm(seq_id)
        return {"tok_s": count * steps / elapsed}

    def greedy(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> dict[str, Any]:
        """The answers, each alone."""
        answers = []
        for prompt in prompts:
            tokens = self._evaluate(0, prompt)
            for position in range(len(prompt), len(prompt) + max_tokens - 1):
                tokens += self._decoder.step([(0, tokens[-1:], position, True)])
            self._decoder.seq_rm(0)
            answers.append(tokens)
        return {"answers": answers}

    def _evaluate(self, seq_id: int, prompt: Sequence[int]) -> list[int]:
        for start in range(0, len(prompt), N_BATCH):
            chunk = prompt[start : start + N_BATCH]
            drawn = self._decoder.step([(seq_id, chunk, start, start + len(chunk) == len(prompt))])
        return drawn

    def _step(self, tokens: Sequence[int], lengths: Sequence[int], step: int) -> list[int]:
        return self._decoder.step(
            [(seq_id, (token,), lengths[seq_id] + step, True) for seq_id, token in enumerate(tokens)]
        )


class Service:
    """The slots behind a ROUTER socket."""

    def __init__(self, decoder: LlamaDecoder, slots: LlamaSlots, address: str) -> None:
        self._decoder = decoder
        self.slots = slots
        self.socket = zmq.Context.instance().socket(zmq.ROUTER)
        self.socket.sndhwm = 0  # a ROUTER drops what is beyond it
        self.socket.bind(address)
        self._calls: dict[tuple[bytes, int], SlotRequest] = {}
        self._beat_at = 0.0

    def receive(self) -> None:
        """Acts on every message that is there."""
        while True:
            try:
                identity, data = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            match msgpack.unpackb(data, strict_map_key=False):
                case [0, msgid, "stream", [params, *_]]:
                    self._start(identity, msgid, params)
                case [0, msgid, method, *_]:
                    self._send(identity, [1, msgid, {"code": "unknown_method", "message": method}, None])
                case [2, "cancel", [msgid]]:
                    request = self._calls.pop((identity, msgid), None)
                    if request is not None:
                        self.slots.cancel(request)
                        error = {"code": "cancelled", "message": "by the client"}
                        self._send(identity, [1, msgid, error, None])

    def beat(self) -> None:
        """Tells clients with open calls, each second, that they are not forgotten."""
        now = time.monotonic()
        if now - self._beat_at >= HEARTBEAT_S:
            self._beat_at = now
            for identity in {identity for identity, _ in self._calls}:
                self._send(identity, [2, "heartbeat", []])

    def _start(self, identity: bytes, msgid: int, params: dict[str, Any]) -> None:
        texts: list[str] = []

        def on_token(index: int, token: int) -> None:
            texts.append(self._decoder.text(token))
            self._send(identity, [2, "token", [msgid, index, token, texts[-1]]])

        def on_end(request: SlotRequest) -> None:
            del self._calls[identity, msgid]
            usage = {
                "prompt_tokens": len(request.prompt),
                "completion_tokens": len(request.answer),
                "cached_tokens": request.cached_tokens,
            }
            result = {
                "text": "".join(texts),
                "token_ids": request.answer,
                "finish_reason": "length",
                "usage": usage,
            }
            self._send(identity, [1, msgid, None, result])

        prompt, max_tokens = params["token_ids"], params["max_tokens"]
        if len(prompt) + max_tokens > self._decoder.n_ctx_seq:
            error = {"code": "prompt_too_long", "message": f"a sequence has {self._decoder.n_ctx_seq} positions"}
            self._send(identity, [1, msgid, error, None])
            return
        request = SlotRequest(prompt, max_tokens, on_token, on_end)
        self._calls[identity, msgid] = request
        self.slots.add(request)

    def _send(self, identity: bytes, message: list[Any]) -> None:
        self.socket.send_multipart([identity, msgpack.packb(message)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--address", required=True)
    parser.add_argument("--n-slots", type=int, required=True)
    parser.add_argument("--n-ctx-seq", type=int, required=True)
    parser.add_argument("--n-threads", type=int, required=True)
    parser.add_argument("--flash-attention", action="store_true")
    options = parser.parse_args()
    lines = CommandLines()
    decoder = LlamaDecoder(
        options.model,
        n_seq=options.n_slots + 1,
        n_ctx_seq=options.n_ctx_seq,
        n_threads=options.n_threads,
        flash_attention=options.flash_attention,
    )
    batches, service = FixedBatches(decoder), Service(decoder, LlamaSlots(decoder, options.n_slots), options.address)

    def keep_prefix(tokens: Sequence[int]) -> dict[str, Any]:
        service.slots.keep_prefix(tokens)
        return {}

    handlers = {
        "prefill": batches.prefill,
        "decode": batches.decode,
        "greedy": batches.greedy,
        "keep_prefix": keep_prefix,
    }
    lines.reply({"system": decoder.system_info()})
    poller = zmq.Poller()
    poller.register(service.socket, zmq.POLLIN)
    poller.register(lines.fileno(), zmq.POLLIN)
    while True:
        ready = dict(poller.poll(None if service.slots.is_idle else 0))
        if lines.fileno() in ready:
            try:
                commands = lines.receive()
            except EOFError:
                return
            for command in commands:
                lines.reply(handlers[command.pop("do")](**command))
        service.receive()
        service.beat()
        if not service.slots.is_idle:
            service.slots.step()


if __name__ == "__main__":
    main()
