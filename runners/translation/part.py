from agentrl.base.parts import Part

HERE = "agentrl.runners.translation"

PART = Part(
    name="translated APIs",
    summary="Agents that speak OpenAI's Responses, Anthropic's Messages or Google's API.",
    dialects={
        "/v1/responses": f"{HERE}.gateway:RESPONSES",
        "/v1/responses/compact": f"{HERE}.stored:COMPACT",
        "/v1/responses/input_tokens": f"{HERE}.stored:INPUT_TOKENS",
        "/v1/responses/{id}": f"{HERE}.stored:RESPONSE",
        "/v1/responses/{id}/cancel": f"{HERE}.stored:CANCEL",
        "/v1/responses/{id}/input_items": f"{HERE}.stored:INPUT_ITEMS",
        "/v1/conversations": f"{HERE}.stored:CONVERSATIONS",
        "/v1/conversations/{id}": f"{HERE}.stored:CONVERSATION",
        "/v1/conversations/{id}/items": f"{HERE}.stored:ITEMS",
        "/v1/conversations/{id}/items/{item}": f"{HERE}.stored:ITEM",
        "/v1/messages": f"{HERE}.gateway:MESSAGES",
        "/v1/messages/count_tokens": f"{HERE}.gateway:COUNTED_MESSAGES",
        "/v1/models/{model}:{verb}": f"{HERE}.gateway:GOOGLE",
        "/v1beta/models/{model}:{verb}": f"{HERE}.gateway:GOOGLE",
    },
)
