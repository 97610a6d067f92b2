"""`make demo`: three math questions through NeMo Gym, bridge, sidecar and vLLM, shown token by token."""
