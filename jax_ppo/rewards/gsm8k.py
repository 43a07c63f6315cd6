r"""The answer rule for GSM8K: from the text of a response to a score, by three rules.

`strict` (default). The response is cut at its first end-token text. What follows the *last* `####` (further `#`, spaces and
line breaks skipped) to the end of that line is the answer text; without any `####`, the content of the last `\boxed{}`;
nothing else counts. The first number of the answer text is the answer.

`flexible`. The strict answer where a marker or a box exists, else the last number of the text.

`verl`. The rule behind verl's published numbers, for comparison only: the last match of `#### (\-?[0-9\.\,]+)` within the last
300 characters, commas and dollar signs removed, compared as a string.

A *number* is an optional sign and digits, plain or grouped in threes by one kind of separator (comma, space), with optional
decimals; `.5` is 0.5. A number that runs on into another is no answer, and then the text has none: `3:30`, `36/2`, `18-20`,
`1.8e1`, `12,50`, `10 + 8`, `1.5.2`. Numbers are compared exactly, as decimal strings: 18.00 is 18 and 18.5 is not.

How the cases are read that this leaves open:

- Two numbers run on when only operators, brackets around them, currency signs, `*`, `%` or spaces stand between (`1 1/2`,
  `12 50`, `50% * 36`, `(3)(6)`), or letters without a space (`3h30`). A comma, full stop or colon joins only without a space
  behind it: `18, 20` and `18. 20` are lists, and the first number counts, as it does in `18 apples and 3 pears`. `=` does
  not join: in `9*2=18` the last number is 18.
- A number under a root, with an exponent, a fraction behind it or `±` in front of it is an expression and no answer; an
  exponent of a unit (`18 cm^2`) is no number.
- The first group of grouped digits does not begin with 0: `0,125` is no answer.
- Currency signs and `*` may stand between sign and digits: `-$18`, `- 3`. A dash directly behind a letter or another dash is
  punctuation. Under `flexible` so is a dash with a space that begins a line, as in a list.
- `\text{..}` is ignored together with its content. Only the digits 0 to 9 are digits.
- The last marker decides even when no number follows it. A box counts when its brace is closed; of nested ones the inner.
- `verl` does not cut at end tokens, because its texts never hold them.

No response raises, and the time is linear in its length.
"""

import re
from collections.abc import Callable

MARKER = "####"
END = re.compile(r"<\|im_end\|>|<\|endoftext\|>|</s>|<end>")
VERL = re.compile(r"#### (\-?[0-9\.\,]+)")
VERL_CHARACTERS = 300
ANSWER_LINE = re.compile(r"[#\s\u200b\ufeff]*+([^\n\r\v\f\x85\u2028\u2029]*)")
BOX_PARTS = re.compile(r"\\boxed[ \n]?\{|\\[{}]|[{}]")

# Insides of character classes.
SPACE = " \\t\\xa0\\u2000-\\u200a\\u202f\\u205f\\u3000"
IGNORED = "*%$¢£¤¥֏؋฿₠-⃏﷼＄￠￡￥￦"
DASH = "\\-\u2212\u2013\u2010\u2011\u2012\ufe63\uff0d"  # U+2212 and the en dash, then hyphens that keyboards and fonts produce
SIGN = DASH + "+\uff0b"
OPERATOR = SIGN + "/\u2044\u2215×÷·⋅xX^√±"
OPEN, CLOSE = r"(\[{", r")\]}"
RAISED = "¹²³⁰⁴-⁹¼-¾⅐-⅞"

# What a text looks like before numbers are sought in it. LaTeX is reduced to single characters, so that the patterns below
# need not know it: √ stands for what takes the following number as an argument, ² for any exponent, u for a word.
REWRITES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"[\u00ad\u200b-\u200f\u2060\ufeff]|\\!|\\left|\\right", ""),
        (r"\\text ?\{[^{}]*\}", " u"),
        (r"\{,\}", ","),
        (r"\\[$%]", "$"),
        (r"\\[,;: ]|~", " "),
        (rf"\^ ?[{OPEN}]? ?[{SIGN}]?[0-9]+(?:\.[0-9]+)?[{CLOSE}]?", "²"),
        (r"\\(?:cdot|times|div)", "×"),
        (r"\\[dtc]?frac|\\?sqrt", "√"),
        (r"\\pm|\+/-", "±"),
    )
)
LIST_DASH = re.compile(rf"(?<=\n)([ \t]*)[{DASH}] ")

