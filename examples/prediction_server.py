"""A latency predictor for llm-d's router, from a file of `kvrsim predictor build`, without any package:

python prediction_server.py PREDICTOR --tpot-ms 12 --port 8001

It answers as the prediction server of llm-d-latency-predictor (POST /predict, /predict/bulk, /predict/bulk/strict, GET
/readyz, /healthz, /status), which the router's predicted-latency scorer asks at PREDICTION_SERVER_URL. Nothing is
trained. ttft_ms is the end that 9 of 10 prefills should not exceed, plus as much for each waiting request.
"""

import argparse
import json
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from read_predictor import predict

COUNTS = ("input_token_length", "num_request_waiting", "num_request_running", "num_tokens_generated")
SHARES = ("kv_cache_percentage", "prefix_cache_score")
ABOUT = {"model_type": "kvrsim", "objective_type": "quantile", "quantile": 0.9}
STARTED = datetime.now(UTC).isoformat()


def answer(grid: dict, tpot_ms: float, request: dict) -> dict:
    """The prediction for one request; ValueError for a field that is missing, wrong or outside the predictor."""
    for name in COUNTS:
        if not isinstance(request.get(name), int) or request[name] < 0:
            raise ValueError(f"{name}: a whole number of at least 0")
    for name in SHARES:
        if not isinstance(request.get(name), (int, float)) or not 0 <= request[name] <= 1:
            raise ValueError(f"{name}: a number from 0 to 1")
    least = grid["new_tokens"][0]
    tokens = max(least, request["input_token_length"])
    cached = int(request["prefix_cache_score"] * tokens)
    found = predict(grid, tokens, min(cached, tokens - least, grid["cached_prefix"][-1]))
    ttft_ms = 1000 * found["ttft_high_s"] * (1 + request["num_request_waiting"])
    now = datetime.now(UTC).isoformat()
    return {"ttft_ms": ttft_ms, "tpot_ms": tpot_ms, "predicted_at": now, **ABOUT, "last_model_load": STARTED}


def answers(grid: dict, tpot_ms: float, requests: list) -> dict:
    """The predictions for many requests; None and an error for each that has none."""
    predictions, errors = [], []
    for index, request in enumerate(requests):
        try:
            predictions.append(answer(grid, tpot_ms, request))
        except ValueError as error:
            predictions.append(None)
            errors.append({"index": index, "error": str(error), "request": request})
    failed = len(errors)
    counts = {"total_requests": len(requests), "successful_predictions": len(requests) - failed}
    return {"predictions": predictions, "errors": errors, **counts, "failed_predictions": failed}


def server(grid: dict, tpot_ms: float, port: int) -> ThreadingHTTPServer:
    """The server, which serves when `serve_forever` is called."""

    class Handler(BaseHTTPRequestHandler):
        def reply(self, status: int, content: dict) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            if self.path == "/healthz":
                self.reply(200, {"status": "ok", "service": "kvrsim"})
            elif self.path == "/readyz":
                self.reply(200, {"status": "ready", **ABOUT})
            elif self.path == "/status":
                models = {"ttft_model": True, "tpot_model": True}
                about = {"is_ready": True, **ABOUT, "last_model_load": STARTED}
                self.reply(200, {**about, "training_server_url": "", "models_exist": models})
            else:
                self.reply(404, {"detail": "Not Found"})

        def do_POST(self) -> None:
            try:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path == "/predict":
                    self.reply(200, answer(grid, tpot_ms, request))
                elif self.path == "/predict/bulk":
                    self.reply(200, {**answers(grid, tpot_ms, request["requests"]), "processing_time_ms": 0.0})
                elif self.path == "/predict/bulk/strict":
                    strict = [answer(grid, tpot_ms, one) for one in request["requests"]]
                    counts = {"total_requests": len(strict), "successful_predictions": len(strict)}
                    self.reply(
                        200, {"predictions": strict, **counts, "failed_predictions": 0, "processing_time_ms": 0.0}
                    )
                else:
                    self.reply(404, {"detail": "Not Found"})
            except (ValueError, KeyError, TypeError) as error:
                self.reply(400, {"detail": str(error)})

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="TTFT for llm-d's router")
    parser.add_argument("predictor", help="a file of kvrsim predictor build")
    parser.add_argument("--tpot-ms", type=float, required=True, help="milliseconds per output token, which you know")
    parser.add_argument("--port", type=int, default=8001)
    arguments = parser.parse_args()
    with open(arguments.predictor) as file:
        server(json.load(file), arguments.tpot_ms, arguments.port).serve_forever()
