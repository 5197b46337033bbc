"""Answers the demo as ``dcpjax serve`` would, without a model. Writes its process id first.

usage: stand_in_server.py PID_FILE BEHAVIOUR PORT, where BEHAVIOUR is one of
answer, refuse (HTTP 400), break (end the stream early), fail (an error inside the stream),
die (at start), load (never ready)
"""

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PID_FILE, BEHAVIOUR, PORT = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
USAGE = {"prompt_tokens": 100, "completion_tokens": 4}
METRICS = f"""
# TYPE dcpjax:kv_bytes_per_rank gauge
dcpjax:kv_bytes_per_rank{{model_name="model"}} {11 * 16 * 2**20}
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{{model_name="model",block_size="16",num_gpu_blocks="10"}} 1
"""
TRANSFER = {
    "backend": "nixl",
    "num_bytes": 6 * 2**20,
    "seconds": 0.012,
    "bytes": [[2**20, 2 * 2**20], [0, 3 * 2**20]],
    "pieces": [[4, 5], [0, 6]],
    "parts": {"latent": 5 * 2**20, "indexer": 2**20},
}
MODELS = {"data": [{"id": "model"}]}


class Handler(BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Stay silent."""

    def do_GET(self) -> None:
        bodies = {
            "/health": "",
            "/v1/models": json.dumps(MODELS),
            "/metrics": METRICS,
            "/stats": json.dumps({"kv_transfer": {"last_transfer": TRANSFER}}),
        }
        status = 503 if BEHAVIOUR == "load" else 200
        self.reply(status, bodies[self.path])

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if BEHAVIOUR == "refuse":
            self.reply(400, json.dumps({"error": {"message": "the prompt is too long"}}))
            return
        pieces = [{"choices": [{"delta": {"content": word}}]} for word in ("It ", "is ", "here.")]
        events = [json.dumps(piece) for piece in pieces]
        if BEHAVIOUR == "answer":
            events += [json.dumps({"choices": [], "usage": USAGE}), "[DONE]"]
        if BEHAVIOUR == "fail":
            events.append(json.dumps({"error": {"message": "the engine stopped"}}))
        self.reply(200, "".join(f"data: {event}\n\n" for event in events))

    def reply(self, status: int, body: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())


PID_FILE.write_text(str(os.getpid()))
if BEHAVIOUR == "die":
    time.sleep(0.2)
    print("error: no such model (model='nowhere')", file=sys.stderr)
    sys.exit(2)
print("loading the weights", flush=True)
ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
