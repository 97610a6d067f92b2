"""A program in NeMo Gym's place: it takes the same command line and its servers answer at the same routes.

For what a node does when Gym dies, hangs, or does not start; what Gym itself does is for `tests/real`.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

import httpx
import psutil

from tokentape_executor.node import GymSpec

_GYM = """#!{python}
import http.server, json, os, subprocess, sys, threading, time

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        answer = self.server.answers.get(self.path)
        body = json.dumps(answer).encode()
        self.send_response(200 if answer is not None else 404)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.do_GET()
    def log_message(self, *_):
        pass

def server(port, answers):
    made = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
    made.answers = answers
    return made

if sys.argv[1] == "agent":
    agent = server(0, {{"/": {{}}, "/run": {{"reward": 1.0, "by": os.getpid()}}}})
    print(agent.server_port, flush=True)
    agent.serve_forever()

options = dict(word.lstrip("+").split("=", 1) for word in sys.argv[3:])
tries = os.path.join(os.path.dirname(__file__), "tries")
with open(tries, "a") as file:
    file.write("x")
match options["config_paths"].strip("[]"), os.path.getsize(tries):
    case "failing", _:
        sys.exit("the environment has no such server")
    case "slow", _:
        time.sleep(300)
    case "port_taken", 1:
        print("[Errno 98] error while attempting to bind on address: address already in use", flush=True)
        time.sleep(300)
    case "only_once", count if count > 1:
        sys.exit("once was enough")
agent = subprocess.Popen([sys.executable, __file__, "agent"], stdout=subprocess.PIPE)
port = int(agent.stdout.readline())
config = {{name: options[name] for name in ("policy_base_url", "policy_model_name", "uv_venv_dir") if name in options}}
config["echo"] = {{"responses_api_agents": {{"simple_agent": {{"host": "127.0.0.1", "port": port}}}}}}
instances = [{{"host": "127.0.0.1", "port": port}}]
head = server(
    int(options["head_server.port"]),
    {{"/global_config_dict_yaml": json.dumps(config), "/server_instances": instances}},
)
print("Gym serves", flush=True)
head.serve_forever()
"""


def make_gym(venv: Path, *, version: str = "0.4.0") -> Path:
    """Make what looks like a virtual environment with nemo-gym; return it."""
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "activate").touch()
    _make_program(venv / "bin" / "python", f"#!/bin/sh\necho {version}\n")
    _make_program(venv / "bin" / "gym", _GYM.format(python=sys.executable))
    for kind in ("resources_servers", "responses_api_agents", "responses_api_models"):
        (venv / "lib" / "python3.13" / "site-packages" / kind / "one").mkdir(parents=True)
    return venv


def _make_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def gym_spec(venv: Path, behaviour: str = "normal") -> GymSpec:
    return GymSpec(venv, (behaviour,), (), "toy")


def gym_processes(venv: Path) -> dict[str, psutil.Process]:
    """The processes `gym` and `agent`, as far as they run."""
    found: dict[str, psutil.Process] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if str(venv / "bin" / "gym") in words[:2] and process.status() != psutil.STATUS_ZOMBIE:
                found["agent" if words[2] == "agent" else "gym"] = process
    return found


@contextlib.contextmanager
def running_gym(venv: Path, port: int, **options: str) -> Generator[str]:
    """Run it as somebody else does, its head server at `port`; its URL."""
    words = [f"+{name}={value}" for name, value in {"head_server.port": str(port), **options}.items()]
    process = subprocess.Popen([venv / "bin" / "gym", "env", "start", "+config_paths=[normal]", *words])
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 20
        while True:
            with contextlib.suppress(httpx.HTTPError):
                httpx.get(f"{url}/server_instances", trust_env=False)
                break
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield url
    finally:
        for each in [*psutil.Process(process.pid).children(), psutil.Process(process.pid)]:
            each.kill()
        process.wait()
