"""Normalises Google's JSON: each field gets one spelling, and schemas become JSON Schema.

Google takes camelCase and snake_case, and its clients send a mixture. `REQUEST` lists the fields
that exist. Invariant: an unknown field is rejected, and a field without effect is recorded, but
data of the agent is neither checked nor changed: arguments and results of functions, names of
properties, values of an enumeration. Source: https://ai.google.dev/api/generate-content
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from agentrl.core.types import Json
from agentrl.runners.apis import common
from agentrl.runners.apis.base import UntranslatableError
from agentrl.runners.apis.chat import Body

Reader = Callable[[Json, str], Json]  # (value, path) -> value
Fields = dict[str, Any]
"""Field -> what its value is: `KEPT`, `DROPPED`, the values that have no effect, fields of its own,
a list with those of its elements, or a Reader."""

KEPT, DROPPED = object(), object()
TYPES = {"ARRAY", "BOOLEAN", "INTEGER", "NULL", "NUMBER", "OBJECT", "STRING"}


def read(data: Json, fields: Fields, where: str, dropped: list[str]) -> Body:
    """Return an object at path `where` with its fields in camelCase; append those without effect to
    `dropped`. As at Google, null means a missing field."""
    result: Body = {}
    for name, value in _spelled(data, fields, where).items():
        path, reader = f"{where}.{name}".lstrip("."), fields.get(name)
        if reader is None:
            raise common.impossible(path, f"{value!r:.80}")
        if value is None or (reader is DROPPED and value == []):
            continue
        if reader is KEPT:
            result[name] = value
        elif reader is DROPPED:
            dropped.append(path)
        elif isinstance(reader, tuple):
            if value not in reader:
                raise common.impossible(path, f"{value!r:.80}")
        elif isinstance(reader, dict):
            result[name] = read(value, reader, path, dropped)
        elif isinstance(reader, list):  # Google also accepts a single element in place of a list
            elements = [value] if isinstance(value, dict) else value
            if not isinstance(elements, list):
                raise UntranslatableError(path, "is not a list of objects", code="invalid_type")
            result[name] = [
                read(element, reader[0], f"{path}[{i}]", dropped)
                for i, element in enumerate(elements)
            ]
        else:
            result[name] = reader(value, path)
    return result


def one_of(*values: Json) -> Reader:
    """Read one of these values."""

    def reader(value: Json, where: str) -> Json:
        if value not in values:
            raise common.impossible(where, f"{value!r:.80}")
        return value

    return reader


def integer(value: Json, where: str) -> Json:
    """Read an integer, which Google's SDK writes as 5.0 and others as "5"."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and re.fullmatch("-?[0-9]{1,18}", value):
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise UntranslatableError(where, f"{value!r:.80} is not an integer", code="invalid_type")
    return value


def object_of_agent(value: Json, where: str) -> Json:
    """Read data of the agent: arguments or results of a function."""
    if not isinstance(value, dict):
        raise UntranslatableError(where, "is not an object", code="invalid_type")
    return value


def _spelled(data: Json, fields: Fields, where: str) -> Body:
    """Return an object with its known fields in camelCase."""
    if not isinstance(data, dict):
        raise UntranslatableError(where or "request", "is not an object", code="invalid_type")
    result: Body = {}
    for name, value in data.items():
        usual = _camel(name) if _camel(name) in fields else name
        if usual in result:
            why = f"is there twice, as {name!r:.80} and in another spelling; leave one out"
            raise UntranslatableError(f"{where}.{usual}".lstrip("."), why)
        result[usual] = value
    return result


