#!/usr/bin/env bash
# Natural guess: in the prompt of a conversation the system prompt and the tools stand at its beginning, so the prompt of the
# second question begins with that of the first.
# What is so: Mistral's own tokenizer (mistral-common) writes both before the last user's message, with the format v3 of
# Mistral 7B v0.3, Nemo and Mixtral. With each question they leave the place where they stood and stand further down: the
# first question, when it has been answered, is one without instructions. v7 keeps the system prompt in front and still
# moves the tools.
# Why it matters: turns of several questions share no prefix beyond the first token, so each is a row of its own and a cache
# saves nothing; and the policy reads its first answer as given without the instructions and tools that it had.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --disable-pip-version-check "mistral-common[sentencepiece]==1.13.1" \
    2>&1 | grep -v WARNING || true
cd "$folder"
env/bin/python - <<'PY'
import sys
from importlib.metadata import version

from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

one = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "One?"}]
two = [*one, {"role": "assistant", "content": "1."}, {"role": "user", "content": "Two?"}]
tool = {"type": "function", "function": {"name": "search", "description": "", "parameters": {"type": "object"}}}

print("mistral-common", version("mistral-common"))
formats = {"v3": MistralTokenizer.v3(is_tekken=True), "v7": MistralTokenizer.v7()}
seen = {}
for name, tokenizer in formats.items():
    for tools in (None, [tool]):
        first, second = (
            tokenizer.encode_chat_completion(ChatCompletionRequest(messages=messages, tools=tools))
            for messages in (one, two)
        )
        shared = 0
        while shared < len(first.tokens) and first.tokens[shared] == second.tokens[shared]:
            shared += 1
        seen[name, bool(tools)] = shared == len(first.tokens)
        print(f"{name}, {'a tool' if tools else 'no tools'}: {shared} of {len(first.tokens)} tokens are shared")
        print("   ", second.text.replace("\n", " "))
moved = "[INST]One?[/INST]1.</s>[INST]Be brief."
text = formats["v3"].encode_chat_completion(ChatCompletionRequest(messages=two)).text.replace("\n", "")
expected = {("v3", False): False, ("v3", True): False, ("v7", False): True, ("v7", True): False}
sys.exit(seen != expected or moved not in text)
PY
