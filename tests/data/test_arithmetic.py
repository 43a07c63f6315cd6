"""The built-in task: right answers, disjoint splits, known rates of mistakes, and a tokenizer that loses nothing."""

import json
import random
import re
import unicodedata
from collections import Counter

import pytest
from transformers import AutoConfig, AutoTokenizer, Qwen2Config

from jax_ppo.data import arithmetic
from jax_ppo.rewards import gsm8k
from jax_ppo.types import InputError, Problem

# Read from the question alone: a word that only this kind of problem has, the answer, and the operations of its working.
KINDS = {
    "finds": (lambda a, b, c: a + b - c, "+-", False),
    "bags": (lambda a, b, c: a * b + c, "*+", False),
    "boxes": (lambda a, b, c: a * b - c, "*-", True),
    "keeps": (lambda a, b, c: (a - b) * c, "-*", True),
    "Tuesday for": (lambda a, b, c: (a + b) * c, "+*", True),
    "pay": (lambda a, b, c, d: a * b + c * d, "**+", True),
    "Wednesday": (lambda a, b, c: a + b + c, "++", False),
}
EQUATION = re.compile(r"(\d+)([+*-])(\d+)=(\d+)")
RESULT = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}
DRILL = re.compile(r"(\d+)([+*-])(\d+)=")


def numbers(problem: Problem) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", problem.question)))


def kind(problem: Problem) -> str:
    (found,) = [word for word in KINDS if word in problem.question]
    return found


def right(problem: Problem) -> int:
    return KINDS[kind(problem)][0](*numbers(problem))


def equations(problem: Problem) -> list[tuple[int, str, int, int]]:
    lines = [line for line in problem.solution.split("\n") if not line.startswith("####")]
    matches = [EQUATION.fullmatch(line) for line in lines]
    assert all(matches), problem.solution
    return [(int(m[1]), m[2], int(m[3]), int(m[4])) for m in matches]


def consistent(problem: Problem) -> bool:
    return all(RESULT[operation](a, b) == c for a, operation, b, c in equations(problem))


@pytest.fixture(scope="module")
def splits() -> dict[str, list[Problem]]:
    return {split: arithmetic.problems(split, size, seed=0) for split, size in arithmetic.SIZES.items()}


@pytest.fixture(scope="module")
def demonstrations() -> list[Problem]:
    return arithmetic.demonstrations(20000, seed=1)


@pytest.fixture(scope="module")
def tokenizer():
    return arithmetic.tokenizer()


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_answer_follows_from_the_question(splits, split):
    for problem in splits[split]:
        assert int(problem.answer) == right(problem) > 0
        assert problem.solution.endswith(f"\n#### {problem.answer}")
        assert consistent(problem)
        assert "".join(e[1] for e in equations(problem)) == KINDS[kind(problem)][1]
        assert gsm8k.gold(problem.solution) == problem.answer
        assert gsm8k.score(problem.solution, problem.answer, method="strict") == 1.0


def test_splits_share_no_combination_of_numbers(splits):
    train, test = ({numbers(p) for p in splits[split]} for split in ("train", "test"))
    assert not train & test
    # Still no number of the test is new to the model: each occurs in that place of that kind of problem in training.
    seen = {(kind(p), *place) for p in splits["train"] for place in enumerate(numbers(p))}
    assert {(kind(p), *place) for p in splits["test"] for place in enumerate(numbers(p))} <= seen


def test_every_fifth_combination_is_held_out():
    for length in (3, 4):
        for last in range(20):  # counting in the last number, the others fixed
            combination = (7,) * (length - 1) + (last,)
            later = (*combination[:-1], last + 5)
            assert arithmetic.held_out(combination) == arithmetic.held_out(later)
        assert sum(arithmetic.held_out((3,) * (length - 1) + (last,)) for last in range(5)) == 1


@pytest.mark.parametrize("split", ["train", "test"])
def test_kinds_are_balanced_and_no_question_comes_twice(splits, split):
    counts = Counter(map(kind, splits[split]))
    assert len(counts) == 7
    assert max(counts.values()) - min(counts.values()) <= 1
    assert len({p.question for p in splits[split]}) == len(splits[split])