NUMBER = re.compile(
    rf"(?P<taken>(?:[√±]|\}}\{{)[{SPACE}{IGNORED}{OPEN}]*+)?"
    rf"(?P<sign>(?<![^\W\d_])(?<![{DASH}])[{SIGN}](?:[{SPACE}{IGNORED}]*+|[{OPEN}]++))?"
    r"(?P<digits>"
    r"[1-9][0-9]{0,2}(?:,[0-9]{3})+(?:\.[0-9]+)?"
    r"|[1-9][0-9]{0,2}(?:[ \xa0\u2007-\u2009\u202f][0-9]{3})+(?:\.[0-9]+)?"
    r"|[0-9]+(?:\.[0-9]+)?"
    r"|(?<![\w.)])\.[0-9]+)"
)
ONLY_NUMBER = re.compile(rf"[{SPACE}{IGNORED}]*{NUMBER.pattern}[{SPACE}{IGNORED}]*")
# What may stand between two numbers that run on into each other.
JOINT = re.compile(
    rf"[{SPACE}{IGNORED}]*"
    rf"|[{SPACE}{IGNORED}{CLOSE}]*+[{OPERATOR}][{SPACE}{IGNORED}{OPERATOR}{OPEN}{CLOSE}]*"
    rf"|( ?)\*\1[{OPEN}]+"
    rf"|[{CLOSE}]*[{OPEN}]+"
    rf"|[{SPACE}]+:[{SPACE}]+"
    r"|[.,:'’_…—]+|[^\W\d_]+[-+]?"
)
RUNS_OUT = re.compile(rf" ?[{RAISED}]|(?![0-9])\d")
SEPARATORS = re.compile(r"[^0-9.]")


def score(response: str, answer: str, *, method: str = "strict") -> float:
    """1 where the response gives the gold answer, else 0.

    Args:
      response: text the model generated, without the prompt.
      answer:   gold answer of the same row, for instance "18" or "1,250". One that is no number is never met.
      method:   "strict", "flexible" or "verl", as described at the head of this module.

    Returns:
      1.0 or 0.0.

    Raises:
      ValueError: for an unknown method; nothing else, whatever the response.
    """
    read, read_gold = _readers(method)
    found = read(response)
    return float(found is not None and found == read_gold(answer))


def graded(response: str, answer: str, *, method: str = "strict", format_score: float = 0.0) -> float:
    """`score`, with `format_score` in place of 0 for a wrong answer in the right form.

    The form is right where `strict` finds a number, whatever the method that decides on the answer.

    Args:
      response, answer, method: as in `score`.
      format_score: what a wrong answer in the right form is worth.

    Returns:
      1.0, `format_score` or 0.0.

    Raises:
      ValueError: for an unknown method.
    """
    right = score(response, answer, method=method)
    if right or not format_score:
        return right
    return format_score if extract(response) is not None else 0.0


def extract(response: str, *, method: str = "strict") -> str | None:
    """The answer that a rule finds in a response.

    Args:
      response: text the model generated, without the prompt.
      method:   "strict", "flexible" or "verl".

    Returns:
      The number as a plain decimal ("1250", "-7", "0.5": no separators, no needless zeros, no plus) or None. Under "verl"
      the matched characters without commas, which need not be a number.

    Raises:
      ValueError: for an unknown method.
    """
    return _readers(method)[0](response)


def gold(solution: str) -> str:
    """The gold answer of a reference solution: the number behind its one `####`.

    Args:
      solution: worked solution that ends in "#### N".

    Returns:
      N as a plain decimal, "1250" for "1,250", so that the response "#### N" scores 1 under every method.

    Raises:
      ValueError: where there is no marker or more than one, or where no number, or more than a number, follows it.
    """
    before, *after = solution.split(MARKER)
    if not after:
        raise ValueError(f'no "{MARKER}" in front of an answer in {_short(before)}')
    if len(after) > 1:
        raise ValueError(f'{len(after)} times "{MARKER}", must be once')
    text = after[0].strip()
    if not text:
        raise ValueError(f'nothing follows "{MARKER}"')
    number = _first_number(text)
    if number is None or not ONLY_NUMBER.fullmatch(_rewrite(text)):
        raise ValueError(f'{_short(text)} after "{MARKER}" is not a number')
    return number


