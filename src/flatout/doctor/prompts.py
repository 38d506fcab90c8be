"""The selfcheck's fixed prompts: one line to a page, several languages, scripts and kinds of text. Data only.

A text that changes makes figures of different days incomparable: add to the end. Called by selfcheck.py.
"""

from __future__ import annotations

_STORY = (
    "The lighthouse keeper had counted ships for thirty years, and in all that time no two of them had passed at the same hour. He wrote "
    "each one down in a book bound in green cloth: the name, if he could read it, the direction, the weather, and whether the captain had "
    "answered the lamp. On the evening when the fog came in from the north he heard an engine that he did not know. It was slow and uneven, "
    "like a man who climbs a stair with a heavy load, and it seemed to come from every side at once. He lit the second lamp, which was "
    "meant for storms, and went down to the rocks with a rope. There, where the water is never still, a small boat turned round and round, "
    "and in it sat a child with a lantern, who looked up at him and said"
)

_PARAGRAPH = (
    "Memory bandwidth is the rate at which a processor can read or write data. A language model that writes one token at a time has to read "
    "all of its weights for each of them, so that the time of a token can't be shorter than the size of the weights divided by that rate. "
    "Larger batches share the reading: eight requests take hardly longer than one, as long as the arithmetic is not the limit. That is why "
    "a server"
)

PROMPTS: dict[str, str] = {  # name -> text
    "fact": "The capital of France is",
    "story": _STORY,
    "one word": "Once",
    "python": "def fibonacci(n: int) -> int:\n    if n < 2:\n        return n\n    return ",
    "question": "Question: What is the boiling point of water at sea level, in degrees Celsius?\nAnswer:",
    "json": '{"name": "Ada Lovelace", "born": 1815, "fields": ["mathematics", "computing"], "died": ',
    "sums": "2 + 2 = 4\n3 + 5 = 8\n7 + 6 = 13\n9 + 8 = 17\n12 + 15 =",
    "paragraph": _PARAGRAPH,
    "german": "Die Donau entspringt im Schwarzwald und mündet nach 2.857 Kilometern in das Schwarze Meer. Sie fließt durch",
    "chinese": "长城是中国古代的军事防御工程,它的主体部分始建于",
    "repeated": "one two three four one two three four one two three four one two three",
    "chat": "User: I can't sleep. What should I do?\nAssistant: Try to keep the same hours every day.\nUser: And if that doesn't help?\nAssistant:",
    "sql": "SELECT customer_id, SUM(amount) AS total\nFROM orders\nWHERE created_at >= '2024-01-01'\nGROUP BY",
    "russian": "Зимой в Сибири температура часто опускается ниже",
    "list": "Ingredients for bread:\n- 500 g flour\n- 10 g salt\n- 350 ml water\n-",
    "verse": "Shall I compare thee to a summer's day?\nThou art more lovely and more temperate:\nRough winds do shake",
    "html": '<ul>\n  <li><a href="/home">Home</a></li>\n  <li><a href="/about">About</a></li>\n  <li><a href="',
    "spaces": "a    b\t\tc\n\n\n   d      e",
    "symbols": "∀x ∈ ℝ: x² ≥ 0 → 🙂👍🏽 ½ €",
    "digits": "3.14159265358979323846264338327950288419716939937510582097494459230781640628620899",
}