def test_problems_depend_on_the_seed_alone():
    first = arithmetic.problems("train", 20, seed=3)
    assert arithmetic.problems("train", 50, seed=3)[:20] == first
    assert not set(first) & set(arithmetic.problems("train", 20, seed=4))
    # The same on every machine and in every version of Python.
    assert arithmetic.problems("train", 1, seed=0) == [
        Problem(
            "Ben has 20 cards, finds 8 more and loses 2. How many cards does Ben have now?", "26", "20+8=28\n28-2=26\n#### 26"
        )
    ]


def test_more_problems_than_questions_repeat_instead_of_hanging(monkeypatch):
    monkeypatch.setattr(arithmetic, "NAMES", ["Mia"])
    monkeypatch.setattr(arithmetic, "ITEMS", ["nuts", "eggs"])
    problems = arithmetic.problems("test", 1000, seed=0)
    assert len(problems) == 1000
    assert len({p.question for p in problems}) < 1000


def test_an_unknown_split_is_refused():
    with pytest.raises(InputError, match=r"no split 'validation'; there are train, test"):
        arithmetic.problems("validation", 1, seed=0)


def test_half_of_the_demonstrations_are_bare_sums(demonstrations):
    drills = [p for p in demonstrations if DRILL.fullmatch(p.question)]
    assert len(drills) == 10000
    for problem in drills:
        *sums, marker = problem.solution.split("\n")
        assert len(sums) == 3
        assert all(RESULT[o](a, b) == c >= 0 for a, o, b, c in equations(problem))
        assert problem.question == sums[0].partition("=")[0] + "="
        assert problem.answer == sums[-1].partition("=")[2]
        assert marker == f"#### {problem.answer}"
    # Shuffled: about half of any stretch.
    assert 400 < sum(bool(DRILL.fullmatch(p.question)) for p in demonstrations[:1000]) < 600


def test_demonstrations_are_wrong_as_often_as_they_should_be(demonstrations):
    rows = [p for p in demonstrations if not DRILL.fullmatch(p.question)]
    operations = {p: "".join(e[1] for e in equations(p)) for p in rows}
    for hard, rate in ((True, 0.65), (False, 0.20)):
        of_kind = [p for p in rows if KINDS[kind(p)][2] == hard]
        wrong = sum(operations[p] != KINDS[kind(p)][1] for p in of_kind) / len(of_kind)
        assert wrong == pytest.approx(rate, abs=0.03)
    assert sum(not consistent(p) for p in rows) / len(rows) == pytest.approx(0.05, abs=0.01)
    assert sum("####" not in p.solution for p in rows) / len(rows) == pytest.approx(0.05, abs=0.01)


def test_a_wrong_working_never_ends_in_the_right_answer(demonstrations):
    rows = [p for p in demonstrations if not DRILL.fullmatch(p.question)]
    for problem in rows:
        assert int(problem.answer) == right(problem)
        assert not arithmetic.held_out(numbers(problem))
        assert all(c >= 0 for *_, c in equations(problem))
        as_asked = "".join(e[1] for e in equations(problem)) == KINDS[kind(problem)][1]
        if consistent(problem):
            assert (equations(problem)[-1][3] == right(problem)) == as_asked
        if "####" in problem.solution:
            assert gsm8k.gold(problem.solution) == str(equations(problem)[-1][3])


def test_wrong_workings_differ_for_every_combination():
    # All numbers, not only the drawn ones: the result is another one and no step is negative.
    for template in arithmetic.TEMPLATES:
        assert len(template.wrong) == len(template.steps)
        low, high = (tuple(pick(values) for values in template.numbers) for pick in (min, max))
        for combination in (low, high, (low[0], *high[1:]), (*low[:-1], high[-1])):
            (_, true), (text, false) = (arithmetic._work(steps, combination) for steps in (template.steps, template.wrong))
            assert true != false
            assert "=-" not in text


