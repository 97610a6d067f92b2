"""The tokens that structured output allowed at each position, recomputed with XGrammar, vLLM's engine for it."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

from tokentape.v1 import types_pb2
from tokentape_executor.errors import ExecutorError


class GrammarError(ExecutorError):
    """A structured output's masks cannot be recomputed."""


class Grammars:
    """Compiles grammars for one tokenizer. Needs xgrammar (it comes with vLLM) and torch."""

    def __init__(self, tokenizer: Any, vocabulary_size: int) -> None:
        """`tokenizer`: the model's, of transformers, or `None`; `vocabulary_size`: columns of its logits.

        Raises `GrammarError` where the tokenizer or xgrammar is missing.
        """
        if tokenizer is None:
            raise GrammarError("structured output: its masks need the model's tokenizer")
        try:
            import xgrammar  # noqa: PLC0415 - an optional dependency
        except ImportError:
            raise GrammarError("structured output: its masks need the package xgrammar, which is missing") from None
        self._xgrammar = xgrammar
        self._vocabulary_size = vocabulary_size
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocabulary_size)
        self._compiler = xgrammar.GrammarCompiler(info)

    def mask(
        self,
        logits: Any,
        token_ids: Sequence[int],
        form: types_pb2.StructuredOutput,
        stop_token_ids: Collection[int],
    ) -> Any:
        """Return `logits` (float32, P rows), -inf where `form` forbade a token, for P tokens from a completion's first.

        Where one of `token_ids` is itself forbidden, so that the engine cannot have sampled it, its own value is -inf,
        and what follows it is not masked. Raises `GrammarError` where the form cannot be compiled.
        """
        matcher = self._xgrammar.GrammarMatcher(
            self._compile(form), override_stop_tokens=sorted(stop_token_ids) if stop_token_ids else None
        )
        masked = logits.clone()
        for position, token_id in enumerate(token_ids):
            if matcher.is_terminated():
                break
            bits = self._xgrammar.allocate_token_bitmask(1, self._vocabulary_size)
            matcher.fill_next_token_bitmask(bits)
            self._xgrammar.apply_token_bitmask_inplace(masked[position : position + 1], bits.to(masked.device))
            if not matcher.accept_token(token_id):
                break
        return masked

    def _compile(self, form: types_pb2.StructuredOutput) -> Any:
        try:
            return self._compiled(form)
        except RuntimeError as error:  # what xgrammar raises for any form that it cannot use
            raise GrammarError(f"structured output: {error}") from None

    def _compiled(self, form: types_pb2.StructuredOutput) -> Any:
        match form.WhichOneof("form"):
            case "json_schema":
                return self._compiler.compile_json_schema(form.json_schema)
            case "json_object":
                return self._compiler.compile_json_schema('{"type": "object"}')
            case "regex":
                return self._compiler.compile_regex(form.regex)
            case "grammar":
                return self._compiler.compile_grammar(form.grammar)
            case "choices":
                alternatives = " | ".join(json.dumps(value, ensure_ascii=False) for value in form.choices.values)
                return self._compiler.compile_grammar(f"root ::= {alternatives}")
            case "structural_tag":
                return self._compiler.compile_structural_tag(form.structural_tag)
            case None:
                raise GrammarError("structured output: its form is not known")
