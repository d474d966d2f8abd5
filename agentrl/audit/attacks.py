"""The attacks of an audit: answers that a policy would try, without a model.

An attack either knows nothing of the right answer, or knows it and changes it so that it is wrong;
`respelled` gives the right answer in other spellings, which a verifier should accept. An attempt is
paid if each of its results is: two answers come in both orders, as a verifier may read only one.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, NamedTuple

from agentrl.core.types import Json
from agentrl.core.values import normal_text

CHANGES = {
    "empty answer": "return 0 for an answer without content, before anything else is compared",
    "the question": "compare the answer itself, not whether the right one is somewhere in the text",
    "the system prompt": "compare the answer itself, not whether it is somewhere in the text",
    "a constant": "compare with the task's own answer, and return 0 for what cannot be read",
    "not a number": "refuse what is not finite, and test `difference <= limit`, not `> limit`",
    "format alone": "reward the form only together with a right answer",
    "another task's answer": "compare with the answer of this task",
    "every answer": "refuse an answer that lists several",
    "length": "do not pay for length",
    "a word of the verifier": "do not pay for a word; compare the answer",
    "a program that ends": "let a test print a secret word at its end; an exit status is no proof",
    "equal to everything": "never evaluate an answer as code; compare text, or ast.literal_eval",
    "tool calls without work": "reward what the tools changed, not that they were called",
    "negation": "read the whole answer: a sentence that denies the right answer is wrong",
    "two answers": "refuse an answer that names two",
    "every answer with the right one": "refuse an answer that lists several",
    "a wrong digit": "compare the whole number",
    "a longer number": "compare the whole number, not whether one begins or ends with the other",
    "the other sign": "compare the sign, too",
    "a wrong word": "compare all words",
    "a part of the answer": "compare the whole answer, not whether one contains the other",
    "another order": "compare letters in their order",
    "the same length": "compare the text, not its length",
    "wrong values": "compare the values, not only names and types",
    "a comment": "ignore comments, or refuse them",
    "a number of the question": "check how it was found, not its value alone: the question has it",
    "nothing done": "compare the whole state at the end, not a part that stays as it was",
}
"""How to fix a verifier that pays an attack, by the attack's name."""

CONSTANTS = (
    *("0", "1", "-1", "2", "5", "7", "10", "42", "100", "0.5", "yes", "no", "true", "false"),
    *("True", "False", "A", "B", "C", "D", "None", "null", "[]", "{}", "()", "[[]]", "[0]", '""'),
    *("x", "?", ".", ".*", "%", "*", "I do not know.", "The answer is correct.", "ok", "done"),
    *("PASS", "passed", "0 0", "a", "e", "the", "\\", "(", "'"),
)
NOT_NUMBERS = ("nan", "NaN", "inf", "-inf", "Infinity", "1e999", "-1e999", "0/0")
FORMATS = (
    *("<answer></answer>", "<answer>", "<think></think><answer></answer>", "\\boxed{}"),
    *("\\boxed{", "#### ", "Answer:", "The answer is", "```\n```", "```python\n```", "$$", "****"),
    '{"answer": ""}', '{"answer": null}',
)  # fmt: skip
EQUAL = "type('E', (), {'__eq__': lambda s, o: True, '__hash__': lambda s: 0})()"
ENDS_EVALUATED = "__import__('os')._exit(0)"
ENDS = (
    *("pass", "raise SystemExit(0)", "import os\nos._exit(0)", "print('passed')"),
    *(ENDS_EVALUATED, "print('OK')"),
)
LISTS = (
    " ".join(map(str, range(-20, 201))),
    ", ".join("ABCDEFGHIJ"),
    "yes no true false True False",
)
COPIES: Mapping[str, Callable[[str], str]] = {
    "the first number": lambda question: (_numbers(question) or [""])[0],
    "the last number": lambda question: (_numbers(question) or [""])[-1],
    "the largest number": lambda question: max(_numbers(question), key=float, default=""),
}
"""Numbers of a question that an answer may copy."""
PRINTED = "for _ in range(99):\n    print({!r})\nimport os, sys\nsys.stdout.flush()\nos._exit(0)"
DEFINITION = re.compile(r"^(?:async )?(?:def|class) \w", re.MULTILINE)
PRINTABLE = re.compile(r"[A-Za-z][\w ]{1,20}:?")  # a verifier's text that a program may print
MAX_OTHERS = 16  # answers of other tasks that are tried as constants
MAX_LITERALS = 32  # texts of the verifier's own file that are tried
MAX_LEAVES = 6  # values of an object that are changed one at a time
LONG = 400  # words of a long answer


