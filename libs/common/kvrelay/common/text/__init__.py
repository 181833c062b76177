"""From a choice's tokens to its text: detokenizing, stop strings, alignment of tokens and text."""

from kvrelay.common.text.choice import ChoiceText, TextDelta, TokenText
from kvrelay.common.text.detokenizer import Detokenizer
from kvrelay.common.text.stops import StopPatterns, StopStrings

__all__ = ["ChoiceText", "Detokenizer", "StopPatterns", "StopStrings", "TextDelta", "TokenText"]
