"""ControlService: from request to operation, from state to response."""

from __future__ import annotations

import hashlib

from tokentape.v1 import control_pb2, control_pb2_grpc
from tokentape_sidecar.calls import Calls
from tokentape_sidecar.control import Control
from tokentape_sidecar.control_states import State
from tokentape_sidecar.engine import Engine
from tokentape_sidecar.engine_controls import PauseMode
from tokentape_sidecar.errors import InvalidArgument
from tokentape_sidecar.interceptors import Context
from tokentape_sidecar.tape import Tape
from tokentape_sidecar.tape_store import TapeStore

_MODES = {
    control_pb2.PAUSE_MODE_KEEP: PauseMode.KEEP,
    control_pb2.PAUSE_MODE_WAIT: PauseMode.WAIT,
    control_pb2.PAUSE_MODE_ABORT: PauseMode.ABORT,
}
_STATES = {
    State.RUNNING: control_pb2.ENGINE_STATE_RUNNING,
    State.PAUSED: control_pb2.ENGINE_STATE_PAUSED,
    State.ASLEEP: control_pb2.ENGINE_STATE_ASLEEP,
    State.UPDATING_WEIGHTS: control_pb2.ENGINE_STATE_UPDATING_WEIGHTS,
    State.WEIGHTS_BROKEN: control_pb2.ENGINE_STATE_WEIGHTS_BROKEN,
    State.STALLED: control_pb2.ENGINE_STATE_STALLED,
    State.DEAD: control_pb2.ENGINE_STATE_DEAD,
}


class ControlServicer(control_pb2_grpc.ControlServiceServicer):
    """Serves `tokentape.v1.ControlService`."""

    def __init__(self, *, control: Control, engine: Engine, calls: Calls, tapes: TapeStore) -> None:
        self._control = control
        self._engine = engine
        self._calls = calls
        self._tapes = tapes

    async def PauseGeneration(
        self, request: control_pb2.PauseGenerationRequest, context: Context
    ) -> control_pb2.PauseGenerationResponse:
        """Stop sampling."""
        del context
        await self._control.pause(_mode(request.mode), clear_cache=not request.keep_prefix_cache)
        return control_pb2.PauseGenerationResponse()

    async def ResumeGeneration(
        self, request: control_pb2.ResumeGenerationRequest, context: Context
    ) -> control_pb2.ResumeGenerationResponse:
        """Sample again."""
        del request, context
        await self._control.resume()
        return control_pb2.ResumeGenerationResponse()

    async def UpdateWeights(
        self, request: control_pb2.UpdateWeightsRequest, context: Context
    ) -> control_pb2.UpdateWeightsResponse:
        """Load a checkpoint."""
        del context
        await self._control.update_weights(request.directory, request.weight_version)
        return control_pb2.UpdateWeightsResponse()

    async def SetWeightVersion(
        self, request: control_pb2.SetWeightVersionRequest, context: Context
    ) -> control_pb2.SetWeightVersionResponse:
        """Name the present weights."""
        del context
        await self._control.set_weight_version(request.weight_version)
        return control_pb2.SetWeightVersionResponse()

    async def ResetPrefixCache(
        self, request: control_pb2.ResetPrefixCacheRequest, context: Context
    ) -> control_pb2.ResetPrefixCacheResponse:
        """Forget cached prefixes."""
        del request, context
        await self._control.reset_prefix_cache()
        return control_pb2.ResetPrefixCacheResponse()

    async def Sleep(self, request: control_pb2.SleepRequest, context: Context) -> control_pb2.SleepResponse:
        """Release the engine's memory."""
        del context
        mode = PauseMode.KEEP if request.mode == control_pb2.PAUSE_MODE_UNSPECIFIED else _mode(request.mode)
        await self._control.sleep(request.level if request.HasField("level") else 1, mode)
        return control_pb2.SleepResponse()

    async def WakeUp(self, request: control_pb2.WakeUpRequest, context: Context) -> control_pb2.WakeUpResponse:
        """Take it back."""
        del context
        await self._control.wake_up(request.tags)
        return control_pb2.WakeUpResponse()

    async def GetEngineState(
        self, request: control_pb2.GetEngineStateRequest, context: Context
    ) -> control_pb2.GetEngineStateResponse:
        """Tell what the engine is doing."""
        del request, context
        return control_pb2.GetEngineStateResponse(
            state=_STATES[self._control.state],
            weight_version=self._engine.weight_version,
            running_calls=self._calls.running_count,
            problem=self._control.problem,
        )

    async def ListTapes(self, request: control_pb2.ListTapesRequest, context: Context) -> control_pb2.ListTapesResponse:
        """List the tapes, by hashes of their ids."""
        del request, context
        return control_pb2.ListTapesResponse(tapes=map(_summary, self._tapes.held()))


def _mode(mode: control_pb2.PauseMode.ValueType) -> PauseMode:
    if mode not in _MODES:
        raise InvalidArgument("mode", "must be PAUSE_MODE_KEEP, PAUSE_MODE_WAIT or PAUSE_MODE_ABORT")
    return _MODES[mode]


def _summary(tape: Tape) -> control_pb2.ListTapesResponse.TapeSummary:
    return control_pb2.ListTapesResponse.TapeSummary(
        tape_id_sha256=hashlib.sha256(tape.tape_id.encode()).hexdigest(),
        call_count=len(tape.calls),
        sampled_token_count=tape.sampled_token_count,
        sealed=tape.sealed,
        size_bytes=tape.size_bytes,
        watcher_count=tape.watcher_count,
        running_call_count=len(tape.running_calls),
    )
