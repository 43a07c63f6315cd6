"""The answer rule against the table of cases, the reference solutions, decimal arithmetic and a naive brace matcher."""

import json
import random
import re
import time
from decimal import Decimal
from pathlib import Path

import pytest

from jax_ppo.rewards import gsm8k

RULES = ("strict", "flexible", "verl")


def test_table_of_cases(shared: Path) -> None:
    cases = [json.loads(line) for line in (shared / "reward_cases.jsonl").read_text(encoding="utf-8").split("\n") if line]
    wrong = [
        (case["id"], rule, case["why"])
        for case in cases
        for rule in RULES
        if gsm8k.score(case["response"], case["answer"], method=rule) != case[rule]
    ]
    assert len(cases) == 43
    assert wrong == []


def test_every_reference_solution(shared: Path) -> None:
    files = [shared / "gsm8k" / f"{name}.jsonl" for name in ("train", "test")]
    lines = [line for file in files for line in file.read_text(encoding="utf-8").split("\n") if line]
    assert len(lines) == 8792
    for line in lines:
        solution = json.loads(line)["answer"]
        written = solution.split("#### ")[1]
        assert gsm8k.gold(solution) == str(int(written.replace(",", "")))
        for answer in (written, gsm8k.gold(solution)):
            assert gsm8k.score(solution, answer, method="verl") == 1
            for ending in ("", ".", " Done, thanks.", "<|im_end|>", "\nSo 1 and 2."):
                assert gsm8k.score(solution + ending, answer) == 1, solution
                assert gsm8k.score(solution + ending, answer, method="flexible") == 1, solution
        assert gsm8k.score(solution, written + "1") == 0


@pytest.mark.parametrize(
    ("text", "number"),
    [
        # full stops, commas and other endings
        ("42.", "42"), ("42,", "42"), ("42...", "42"), ("42!", "42"), ("42.5.", "42.5"), ("42 .", "42"), ("42\\\\", "42"),
        # signs
        ("-3", "-3"), ("+3", "3"), ("\u22123", "-3"), ("\u20133", "-3"), ("- 3", "-3"), ("\u2212 3", "-3"), ("(-3)", "-3"),
        ("-$3", "-3"), ("$-3", "-3"), ("- $3", "-3"), ("-\\$3", "-3"), ("**-3**", "-3"), ("-(3)", "-3"), ("-0", "0"), ("-0.00", "0"),
        ("Profit-3", "3"), ("--3", "3"), ("3-", "3"), ("3 -", "3"),
        # groups
        ("1,250", "1250"), ("1 250", "1250"), ("1\u00a0250", "1250"), ("1\u2009250", "1250"), ("1\u202f250", "1250"),
        ("1 250 000.5", "1250000.5"), ("109,200,000", "109200000"), ("1{,}250", "1250"), ("1\\,250", "1250"),
        ("1,\\!250", "1250"), ("1,250,", "1250"), ("-1,250.00", "-1250"),
        # decimals and zeros
        ("18.50", "18.5"), ("007", "7"), ("0.0", "0"), (".5", "0.5"), ("$.50", "0.5"), ("0.10", "0.1"), ("...5", "5"),
        # currency
        ("$18", "18"), ("\\$18", "18"), ("€18", "18"), ("18 €", "18"), ("£1,250.50", "1250.5"), ("₹ 18", "18"), ("¥18", "18"),
        ("US$18", "18"), ("Rs.18", "18"), ("18 USD", "18"),
        # markup
        ("**18**", "18"), ("*18*", "18"), ("__18__", "18"), ("**$18**", "18"), ("\\(18\\)", "18"), ("$18$", "18"), ("`18`", "18"),
        ("18\\text{ dollars}", "18"), ("18 \\text{ cm}^2", "18"), ("\\text{Total 3: }18", "18"), ("\\boxed{18}", "18"),
        ("\\textbf{18}", "18"), ("18\\%", "18"), ("90^\\circ", "90"), ("90^{\\circ}", "90"), ("1\u200b8", "18"),
        ("\ufeff18", "18"),
        # units and what follows
        ("18kg", "18"), ("18th", "18"), ("18-inch", "18"), ("18 cm^2", "18"), ("18 m\u00b2", "18"), ("18/day", "18"),
        ("18%", "18"), ("18 (9*2)", "18"), ("**18** (3 each)", "18"), ("18, 20", "18"), ("18. 20 were left", "18"), ("18 or 20", "18"),
        ("18 \u2014 3 more", "18"), ("18 = 9*2", "18"), ("x = 18", "18"), ("x^2 = 18", "18"), ("~18", "18"),
    ],
)  # fmt: skip
def test_answers(text: str, number: str) -> None:
    assert gsm8k.extract("12 and 13\n#### " + text) == number
    assert gsm8k.extract("####" + text, method="flexible") == number
    assert gsm8k.score("#### " + text, number) == 1
    assert gsm8k.score("#### " + text, number + "1" if "." in number else number + ".1") == 0


