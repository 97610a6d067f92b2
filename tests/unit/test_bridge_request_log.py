from __future__ import annotations

import httpx
from fastapi.responses import PlainTextResponse

from tokentape_bridge import metrics
from tokentape_bridge.request_log import RequestLog


async def test_methods_that_clients_make_up_are_counted_as_one() -> None:
    transport = httpx.ASGITransport(RequestLog(PlainTextResponse("coffee")))
    async with httpx.AsyncClient(transport=transport, base_url="http://bridge") as client:
        for method in ("BREW", "WHEN", "PROPFIND"):
            assert (await client.request(method, "/")).status_code == 200
    counted = [line for line in metrics.exposition().decode().splitlines() if line.startswith("http_requests_total{")]
    assert [line for line in counted if 'method="other"' in line]
    assert not any("BREW" in line or "WHEN" in line or "PROPFIND" in line for line in counted)
