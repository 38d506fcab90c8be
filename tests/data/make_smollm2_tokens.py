"""Writes smollm2_tokens.json: what Transformers' tokenizer makes of tricky texts and of odd ids, for the default model. Takes 20 s.

python tests/data/make_smollm2_tokens.py PATH_TO/SmolLM2-135M-Instruct.Q4_1.gguf
Transformers' GGUF reader knows no split for the tag "smollm"; the model's own tokenizer.json has Digits, then ByteLevel, which is set here.
"""

import json
import random
import sys
from pathlib import Path

from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "text"))
from vocabularies import TRICKY  # noqa: E402

MORE = [
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "a<|endoftext|>b<repo_name>c <file_sep> d",
    "  <|im_end|>  ",
    "<|im_end|",
    "Die Katze saß auf der Matte; 1,234.56 € kosteten 3 Stück.",
    "SELECT * FROM t WHERE x >= 10 AND y != 'z';\r\n-- done\r\n",
    "\\frac{a}{b} = \\sum_{i=0}^{n} x_i^2",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "        eight spaces, then\t\ttwo tabs",
    "ﷺ ꧁ ꧂ \u202eabc\u202c",
    "Zürich—Genève … „quotes“ «guillemets» ‚x‘",
    "1. one\n2. two\n\n- three\n\n```python\nx = 1\n```\n",
    "ALLCAPS MiXeD camelCase snake_case kebab-case 100% C++ C#",
    "今天天气很好，我们去公园吧！",
    "🤖🤖🤖 beep 🤖",
    "café vs cafe\u0301",
    "\ud7ff\ue000\ufffd",
    "tab\tnewline\ncarriage\rreturn\x0bvt\x0cff",
    "word " * 30,
]


def main(gguf: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    texts = [{"text": text, "ids": tokenizer.encode(text, add_special_tokens=False)} for text in TRICKY + MORE]
    chance = random.Random(7)
    odd = [[chance.randrange(49152) for _ in range(n)] for n in (1, 2, 3, 5, 8, 13, 21)] + [
        tokenizer.encode("😀 世界", add_special_tokens=False)[:-1],
        [1, 2, 0, *tokenizer.encode(" x", add_special_tokens=False)],
    ]
    decoded = [{"ids": ids, "text": tokenizer.decode(ids), "shown": tokenizer.decode(ids, skip_special_tokens=True)} for ids in odd]
    (HERE / "smollm2_tokens.json").write_text(json.dumps({"texts": texts, "decoded": decoded}, indent=None, separators=(",", ":")) + "\n")
    print(len(texts), "texts,", len(decoded), "decoded")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