@pytest.mark.parametrize(
    "text",
    [
        "", ".", ",", "eighteen", "$", "-", "½", "\uff11\uff18",
        # separators in the wrong place
        "12,50", "12{,}50", "1,2345", "1234,567", "1,250,00", "1.250,00", "1.250.000", "0,125", "1.5.2", "12 50", "1,250 000",
        "1'250", "1_250", "18..20",
        # expressions, ranges, ratios, times
        "3:30", "3 : 4", "36/2", "36 / 2", "$36/$2", "18-20", "18 - 20", "18\u201320", "18\u201420", "5 -3", "10 + 8",
        "10+8 = 18", "10 + $8", "10 + \\$8", "3*4", "3 * 4", "2**3", "3*(4)", "3(4)", "(3)(4)", "(36)/2", "3x4", "3 x 4", "3×4", "36 ÷ 2", "3·4",
        "3 \\times 4", "3\\cdot4", "36 \\div 2", "50% * 36", "18 ~ 20", "10 - (-8)",
        "1.8e1", "1.8E1", "18e+1", "180e-1", "0x12", "3h30", "5'11\"",
        # powers, roots, fractions, two signs at once
        "18^2", "18 ^ 2", "18^{2}", "18^{-2}", "18\u00b2", "18½", "18 ½", "1 1/2", "\\frac{36}{2}", "\\dfrac{36}{2}", "\\frac34",
        "\\frac{x}{2}", "3\\frac{1}{2}", "\\sqrt{16}", "\\sqrt16", "sqrt(16)", "√16", "3\\sqrt{2}", "±3", "\\pm 3", "+/-3",
        "\\left(36\\right)/2", "\\text{18}", "1\uff18",
    ],
)  # fmt: skip
def test_no_answers(text: str) -> None:
    """None of these has an answer, whichever of the numbers in it the gold answer is."""
    assert gsm8k.extract("So 18 it is. #### " + text) is None
    assert gsm8k.extract("So 18 it is. \\boxed{" + text + "}", method="flexible") is None
    for answer in re.findall(r"[0-9]+", text):
        assert gsm8k.score("#### " + text, answer) == 0
        assert gsm8k.score("\\boxed{" + text + "}", answer) == 0


@pytest.mark.parametrize(
    ("response", "strict", "flexible"),
    [
        ("####18", "18", "18"),
        ("####  18", "18", "18"),
        ("####\n\n 18", "18", "18"),
        ("##### 18", "18", "18"),
        ("#### # 18", "18", "18"),
        ("#### 18\r\n17", "18", "18"),
        ("#### 18\u202817", "18", "18"),
        ("#### so\n18", None, None),
        ("#### 18\n####", None, None),
        ("5-3=#### 2", "2", "2"),
        ("### 18", None, "18"),
        ("\\boxed{17} \\boxed{18}", "18", "18"),
        ("\\boxed{17} #### none", None, None),
        ("\\boxed{\n18\n}", "18", "18"),
        ("\\boxed {18}", "18", "18"),
        ("\\boxed{\\{18\\}}", "18", "18"),
        ("\\boxed{\\frac{1}{2}} is \\boxed{0.5}", "0.5", "0.5"),
        ("\\boxed{eighteen} 18", None, None),
        ("\\boxed{18", None, "18"),
        ("boxed{18}", None, "18"),
        ("#### 18<|im_end|>9", "18", "18"),
        ("#### 18<|endoftext|>#### 9", "18", "18"),
        ("#### 18</s> 9", "18", "18"),
        ("#### 1<end>8", "1", "1"),
        ("18 <end> #### 9", None, "18"),
        ("<|im_end|>#### 18", None, None),
        ("<|endoftext|><|endoftext|>", None, None),
        ("The total is 72, altogether.", None, "72"),
        ("She has $9*2=18", None, "18"),
        ("It takes 36/2", None, None),
        ("At 3:30.", None, None),
        ("She has 5, 6, and 7", None, "7"),
        ("That is 18 cm^2.", None, "18"),
        ("That leaves:\n- 18 eggs", None, "18"),
        ("That leaves -18", None, "-18"),
        ("5 - 3 = 2", None, "2"),
    ],
)
def test_where_the_answer_is_sought(response: str, strict: str | None, flexible: str | None) -> None:
    assert gsm8k.extract(response) == strict
    assert gsm8k.extract(response, method="flexible") == flexible


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        ("#### 18", "18", 1),
        ("#### 1,250", "1,250", 1),
        ("#### 1,250", "1250", 1),
        ("#### 12,50", "1,250", 1),
        ("#### 18.", "18", 0),
        ("#### 18.0", "18", 0),
        ("####18", "18", 0),
        ("####  18", "18", 0),
        ("#### $18", "18", 0),
        ("#### -3", "-3", 1),
        ("\\boxed{18}", "18", 0),
        ("#### 17 #### 18", "18", 1),
        ("#### 18" + "." * 293, "18", 0),
        ("#### 18" + " " * 293, "18", 1),
        ("#### 18" + " " * 294, "18", 0),
        ("#### ,", "18", 0),
    ],
)
def test_verl_rule(response: str, answer: str, right: int) -> None:
    assert gsm8k.score(response, answer, method="verl") == right


