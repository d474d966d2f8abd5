"""What do images cost the learner, and are its log-probs right?

python -m tests.benchmarks.vision_learning --json

`logprob_error_<class>`: largest difference in nats between the log-probs of a tiny model by cached
sampling (the embedded engine), in a trie and in rows of their own, and those of the class's forward
pass with pixel values; `logprob_error`: the largest. `trie_over_calls`: CPU seconds of an update of
rollouts of ten turns that show a screenshot each and keep the earlier ones, as one row per rollout
in a trie, over the same calls with a row each in one batch, whose images are encoded once too;
`trie_over_separate`: over a batch for each call. `decoded_per_image`, `encoded_per_image`: how
often the update reads an image with a tower that learns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from base64 import b64encode
from typing import Any

import httpx
import torch
from msgspec import structs

from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.merge import build_batch
from agentrl.algorithms.engines.embedded.server import EmbeddedServer
from agentrl.algorithms.model.packing import Packing
from agentrl.types import Group, Sampling, Transition, float32, int32
from agentrl.vision import tiny
from agentrl.vision.calls import Finder
from agentrl.vision.learner import SeeingLearner
from tests import factories
from tests.agentrl.vision.looks import KINDS, WORDS, eyes_of, looked, own_logprobs, png

Figures = dict[str, float]
ROLLOUTS, TURNS, PATCH = 4, 10, 7
SCREEN = (16 * PATCH, 12 * PATCH)  # 48 placeholders of a screenshot
PROMPT, ANSWER = 12, 8  # tokens of text of each turn
REPEATS = 3


def parity() -> Figures:
    errors = {f"logprob_error_{kind}": _error(kind) for kind in KINDS}
    return errors | {"logprob_error": max(errors.values())}


def _error(kind: Any) -> float:
    model, tokenizer = tiny.make(kind, WORDS, most=28 * 56)
    calls = asyncio.run(_sampled(model, tokenizer))
    group = factories.group(*(factories.rollout(call.id, [call]) for call in calls))
    batch = build_batch(Finder(eyes_of(model), "policy").complete([group]))
    with torch.no_grad():
        own = torch.cat([own_logprobs(model, call) for call in calls])
    ways: tuple[Packing, ...] = ("trie", "rows")
    learners = [SeeingLearner(model, tokenizer, packing=way) for way in ways]
    found = [batch.behaviour, *(learner.logprobs(batch) for learner in learners)]
    return max(float((each - own).abs().max()) for each in found)


async def _sampled(model: Any, tokenizer: Any) -> list[Transition]:
    """Calls of the embedded server at once: four pairs begin with the same image."""
    server = EmbeddedServer(model, tokenizer, threads=1, defaults=Sampling(max_tokens=8))
    await server.start()
    placeholder = model.config.image_token_id

    async def ask(http: httpx.AsyncClient, number: int) -> Transition | None:
        images = [png(number // 2), png(100 + number, 40, 50)]
        urls = [f"data:image/png;base64,{b64encode(body).decode()}" for body in images]
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        content = [parts[0], {"type": "text", "text": "what is this"}, parts[1]]
        body = {"messages": [{"role": "user", "content": content}], "seed": number}
        body |= {"logprobs": True, "return_token_ids": True}
        answer = (await http.post("/v1/chat/completions", json=body)).json()
        (choice,) = answer["choices"]
        if placeholder in choice["token_ids"]:  # the class itself counts them by their ids
            return None
        return Transition(
            id=str(number), attempt="a", index=0, prompt=int32(answer["prompt_token_ids"]),
            completion=int32(choice["token_ids"]),
            logprobs=float32([one["logprob"] for one in choice["logprobs"]["content"]]),
            images=tuple(eyes_of(model).catalogue.add(body).digest for body in images),
        )  # fmt: skip

    async with httpx.AsyncClient(base_url=server.base_url.removesuffix("/v1"), timeout=60) as http:
        calls = await asyncio.gather(*(ask(http, number) for number in range(16)))
    await server.close()
    return [call for call in calls if call is not None]


def ten_turns() -> Figures:
    width, height = SCREEN
    model, tokenizer = tiny.make(
        "qwen2_5_vl", WORDS, trained=True, patch=PATCH, most=width * height
    )
    torch.set_num_threads(1)
    groups = _conversations(model)
    eyes, learner = eyes_of(model), SeeingLearner(model, tokenizer, token_budget=2**14)
    images = ROLLOUTS * TURNS
    decoded = len(set(_digests(groups)))
    together = _batch(model, groups)
    each = [_alone(groups, at) for at in range(images)]
    in_rows = SeeingLearner(model, tokenizer, token_budget=2**14, packing="rows")
    ways: list[tuple[SeeingLearner, list[Batch]]] = [
        (learner, [together]),
        (in_rows, [_batch(model, each)]),
        (in_rows, [_batch(model, [group]) for group in each]),
    ]
    _update(learner, [together])
    before = eyes.learned.encoded
    _update(learner, [together])
    encoded = (eyes.learned.encoded - before) / images
    seconds = [[_seconds(*way) for way in ways] for _ in range(REPEATS)]
    trie, rows, separate = (statistics.median(column) for column in zip(*seconds, strict=True))
    return {
        "trie_over_calls": trie / rows,
        "trie_over_separate": trie / separate,
        "trie_seconds": trie,
        "calls_seconds": rows,
        "separate_seconds": separate,
        "decoded_per_image": eyes.catalogue.decoded / decoded,
        "encoded_per_image": encoded,
    }


def _seconds(learner: SeeingLearner, batches: list[Batch]) -> float:
    started = time.process_time()
    _update(learner, batches)
    return time.process_time() - started


def _conversations(model: Any) -> list[Group]:
    """One rollout each; all begin with the same words."""
    width, height = SCREEN
    groups = []
    for number in range(ROLLOUTS):
        prompt, calls = list[Any](), []
        for turn in range(TURNS):
            prompt = [*prompt, *(4 + n % 8 for n in range(PROMPT))]
            prompt.append(png(1000 + TURNS * number + turn, width, height))
            answer = [4 + (number + turn + n) % 9 for n in range(ANSWER)]
            calls.append(looked(f"{number}/{turn}", [*prompt, 1], answer, model))
            prompt = [*prompt, 1, *answer]
        groups.append(factories.group(factories.rollout(str(number), calls), id=str(number)))
    return groups


def _alone(groups: list[Group], at: int) -> Group:
    group, turn = groups[at // TURNS], at % TURNS
    (rollout,) = group.rollouts
    only = structs.replace(rollout, id=f"{at}", transitions=[rollout.transitions[turn]])
    return structs.replace(group, id=f"{at}", rollouts=[only])


def _digests(groups: list[Group]) -> list[str]:
    calls = (call for group in groups for rollout in group.rollouts for call in rollout.transitions)
    return [digest for call in calls for digest in call.images]


def _batch(model: Any, groups: list[Group]) -> Batch:
    return build_batch(Finder(eyes_of(model), "policy").complete(groups), reward_names=())


def _update(learner: SeeingLearner, batches: list[Batch]) -> None:
    """Forward and backward passes, without the optimizer, whose cost is the same."""
    for batch in batches:
        n = batch.n_tokens
        learner._backward(batch, lambda p, at, n=n: torch.full((len(at),), 1 / n), None, None)
        learner._changed()
    learner._zero_grad()


def figures() -> Figures:
    return parity() | ten_turns()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    found = figures()
    if parser.parse_args().json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:32} {value:.3g}")


if __name__ == "__main__":
    main()
