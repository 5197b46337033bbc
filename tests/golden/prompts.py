"""The texts that SmolLM2 continues. More than are used: those with near ties are left out."""

from pathlib import Path

LOG = Path(__file__).resolve().parents[2] / "scripts" / "assets" / "harbour_log.txt"

CODE = '''def moving_average(values, width):
    """Means of all windows of `width` values."""
    total = sum(values[:width])
'''
SHORT = [
    "Hello",
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "1, 2, 3, 5, 8, 13,",
    CODE,
    "SELECT name, COUNT(*) FROM orders WHERE",
    '{"name": "Ada", "born": 1815, "languages": [',
    "\n\n\n\t  \n",
    "Gr\u00fc\u00dfe aus M\u00fcnchen! Das Wetter ist heute",
    "\u4eca\u65e5\u306f\u3001\u4e16\u754c\u3002",
    "\u041c\u043e\u0441\u043a\u0432\u0430 \u2014 \u0441\u0442\u043e\u043b\u0438\u0446\u0430",
    "\U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467 \u2603 means",
    "<|im_start|>user\nWhat is the boiling point of water?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>system\nAnswer in one word.<|im_end|>\n<|im_start|>user\nIs ice cold?<|im_end|>\n"
    "<|im_start|>assistant\n",
    "a a a a a a a a a a a a a a a a a a a a a a a a a a a a a a a a a a a a a a",
    "The mitochondria is the powerhouse of",
    "E = mc^2 means that energy",
    "for (int i = 0; i < n; i++) {",
    "Dear Sir or Madam,\n\nI am writing to",
    "x",
    "Photosynthesis turns light into",
    "To be, or not to be,",
    "\u0645\u0631\u062d\u0628\u0627",
]


def texts() -> dict[str, str]:
    """Name to text: short ones, parts of a log, and a question about more than the whole log."""
    log = LOG.read_text(encoding="utf-8")
    question = "\n\nQuestion: which ferry came in on the first day of May?\nAnswer:"
    return {f"short {index}": text for index, text in enumerate(SHORT)} | {
        "log 600": log[:600],
        "log 2500": log[:2500],
        "long": log + log[300:6500] + question,
    }
