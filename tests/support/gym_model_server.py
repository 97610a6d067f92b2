"""NeMo Gym's own model servers in one process, each under its name: `python gym_model_server.py SERVERS READY_FILE`.

Runs in Gym's environment, which has nothing of ours. SERVERS is a JSON file with the configuration of each by name.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount


def main() -> None:
    servers: dict[str, dict[str, Any]] = json.loads(Path(sys.argv[1]).read_text())
    head = {"host": "127.0.0.1", "port": 1}  # Nothing asks it.
    model = {
        name: {"responses_api_models": {"vllm_model": {"entrypoint": "app.py", **head, **config}}}
        for name, config in servers.items()
    }
    os.environ["NEMO_GYM_CONFIG_DICT"] = json.dumps({"head_server": head, **model})

    # Gym reads the environment when it is imported, and is not there where types are checked.
    gym: Any = import_module("nemo_gym.server_utils")
    model_class: Any = import_module("responses_api_models.vllm_model.app").VLLMModel

    def app_of(name: str) -> Any:
        os.environ["NEMO_GYM_CONFIG_PATH"] = name
        client = gym.ServerClient(
            head_server_config=gym.BaseServerConfig(**head), global_config_dict=gym.get_global_config_dict()
        )
        server = model_class(config=model_class.load_config_from_global_config(), server_client=client)
        app = server.setup_webserver()
        server.setup_exception_middleware(app)
        return app

    app = Starlette(routes=[Mount(f"/{name}", app_of(name)) for name in servers])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        ready = Path(sys.argv[2])
        ready.with_suffix(".new").write_text(f"http://{host}:{port}")
        ready.with_suffix(".new").rename(ready)
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])


if __name__ == "__main__":
    main()