def _camel(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(word[:1].upper() + word[1:] for word in others)


# -- schemas ---------------------------------------------------------------------------------------

COUNTS = ("maxItems", "minItems", "maxLength", "minLength", "maxProperties", "minProperties")
INNER = ("additionalProperties", "items", "not", "contains", "if", "then", "else", "propertyNames")
LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")
MAPS = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
# Words of Google's Schema that differ between the spellings, or from JSON Schema.
WORDS = dict.fromkeys((*COUNTS, "additionalProperties", "anyOf", "propertyOrdering"), KEPT)


def json_schema(source: Json, where: str) -> Json:
    """Convert Google's Schema, or a JSON Schema with some of its words, to JSON Schema."""
    if isinstance(source, bool):
        return source
    schema = _spelled(source, WORDS, where)
    for google, usual in (("defs", "$defs"), ("ref", "$ref")):
        if google in schema and usual not in schema:
            schema[usual] = schema.pop(google)
    if isinstance(link := schema.get("$ref"), str):
        schema["$ref"] = link.replace("#/defs/", "#/$defs/")
    for name in COUNTS:  # 64-bit integers are strings in Google's JSON
        if isinstance(count := schema.get(name), str) and count.isdecimal():
            schema[name] = int(count)
    for name in (*INNER, *LISTS, *MAPS):
        if (inner := schema.get(name)) is not None:
            schema[name] = _inner(name, inner, f"{where}.{name}")
    if schema.get("type") == "TYPE_UNSPECIFIED":
        del schema["type"]
    if "type" in schema:
        schema["type"] = _types(schema["type"])
    order, properties = schema.pop("propertyOrdering", None), schema.get("properties")
    if isinstance(order, list) and properties:
        first = {name: properties[name] for name in order if name in properties}
        schema["properties"] = first | properties
    if (example := schema.pop("example", None)) is not None:
        schema.setdefault("examples", [example])
    return _nullable(_enumerated(schema))


def _inner(name: str, inner: Json, where: str) -> Json:
    if name in MAPS:
        if not isinstance(inner, dict):
            raise UntranslatableError(where, "is not an object", code="invalid_type")
        return {key: json_schema(value, f"{where}.{key}") for key, value in inner.items()}
    if isinstance(inner, list):
        return [json_schema(value, f"{where}[{i}]") for i, value in enumerate(inner)]
    return json_schema(inner, where)


def _types(kind: Json) -> Json:
    if isinstance(kind, list):
        return [_types(alternative) for alternative in kind]
    return kind.lower() if isinstance(kind, str) and kind in TYPES else kind


def _enumerated(schema: Body) -> Body:
    """Google's enumerations have a format, and are strings also if the type is a number."""
    if schema.get("format") == "enum":
        del schema["format"]
        if schema.get("type") == "integer":
            schema["enum"] = [_number(value) for value in schema.get("enum") or ()]
    return schema


def _number(value: Json) -> Json:
    return int(value) if isinstance(value, str) and value.lstrip("-").isdecimal() else value


def _nullable(schema: Body) -> Body:
    if not schema.pop("nullable", False):
        return schema
    if isinstance(schema.get("enum"), list) and None not in schema["enum"]:
        schema["enum"] = [*schema["enum"], None]
    kind = schema.get("type")
    if isinstance(kind, str) and kind != "null":
        schema["type"] = [kind, "null"]
    elif isinstance(kind, list) and "null" not in kind:
        schema["type"] = [*kind, "null"]
    if isinstance(schema.get("anyOf"), list) and {"type": "null"} not in schema["anyOf"]:
        schema["anyOf"] = [*schema["anyOf"], {"type": "null"}]
    return schema


# -- fields ----------------------------------------------------------------------------------------

BLOB: Fields = {"data": KEPT, "mimeType": KEPT, "displayName": DROPPED}
ABOUT_MEDIA: Fields = dict.fromkeys(("mediaProcessing", "mediaResolution"), DROPPED)
CALL: Fields = {"id": KEPT, "name": KEPT, "args": object_of_agent}
CALL |= {"partialArgs": ([],), "willContinue": (False,)}
RESULT: Fields = {"id": KEPT, "name": KEPT, "response": object_of_agent, "willContinue": (False,)}
RESULT |= {"scheduling": DROPPED, "parts": [{"inlineData": BLOB, "fileData": KEPT} | ABOUT_MEDIA]}
PART: Fields = {"text": KEPT, "inlineData": BLOB, "functionCall": CALL, "functionResponse": RESULT}
# Types that are rejected later, with a description.
PART |= dict.fromkeys(("fileData", "executableCode", "codeExecutionResult"), KEPT)
PART |= dict.fromkeys(("toolCall", "toolResponse", "audioTranscription"), KEPT)
CONTENT_FIELDS = frozenset(PART)  # a part has one of these fields
PART |= {"thought": KEPT, "thoughtSignature": KEPT} | ABOUT_MEDIA
PART |= dict.fromkeys(("partMetadata", "speechMetadata", "videoMetadata"), DROPPED)
CONTENT: Fields = {"role": KEPT, "parts": [PART]}
SCHEMAS: Fields = {"responseSchema": json_schema, "responseJsonSchema": json_schema}
DECLARATION: Fields = {"name": KEPT, "description": KEPT, "behavior": DROPPED, "response": DROPPED}
DECLARATION |= {"responseJsonSchema": DROPPED}
DECLARATION |= {"parameters": json_schema, "parametersJsonSchema": json_schema}
# Tools that run on Google's servers.
HOSTED = {"codeExecution", "fileSearch", "googleMaps", "googleSearch", "googleSearchRetrieval"}
HOSTED |= {"urlContext", "retrieval", "enterpriseWebSearch", "parallelAiSearch", "exaAiSearch"}
HOSTED |= {"mcpServers"}
TOOL: Fields = {"functionDeclarations": [DECLARATION]} | dict.fromkeys(HOSTED, DROPPED)
CALLING: Fields = {"mode": KEPT, "allowedFunctionNames": KEPT}
CALLING |= {"streamFunctionCallArguments": (False,)}
TOOL_CONFIG: Fields = {"functionCallingConfig": CALLING, "retrievalConfig": DROPPED}
TOOL_CONFIG |= {"includeServerSideToolInvocations": DROPPED}
# A budget of thinking has no effect on the policy.
THINKING: Fields = {"thinkingLevel": KEPT, "thinkingBudget": DROPPED, "includeThoughts": DROPPED}
SAME = {"temperature": "temperature", "topP": "top_p", "topK": "top_k", "seed": "seed"}
SAME |= {"maxOutputTokens": "max_completion_tokens", "stopSequences": "stop"}
SAME |= {"presencePenalty": "presence_penalty", "frequencyPenalty": "frequency_penalty"}
MIME_TYPES = ("application/json", "text/plain")
CONFIG: Fields = dict.fromkeys(SAME, KEPT) | SCHEMAS | {"thinkingConfig": THINKING}
CONFIG |= dict.fromkeys(("topK", "maxOutputTokens", "seed"), integer)
CONFIG |= {"candidateCount": (1,), "responseModalities": ([], ["TEXT"]), "audioTimestamp": (False,)}
CONFIG |= {"responseMimeType": one_of("", *MIME_TYPES), "responseLogprobs": (False,)}
CONFIG |= dict.fromkeys(("enableEnhancedCivicAnswers", "mediaResolution"), DROPPED)
REQUEST: Fields = {"contents": [CONTENT], "systemInstruction": CONTENT, "tools": [TOOL]}
REQUEST |= {"generationConfig": CONFIG, "toolConfig": TOOL_CONFIG, "model": KEPT}
REQUEST |= {"cachedContent": ("",)}
REQUEST |= dict.fromkeys(("labels", "safetySettings", "serviceTier", "store"), DROPPED)
COUNT: Fields = REQUEST | {"generateContentRequest": REQUEST}


def listed(dropped: list[str]) -> list[str]:
    """Return the fields without effect, each once, without indices of lists."""
    names: dict[str, None] = {}
    for path in dropped:
        name = re.sub(r"\[\d+\]", "", path).removeprefix("generationConfig.")
        hosted = name.removeprefix("tools.") in HOSTED
        names[name.replace(".", ": ") if hosted else name.removeprefix("thinkingConfig.")] = None
    return [*names]
