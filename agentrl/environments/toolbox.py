"""Building blocks of plug-ins.

They render observations as text, parse actions from replies, convert tools, make tasks from seeds
or names, and search for replies that solve a task.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

from agentrl.core.errors import ConfigError
from agentrl.core.types import Reward, Scope
from agentrl.environments.base import Environment, Episode, Message
from agentrl.runners.scoring import as_number

COLORED = re.compile(r"\x1b\[([34])\d(;1)?m([^\x1b]*)\x1b\[0m")
COLOR = re.compile(r"\x1b\[[\d;]*m")
LAST_MOVE = re.compile(r"(?m)^  \(\w+\)$")  # highlighted text in Gymnasium's renderings
DIGITS = re.compile(r"(\.\d{3})\d+")
PYTHON_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")
SEARCH = 20.0  # maximum seconds of a search for a solution
MAX_NUMBERS = 400  # numbers in an observation; an image has more


def shown(value: Any) -> str:
    """An observation as JSON with three digits after the point; arrays are lists.

    Raises ConfigError for one with too many numbers to act on, such as an image."""
    text = DIGITS.sub(r"\1", json.dumps(value, default=lambda array: array.tolist()))
    if text.count(",") > MAX_NUMBERS:
        raise ConfigError(
            f"an observation has {text.count(',') + 1} numbers, like an image, which a model cannot"
            " read as text: write a plug-in that describes it"
        )
    return text


def plain(picture: str) -> str:
    """A picture for a terminal with its colors as brackets: (background), [letter], <bold>."""
    while COLORED.search(picture):
        picture = COLORED.sub(_sign, picture)
    return LAST_MOVE.sub("", COLOR.sub("", picture)).strip("\n")


def _sign(match: re.Match[str]) -> str:
    left, right = "<>" if match[2] else "()" if match[1] == "4" else "[]"
    return f"{left}{match[3]}{right}"


def content(reply: Message) -> str:
    """The text of a reply, which may have none."""
    text = reply.get("content") or ""
    return text if isinstance(text, str) else "".join(part.get("text") or "" for part in text)


def number(value: Any) -> float:
    """A reward as a package gives it. Raises ValueError for anything but a number, even for a
    string of digits."""
    try:
        return as_number(value)
    except ValueError:
        raise ValueError(f"the reward {value!r:.80} is not a number") from None


def named(reply: Message, actions: Iterable[str]) -> str | None:
    """The last of the actions that a reply names, so that a model may think before it acts."""
    by_lower = {action.lower(): action for action in actions}
    words = "|".join(re.escape(word) for word in sorted(by_lower, key=len, reverse=True))
    mentions = re.findall(rf"(?<![\w.-])(?:{words})(?![\w-]|\.\d)", content(reply).lower())
    return by_lower[mentions[-1]] if mentions and words else None


def chosen(reply: Message, names: Sequence[str], space: Any) -> Any:
    """The action of Gymnasium's space that a reply names, or None. In a discrete space it is the
    last of `names` in the reply, in other spaces the reply's last numbers."""
    if names:
        name = named(reply, names)
        return None if name is None else space.start + list(names).index(name)
    numbers = NUMBER.findall(content(reply).lower())[-space.sample().size :]
    action = space.sample()
    action.flat[: len(numbers)] = [float(number) for number in numbers]
    return action if len(numbers) == action.size and space.contains(action) else None


def rules(documentation: str | None, signs: str) -> str:
    """A system message from a class's documentation in Markdown: the sections on the task, actions
    and rewards, and either `signs`, the meaning of observations, or the section on them."""
    titles = ["Description", "Mission", "Action", "Reward", *([] if signs else ["Observation"])]
    parts = re.split(r"(?m)^ *#+ ", inspect.cleandoc(documentation or ""))[1:]
    sections = [part.strip() for part in parts if part.startswith(tuple(titles))]
    seen = [f"You see: {signs}"] if signs else []
    return "\n\n".join([*sections, *seen, "The last action that you name is taken."])


def shortest(
    begin: Callable[[], Episode], actions: Callable[[Any], Iterable[str]], enough: float = 0.0
) -> list[str] | dict[str, list[str]] | None:
    """The shortest list of replies that ends an episode with a reward above `enough` for the last
    reply, by role if several play. None: not found in SEARCH seconds, or such rewards come before
    the end.

    A state is the observation, or the episode's attribute `last` where observations contain the
    past. Each path is played from the start, as copies of many environments are not independent."""
    visited, queue = set[str](), deque([list[str]()])
    until = time.monotonic() + SEARCH
    while queue and time.monotonic() < until:
        replies = queue.popleft()
        before, *_ = _played(begin, replies)
        for action in list(actions(before)):
            game, roles, observation, reward, over = _played(begin, [*replies, action])
            if isinstance(reward, dict):
                reward = reward.get(roles[-1])
            if reward and reward > enough:
                return _by_role(roles, [*replies, action]) if over else None
            if (
                not over
                and (state := f"{roles[-1:]} {getattr(game, 'last', observation)}") not in visited
            ):
                visited.add(state)
                queue.append([*replies, action])
    return None


