"""The built-in task: word problems in the form of GSM8K, a tokenizer and a model small enough for a laptop.

    Mia fills 4 boxes with 6 pears each and then sells 5 pears. How many pears are left?
    4*6=24
    24-5=19
    #### 19

Nothing is downloaded. Every fifth combination of numbers is held out, whatever the template, so no held-out problem shares its
numbers with a training problem.
"""

import operator
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

from jax_ppo.types import InputError, Problem

SIZES = {"train": 20000, "test": 500}

# The demonstrations of the warm start: how many show a wrong operation, a wrong result, or no final answer. They leave a model
# that answers in the right form and is right often enough for a reward to teach it the rest.
WRONG_HARD = 0.65
WRONG_EASY = 0.20
SLIPS = 0.05
MISSING_MARKER = 0.05

# 30 names and 29 items fill the vocabulary to 384 entries.
NAMES = (
    "Ada Ali Amy Anna Ben Bo Cara Carl Dan Dora Ella Emil Eva Finn Gus Hana Ian Ida Jack Jill Kim Leo Lina Max Mia Nina Omar"
    " Pia Sam Tom"
).split()
ITEMS = (
    "apples pears plums peaches lemons limes oranges melons figs dates nuts eggs buns cakes pies rolls cards coins stamps pens"
    " pencils rulers books toys balls kites candles shells beads"
).split()
WORDS = (
    "How Monday Tuesday Wednesday all and are bags boxes buys does dollars each fills finds for get has have in is keeps left"
    " loses many more now on pay picks rest sells that the then with"
).split()

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}

# Bare sums of the warm start: operation and operands, which cover those of the templates.
DRILLS = (
    ("+", range(2, 65), range(2, 10)),
    ("+", range(6, 25), range(6, 21)),
    ("-", range(9, 65), range(2, 10)),
    ("*", range(1, 11), range(2, 9)),
)
SUMS_A_DRILL = 3


@dataclass(frozen=True)
class Template:
    """One kind of problem.

    text:    the question; {n} is a name, {x} and {y} are items, {a} to {d} numbers.
    numbers: what a, b, c, d are drawn from.
    steps:   equations in order; a letter is a number of the text, a digit the result of that equation.
    wrong:   the same with a plausible wrong operation; never gives the right result, nor a negative one.
    hard:    whether the demonstrations are mostly wrong.
    """

    text: str
    numbers: tuple[range, ...]
    steps: tuple[str, ...]
    wrong: tuple[str, ...]
    hard: bool


TEMPLATES = (
    Template(
        "{n} has {a} {x}, finds {b} more and loses {c}. How many {x} does {n} have now?",
        (range(10, 30), range(2, 10), range(2, 10)),
        ("a+b", "1-c"),
        ("a+b", "1+c"),
        hard=False,
    ),
    Template(
        "{n} buys {a} bags with {b} {x} each and {c} more {x}. How many {x} does {n} have?",
        (range(2, 9), range(3, 9), range(2, 10)),
        ("a*b", "1+c"),
        ("a+b", "1+c"),
        hard=False,
    ),
    Template(
        "{n} fills {a} boxes with {b} {x} each and then sells {c} {x}. How many {x} are left?",
        (range(3, 9), range(3, 9), range(2, 9)),
        ("a*b", "1-c"),
        ("a*b", "1+c"),
        hard=True,
    ),
    Template(
        "{n} has {a} {x}, keeps {b} and sells the rest for {c} dollars each. How many dollars does {n} get?",
        (range(8, 13), range(2, 8), range(3, 9)),
        ("a-b", "1*c"),
        ("a-b", "1+c"),
        hard=True,
    ),
    Template(
        "{n} sells {a} {x} on Monday and {b} on Tuesday for {c} dollars each. How many dollars does {n} get?",
        (range(2, 6), range(2, 6), range(3, 9)),
        ("a+b", "1*c"),
        ("a+b", "1+c"),
        hard=True,
    ),
    Template(
        "{n} buys {a} {x} for {b} dollars each and {c} {y} for {d} dollars each. How many dollars does {n} pay?",
        (range(2, 5), range(3, 7), range(2, 5), range(3, 6)),
        ("a*b", "c*d", "1+2"),
        ("a+b", "c+d", "1+2"),
        hard=True,
    ),
    Template(
        "{n} picks {a} {x} on Monday, {b} on Tuesday and {c} on Wednesday. How many {x} is that in all?",
        (range(5, 21), range(2, 10), range(2, 7)),
        ("a+b", "1+c"),
        ("a+b", "1-c"),
        hard=False,
    ),
)


@dataclass(frozen=True)
class Draw:
    """A problem before its solution is written: template, numbers and question."""

    template: Template
    numbers: tuple[int, ...]
    question: str


def problems(split: str, count: int, seed: int) -> list[Problem]:
    """Word problems with their worked solutions, the seven templates in turn.

    Args:
      split: "train" or "test"; the two share no combination of numbers.
      count: how many. A shorter list is the beginning of a longer one.
      seed: the same seed gives the same problems.

    Returns:
      `count` problems, no question twice while there are others.

    Raises:
      InputError: an unknown split.
    """
    return [_problem(draw.question, *_work(draw.template.steps, draw.numbers)) for draw in _draws(split, count, seed)]


