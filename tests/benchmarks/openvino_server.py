"""A thin service of OpenVINO GenAI: OpenAI's streamed chats in front of its ContinuousBatchingPipeline.

    python openvino_server.py DIRECTORY SLOTS PORT THREADS

It runs in the environment of the peer (`compare/peers.py`), so it imports nothing of this project. One thread makes the
pipeline's steps, and writes each token to its caller's socket itself: there is no queue, and no thread to wake.
"""

import json
import queue
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import openvino_genai

POSITIONS, KV_BLOCK = 512, 32  # of a sequence; tokens of a block on a CPU


class Chat:
    """A caller's request, until its last token was written."""

    def __init__(self, prompt, max_tokens, write):
        self.prompt, self.max_tokens, self.write = prompt, max_tokens, write
        self.handle, self.ended = None, threading.Event()


class Service:
    """Owns the pipeline; `steps` is the only thread that calls it, once it runs."""

    def __init__(self, directory, slots, threads):
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.num_kv_blocks = slots * POSITIONS // KV_BLOCK
        scheduler.max_num_seqs = slots
        scheduler.enable_prefix_caching = True
        properties = {"INFERENCE_NUM_THREADS": threads}
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(directory, scheduler, "CPU", properties)
        self.tokenizer = self.pipeline.get_tokenizer()
        self.new = queue.SimpleQueue()

    def steps(self):
        """Makes steps while there is anything to do."""
        running, number = [], 0
        while True:
            while not self.new.empty() or not running:
                chat = self.new.get()
                number += 1
                settings = openvino_genai.GenerationConfig(
                    max_new_tokens=chat.max_tokens, ignore_eos=True, do_sample=False
                )
                chat.handle = self.pipeline.add_request(number, chat.prompt, settings)
                running.append(chat)
            self.pipeline.step()
            for chat in running:
                while chat.handle.can_read():
                    for output in chat.handle.read().values():
                        chat.write(self.tokenizer.decode(list(output.generated_ids)))
                if chat.handle.get_status() != openvino_genai.GenerationStatus.RUNNING:
                    chat.ended.set()
            running = [chat for chat in running if not chat.ended.is_set()]


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    service = None

    def do_GET(self):  # http.server's name
        """Health."""
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self):
        """A streamed chat."""
        fields = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = self.service.tokenizer.apply_chat_template(fields["messages"], add_generation_prompt=True)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        chat = Chat(prompt, fields["max_tokens"], self._write)
        self.service.new.put(chat)
        chat.ended.wait()
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def _write(self, text):
        chunk = json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]}, separators=(",", ":"))
        self.wfile.write(f"data: {chunk}\n\n".encode())

    def log_message(self, *_):
        """Nothing is logged."""


class Server(ThreadingHTTPServer):
    """With room for callers that all connect at once."""

    request_queue_size = 128
    daemon_threads = True


def main():
    """Serves until it is ended."""
    directory, slots, port, threads = sys.argv[1], *map(int, sys.argv[2:5])
    Handler.service = service = Service(directory, slots, threads)
    threading.Thread(target=service.steps, daemon=True).start()
    Server(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