def test_text_behind_the_answer() -> None:
    for behind in (" so she is done" * 30, "\n" + "12 345 " * 60, "\nall right" * 2000):
        assert gsm8k.score("Half of 84.\n#### 42" + behind, "42") == 1
        assert gsm8k.score("Half of 84.\n#### 42" + behind, "43") == 0


@pytest.mark.parametrize("rule", RULES)
def test_zero_and_nothing(rule: str) -> None:
    assert gsm8k.score("#### 0", "0", method=rule) == 1
    for response in ("", " \n", "no idea", "####", "#### ", "<|endoftext|>" * 3, "#### none", "\ufffd\x00\ud800"):
        for answer in ("0", "18", ""):
            assert gsm8k.score(response, answer, method=rule) == 0
            assert type(gsm8k.score(response, answer, method=rule)) is float


def test_comparison_is_that_of_exact_decimals() -> None:
    """Against `decimal`, on pairs that floats and ints of limited length cannot tell apart or hold."""
    rng = random.Random(0)
    values = [
        "0",
        "-0",
        "0.1",
        "0.10",
        "0.1000000000000000055511151231257827",
        "9007199254740993",
        "9007199254740992",
        "1" * 5000,
    ]
    for _ in range(300):
        whole = str(rng.choice([0, 7, 18, 1250, 109200000]))
        decimals = rng.choice(["", ".0", ".5", ".50", ".05"])
        values.append(rng.choice(["", "-"]) + whole.zfill(rng.choice([1, 4])) + decimals)
    for a in values:
        b = rng.choice(values)
        for left, right in ((a, b), (a, a)):
            assert gsm8k.score("#### " + left, right) == (Decimal(left) == Decimal(right)), (left, right)


def test_grouped_digits_equal_plain_ones() -> None:
    rng = random.Random(1)
    for _ in range(300):
        value = rng.randrange(10 ** rng.randint(1, 15))
        for separator in (",", " ", "\u00a0", "\u2009", "{,}"):
            assert gsm8k.extract(f"#### -{value:,}.50".replace(",", separator)) == f"-{value}.5"


def _last_closed_box(tokens: list[str]) -> str | None:
    """The naive truth: from the last box to the first, count braces until they balance."""
    for start in reversed(range(len(tokens))):
        depth = 1
        for end in range(start + 1, len(tokens)):
            depth += {"\\boxed{": 1, "{": 1, "}": -1}.get(tokens[end], 0)
            if tokens[start] == "\\boxed{" and depth == 0:
                return "".join(tokens[start + 1 : end])
    return None


def test_last_box_against_counting_braces() -> None:
    rng = random.Random(2)
    found = 0
    for _ in range(2000):
        tokens = rng.choices(["\\boxed{", "{", "}", "a", "\\{", "\\}"], weights=[2, 1, 3, 2, 1, 1], k=rng.randint(1, 14))
        # The words are numbered, so that the first number of the content tells which box it is.
        tokens = [f" word {i} " if token == "a" else token for i, token in enumerate(tokens)]
        content = _last_closed_box(tokens)
        numbers = re.findall(r"[0-9]+", content or "")
        found += bool(numbers)
        assert gsm8k.extract("".join(tokens)) == (numbers[0] if numbers else None), tokens
    assert found > 200


