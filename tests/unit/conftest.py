"""Fixtures that unit tests share."""

from support.driven import driven, observer
from support.tokenizers import chat_model, tokenizer_directory

__all__ = ["chat_model", "driven", "observer", "tokenizer_directory"]
