"""Small tokenizers made on the spot, and the texts to try them on. Shared by the tests of text/; holds no tests."""

from __future__ import annotations

import functools
import io
import json
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. The dog sleeps; the fox doesn't.",
    "Here is the English alphabet: ABC DEFGHIJ KLMNOP. It's all we've got, isn't it?",
    "def factorial(n):\n    return 1 if n < 2 else n * factorial(n - 1)\n\n\tprint(factorial(10))",
    "Café déjà vu, naïve façade. Straße über Österreich. Привет, мир! Γειά σου κόσμε.",
    "世界 你好 こんにちは 안녕하세요 世界 你好",
    "Numbers: 1 12 123 1234 3.14159 2,718 and $5.00 (50%).",
    "a    b\n\n  c\t d   e    f      g",
] * 4

TRICKY = [
    "",
    " ",
    "  ",
    "Hello world! Café déjà vu — 123 😊",
    " leading and trailing ",
    "a    b\n\n  c\t d",
    "\n\n\n",
    "\tdef f(x):\n\t\treturn x  +   1  # done",
    "x  12 and a   3.14 and 1234567",
    "it's I'll don't WE'RE 'tis O'Reilly's",
    "世界，你好。こんにちは 안녕하세요 ไทย עברית العربية",
    "A 世界ab 👩‍👩‍👧 é \u200d x",
    "👩‍👩‍👧‍👦 🇫🇷 1️⃣ 🏳️‍🌈",
    "e\u0301 é ﬁ ½ ² ٣٤ ①",
    "\x00\x01\x7f",
    "a\u200db\ufeffc\u2028d\xa0e",
    "▁ already ▁marked",
    "<0x41> is not a byte",
    "Ġ and Ċ are letters too",
    "𝕏 𐍈 \U0010ffff",
    "http://example.com/a?b=c&d=e#f_g-h",
    "{}[]()<>|\\/\"'`~!@#$%^&*_+-=",
]


@functools.cache
def byte_level_backend() -> tokenizers.Tokenizer:
    """Byte-level BPE with a start token that encoding adds, special tokens, and added tokens with spaces around and inside."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(
        [AddedToken("<think>", normalized=False), AddedToken("<a tool>", normalized=False), AddedToken("  <wide>  ", normalized=False)]
    )
    backend.add_special_tokens([AddedToken("<|user|>", normalized=False, rstrip=True, special=True)])
    backend.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 0)])
    return backend


@functools.cache
def sentencepiece_model(add_dummy_prefix: bool = True) -> sentencepiece.SentencePieceProcessor:
    """BPE with byte fallback, as Llama 2 has; text goes in unchanged."""
    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in CORPUS for line in text.split("\n") if line),
        model_writer=file,
        model_type="bpe",
        vocab_size=560,
        character_coverage=0.98,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=add_dummy_prefix,
        control_symbols=["<|im_start|>", "<|im_end|>"],
        split_digits=True,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=file.getvalue())


def gguf_metadata(model: sentencepiece.SentencePieceProcessor, **changes: Any) -> dict[str, Any]:
    """What llama.cpp's converter writes for it."""
    size = model.get_piece_size()
    types = [
        2 if model.is_unknown(i) else 3 if model.is_control(i) else 5 if model.is_unused(i) else 6 if model.is_byte(i) else 1
        for i in range(size)
    ]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in range(size)],
        "tokenizer.ggml.scores": [model.get_score(i) for i in range(size)],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": model.bos_id(),
        "tokenizer.ggml.eos_token_id": model.eos_id(),
        "tokenizer.ggml.unknown_token_id": model.unk_id(),
        **changes,
    }


def byte_level_metadata(tag: str | None, **changes: Any) -> dict[str, Any]:
    """The byte-level vocabulary above, as a GGUF file holds it."""
    state = json.loads(byte_level_backend().to_str())
    vocab = {**state["model"]["vocab"], **{token["content"]: token["id"] for token in state["added_tokens"]}}
    tokens = sorted(vocab, key=vocab.__getitem__)
    added = {token["id"]: 3 if token["special"] else 4 for token in state["added_tokens"]}
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in state["model"]["merges"]]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        **({"tokenizer.ggml.pre": tag} if tag is not None else {}),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [added.get(i, 1) for i in range(len(tokens))],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.eot_token_id": vocab["<|im_end|>"],
        **changes,
    }


def save(backend: tokenizers.Tokenizer, folder: Path, **config: Any) -> Path:
    """As Transformers saves it. Returns the folder."""
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(tokenizer_object=backend, **config).save_pretrained(folder)
    return folder
