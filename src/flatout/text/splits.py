"""How byte-level vocabularies cut text into words before merging, by the tag that GGUF files carry (tokenizer.ggml.pre). Data only.

The expressions are those of each model's own tokenizer.json; tags and aliases are llama.cpp's. Called by from_gguf.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import tokenizers
from tokenizers import pre_tokenizers

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_DEEPSEEK_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼ"
    "ℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)


def _cl100k(digits: str, letters: str = r"\p{L}+", symbols: str = r"[^\s\p{L}\p{N}]+[\r\n]*") -> str:
    """OpenAI's second expression, which most families vary in how they take digits."""
    return rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?{letters}|{digits}| ?{symbols}|{_BLANKS}"


def _o200k(digits: str, contraction: str) -> str:
    """OpenAI's third expression: words also end where case falls."""
    words = "|".join(rf"[^\r\n\p{{L}}\p{{N}}]?{word}{contraction}" for word in (f"{_UPPER}*{_LOWER}+", f"{_UPPER}+{_LOWER}*"))
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"


@dataclass(frozen=True)
class Split:
    """Expressions apply one after the other, each on what the one before left or matched."""

    expressions: tuple[str, ...]
    single_digits: bool = False  # each digit is a word of its own, before anything else
    whole_words: bool = False  # a word that is in the vocabulary is one token, whatever the merges say
    adds_bos: bool = False  # where the file doesn't say

    def build(self) -> pre_tokenizers.PreTokenizer:
        steps: list[pre_tokenizers.PreTokenizer] = [pre_tokenizers.Digits(individual_digits=True)] if self.single_digits else []
        steps += [pre_tokenizers.Split(tokenizers.Regex(e), behavior="isolated") for e in self.expressions]
        return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


GPT2 = Split((_GPT2,))
_LLAMA3 = Split((_cl100k(r"\p{N}{1,3}"),), whole_words=True, adds_bos=True)
_QWEN2 = Split((_cl100k(r"\p{N}"),))
_PUNCTUATION_FIRST = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
_DEEPSEEK3 = Split(
    (
        r"\p{N}{1,3}",
        "[一-龥\u3040-ゟ゠-ヿ]+",
        rf"{_PUNCTUATION_FIRST}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_BLANKS}",
    )
)

_FAMILIES: dict[Split, str] = {
    GPT2: "default gpt-2 gpt2 phi-2 mpt olmo jais jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code roberta-bpe"
    " gigachat a.x-4.0 mellum modern-bert exaone4 trillion granite-docling",
    Split((_GPT2,), single_digits=True): "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
    _LLAMA3: "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
    Split(_LLAMA3.expressions): "dbrx smaug-bpe chatglm-bpe glm4",
    _QWEN2: "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
    Split((_cl100k(r"\p{N}", r"[\p{L}\p{M}]+", r"[^\s\p{L}\p{M}\p{N}]+[\r\n]*"),)): "qwen35",
    Split((_cl100k(r"\p{N}", symbols=r"[^\s\p{L}\p{N}\r\n]+"),)): "seed-coder",
    Split((_o200k(r"\p{N}", ""),), whole_words=True, adds_bos=True): "tekken",
    Split((_o200k(r"\p{N}{1,3}", _CONTRACTION + "?"),)): "gpt-4o llama4 kanana2 talkie minimax-m2",
    _DEEPSEEK3: "deepseek-v3 hunyuan-dense joyai-llm",
    Split(
        (
            r"[\r\n]",
            rf"\s?[{_DEEPSEEK_LETTERS}]+",
            "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
            r"\s+$",
            "[一-龥ࠀ-一가-\ud7ff]+",
            r"\p{N}+",
        )
    ): "deepseek-llm",
    Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")): "deepseek-coder",
    Split((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")): "falcon",
}

SPLITS: dict[str, Split] = {tag: split for split, tags in _FAMILIES.items() for tag in tags.split()}
