"""`tokentape-rollout`: prompts in, rollouts out; and what can be done with their tapes away from the engine.

`main` picks the mode; `arguments` reads the command line; `verify` and `script` are the modes for tapes. The mode for
prompts is `run`, and its parts are: `prompts` (what goes in), `journal` and `row` (what comes out, and how it outlives
an interruption), `agents` and `policy` (what runs it), `progress` and `summary` (what is shown).
"""