def _readers(method: str) -> tuple[Callable[[str], str | None], Callable[[str], str | None]]:
    if method not in METHODS:
        raise ValueError(f"method {method!r}: must be one of {', '.join(METHODS)}")
    return METHODS[method]


def _strict(response: str) -> str | None:
    text = _answer_text(_cut(response))
    return None if text is None else _first_number(text)


def _flexible(response: str) -> str | None:
    cut = _cut(response)
    text = _answer_text(cut)
    return _last_number(cut) if text is None else _first_number(text)


def _verl(response: str) -> str | None:
    found = VERL.findall(response[-VERL_CHARACTERS:])
    return found[-1].replace(",", "").replace("$", "") if found else None


def _verl_gold(answer: str) -> str:
    return answer.replace(",", "")


def _cut(response: str) -> str:
    """The response up to its first end-token text."""
    end = END.search(response)
    return response[: end.start()] if end else response


def _answer_text(text: str) -> str | None:
    """The line behind the last marker, else the content of the last box, else None."""
    at = text.rfind(MARKER)
    line = ANSWER_LINE.match(text, at + len(MARKER)) if at >= 0 else None
    return line[1] if line else _boxed(text)


def _boxed(text: str) -> str | None:
    r"""The content of the closed `\boxed{` that opens last; braces are matched in one pass over the text."""
    opened: list[int | None] = []  # for every open brace where its box begins; None for a brace that is no box
    last: tuple[int, int] | None = None
    for part in BOX_PARTS.finditer(text):
        token = part.group()
        if token[-1] == "{" and token != r"\{":
            opened.append(part.end() if token != "{" else None)
        elif token == "}" and opened:
            begin = opened.pop()
            if begin is not None and (last is None or begin > last[0]):
                last = begin, part.start()
    return None if last is None else text[slice(*last)]


def _first_number(text: str) -> str | None:
    """The first number of a text, normalised; None where there is none or where it runs on into the second."""
    text = _rewrite(text)
    numbers = NUMBER.finditer(text)
    first, second = next(numbers, None), next(numbers, None)
    return None if first is None or _joined(text, first, second) else _number(text, first)


def _last_number(text: str) -> str | None:
    """The last number of a text, normalised; None where there is none or where the one before runs on into it."""
    text = _rewrite(LIST_DASH.sub(r"\1", text))
    before = last = None
    for match in NUMBER.finditer(text):
        before, last = last, match
    return None if last is None or _joined(text, before, last) else _number(text, last)


def _rewrite(text: str) -> str:
    for pattern, replacement in REWRITES:
        text = pattern.sub(replacement, text)
    return text


def _joined(text: str, left: re.Match[str] | None, right: re.Match[str] | None) -> bool:
    """Whether two neighbouring numbers run on into each other."""
    if left is None or right is None:
        return False
    return JOINT.fullmatch(text, left.end("digits"), right.start("digits")) is not None


def _number(text: str, match: re.Match[str]) -> str | None:
    """A match of NUMBER as a plain decimal; None where it is the argument or the base of an expression."""
    if match["taken"] or RUNS_OUT.match(text, match.end()):
        return None
    whole, _, decimals = SEPARATORS.sub("", match["digits"]).partition(".")
    plain = ".".join(filter(None, (whole.lstrip("0") or "0", decimals.rstrip("0"))))
    negative = match["sign"] and match["sign"][0] not in "+\uff0b"
    return "-" + plain if negative and plain != "0" else plain


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")


# Rule -> (reads the answer from a response, reads the gold answer); the score compares the two strings.
METHODS: dict[str, tuple[Callable[[str], str | None], Callable[[str], str | None]]] = {
    "strict": (_strict, _first_number),
    "flexible": (_flexible, _first_number),
    "verl": (_verl, _verl_gold),
}
