"""What `tokentape-rollout --help` says around its options."""

USAGE = """\
%(prog)s PROMPTS -o FILE --sidecar ADDRESS [options]
       %(prog)s PROMPTS -o FILE --model DIR [options] [-- VLLM OPTIONS]
       %(prog)s --verify TAPES --model DIR [options]
       %(prog)s --script TAPES [--tape N] [-o FILE]"""

DESCRIPTION = """\
Run an agent on every prompt of a file, and write what a trainer needs: the token ids that the engine was given and
sampled, their log-probabilities, and the reward. Or verify, or replay, the tapes of such rollouts.

A line of PROMPTS is a JSON object. For NeMo Gym: a row with responses_create_params, as Gym takes it, or
{"question": ..., "expected_answer": ...}. For an agent of your own: whatever its run(task, client) takes as task.

A line of the results is one rollout. Interrupt the command (or let it be killed) and run it again: what is there is
not run again, and nothing is lost. When all is done the lines are in the order of the prompts."""

EPILOG = """\
examples:
  # math questions through NeMo Gym, on a sidecar started for them; what follows -- goes to vLLM
  tokentape-rollout questions.jsonl -o results.jsonl --model ./SmolLM2-135M-Instruct --max-tokens 256 \\
    -- --dtype bfloat16 --max-model-len 2048

  # four rollouts of each, on two sidecars that run already, by an agent of your own
  tokentape-rollout tasks.jsonl -o results.jsonl --agent agent.py:Calculator --samples 4 \\
    --sidecar 127.0.0.1:50051 --sidecar 127.0.0.1:50052

  # options from a file (TOML; keys as the options); the command line wins
  printf 'model = "./SmolLM2-135M-Instruct"\\nsamples = 4\\nvllm = {dtype = "bfloat16"}\\n' > rollout.toml
  tokentape-rollout questions.jsonl -o results.jsonl --config rollout.toml

  # the same command again continues; this one also runs what had failed
  tokentape-rollout questions.jsonl -o results.jsonl --model ./SmolLM2-135M-Instruct --retry-failed

  # are the recorded log-probabilities the model's? exit status 1 if not
  tokentape-rollout --verify tapes.jsonl --model ./SmolLM2-135M-Instruct

  # rollouts of a training run: only those of this checkpoint's weights, and no complaint about the rest
  tokentape-rollout --verify tapes.jsonl --model ./checkpoint-40 --weight-version 40 --skip-refused

  # the first tape as a script, then the same rollout again without a model
  tokentape-rollout --script tapes.jsonl --tape 0 -o script.json
  tokentape-sidecar --engine scripted --script script.json --tokenizer ./SmolLM2-135M-Instruct

settings:
  NeMo Gym's environment and configuration, start timeouts, log directory and the defaults of some options are the
  variables TOKENTAPE_*; tokentape_executor/settings.py lists them.

exit status:
  0  every rollout completed, or every tape verified
  1  some failed: their rows have the status, error and error_type
  2  the command line or a file cannot be used, or the policy did not start or is gone; run it again to continue
  130, 143  interrupted by SIGINT, SIGTERM; a second signal ends it at once

docs/tape-file.md says how tapes are stored. Differences are |recorded - recomputed| log-probabilities, in nats.
"""