def _played(
    begin: Callable[[], Episode], replies: list[str]
) -> tuple[Any, list[str], Any, Any, bool]:
    """The episode after these replies, their roles, and the last step's results."""
    game, roles, reward, over = begin(), list[str](), None, False
    observation = game.reset()
    for reply in replies:
        roles.append(game.role)
        observation, reward, over = game.step({"role": "assistant", "content": reply})
    return game, roles, observation, reward, over


def _by_role(roles: list[str], replies: list[str]) -> list[str] | dict[str, list[str]]:
    moves = list(zip(roles, replies, strict=True))
    scripts = {role: [reply for who, reply in moves if who == role] for role in roles}
    return scripts if len(scripts) > 1 else replies


class Seeded(Environment):
    """An environment with seeds as tasks: `episodes` for training, and as many held out."""

    episodes = 64

    def tasks(self, split: str) -> Iterable[dict[str, Any]]:
        first = 0 if split == "train" else 1_000_000
        for i in range(self.episodes):
            yield {"id": f"{split}-{i}", "input": {"seed": first + i}}


def as_python(call: Mapping[str, Any], functions: Container[str]) -> str:
    """A tool call's function as a Python call with literals, or "None" for an unknown function, so
    that no other text of a model is ever evaluated."""
    try:
        arguments = json.loads(call["arguments"] or "{}").items()
    except (ValueError, AttributeError, RecursionError):
        return "None"
    usable = call["name"] in functions and all(key.isidentifier() for key, _ in arguments)
    return f"{call['name']}({', '.join(f'{k}={v!r}' for k, v in arguments)})" if usable else "None"


def as_tool_calls(lines: Iterable[str], docs: Mapping[str, Any]) -> Message | None:
    """An assistant message with these Python calls (arguments must be literals), or None if there
    are none. `docs`: function name -> its parameters, for positional arguments."""
    calls = list[dict[str, Any]]()
    for line in lines:
        call: Any = ast.parse(line, mode="eval").body
        name = ast.unparse(call.func).rpartition(".")[2]
        nodes = dict(zip(docs[name]["parameters"]["properties"], call.args, strict=False))
        nodes |= {keyword.arg: keyword.value for keyword in call.keywords}
        arguments = json.dumps({key: ast.literal_eval(value) for key, value in nodes.items()})
        function = {"name": name, "arguments": arguments}
        calls.append({"id": f"call_{len(calls)}", "type": "function", "function": function})
    return {"role": "assistant", "content": "", "tool_calls": calls} if calls else None


def as_tool(doc: Mapping[str, Any]) -> dict[str, Any]:
    """A function's documentation as a tool of OpenAI's schema; types may be Python's."""
    text = json.dumps({key: doc[key] for key in ("name", "description", "parameters")})
    for python, schema in PYTHON_TYPES.items():
        text = text.replace(f'"type": "{python}"', f'"type": "{schema}"')
    return {"type": "function", "function": json.loads(text)}


def fifths(names: Iterable[str], split: str) -> list[dict[str, Any]]:
    """A task for each name, every fifth held out. Fewer than five tasks are in both splits."""
    all_names = list(names)
    selected = [name for i, name in enumerate(all_names) if (i % 5 == 4) == (split == "heldout")]
    chosen = selected if len(all_names) >= 5 else all_names
    return [{"id": f"{split}/{name}", "input": name} for name in chosen]


def as_fields(text: str, needed: Sequence[str]) -> dict[str, Any]:
    """The JSON object in a reply, or the whole text as the value of the only required field. Raises
    ValueError."""
    if len(needed) == 1 and "{" not in text:
        return {needed[0]: text}
    try:
        return dict(json.loads(text[text.find("{") : text.rfind("}") + 1]))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def by_role(scores: Mapping[str, float], moved: Container[str]) -> list[Reward]:
    """The outcomes of players as rewards of each role that has moved; a role without a call has
    none."""
    return [Reward(float(v), scope=Scope.ROLE, target=k) for k, v in scores.items() if k in moved]


BOARD = "x yours, o theirs, a number: the free cell of this action, . another free cell"


def board(observation: Any, actions: int) -> tuple[str, list[str]]:
    """The observation of PettingZoo's current player as text, and its legal actions. Two planes,
    one per player, are merged into one board, which BOARD explains."""
    masked = isinstance(observation, dict)
    mask = observation["action_mask"] if masked else [1] * actions
    legal = [str(action) for action, allowed in enumerate(mask) if allowed]
    seen = observation["observation"] if masked else observation
    shape: Any = getattr(seen, "shape", ())
    if len(shape) != 3 or shape[2] != 2:
        return f"{shown(seen)}\nActions: {', '.join(legal)}", legal
    cells = [
        "." if actions != shape[0] * shape[1] else str(cell) for cell in range(seen[..., 0].size)
    ]
    for sign, plane in zip("xo", (0, 1), strict=True):
        for cell in seen[..., plane].flatten().nonzero()[0]:
            cells[cell] = sign
    rows = [" ".join(cells[i : i + shape[1]]) for i in range(0, len(cells), shape[1])]
    return "\n".join([*rows, f"Actions: {', '.join(legal)}"]), legal
