from agentrl.base.parts import Part

HERE = "agentrl.algorithms.formats"

PART = Part(
    name="formats",
    summary="Chat templates with tools and formats of tool calls, by name.",
    tables={
        "policy.chat_template": f"{HERE}.table:Template",
        "policy.tool_format": f"{HERE}.table:ToolFormat",
    },
    checks={"formats": f"{HERE}.templates:check"},
    tokenizers={"formats": f"{HERE}.choose:choose"},
    tool_formats={
        "llama3_json": f"{HERE}.llama3_json:Llama3Json",
        "llama4_json": f"{HERE}.llama3_json:Llama3Json",
        "mistral": f"{HERE}.mistral:Mistral",
        "pythonic": f"{HERE}.pythonic:Pythonic",
        "qwen3_coder": f"{HERE}.qwen3_coder:Qwen3Coder",
        "qwen3_xml": f"{HERE}.qwen3_coder:Qwen3Coder",
        "deepseek_v3": f"{HERE}.deepseek:DeepSeekV3",
        "deepseek_v31": f"{HERE}.deepseek:DeepSeekV31",
        "phi4_mini_json": f"{HERE}.phi4_mini_json:Phi4MiniJson",
    },
    cures={"formats": f"{HERE}.choose:cure"},
    training={"formats": f"{HERE}.training:join"},
)
