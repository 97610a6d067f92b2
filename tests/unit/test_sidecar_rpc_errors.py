"""The table of the sidecar's edge is whole."""

from __future__ import annotations

import grpc
import pytest

from tokentape_sidecar import errors
from tokentape_sidecar.rpc_errors import STATUS_OF

# Raised before there is a server.
NEVER_SERVED = {errors.EngineNotLoaded}


RETRIED = {errors.EngineDead, errors.EngineStalled, errors.EngineBusy, errors.ShuttingDown, errors.WeightsBroken}
SERVED = [error for error in errors.TokentapeError.__subclasses__() if error not in NEVER_SERVED]


@pytest.mark.parametrize("error", SERVED)
def test_every_error_has_its_status(error: type[errors.TokentapeError]) -> None:
    assert error in STATUS_OF
    assert STATUS_OF[error] not in {grpc.StatusCode.OK, grpc.StatusCode.UNKNOWN, grpc.StatusCode.CANCELLED}


def test_no_error_is_derived_from_another_so_that_the_table_needs_no_order() -> None:
    assert not [error for error in STATUS_OF if error.__subclasses__()]


@pytest.mark.parametrize("error", sorted(RETRIED, key=str))
def test_only_what_a_client_may_retry_is_unavailable_E13(error: type[errors.TokentapeError]) -> None:
    unavailable = {error for error, status in STATUS_OF.items() if status is grpc.StatusCode.UNAVAILABLE}
    assert unavailable == RETRIED
    assert error in unavailable
