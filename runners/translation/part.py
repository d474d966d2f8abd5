from agentrl.base.parts import Part

HERE = "agentrl.runners.translation"

PART = Part(
    name="translated APIs",
    summary="Agents that speak OpenAI's Responses, Anthropic's Messages or Google's API.",
    dialects={
        "/v1/responses": f"{HERE}.gateway:RESPONSES",
        "/v1/messages": f"{HERE}.gateway:MESSAGES",
        "/v1/messages/count_tokens": f"{HERE}.gateway:COUNTED_MESSAGES",
        "/v1/models/{model}:{verb}": f"{HERE}.gateway:GOOGLE",
        "/v1beta/models/{model}:{verb}": f"{HERE}.gateway:GOOGLE",
    },
)
