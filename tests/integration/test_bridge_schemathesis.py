"""Requests made up from the bridge's own OpenAPI, valid and invalid: answered as it says, never 5xx, never a hang."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode, checks
from schemathesis.specs.openapi import checks as openapi_checks
from schemathesis.specs.openapi.schemas import OpenApiSchema

if TYPE_CHECKING:
    from integration.conftest import Bridge, StartBridge, StartSidecar

SCRIPT = {
    "model": {"name": "toy", "max_model_len": 2048, "vocab_size": 49152, "eos_token_ids": [2]},
    "calls": [{"steps": [{"token_ids": [34, 216]}, {"token_ids": [2], "finish_reason": "stop"}]}],
    "repeat": True,
}
CHECKS: list[Any] = [
    checks.not_a_server_error,
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_schema_conformance,
]
UNLIKELY = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
EXAMPLES = 12
TIMEOUT_SECONDS = 10


@pytest.fixture(scope="module")
def bridge(start_bridge: StartBridge, start_sidecar: StartSidecar) -> Bridge:
    return start_bridge(a=start_sidecar(SCRIPT).address).wait_healthy()


@pytest.fixture(scope="module")
def openapi(bridge: Bridge) -> Any:
    loaded = schemathesis.openapi.from_url(f"{bridge.client.base_url}/openapi.json")
    # schemathesis would load that class's module here only, beside threads of other tests, which has run into a fault
    # of CPython 3.11's parser with two threads at once ("AST constructor recursion depth mismatch").
    assert isinstance(loaded, OpenApiSchema)
    return loaded


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_it_keeps_to_its_openapi(openapi: Any, bridge: Bridge, mode: GenerationMode, subtests: pytest.Subtests) -> None:
    operations = [found.ok() for found in openapi.get_all_operations()]
    if mode is GenerationMode.NEGATIVE:
        # Where there is no body, nothing can be wrong with it; under a tape's path the bodies are the same.
        operations = [it for it in operations if it.body and not it.path.startswith("/tapes/")]
    assert {"/tokenize", "/v1/chat/completions", "/v1/completions"} <= {operation.path for operation in operations}
    for operation in operations:

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(max_examples=EXAMPLES, derandomize=True, database=None, suppress_health_check=UNLIKELY)
        def keeps_to_it(case: Any) -> None:
            case.call_and_validate(checks=CHECKS, timeout=TIMEOUT_SECONDS)

        with subtests.test(operation.label):
            keeps_to_it()
    assert "Traceback" not in bridge.log
    assert bridge.chat().status_code == 200