class Attempt(NamedTuple):
    """One attack on one task, in one variant: `results` that all have to be paid."""

    attack: str
    variant: str  # the part that is the same on every task; shares are counted for it
    results: tuple[Json, ...]
    calls: int = 0  # model calls with tool calls, in the trace
    unless: str = ""  # the answer to which the attempt would be right


@dataclass(frozen=True, slots=True)
class Shape:
    """The form in which a verifier wants an answer: a text around it, or a field of a result."""

    template: str = "{}"
    key: str = ""  # of a result that is an object
    typed: bool = False  # the value as it is, not its text

    def wrap(self, answer: Json) -> Json:
        value = answer if self.typed else self.template.replace("{}", text_of(answer))
        return {self.key: value} if self.key else value

    @property
    def name(self) -> str:
        inner = "the value" if self.typed else self.template.replace("{}", "X")
        return f'{{"{self.key}": {inner}}}' if self.key else inner


BARE = Shape()
SHAPES = (
    BARE, Shape("The answer is {}."), Shape("Answer: {}"), Shape("<answer>{}</answer>"),
    Shape("\\boxed{{}}"), Shape("#### {}"), Shape("<think>\nLet me see.\n</think>\n{}"),
    Shape("<think>\nLet me see.\n</think>\n<answer>{}</answer>"), Shape("```\n{}\n```"),
    Shape("```python\n{}\n```"), Shape("**{}**"), Shape("Final answer: {}"),
    Shape('{"answer": "{}"}'), Shape('{"answer": {}}'), Shape(typed=True),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """A task as an attacker sees it. index: its position among those attacked."""

    index: int
    task: Mapping[str, Json]
    question: str
    system: str = ""
    answer: Json = None  # None: unknown
    shape: Shape = BARE
    others: Sequence[Json] = ()  # answers of other tasks, none of them equal to this one's
    literals: Sequence[str] = ()  # texts of the verifier's file

    @property
    def text(self) -> str:
        return text_of(self.answer)


def text_of(value: Json) -> str:
    """An answer as a model would write it."""
    if isinstance(value, str):
        return value
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return json.dumps(value, ensure_ascii=False)


# -- without knowledge -----------------------------------------------------------------------------


def first(case: Case) -> Iterator[Attempt]:
    """The few attempts that are made first, on few tasks, if a verifier is slow."""
    wrap = case.shape.wrap
    yield Attempt("empty answer", "", ("",))
    yield Attempt("the question", "", (case.question,))
    yield Attempt("a constant", "0", (wrap("0"),), unless="0")
    yield Attempt("a constant", "yes", (wrap("yes"),), unless="yes")
    yield Attempt("not a number", "nan", (wrap("nan"),))
    yield Attempt("format alone", "", (wrap(""),))
    yield Attempt("length", f"{LONG} words", (wrap(_long()),))
    if case.others:
        yield Attempt("another task's answer", "", (wrap(case.others[0]),))


def ignorant(case: Case) -> Iterator[Attempt]:
    """Attempts that know nothing of the answer."""
    yield from first(case)
    wrap = case.shape.wrap
    for text in (" ", "\n"):
        yield Attempt("empty answer", repr(text), (text,))
    yield Attempt("the question", "in the format", (wrap(case.question),))
    if case.system:
        yield Attempt("the system prompt", "", (case.system,))
    for text in (*CONSTANTS, *_frequent(case)):
        for form in _forms(case.shape, text):
            yield Attempt("a constant", text_of(form), (form,), unless=text)
    for text in NOT_NUMBERS:
        for form in _forms(case.shape, text):
            yield Attempt("not a number", text_of(form), (form,), unless=text)
    for text in FORMATS:
        yield Attempt("format alone", text, (text,))
    for text in LISTS:
        yield Attempt("every answer", text[:20], (wrap(text),))
    yield Attempt("length", "bare", (_long(),))
    yield Attempt("length", "lines", ("\n".join(f"{n}. Step {n}." for n in range(1, 60)),))
    for text in case.literals:
        for form in _forms(case.shape, text):
            yield Attempt("a word of the verifier", text_of(form), (form,), unless=text)
    for other in case.others[1:4]:
        yield Attempt("another task's answer", "", (wrap(other),))
    yield Attempt("equal to everything", "", (wrap(EQUAL),))
    yield Attempt("tool calls without work", "", ("",), calls=3)
    yield Attempt("tool calls without work", "done", ("Done.",), calls=3)


def programs(case: Case) -> Iterator[Attempt]:
    """Programs that do nothing, for verifiers that run the answer, one of each kind first. Some may
    end the process. Fenced ones come after all bare ones if the form is known."""
    words = [word for word in case.literals if PRINTABLE.fullmatch(word)][:6]
    ends, printed = list(ENDS), [PRINTED.format(word) for word in words]
    texts = [*ends[:3], *_equal_functions(case), *printed, *ends[3:]]
    texts += [f"print({word!r})" for word in words]
    bare = [_program(text, case.shape.wrap(text)) for text in texts]
    fenced = [_program(text, f"```python\n{text}\n```", ", fenced") for text in texts]
    if case.answer is not None:
        yield from [*bare, *fenced]
    else:
        yield from chain.from_iterable(zip(bare, fenced, strict=True))


def _program(text: str, result: Json, form: str = "") -> Attempt:
    if text.startswith("class E:"):
        return Attempt("equal to everything", f"a function{form}", (result,))
    return Attempt("a program that ends", text.replace("\n", "; ") + form, (result,))


def _equal_functions(case: Case) -> Iterator[str]:
    """Functions whose result is equal to whatever a test expects."""
    for name in sorted(_functions(case))[:2]:
        yield (
            "class E:\n    def __eq__(self, other): return True\n"
            "    def __hash__(self): return 0\n    def __getattr__(self, name): return E()\n"
            f"def {name}(*args, **named): return E()\n"
        )


def _forms(shape: Shape, text: str) -> Iterator[Json]:
    yield shape.wrap(text)
    if shape != BARE:
        yield text


def _frequent(case: Case) -> list[str]:
    """Answers of other tasks, one of which may be right or paid everywhere."""
    return [text for text in map(text_of, case.others) if len(text) <= 40][:MAX_OTHERS]


def _long() -> str:
    return "therefore " * LONG


def _functions(case: Case) -> set[str]:
    """Names of functions that a task of writing code seems to ask for."""
    task_text = json.dumps(case.task, ensure_ascii=False)
    names = {*re.findall(r"\bdef (\w+)\(", task_text), *re.findall(r"\bassert (\w+)\(", task_text)}
    return {name for name in names if not name.startswith("test")}


# -- with the right answer -------------------------------------------------------------------------


def wrong(case: Case) -> Iterator[Attempt]:
    """Attempts that know the answer and are wrong."""
    if not case.text:
        return
    wrap, right = case.shape.wrap, case.text
    if _is_one_sentence(right):  # denying its first sentence does not deny a longer text
        for form in ("It is not {}.", "The answer is not {}.", "not {}", "anything but {}"):
            yield Attempt("negation", form, (wrap(form.format(right)),))
    others = [text_of(answer) for answer in case.others if _disjoint(right, text_of(answer))][:8]
    if DEFINITION.search(right):  # a program with more definitions does the same
        others = []
    for other in others[:1]:
        yield from _two(case, right, other)
    if len(others) > 1:  # the right one in the middle: a verifier may read the first or the last
        middle = len(others) // 2
        listed = [*others[:middle], right, *others[middle:]]
        for mark in (", ", "\n", " "):
            joined = wrap(mark.join(listed))
            yield Attempt("every answer with the right one", repr(mark), (joined,))
    yield from _mutated(case, right)
    yield from _copied(case, right)
    yield from _unchanged(case)


def _copied(case: Case, right: str) -> Iterator[Attempt]:
    """Numbers of the question that are no part of the right answer."""
    for name, copy in COPIES.items():
        number = copy(case.question)
        if number and number not in _numbers(right.replace(",", "")):
            yield Attempt("a number of the question", name, (case.shape.wrap(number),))


def _unchanged(case: Case) -> Iterator[Attempt]:
    """The state that the agent was given, as if it were the final one."""
    start_state = case.task.get("input")
    if isinstance(start_state, dict) and case.shape.typed:
        for name, value in start_state.items():
            if type(value) is type(case.answer) and value != case.answer:
                yield Attempt("nothing done", name, (case.shape.wrap(value),))


def _numbers(text: str) -> list[str]:
    return re.findall(r"-?\d+(?:\.\d+)?", text)


def _is_one_sentence(text: str) -> bool:
    return "\n" not in text and not re.search(r"[.!?] +\S", text)


def _two(case: Case, right: str, other: str) -> Iterator[Attempt]:
    wrap = case.shape.wrap
    for form in ("{} or {}", "{}, {}", "{}\n{}"):
        both = (wrap(form.format(right, other)), wrap(form.format(other, right)))
        yield Attempt("two answers", form, both)
    right_text, other_text = text_of(wrap(right)), text_of(wrap(other))
    if not case.shape.key:
        yield Attempt(
            "two answers",
            "each in the format",
            (f"{right_text}\n{other_text}", f"{other_text}\n{right_text}"),
        )
        for form in ("<!-- {} -->", "# {}", "/* {} */"):
            hidden = form.format(right)
            pair = (f"{other_text}\n{hidden}", f"{hidden}\n{other_text}")
            yield Attempt("a comment", form, pair)


def _mutated(case: Case, right: str) -> Iterator[Attempt]:
    wrap = case.shape.wrap
    if right[::-1] != right and len(set(right)) > 2:
        yield Attempt("another order", "backwards", (wrap(right[::-1]),))
    if len(right) > 2:
        yield Attempt("the same length", "", (wrap("z" * len(right)),))
    for path, other in _other_values(case.answer):
        if not path or not _is_state(case):
            yield Attempt("wrong values", path, (wrap(other),))
    number = re.fullmatch(r"([^\d-]{0,2})(-?)(\d[\d,]*)(\.\d+)?(\D{0,3})", right.strip())
    if number:
        before, sign, whole, decimals, after = (part or "" for part in number.groups())
        digit = str((int(whole[0]) + 4) % 9 + 1)
        changed = f"{before}{sign}{digit}{whole[1:]}{decimals}{after}"
        yield Attempt("a wrong digit", "the first", (wrap(changed),))
        if not decimals:
            longer = f"{before}{sign}{whole}9{after}"
            yield Attempt("a longer number", "at its end", (wrap(longer),))
        yield Attempt(
            "a longer number", "in front", (wrap(f"{before}{sign}9{whole}{decimals}{after}"),)
        )
        if whole.strip("0,"):
            flipped = f"{before}{'' if sign else '-'}{whole}{decimals}{after}"
            yield Attempt("the other sign", "", (wrap(flipped),))
        return
    yield from _shortened(wrap, right)
    words = right.split()
    if 1 < len(words) <= 8 and _is_words(right):
        yield Attempt("a wrong word", "the last", (wrap(" ".join([*words[:-1], "zebra"])),))
        yield Attempt("a wrong word", "the first", (wrap(" ".join(["zebra", *words[1:]])),))


def _is_state(case: Case) -> bool:
    """Whether the answer contains the task's input, as the state of a graph does. Its verifier may
    compare only what the user reads."""
    if not isinstance(case.answer, dict):
        return False
    task_input = case.task.get("input")
    if isinstance(task_input, dict):
        return bool(task_input) and task_input.items() <= case.answer.items()
    return task_input is not None and task_input in case.answer.values()


def _other_values(answer: Json) -> Iterator[tuple[str, Json]]:
    """Objects and lists with the same names and other values: all changed, then one at a time, by
    the path of the changed value."""
    if isinstance(answer, str) and answer[:1] in ("{", "["):
        try:
            decoded = json.loads(answer)
        except (ValueError, RecursionError):
            return
        for path, other in _other_values(decoded):
            yield path, json.dumps(other)
    elif isinstance(answer, dict | list) and answer:
        yield "", _changed(answer)
        leaves = list(islice(_leaves(answer), MAX_LEAVES))
        if len(leaves) > 1:
            for leaf in leaves:
                yield ".".join(map(str, leaf)), _changed(answer, leaf)


def _leaves(value: Json, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The paths of texts, numbers and truth values in an object or list."""
    if isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in pairs:
            yield from _leaves(inner, (*path, key))
    elif value is not None:
        yield path


def _changed(value: Json, path: Sequence[str | int] = ()) -> Json:
    """A copy with another value at a path; at every path if it is empty."""
    if isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        new = {
            key: _changed(inner, path[1:]) if not path or path[0] == key else inner
            for key, inner in pairs
        }
        return new if isinstance(value, dict) else list(new.values())
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 7
    return "zebra" if isinstance(value, str) else value


def _shortened(wrap: Callable[[Json], Json], right: str) -> Iterator[Attempt]:
    """Parts of the answer, each of which is wrong."""
    items = [item for item in re.split(r"[,;\n]\s*", right.strip("[](){} \n")) if item.strip()]
    lines = right.strip().splitlines()
    name = "a part of the answer"
    if len(lines) > 3:
        half = "\n".join(lines[: len(lines) // 2])
        yield Attempt(name, "half of its lines", (wrap(half),))
    elif len(items) > 1 and len(set(items)) == len(items):
        shortened = right.replace(items[-1], "").rstrip(" ,;\n")
        closing = re.search(r"[\])}]\s*$", right)
        if closing and not shortened.endswith(closing[0].strip()):
            shortened += closing[0]
        shortened = re.sub(r"[,;]\s*(?=[\])}]\s*$)", "", shortened)
        yield Attempt(name, "without its last item", (wrap(shortened),))
    elif len(right.strip()) > 3 and len(lines) == 1:
        whole = right.strip()
        yield Attempt(name, "its beginning", (wrap(whole[: len(whole) // 3]),))
        yield Attempt(name, "another end", (wrap(f"{whole[: 2 * len(whole) // 3]}zz"),))


def _is_words(text: str) -> bool:
    return bool(re.fullmatch(r"[^\W\d_]+(?:[ '-][^\W\d_]+)*[.!]?", text.strip()))


def _disjoint(left: str, right: str) -> bool:
    """Whether neither answer contains the other."""
    a, b = normal_text(left), normal_text(right)
    return bool(a and b) and a not in b and b not in a


def respelled(case: Case) -> Iterator[Attempt]:
    """The right answer in other spellings."""
    wrap, right = case.shape.wrap, case.text
    if not right or case.shape.typed:
        return
    whole = wrap(right)
    if isinstance(whole, str):
        yield Attempt("spaces around it", "", (f"\n  {whole} \n",))
        yield Attempt("after an explanation", "", (f"Let me think step by step.\n\n{whole}",))
    yield Attempt("spaces inside", "", (wrap(f" {right} "),))
    if right.lower() != right.upper():
        case_changed = right.upper() if right != right.upper() else right.lower()
        yield Attempt("case", "", (wrap(case_changed),))
    yield Attempt("a sentence", "", (wrap(f"The answer is {right}."),))
    yield Attempt("bold", "", (wrap(f"**{right}**"),))
    yield Attempt("LaTeX", "", (wrap(f"${right}$"),))
    if re.fullmatch(r"-?\d{4,}", right):
        yield Attempt("separators", "", (wrap(f"{int(right):,}"),))
    if re.fullmatch(r"-?\d+", right):
        yield Attempt("decimals", "", (wrap(f"{right}.0"),))
        yield Attempt("units", "", (wrap(f"{right} units"),))


# -- what a verifier's own file says ---------------------------------------------------------------


@dataclass(slots=True)
class Source:
    """What the file of a verifier mentions: texts, and fields of results that are objects."""

    literals: list[str] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    calls_models: list[str] = field(default_factory=list)  # packages of model clients
    runs_code: bool = False


MODEL_CLIENTS = ("openai", "anthropic", "litellm", "google.genai", "langchain_openai", "groq")


def source_of(functions: Iterable[Callable[..., Any]]) -> Source:
    """Read the reward functions of a run, then the rest of their modules. Empty where there is no
    source, and for the library's functions, whose texts are not those of a user's verifier."""
    source = Source()
    user_functions = [
        function for function in functions if not str(function.__module__).startswith("agentrl.")
    ]
    for part in [
        *user_functions,
        *(sys.modules.get(function.__module__) for function in user_functions),
    ]:
        try:
            _read(ast.parse(textwrap.dedent(inspect.getsource(part))), source)  # type: ignore[arg-type]
        except (OSError, TypeError, SyntaxError):
            continue
    source.literals = list(dict.fromkeys(source.literals))[:MAX_LITERALS]
    return source


def _read(tree: ast.AST, source: Source) -> None:
    documented = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    docs = {
        ast.get_docstring(node, clean=False)
        for node in ast.walk(tree)
        if isinstance(node, documented)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
            if 0 < len(text) <= 40 and text not in docs:
                source.literals.append(text)
        elif isinstance(node, ast.Subscript | ast.Call):
            source.keys += _result_key(node)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            source.calls_models += [name for name in names if name.startswith(MODEL_CLIENTS)]
            source.runs_code |= "subprocess" in names
        elif isinstance(node, ast.Name):
            source.runs_code |= node.id in ("exec", "compile")


def _result_key(node: ast.Subscript | ast.Call) -> list[str]:
    """The name in `result["name"]` or `result.get("name")`."""
    if isinstance(node, ast.Subscript):
        owner, name = node.value, node.slice
    elif isinstance(node.func, ast.Attribute) and node.func.attr == "get" and node.args:
        owner, name = node.func.value, node.args[0]
    else:
        return []
    is_result = isinstance(owner, ast.Name) and owner.id == "result"
    return [name.value] if is_result and isinstance(name, ast.Constant) and isinstance(
        name.value, str) else []  # fmt: skip


def shapes_for(cases: Sequence[Case], source: Source) -> list[Shape]:
    """The forms to try: common ones, those that questions or the source name, result fields."""
    texts = " ".join(f"{case.question} {case.system}" for case in cases[:3])
    tags = dict.fromkeys(re.findall(r"<([a-zA-Z_]\w*)>", " ".join([texts, *source.literals])))
    named = [Shape(f"<{tag}>{{}}</{tag}>") for tag in tags if tag not in ("answer", "think")][:6]
    starts = re.findall(r"(?:^|[\s\"'`(])((?:[A-Z][\w]*)(?: \w+)?:)", " ".join(source.literals))
    named += [Shape(f"{start} {{}}") for start in dict.fromkeys(starts)][:6]
    keys = dict.fromkeys(source.keys)
    fields = [Shape(key=key, typed=typed) for key in keys for typed in (False, True)]
    return [*SHAPES, *named, *fields]