def demonstrations(count: int, seed: int) -> list[Problem]:
    """Texts for the supervised warm start, in `Problem.solution`: half are drills, a few bare sums each, half training problems.

    The problems' workings are wrong at the rates on top of this file; `Problem.answer` is right throughout.

    Args:
      count: how many.
      seed: the same seed gives the same demonstrations.

    Returns:
      `count` problems in random order.
    """
    rng = random.Random(f"demonstrations {seed}")
    rows = [_demonstration(draw, rng) for draw in _draws("train", count // 2, seed)]
    rows += [_drill(rng) for _ in range(count - len(rows))]
    rng.shuffle(rows)
    return rows


def held_out(numbers: tuple[int, ...]) -> bool:
    """Whether this combination of numbers belongs to the test split: every fifth one, in whichever number one counts."""
    return sum(weight * number for weight, number in enumerate(numbers, 1)) % 5 == 0


def _draws(split: str, count: int, seed: int) -> Iterator[Draw]:
    if split not in SIZES:
        raise InputError(f"builtin: no split {split!r}; there are {', '.join(SIZES)}")
    rng = random.Random(f"{split} {seed}")
    seen: set[str] = set()
    for index in range(count):
        template = TEMPLATES[index % len(TEMPLATES)]
        for _ in range(100):
            draw = _draw(template, split == "test", rng)
            if draw.question not in seen:
                break
        seen.add(draw.question)
        yield draw


def _draw(template: Template, test: bool, rng: random.Random) -> Draw:
    numbers = tuple(rng.choice(values) for values in template.numbers)
    while held_out(numbers) != test:
        numbers = tuple(rng.choice(values) for values in template.numbers)
    x, y = rng.sample(ITEMS, 2)
    letters = dict(zip("abcd", numbers, strict=False))
    return Draw(template, numbers, template.text.format(n=rng.choice(NAMES), x=x, y=y, **letters))


def _work(steps: tuple[str, ...], numbers: tuple[int, ...], slip: int = -1, by: int = 0) -> tuple[str, int]:
    """The equations as text and the last result. Equation `slip` is off by `by`; later ones go on from there."""
    known = dict(zip("abcd", numbers, strict=False))
    lines, result = [], 0
    for index, step in enumerate(steps):
        left, operation, right = list(step)
        result = OPERATIONS[operation](known[left], known[right]) + (by if index == slip else 0)
        lines.append(f"{known[left]}{operation}{known[right]}={result}")
        known[str(index + 1)] = result
    return "\n".join(lines), result


def _problem(question: str, working: str, result: int) -> Problem:
    return Problem(question, str(result), f"{working}\n#### {result}")


def _demonstration(draw: Draw, rng: random.Random) -> Problem:
    template, numbers = draw.template, draw.numbers
    steps = template.wrong if rng.random() < (WRONG_HARD if template.hard else WRONG_EASY) else template.steps
    slip = rng.randrange(len(steps)) if rng.random() < SLIPS else -1
    working, result = _work(steps, numbers, slip, rng.choice((-1, 1)))
    marker = "" if rng.random() < MISSING_MARKER else f"\n#### {result}"
    return Problem(draw.question, str(_work(template.steps, numbers)[1]), working + marker)


def _drill(rng: random.Random) -> Problem:
    lines, result = [], 0
    for _ in range(SUMS_A_DRILL):
        operation, left, right = rng.choice(DRILLS)
        numbers = rng.choice(left), rng.choice(right)
        line, result = _work((f"a{operation}b",), numbers)
        lines.append(line)
    return _problem(lines[0].partition("=")[0] + "=", "\n".join(lines), result)


PAD, END = "<pad>", "<end>"

# Digits, signs and whatever is no word are single bytes, in the notation of the byte-level alphabet.
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())

# A word takes the space before it along; a name also begins a question, without one.
WHOLE_WORDS = ["####"] + [f" {word}" for word in WORDS + NAMES + ITEMS] + NAMES

VOCABULARY = [PAD, END, *BYTES, *WHOLE_WORDS]

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}{{ '\\n' }}{% endif %}"
)

# The small model, as the config.json of a Hugging Face directory has it: 111,168 parameters.
MODEL: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": len(VOCABULARY),
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "torch_dtype": "float32",
    "bos_token_id": None,
    "eos_token_id": VOCABULARY.index(END),
    "pad_token_id": VOCABULARY.index(PAD),
}


def tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of the built-in task: its words as single tokens, every other text as bytes.

    It is of Qwen's class, because that is what `AutoTokenizer` makes of any directory with a qwen2 model: byte-level, without
    merges, with the words as added tokens. Like Qwen's it brings text to Unicode normal form C.

    Returns:
      A tokenizer of 384 entries for which `decode(encode(text)) == text` holds for every text in normal form C. Its chat
      template is the content of the messages and a newline. `save_pretrained` and `AutoTokenizer` give it back unchanged.
    """
    result = Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate([PAD, END, *BYTES])},
        merges=[],
        unk_token=None,  # type: ignore[arg-type]  # no byte is unknown; the default would be one entry more
        eos_token=END,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
    )
    result.add_tokens([AddedToken(word, normalized=False) for word in WHOLE_WORDS])
    result.chat_template = CHAT_TEMPLATE
    return result
