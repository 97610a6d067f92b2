"""The trainer's side of tokentape: agents' rollouts, read from their tapes as samples to train on."""