def test_demonstrations_depend_on_the_seed_alone():
    assert arithmetic.demonstrations(30, seed=5) == arithmetic.demonstrations(30, seed=5)
    assert arithmetic.demonstrations(30, seed=5) != arithmetic.demonstrations(30, seed=6)
    assert len(arithmetic.demonstrations(7, seed=0)) == 7


def test_prompts_and_responses_fit(splits, demonstrations, tokenizer):
    for problem in splits["train"][:7000] + splits["test"] + demonstrations[:7000]:
        turn = [{"role": "user", "content": problem.question}]
        prompt = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)
        assert len(prompt) <= 33
        limit = 32 if DRILL.fullmatch(problem.question) else 30
        assert len(tokenizer.encode(problem.solution)) + 1 <= limit


def test_words_are_single_tokens_and_digits_too(tokenizer):
    text = "Mia has 12 pears.\n#### 7"
    ids = tokenizer.encode(text)
    assert [tokenizer.decode([index]) for index in ids] == ["Mia", " has", " ", "1", "2", " pears", ".", "\n", "####", " ", "7"]


def test_vocabulary_has_no_waste(splits, tokenizer):
    assert len(tokenizer) == len(arithmetic.VOCABULARY) == len(set(arithmetic.VOCABULARY)) == 384
    assert tokenizer.convert_ids_to_tokens(list(range(384))) == arithmetic.VOCABULARY
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    used = {index for p in splits["train"] for index in tokenizer.encode(p.question + p.solution)}
    assert set(range(258, 384)) <= used


TEXTS = [
    "",
    " ",
    "\n\n  \t x",
    "Mia's pears, hasten allow #####",
    "naïve café — 数学 ½ −3",
    "😀 has 👩‍👩‍👧 12",
    "<pad> and <end>",
    "\x00\x7f\u200b\ufeff\ufffd",
]


def test_every_text_comes_back(tokenizer):
    rng = random.Random(0)
    pieces = [*arithmetic.WHOLE_WORDS, "😀", "é", "\n", "42", "\u0301", "\U0010ffff", " "]
    drawn = ["".join(rng.choice([*pieces, chr(rng.randrange(0xD800))]) for _ in range(12)) for _ in range(500)]
    for text in TEXTS + drawn:
        text = unicodedata.normalize("NFC", text)
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_half_a_character_is_a_replacement_character(tokenizer):
    ids = tokenizer.encode("😀")
    assert len(ids) == 4
    assert tokenizer.decode(ids[:2]) == "\ufffd"
    assert tokenizer.decode(tokenizer.encode(" has") + ids[:3] + tokenizer.encode(" 7")) == " has\ufffd 7"


@pytest.mark.parametrize("with_model", [False, True])
def test_the_saved_tokenizer_is_the_same(splits, tokenizer, tmp_path, capfd, with_model):
    tokenizer.save_pretrained(tmp_path)
    if with_model:  # its config.json decides which class AutoTokenizer takes
        (tmp_path / "config.json").write_text(json.dumps(arithmetic.MODEL))
    loaded = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    assert capfd.readouterr() == ("", "")
    assert len(loaded) == 384
    assert (loaded.pad_token_id, loaded.eos_token_id) == (0, 1)
    for text in [*TEXTS, *(p.question + "\n" + p.solution for p in splits["test"])]:
        assert loaded.encode(text) == tokenizer.encode(text)
    turn = [{"role": "user", "content": "Mia has 1 nut"}]
    prompt = loaded.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)
    assert loaded.decode(prompt) == "Mia has 1 nut\n"
    assert loaded.apply_chat_template(turn, tokenize=False) == "Mia has 1 nut"


def test_the_model_is_a_qwen2_model(tokenizer, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(arithmetic.MODEL))
    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config) is Qwen2Config
    assert config.vocab_size == len(tokenizer)
    assert (config.eos_token_id, config.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    d, f, kv = (
        config.hidden_size,
        config.intermediate_size,
        config.hidden_size * config.num_key_value_heads // config.num_attention_heads,
    )
    layer = (d * d + d) + 2 * (d * kv + kv) + d * d + 3 * d * f + 2 * d
    assert config.tie_word_embeddings
    assert config.vocab_size * d + config.num_hidden_layers * layer + d == 111168
