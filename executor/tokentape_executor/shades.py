"""Sampled tokens for people's eyes: the colour of a probability, and text that cannot drive a terminal.

The colours go from dark and calm (the model was sure) to glowing (it was surprised), so that lightness alone tells
them apart, on any background and to any eye.
"""

from __future__ import annotations

import math

from rich.text import Text

SHADES = (
    (0.9, "bold #ffffff on #3b1c75"),
    (0.5, "bold #ffffff on #8c2981"),
    (0.1, "bold #ffffff on #c83e66"),
    (0.01, "bold #1c1008 on #f98e5e"),
    (0.0, "bold #1c1008 on #fcecae"),
)
"""From which probability on a sampled token has which style, most probable first."""

_CONTROLS = (*range(0x20), 0x7F, *range(0x80, 0xA0), 0x061C, *range(0x200E, 0x2010), *range(0x202A, 0x202F))
"""What moves the cursor, or the direction of writing."""
_PICTURES = {code: 0x2400 + code for code in range(0x20)} | {0x7F: 0x2421}
_VISIBLE = {code: _PICTURES.get(code, 0xFFFD) for code in _CONTROLS if chr(code) not in "\n\t"}


def shade(log_prob: float) -> str:
    """Return the style of a token that was sampled with the natural log-probability `log_prob`."""
    probability = math.exp(log_prob)
    return next(style for least, style in SHADES if probability >= least)


def probability_legend() -> Text:
    """Return the key to the colours."""
    text = Text("sampled with probability ")
    for least, style in SHADES:
        text.append(f" ≥ {least:g} " if least else f" < {SHADES[-2][0]:g} ", style)
    return text


def visible(text: str) -> str:
    """Return `text` with pictures for the control characters that a model may sample; line breaks and tabs stay."""
    return text.translate(_VISIBLE)
