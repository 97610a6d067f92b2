"""The ways to read tokens that `bench.compare` puts side by side."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One way to read tokens."""

    name: str
    server: str
    """The servers that it is read from: one of `compare.Servers`' kinds."""
    client: str
    """One of `clients.CLIENTS`."""
    streamed: bool = True


ROWS = {
    "generate-many": Row("tokentape-sidecar, `GenerateMany`", "sidecar", "generate-many"),
    "generate": Row("tokentape-sidecar, `Generate`", "sidecar", "generate"),
    "bridge-completions": Row("tokentape-bridge, completions, SSE", "bridge", "completions"),
    "bridge-chat": Row("tokentape-bridge, chat, SSE", "bridge", "chat"),
    "bridge-chat-whole": Row("tokentape-bridge, chat, not streamed", "bridge", "chat, whole", streamed=False),
    "smg": Row("smg-grpc-servicer, streamed", "smg", "smg"),
    "smg-whole": Row("smg-grpc-servicer, not streamed", "smg", "smg, whole", streamed=False),
    "http-completions": Row("vLLM HTTP, completions, SSE", "http", "completions"),
    "http-chat": Row("vLLM HTTP, chat, SSE", "http", "chat"),
    "http-chat-whole": Row("vLLM HTTP, chat, not streamed", "http", "chat, whole", streamed=False),
    "http-tokens": Row("vLLM HTTP, /inference/v1/generate, SSE", "http", "tokens"),
    "http-tokens-whole": Row(
        "vLLM HTTP, /inference/v1/generate, not streamed", "http", "tokens, whole", streamed=False
    ),
}