def test_anything_is_graded_without_an_error() -> None:
    rng = random.Random(3)
    pieces = [
        "####",
        "#",
        "\\boxed{",
        "}",
        "{",
        "1",
        "23",
        "250",
        ".",
        ",",
        "-",
        "\u2212",
        " ",
        "\n",
        "$",
        "*",
        "/",
        ":",
        "e",
        "^",
        "(",
    ]
    pieces += [")", "\\text{", "\\frac", "\\sqrt", "½", "²", "\ud800", "\x00", "<end>", "=", "±", "x", "apples", "\u00a0", "٣"]
    plain = re.compile(r"0|-?(?:0|[1-9][0-9]*)(?:\.[0-9]*[1-9])?")
    found = 0
    for _ in range(5000):
        response = "".join(rng.choices(pieces, k=rng.randint(0, 25)))
        for rule in RULES:
            number = gsm8k.extract(response, method=rule)
            assert gsm8k.score(response, "1", method=rule) == (number == "1")
            assert number is None or rule == "verl" or plain.fullmatch(number), (response, number)
            found += number is not None
    assert found > 1000


@pytest.mark.parametrize(
    "unit",
    [
        "1",
        "#",
        "\\boxed{",
        " ",
        "\n",
        "1 ",
        "1,111",
        "-",
        "- ",
        "+(",
        ".1",
        "}{",
        "\\text{",
        "3 (",
        "√(",
        "^ ",
        "<|im_end|",
        "{a",
        "=1",
    ],
)
@pytest.mark.parametrize(("before", "behind"), [("", ""), ("#### ", ""), ("\\boxed{", "}"), ("#### 3", "z4"), ("#### √", "z")])
def test_time_is_linear(unit: str, before: str, behind: str) -> None:
    """100,000 repetitions take far below a second; a quadratic search would take minutes."""
    response = before + unit * 100_000 + behind
    begin = time.perf_counter()
    for rule in RULES:
        gsm8k.score(response, "18", method=rule)
    assert time.perf_counter() - begin < 5


def test_long_response_is_graded_within_50_ms() -> None:
    response = "She sells 9 eggs at $2 each, so 9*2=18. " * 500 + "#### 18"
    assert len(response) > 20_000
    for rule in RULES:
        times = []
        for _ in range(3):
            begin = time.perf_counter()
            assert gsm8k.score(response, "18", method=rule) == 1
            times.append(time.perf_counter() - begin)
        assert min(times) < 0.05


@pytest.mark.parametrize(
    ("response", "method", "expected"),
    [
        ("#### 18", "strict", 1.0),
        ("#### 17", "strict", 0.1),
        ("\\boxed{17}", "strict", 0.1),
        ("It is 17", "strict", 0.0),
        ("It is 17", "flexible", 0.0),
        ("It is 18", "flexible", 1.0),
        ("#### 36/2", "strict", 0.0),
        ("#### none", "strict", 0.0),
        ("####18", "verl", 0.1),
    ],
)
def test_wrong_answer_in_the_right_form(response: str, method: str, expected: float) -> None:
    assert gsm8k.graded(response, "18", method=method, format_score=0.1) == expected
    assert gsm8k.graded(response, "18", method=method) == float(expected == 1.0)


@pytest.mark.parametrize(
    ("solution", "reason"),
    [
        ("42", 'no "####"'),
        ("The answer is 42.", 'no "####"'),
        ("", 'no "####"'),
        ("#### ", "nothing follows"),
        ("####", "nothing follows"),
        ("####abc", "'abc' after \"####\" is not a number"),
        ("#### 42 apples", "is not a number"),
        ("#### 12,50", "is not a number"),
        ("#### 36/2", "is not a number"),
        ("#### 42\nMore.", "is not a number"),
        ("#### 1\n#### 2", "2 times"),
        ("########", "2 times"),
    ],
)
def test_unusable_solutions(solution: str, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        gsm8k.gold(solution)


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        ("4 + 4\n#### 8", "8"),
        ("####8 \n", "8"),
        ("#### 1,250", "1250"),
        ("#### -3", "-3"),
        ("#### $18.00", "18"),
        ("#### \u2212 3", "-3"),
    ],
)
def test_gold_can_be_met_under_every_rule(solution: str, answer: str) -> None:
    assert gsm8k.gold(solution) == answer
    for rule in RULES:
        assert gsm8k.score(f"#### {answer}", gsm8k.gold(solution), method=rule) == 1


def test_unknown_method_is_refused() -> None:
    for function in (gsm8k.score, gsm8k.graded):
        with pytest.raises(ValueError, match="'lenient': must be one of strict, flexible, verl"):
            function("#### 18", "18", method="lenient")
    with pytest.raises(ValueError, match="lenient"):
        gsm8k.extract("#### 18", method="lenient")
