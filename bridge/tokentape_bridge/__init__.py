"""The bridge: an OpenAI-compatible HTTP server in front of sidecars.

It knows text (chat templates, tools, OpenAI JSON) where the sidecar knows token ids alone, and holds nothing that it
cannot rebuild from the sidecar. A request passes through these modules, in this order:

`routes` (HTTP) → `schemas` (its JSON) → `messages` (for the chat template) → `tokenizer` (to token ids) → `sampling`
(parameters) → `sidecar` (the gRPC call) → `completion` (collects its events) → `responses` (OpenAI JSON).
`sidecar_pool` chooses the sidecar, `errors` holds every error's HTTP form.
"""
