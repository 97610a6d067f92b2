"""The sidecar: gRPC beside an inference engine. Token ids in; token ids and log-probabilities out, kept on tapes.

Layers, each knowing only those above it:

- `engine`, `errors`: the port that engines implement, and what can go wrong;
- `record`, `tape`, `calls`, `tape_store`, `stall`, `validation`: the domain, without gRPC or protobuf;
- `vllm_engine` (with `weights`), `scripted_engine` (with `script`): the engines;
- `convert`, `rpc_errors`, `generation_servicer`, `tape_servicer`: the contract's edge;
- `server`, `main`: a running sidecar, and the command that runs one.
"""
